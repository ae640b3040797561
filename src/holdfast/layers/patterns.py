"""Four ways to let agents work together, and three profiles for how long to wait for them.

    fan_out   one payload to many agents at once; each answers or fails by itself
    fan_in    the same, and their answers merged into one decision; a correlation is this across processes
    route     the first rule that matches says who does it, or the default
    sequence  one stage after the other, each on what the one before gave; a stage may stop with a reason

An agent is any callable of one payload, asynchronous or not. Nothing here is stored: what must survive a crash is a
correlation's signal, or a workflow. Time is the clock's that is passed on.

How it fails. An agent that raises, or takes longer than the timeout, fails alone: its Outcome says so, the others go on.
`fan_in` with fewer answers than `min_agents` decides `{action: timeout}`. An error in a rule or a stage is raised.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from holdfast.clock import Clock, Duration, SystemClock, as_datetime, optional_ms
from holdfast.errors import InvalidInput, Unavailable
from holdfast.layers.merging import Question, Strategy, merged_of, strategy_of

AGENTS_MAX: Final = 100
"""Agents of one correlation or fan-out."""
PATTERNS: Final = ("fan_in", "fan_out", "conditional", "sequential")

Agent: TypeAlias = Callable[[Any], Any | Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Profile:
    """How many agents to wait for, and how long."""

    agents: int
    timeout_ms: int


PROFILES: Final = {
    "simple": Profile(2, 60_000),
    "workflow": Profile(3, 300_000),
    "high_frequency": Profile(1, 10_000),
}


def profile_of(name: str) -> Profile:
    if name not in PROFILES:
        raise InvalidInput(f"there is no profile {name!r:.60}; there are {', '.join(PROFILES)}")
    return PROFILES[name]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one agent's part: a value, or the error that it failed with."""

    agent: str
    value: Any = None
    error: Exception | None = None
    at_ms: int = 0

    @property
    def ok(self) -> bool:
        return self.error is None


async def fan_out(
    agents: Mapping[str, Agent],
    payload: Any,
    *,
    timeout: Duration | None = None,  # noqa: ASYNC109 - by the clock that is given
    clock: Clock | None = None,
) -> dict[str, Outcome]:
    """Ask all at once; give every answer and every failure, by agent. One that fails disturbs none of the others."""
    if not 0 < len(agents) <= AGENTS_MAX:
        raise InvalidInput(f"between 1 and {AGENTS_MAX} agents can be asked, not {len(agents)}")
    clock = clock or SystemClock()
    timeout_ms = optional_ms(timeout, name="timeout")
    deadline = None if timeout_ms is None else clock.now_ms() + timeout_ms
    tasks = {name: asyncio.ensure_future(_ask(name, agent, payload, clock)) for name, agent in agents.items()}
    try:
        await _until(tasks.values(), clock, deadline)
        outcomes = {}
        for name, task in tasks.items():
            if task.done():
                outcomes[name] = task.result()
            else:
                late = Unavailable(f"{name} did not answer within {(timeout_ms or 0) / 1000:g} s; it was given up")
                outcomes[name] = Outcome(name, error=late, at_ms=clock.now_ms())
        return outcomes
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _ask(name: str, agent: Agent, payload: Any, clock: Clock) -> Outcome:
    try:
        value = await called(agent, payload)
    except (Exception, asyncio.CancelledError) as exc:  # isolated: whatever it is, it is this agent's outcome
        task = asyncio.current_task()
        if isinstance(exc, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # it is this that is cancelled, and nothing of the agent's own
        error = exc if isinstance(exc, Exception) else Unavailable(f"{name} was cancelled by something of its own")
        return Outcome(name, error=error, at_ms=clock.now_ms())
    return Outcome(name, value, at_ms=clock.now_ms())


async def _until(tasks: Iterable[asyncio.Future[Any]], clock: Clock, deadline: int | None) -> None:
    """Until all are done, or the clock has reached the deadline."""
    everybody = asyncio.gather(*(asyncio.shield(task) for task in tasks), return_exceptions=True)
    waits: list[asyncio.Future[Any]] = [everybody]
    if deadline is not None:
        waits.append(asyncio.ensure_future(clock.sleep_until(deadline)))
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def fan_in(
    agents: Mapping[str, Agent],
    payload: Any,
    *,
    merge: str | Strategy = "all",
    min_agents: int | None = None,
    timeout: Duration | None = None,  # noqa: ASYNC109 - by the clock that is given
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Ask all at once and merge their analyses into one decision; a timeout's decision when too few answered."""
    clock = clock or SystemClock()
    _, strategy = strategy_of(merge)
    outcomes = await fan_out(agents, payload, timeout=timeout, clock=clock)
    answered = sorted((each for each in outcomes.values() if each.ok), key=lambda each: each.at_ms)
    missing = tuple(each.agent for each in outcomes.values() if not each.ok)
    if len(answered) < (len(agents) if min_agents is None else min_agents):
        return timeout_decision([each.agent for each in answered], list(missing))
    signals = {
        each.agent: {
            "agent_name": each.agent,
            "enriched_at": as_datetime(each.at_ms).isoformat(),
            "analysis": each.value,
        }
        for each in answered
    }
    return dict(
        merged_of(await called(strategy, signals, Question("", tuple(agents), missing, bool(missing)))).decision
    )


def timeout_decision(there: list[str], missing: list[str], missing_count: int | None = None) -> dict[str, Any]:
    """What is decided when too few answered in time."""
    return {
        "action": "timeout",
        "reason": "workflow_timeout",
        "partial_signals": there,
        "missing_signals": missing,
        "missing_count": len(missing) if missing_count is None else missing_count,
    }


@dataclass(frozen=True, slots=True)
class Route:
    """Who does it, when this is true of the payload."""

    when: Callable[[Any], bool]
    then: Agent
    name: str = ""


async def route(rules: Iterable[Route], payload: Any, *, default: Agent | None = None) -> Any:
    """Ask whom the first matching rule names, in their order; the default when none matches."""
    for rule in rules:
        if rule.when(payload):
            return await called(rule.then, payload)
    if default is None:
        raise InvalidInput("no rule matches this payload and there is no default; add one with default=")
    return await called(default, payload)


@dataclass(frozen=True, slots=True)
class Stop:
    """What a stage gives to end a sequence before its last stage."""

    reason: str
    value: Any = None


@dataclass(frozen=True, slots=True)
class Ran:
    """How far a sequence came."""

    value: Any
    done: tuple[str, ...]
    """The stages that ran, in order."""
    stopped_by: str | None = None
    reason: str | None = None


async def sequence(stages: Mapping[str, Agent], payload: Any) -> Ran:
    """One stage after the other, each on what the one before gave, until the last or until one gives a Stop."""
    done: list[str] = []
    value = payload
    for name, stage in stages.items():
        value = await called(stage, value)
        done.append(name)
        if isinstance(value, Stop):
            return Ran(value.value, tuple(done), name, value.reason)
    return Ran(value, tuple(done))


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives, asynchronous or not."""
    answer = function(*arguments)
    if answer is None:
        return None
    return await answer if inspect.isawaitable(answer) else answer
