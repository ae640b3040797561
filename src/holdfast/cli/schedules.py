"""Schedules of workflows: add, list, pause, remove."""

from __future__ import annotations

from typing import Annotated

from holdfast.cli import output
from holdfast.cli.command import Argument, Option, command, group, topic
from holdfast.cli.session import Session
from holdfast.cli.values import parsed, whole_number
from holdfast.layers.workflows.schedules import ScheduleView

app = topic()
commands = topic()
app.add(commands, "schedule")

Id = Annotated[str, Argument(metavar="ID", help="The schedule.", show_default=False)]


@group(commands)
async def schedule(session: Session) -> None:
    """List schedules, or add and operate one.

    \b
    Example:
      holdfast schedule add "0 7 * * 1-5" research --timezone America/New_York
      holdfast schedule list
    """
    await _list(session)


@command(commands)
async def add(
    session: Session,
    cron: Annotated[
        str,
        Argument(metavar="CRON", help="Minute, hour, day, month, weekday; seconds may come first.", show_default=False),
    ],
    workflow: Annotated[str, Argument(metavar="WORKFLOW", help="What is started.", show_default=False)],
    input: Annotated[
        str | None, Argument(metavar="JSON", help="Its input; nothing is null.", show_default=False)
    ] = None,
    timezone: Annotated[str, Option(metavar="ZONE", help="Whose clock it follows.")] = "UTC",
    id: Annotated[
        str | None, Option("--id", metavar="ID", help="The schedule's id. Default: the workflow's name.")
    ] = None,
    catch_up: Annotated[
        str, Option(metavar="WHICH", help="Of those missed while no worker was there, start none, one or all.")
    ] = "one",
    priority: Annotated[str, Option(metavar="NUMBER", help="Higher ones run first.")] = "0",
) -> None:
    """Start a workflow at the times of a cron expression, each once, by whichever worker is there.

    An execution's id is the schedule's with the time, such as research@2026-11-16T12:00:00Z.

    \b
    Example:
      holdfast schedule add "0 7 * * 1-5" research --timezone America/New_York
      holdfast schedule add "*/15 * * * *" sweep '{"depth": 2}' --id sweep-often --catch-up none
    """
    given = None if input is None else parsed(input)
    async with session.space(create=True) as space:
        made = await space.workflows.schedules.add(
            cron,
            workflow,
            given,
            timezone=timezone,
            id=id,
            catch_up=catch_up,  # type: ignore[arg-type]
            priority=whole_number(priority),
        )
        if not await space.workflows.is_served(workflow):
            output.note(f"no worker serves {workflow!r} now; nothing is started as long as none does", session.json)
    text = f"{output.shown(made.id)}: next at {output.moment(made.next_at)}"
    output.value(output.plain(made) if session.json else text, session.json)


@command(commands, name="list")
async def list_(session: Session) -> None:
    """List schedules: when each is due next, and what it started last.

    \b
    Example:
      holdfast schedule list
    """
    await _list(session)


async def _list(session: Session) -> None:
    async with session.space() as space:
        found = await space.workflows.schedules.list()
    if session.json:
        output.json_line([output.plain(each) for each in found])
        return
    columns = ("id", "workflow", "cron", "zone", "next", "last", "started", "missed")
    output.table(columns, [_row(each) for each in found])


def _row(each: ScheduleView) -> list[str]:
    due = "paused" if each.paused else output.moment(each.next_at) or ""
    last = output.moment(each.last_at) or ""
    return [each.id, each.workflow, each.cron, each.timezone, due, last, str(each.started), str(each.missed)]


@command(commands)
async def remove(session: Session, id: Id) -> None:
    """Remove a schedule. What it has started goes on.

    \b
    Example:
      holdfast schedule remove research
    """
    async with session.space() as space:
        await space.workflows.schedules.remove(id)
    _done(session, id, "removed")


@command(commands)
async def pause(session: Session, id: Id) -> None:
    """Let a schedule start nothing until it is resumed.

    \b
    Example:
      holdfast schedule pause research
    """
    async with session.space() as space:
        await space.workflows.schedules.pause(id)
    _done(session, id, "paused")


@command(commands)
async def resume(session: Session, id: Id) -> None:
    """Let a schedule go on with its next time; what was due meanwhile is not started.

    \b
    Example:
      holdfast schedule resume research
    """
    async with session.space() as space:
        await space.workflows.schedules.resume(id)
        made = await space.workflows.schedules.get(id)
    _done(session, id, f"next at {output.moment(made.next_at)}")


def _done(session: Session, id: str, status: str) -> None:
    output.value({"id": id, "status": status} if session.json else f"{output.shown(id)}: {status}", session.json)
