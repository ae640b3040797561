"""Several branches of one execution at the same time, each in a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from holdfast.layers.workflows.branches import BRANCH, Branch
from holdfast.layers.workflows.performing import flush

if TYPE_CHECKING:
    from holdfast.layers.workflows.running import Run

Work = tuple[str, Awaitable[Any]]
"""A branch's path, and what is done there."""


async def branch_out(
    run: Run, branches: list[Work], *, return_exceptions: bool = False, then: Callable[[], list[Work]] = list
) -> list[Any]:
    """Run each branch, and those that `then` gives whenever one is done, until all are; gives their results in order.

    When one fails, the others are cancelled, and its error is raised when they are gone.
    """
    if not branches:
        return []
    loop, left = asyncio.get_running_loop(), 0
    gathered = asyncio.Event()
    failed: BaseException | None = None
    tasks: list[asyncio.Task[Any]] = []
    begun: list[Awaitable[Any]] = []

    def begin(works: list[Work]) -> None:
        nonlocal left
        left += len(works)
        run.runnable.more(len(works))
        for path, work in works:
            begun.append(work)
            tasks.append(loop.create_task(grow(Branch(path, run.journal), work), context=copy_context()))

    async def grow(branch: Branch, work: Awaitable[Any]) -> Any:
        nonlocal left, failed
        branch.task = asyncio.current_task()
        BRANCH.set(branch)
        run.branches.add(branch)
        try:
            result = await work
            if operations := flush(run, branch):
                run.journal.stage(operations)
            begin(then())
            return result
        except BaseException as exc:
            if failed is None and not (return_exceptions and isinstance(exc, Exception)):
                failed = exc
                run.runnable.more()  # who waits for them goes on, as soon as the others have been cancelled
                for task in tasks:
                    if task is not branch.task:
                        task.cancel()
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
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        _look(tasks, begun)
        raise
    _look(tasks, begun)
    if failed is not None:
        raise failed
    return [task.exception() or task.result() for task in tasks]


def _look(tasks: list[asyncio.Task[Any]], begun: list[Awaitable[Any]]) -> None:
    """Their errors are known, and what was cancelled before it began is not awaited on purpose: nobody needs to be warned."""
    for work in begun:
        if asyncio.iscoroutine(work):
            work.close()
    for task in tasks:
        if not task.cancelled():
            task.exception()
