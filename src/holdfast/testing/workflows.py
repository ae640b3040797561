"""Testing workflows: in memory, in no time, with other steps, with a crash at every commit.

    outcome = await run_workflow(approve, {"price": 3}, steps={"quote": 7}, signals=[("approval", True)])
    assert outcome.result == "bought"
    await crash_everywhere(approve, {"price": 3}, steps={"quote": 7}, signals=[("approval", True)])

Time is skipped: a sleep of a day, a timeout, a backoff take none. `steps` says what is called instead of a step's function, by the step's name: a
function with the same arguments (ctx if it has a parameter `ctx`), an exception that is raised, or a value that is given. Steps
that are not async run at once and not in threads; a step that really waits for something outside should be replaced.

`crash_everywhere` runs it undisturbed, and then kills its worker at every commit in turn, before the commit and after it; another
worker goes on when the lease has ended. Outcomes must be equal. What steps do outside of the workflow they may do twice.

`testing/replaying.py` checks changed code against recorded histories.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import holdfast
from holdfast.errors import ExecutionFailed
from holdfast.layers.workflows.definitions import definition_of
from holdfast.layers.workflows.entries import LIVE, LogEvent
from holdfast.layers.workflows.handles import ExecutionHandle
from holdfast.layers.workflows.worker import LEASE_MS
from holdfast.space import Space
from holdfast.store import Store
from holdfast.testing.dying import Life
from holdfast.testing.timeline import Timeline

SPACE: Final = "test"
AGENT: Final = "tester"
ID: Final = "under-test"
LEASE: Final = "10000d"
"""To renew leases through days of sleep would be most of the work; that of a worker that dies is ended when its time would be over."""
COMMITS_MAX: Final = 2_000
"""A workflow with more commits is too large to be killed at each of them."""


@dataclass(frozen=True)
class Outcome:
    """What came of an execution, and of those it started."""

    status: str
    result: Any
    """None if it failed or was cancelled."""
    error: dict[str, str] | None
    state: dict[str, Any]
    steps: dict[str, dict[str, Any]] = field(repr=False)
    """By path, as `handle.steps()` gives them."""
    log: list[LogEvent] = field(repr=False)
    children: dict[str, Outcome]
    """By id."""
    took: timedelta
    """Of the time that was skipped."""
    commits: int
    """Of the worker: at each of them it may die."""

    def settled(self) -> Any:
        """What must not depend on crashes: everything but times, counts of commits, and the order of what ran at once."""
        steps = {path: (each["status"], each.get("result")) for path, each in self.steps.items() if "#" in path}
        children = {id: child.settled() for id, child in self.children.items()}
        return self.status, self.result, self.error, self.state, steps, children


async def run_workflow(
    workflow: Any,
    input: Any = None,
    *,
    steps: Mapping[str, Any] | None = None,
    signals: Iterable[tuple[str, Any]] = (),
    workflows: Sequence[Any] = (),
) -> Outcome:
    """Run it to its end, in no time. `signals` are sent before it begins; `workflows` are those that it starts."""
    return await _lived(workflow, input, steps, list(signals), workflows, None, after=False)


async def crash_everywhere(
    workflow: Any,
    input: Any = None,
    *,
    steps: Mapping[str, Any] | None = None,
    signals: Iterable[tuple[str, Any]] = (),
    workflows: Sequence[Any] = (),
    compare: Callable[[Outcome], Any] = Outcome.settled,
) -> int:
    """Kill its worker at every commit in turn; AssertionError where the outcome is another than undisturbed. Gives how often it died.

    `compare` gives what must be equal, where that is not all: `lambda outcome: outcome.result`.
    """
    sent = list(signals)
    undisturbed = await _lived(workflow, input, steps, sent, workflows, None, after=False)
    if undisturbed.commits > COMMITS_MAX:
        raise AssertionError(
            f"it has {undisturbed.commits:,} commits; at most {COMMITS_MAX:,} are crashed at. Test a smaller input"
        )
    expected, crashes = compare(undisturbed), 0
    for at in range(undisturbed.commits):
        for after in (False, True):
            found = compare(await _lived(workflow, input, steps, sent, workflows, at, after=after))
            crashes += 1
            if found != expected:
                where = f"{'after' if after else 'before'} commit {at} of {undisturbed.commits}"
                raise AssertionError(f"killed {where}, it ended as\n{found}\nand undisturbed as\n{expected}")
    return crashes


async def _lived(
    workflow: Any,
    input: Any,
    steps: Mapping[str, Any] | None,
    signals: list[tuple[str, Any]],
    workflows: Sequence[Any],
    kill_at: int | None,
    *,
    after: bool,
) -> Outcome:
    clock = Timeline()
    known = {definition_of(each).name: each for each in (workflow, *workflows)}
    replaced = {name: _function(what) for name, what in (steps or {}).items()}
    with tempfile.TemporaryDirectory(prefix="holdfast-test-") as folder:
        async with holdfast.open("memory:", clock=clock, background=False) as store:
            space = store.space(SPACE, agent=AGENT)
            handle = await space.workflows.start(workflow, input, id=ID)
            for name, value in signals:
                await handle.signal(name, value)
            began = clock.now_ms()
            life = Life(space, Path(folder), [*known.values()], kill_at, after=after, replaced=replaced, lease=LEASE)
            ending = asyncio.ensure_future(ended(store, space))
            dying = asyncio.ensure_future(life.engine.dead.wait())
            try:
                await _pass(
                    clock,
                    asyncio.ensure_future(asyncio.wait([ending, dying], return_when=asyncio.FIRST_COMPLETED)),
                    space,
                )
                if not ending.done():
                    await life.end()
                    await life.bury()
                    clock.advance(LEASE_MS)
                    life = Life(space, Path(folder), [*known.values()], replaced=replaced, lease=LEASE)
                    await _pass(clock, ending, space)
                took = timedelta(milliseconds=clock.now_ms() - began)
                return await _outcome(space, handle, took, life.engine.commits)
            finally:
                dying.cancel()
                ending.cancel()
                await life.end()


async def _pass(clock: Timeline, work: asyncio.Future[Any], space: Space) -> None:
    try:
        await clock.run(work)
    except AssertionError:
        waits = {view.id: view.waits or view.status for view in await space.workflows.list()}
        raise AssertionError(f"it does not end, whatever time passes; what is left: {waits}") from None


async def ended(store: Store, space: Space) -> None:
    """Return when every execution has ended."""
    async for _ in store.engine.watch(space.name, "workflows/executions/", cursor="r0"):
        if not (await store.engine.scan(space.name, LIVE, limit=1)).entries:
            return


async def _outcome(space: Space, handle: ExecutionHandle, took: timedelta, commits: int) -> Outcome:
    view = await handle.status()
    try:
        result = await handle.result(0)
    except ExecutionFailed:
        result = None
    steps = await handle.steps()
    begun = {step["child"] for step in steps.values() if "child" in step}
    children = {id: await _outcome(space, await space.workflows.get(id), took, commits) for id in sorted(begun)}
    log = await handle.log()
    return Outcome(view.status, result, view.error, await handle.state(), steps, log, children, took, commits)


def _function(what: Any) -> Callable[..., Any]:
    """What is called instead of a step."""
    if callable(what) and not isinstance(what, type):
        function: Callable[..., Any] = what
        return function

    async def given(*_: Any) -> Any:
        if isinstance(what, BaseException) or (isinstance(what, type) and issubclass(what, BaseException)):
            raise what
        return what

    return given
