"""A class of steps, run as code: each step as soon as those it needs are done.

The calls are made in the order of the definition, so that each has its place whatever finishes first; then the steps that need nothing
begin, and whenever one is done those that it was the last need of. A step gets ctx, the item if it is done for each item of another's
result, and as many results of the steps before it as it takes. The execution's result is that of the last step; if there are several
that no other needs, a dictionary of theirs.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from holdfast.codec import decode
from holdfast.errors import StepFailed
from holdfast.layers.workflows.away import AsTask, OnQueue
from holdfast.layers.workflows.branches import BRANCH, Branch, Call, Within, call
from holdfast.layers.workflows.branching import Work, branch_out
from holdfast.layers.workflows.definitions import Definition, Step, positional
from holdfast.layers.workflows.entries import StepRecord, raw
from holdfast.layers.workflows.performing import Elsewhere, Task, perform, skip

if TYPE_CHECKING:
    from holdfast.layers.workflows.running import Run


async def run_steps(run: Run, definition: Definition) -> Any:
    """Run an instance of the class from beginning to end."""
    instance = definition.target()
    calls = {step.name: call(run.journal, step.name) for step in definition.steps}
    begun: set[str] = set()
    results: dict[str, Any] = {}

    async def do(step: Step) -> None:
        results[step.name] = await _do(run, instance, step, calls[step.name], results)

    def free() -> list[Work]:
        ready = [step for step in definition.steps if step.name not in begun and results.keys() >= set(step.needs)]
        begun.update(step.name for step in ready)
        return [("", do(step)) for step in ready]

    await branch_out(run, free(), then=free)
    needed = {need for step in definition.steps for need in step.needs}
    last = [step.name for step in definition.steps if step.name not in needed]
    return results[last[0]] if len(last) == 1 else {name: results[name] for name in last}


async def _do(run: Run, instance: Any, step: Step, made: Call, results: dict[str, Any]) -> Any:
    run.runnable.made += 1  # the call, which begins now
    with Within(run.runnable, run.journal, made.branch):
        function = getattr(instance, step.function.__name__)
        given = tuple(results[name] for name in step.after)
        if not await _wanted(run, step, given):
            await skip(run, Task(made.branch, made.path, made.position, function, ()))
            return None
        elsewhere: Elsewhere | None = AsTask() if step.task else None
        if step.queue is not None:
            elsewhere = OnQueue(step.queue, step=step.name)
        options: dict[str, Any] = {
            "retry": step.retry,
            "timeout_ms": step.timeout_ms,
            "on_error": step.on_error,
            "elsewhere": elsewhere,
        }
        if step.each is None:
            task = Task(
                made.branch, made.path, made.position, function, given[: step.takes], with_ctx="first", **options
            )
            return await perform(run, task)
        items = results[step.each]
        if not isinstance(items, list):
            raise StepFailed(
                f"step {step.name!r} is done for each item of {step.each!r}, whose result is no list but {items!r:.60}",
                step=made.path,
                kind="TypeError",
                reason="no list",
            )
        run.runnable.made += 1  # the map is a call of its own
        return await run.context.mapped(
            made,
            function,
            items,
            step.max_workers,
            step.retry,
            step.timeout_ms,
            step.on_error,
            step.min_success_rate,
            given[: max(0, step.takes - 1)],
            "first",
            elsewhere,
        )


async def _wanted(run: Run, step: Step, given: tuple[Any, ...]) -> bool:
    """What `when` said; it is asked once."""
    if step.when is None:
        return True
    journal, path = run.journal, f"~when:{step.name}"
    record = journal.records.get(path)
    if record is None:
        branch = Branch(path, journal, is_step=True)  # what it writes is forgotten
        token = BRANCH.set(branch)
        try:
            answer = step.when(run.context, *given[: positional(step.when, "when") - 1])
            if inspect.isawaitable(answer):
                answer = await answer
        finally:
            BRANCH.reset(token)
        record = StepRecord("completed", kind="when", result=raw(bool(answer), ""))
        journal.stage([journal.record(path, record)])
    return bool(decode(bytes(record.result)))
