"""Managers: start one, see which there are, stop them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from holdfast.cli import output, values
from holdfast.cli.command import Argument, Option, command, group, topic
from holdfast.cli.run import check_reachable
from holdfast.cli.session import Session
from holdfast.cli.tasks import accepted, tell_state
from holdfast.errors import InvalidInput, NotFound, TaskPending
from holdfast.layers.task_handle import TaskHandle
from holdfast.layers.task_launch import ManagerInfo
from holdfast.space import Space

app = topic()
commands = topic()
app.add(commands, "manager")

STOP_WAIT = "60s"


@group(commands)
async def manager(session: Session) -> None:
    """List the managers that run tasks, or start and stop one.

    \b
    Example:
      holdfast manager start --concurrency 8
      holdfast manager list
      holdfast manager stop --all
    """
    await _list(session)


@command(commands)
async def start(
    session: Session,
    concurrency: Annotated[
        str | None, Option(metavar="NUMBER", help="Tasks at once. Default: twice the cores.")
    ] = None,
    idle: Annotated[str | None, Option(metavar="TIME", help="How long it stays without work. Default: 10m.")] = None,
    host: Annotated[str | None, Option(metavar="NAME", help="What this host is called. [env: HOLDFAST_HOST]")] = None,
    allow_module: Annotated[
        list[str] | None, Option(metavar="MODULE", help="Run functions of this module only. Repeatable.")
    ] = None,
    allow_command: Annotated[
        list[str] | None, Option(metavar="PATH", help="Run this command only. Repeatable.")
    ] = None,
    preload: Annotated[
        list[str] | None, Option(metavar="MODULE", help="Import it once, for functions that need it. Repeatable.")
    ] = None,
) -> None:
    """Start a manager on this host, in the background, and print its tid.

    One serves a space on a host: where there is one already, that one is told, and keeps its own options. holdfast run starts one by itself.

    \b
    Example:
      holdfast manager start
      holdfast manager start --concurrency 8 --idle 1h --allow-module 'reports.*'
    """
    from holdfast.manager import ensure_manager

    options: dict[str, Any] = {
        "concurrency": None if concurrency is None else values.whole_number(concurrency),
        "idle": idle,
        "host": host,
        "allow_modules": tuple(allow_module or ()) or None,
        "allow_commands": tuple(allow_command or ()) or None,
        "preload": tuple(preload or ()) or None,
    }
    async with session.store(create=True) as store:
        space = await session.view(store)
        await check_reachable(store, space)
        info = await ensure_manager(space, **{name: value for name, value in options.items() if value is not None})
    output.value(_told(info) if session.json else info.tid, session.json)


@command(commands, name="list")
async def list_(session: Session) -> None:
    """List the managers of the space: where each is, since when, how many tasks it runs at once.

    \b
    Example:
      holdfast manager list --json
    """
    await _list(session)


async def _list(session: Session) -> None:
    async with session.space() as space:
        found = await space.tasks.managers()
    if session.json:
        output.json_line([_told(info) for info in found])
        return
    rows = [
        [info.tid, info.host, str(info.pid), str(info.capacity), output.moment(info.since) or "", _how(info)]
        for info in found
    ]
    output.table(("tid", "host", "pid", "capacity", "since", "state"), rows)


@command(commands)
async def status(
    session: Session,
    tid: Annotated[str | None, Argument(metavar="TID", help="The manager; may be left out where there is one.")] = None,
) -> None:
    """Show a manager as the task that it is.

    \b
    Example:
      holdfast manager status
    """
    async with session.space() as space:
        if tid is None:
            found = await space.tasks.managers()
            if len(found) != 1:
                raise _not_one(found)
            tid = found[0].tid
        tell_state(await (await space.tasks.get(tid)).state(), session.json)


@command(commands)
async def stop(
    session: Session,
    tids: Annotated[
        list[str] | None, Argument(metavar="TID", help="Which; may be left out where there is one.")
    ] = None,
    every: Annotated[bool, Option("--all", help="All of them, on every host.")] = False,
    kill: Annotated[bool, Option("--kill", help="At once, with all they run.")] = False,
    wait: Annotated[str, Option(metavar="TIME", help="How long to wait for their end; 0 not at all.")] = STOP_WAIT,
) -> None:
    """Stop managers: they take nothing more, give what they run a grace to end, and leave.

    What they had taken and not begun is left to others, or to the next one.

    \b
    Example:
      holdfast manager stop
      holdfast manager stop --all --wait 10s
    """
    if tids and every:
        raise InvalidInput("name managers, or say --all")
    patience = values.wait(wait)
    async with session.space() as space:
        handles = await _meant(space, tids, every)
        await asyncio.gather(*(_stop(handle, kill, patience) for handle in handles))
    for handle in handles:
        output.value({"tid": handle.tid} if session.json else handle.tid, session.json)


async def _stop(handle: TaskHandle, kill: bool, patience: str | int) -> None:
    try:
        accepted(handle, await (handle.kill if kill else handle.stop)(wait=patience))
    except TaskPending:
        if patience != 0:
            raise
        return
    await handle.wait(patience)


async def _meant(space: Space, tids: list[str] | None, every: bool) -> list[TaskHandle]:
    if tids:
        return [await space.tasks.get(tid) for tid in tids]
    found = await space.tasks.managers()
    if not every and len(found) != 1:
        raise _not_one(found)
    return [await space.tasks.get(info.tid) for info in found]


def _not_one(found: list[ManagerInfo]) -> NotFound | InvalidInput:
    if not found:
        return NotFound("no manager serves this space; holdfast manager start, or holdfast run, starts one")
    return InvalidInput(f"there are {len(found)} managers: name one, see holdfast manager list")


def _told(info: ManagerInfo) -> dict[str, Any]:
    return {**output.plain(info), "draining": info.draining}


def _how(info: ManagerInfo) -> str:
    return "draining" if info.draining else "serving"
