"""Several branches of one execution at the same time, each in a task of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, cast

from holdfast.errors import NonDeterminism
from holdfast.layers.workflows.branches import BRANCH, Branch, here
from holdfast.layers.workflows.performing import flush

if TYPE_CHECKING:
    from holdfast.layers.workflows.running import Run

Work = tuple[str, Awaitable[Any]]
"""A branch's path, and what is done there."""


async def refuse(awaitables: tuple[Awaitable[Any], ...]) -> None:
    """What was to be done in branches of a branch that is refused: each is begun, and refused as well."""
    task = cast(asyncio.Task[Any], asyncio.current_task())
    for work in awaitables:
        if asyncio.iscoroutine(work):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # another error is told already
                await work


async def branch_out(
    run: Run, branches: list[Work], *, return_exceptions: bool = False, then: Callable[[], list[Work]] = list
) -> list[Any]:
    """Run each branch, and those that `then` gives whenever one is done, until all are; gives their results in order.

    When one fails, the others are cancelled, and its error is raised when they are gone. Those that have not begun yet begin, and
    are refused their first call: so each that was counted counts itself out again.
    """
    if not branches:
        return []
    loop, left, around = asyncio.get_running_loop(), 0, here()
    gathered = asyncio.Event()
    failed: BaseException | None = None
    tasks: list[asyncio.Task[Any]] = []
    growing: list[asyncio.Task[Any]] = []

    def begin(works: list[Work]) -> None:
        nonlocal left
        left += len(works)
        run.runnable.more(len(works))
        for path, work in works:
            tasks.append(loop.create_task(grow(Branch(path, run.journal, within=around), work), context=copy_context()))

    def fail(error: BaseException, branch: Branch | None = None) -> None:
        nonlocal failed
        if failed is None and left:
            failed = error
            run.runnable.more()  # who waits for them goes on, as soon as the others have been cancelled
            for task in growing:
                if branch is None or task is not branch.task:
                    task.cancel()

    async def grow(branch: Branch, work: Awaitable[Any]) -> Any:
        nonlocal left
        branch.task = task = cast(asyncio.Task[Any], asyncio.current_task())
        BRANCH.set(branch)
        run.branches.add(branch)
        growing.append(task)
        if failed is not None:
            branch.refuses = True
            task.cancel()  # it is, as soon as it waits for something else than a call
        try:
            result = await work
            if not branch.is_step and (operations := flush(run, branch)):
                run.journal.stage(operations)
            if failed is None:
                begin(then())
            return result
        except BaseException as exc:
            if not (return_exceptions and isinstance(exc, Exception)) or isinstance(exc, NonDeterminism):
                fail(exc, branch)
            raise
        finally:
            run.branches.discard(branch)
            left -= 1
            if not left:
                if failed is None:
                    run.runnable.more()  # who waits for them goes on
                gathered.set()
            run.runnable.less()

    begin(branches)
    try:
        run.runnable.less()
        await gathered.wait()
        await asyncio.wait(tasks)
    except BaseException as exc:
        fail(exc)
        await asyncio.wait(tasks)
        _look(tasks)
        raise
    _look(tasks)
    if failed is not None:
        run.leave([path for path, _ in branches if path])
        raise failed
    return [task.exception() or task.result() for task in tasks]


def _look(tasks: list[asyncio.Task[Any]]) -> None:
    """Their errors are known: nobody needs to be warned."""
    for task in tasks:
        if not task.cancelled():
            task.exception()
