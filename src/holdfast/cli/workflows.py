"""Executions of workflows: list, show as a timeline, start, signal, pause, go back, archive."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

from holdfast.cli import output
from holdfast.cli.command import Argument, Option, command, group, topic
from holdfast.cli.session import Session
from holdfast.cli.timeline import lines_of, rows_of
from holdfast.cli.values import parsed, whole_number
from holdfast.clock import SystemClock, as_datetime
from holdfast.errors import InvalidInput
from holdfast.layers.workflows.handles import ExecutionHandle, ExecutionView, Workflows

app = topic()
commands = topic()
app.add(commands, "workflow")

LISTED: Final = 100
"""How many are listed, unless told."""
POINTS: Final = 200
CLEAR: Final = "\x1b[H\x1b[2J"

Id = Annotated[str, Argument(metavar="ID", help="The execution.", show_default=False)]
Name = Annotated[str | None, Option("--name", metavar="NAME", help="Only those of this workflow.")]
Number = Annotated[str, Option("-n", metavar="NUMBER", help="How many at most.")]
Keep = Annotated[
    str | None, Option(metavar="TIME", help="How long archives are kept, such as 365d. Default: for ever.")
]


@group(commands)
async def workflow(session: Session) -> None:
    """List executions of workflows, or operate one.

    \b
    Example:
      holdfast workflow list --status running
      holdfast workflow show msft-2026-11-15
    """
    await _list(session, None, None, LISTED)


@command(commands, name="list")
async def list_(
    session: Session,
    name: Name = None,
    status: Annotated[
        str | None,
        Option(metavar="STATUS", help="pending, running, paused, completed, failed or cancelled."),
    ] = None,
    number: Number = str(LISTED),
) -> None:
    """List executions that have not ended; with a --status that is an end, those that ended so, the last ones first.

    \b
    Example:
      holdfast workflow list --name research
      holdfast workflow list --status failed
    """
    await _list(session, name, status, whole_number(number))


async def _list(session: Session, name: str | None, status: str | None, limit: int) -> None:
    async with session.space() as space:
        found = await space.workflows.list(name=name, status=status, limit=limit)
    if session.json:
        output.json_line([output.plain(view) for view in found])
        return
    rows = [
        [
            view.id,
            view.name,
            view.status,
            output.moment(view.started_at or view.created_at) or "",
            output.moment(view.ended_at) or "",
            _waiting(view),
        ]
        for view in found
    ]
    output.table(("id", "workflow", "status", "since", "ended", ""), rows)
    if not rows and status is None:
        output.note("nothing goes on; --status completed, failed or cancelled lists what has ended", False)


def _waiting(view: ExecutionView) -> str:
    if view.error is not None:
        return f"{view.error.get('type')}: {view.error.get('message')}"[:80]
    return ", ".join(f"{wait['kind']} {wait.get('name', '')}".strip() for wait in view.waits[:3])


@command(commands)
async def show(
    session: Session,
    id: Id,
    watch: Annotated[
        bool, Option("--watch", "--follow", help="Show it anew whenever something happens, until it ends.")
    ] = False,
) -> None:
    """Draw an execution as a timeline: its steps with durations, attempts, waits and parallel tasks; its state and result.

    The tasks of a map are one line with counts. A workflow that no worker serves is said to wait.

    \b
    Example:
      holdfast workflow show msft-2026-11-15
      holdfast workflow show msft-2026-11-15 --watch
      holdfast workflow show msft-2026-11-15 --json | jq .steps
    """
    async with session.space() as space:
        handle = await space.workflows.get(id)
        if not watch:
            await _show(session, space.workflows, handle, await handle.status())
            return
        async for view in handle.watch():
            if sys.stdout.isatty() and not session.json:
                sys.stdout.write(CLEAR)
            await _show(session, space.workflows, handle, view)
            output.flush()


async def _show(session: Session, workflows: Workflows, handle: ExecutionHandle, view: ExecutionView) -> None:
    steps, state = await handle.steps(results=session.json, as_called=True), await handle.state()
    result = await handle.result(0) if view.status == "completed" else None
    served = view.ended_at is not None or await workflows.is_served(view.name)
    if not session.json:
        now = as_datetime(SystemClock().now_ms())
        for line in lines_of(view, steps, state, result, served=served, now=now):
            output.line(line)
        return
    told = output.plain(view) | {"served": served, "state": state, "result": result}
    output.json_line(told | {"steps": output.plain(steps), "timeline": [output.plain(row) for row in rows_of(steps)]})


@command(commands)
async def start(
    session: Session,
    name: Annotated[str, Argument(metavar="NAME", help="The workflow.", show_default=False)],
    input: Annotated[
        str | None, Argument(metavar="JSON", help="The input; nothing is null.", show_default=False)
    ] = None,
    id: Annotated[str | None, Option("--id", metavar="ID", help="Its id; the same again starts nothing.")] = None,
    priority: Annotated[str, Option(metavar="NUMBER", help="Higher ones run first.")] = "0",
    key: Annotated[str | None, Option(metavar="TEXT", help="The key of its limit, where its code makes one.")] = None,
    wait: Annotated[str | None, Option(metavar="TIME", help="Wait so long for its result, and print that.")] = None,
) -> None:
    """Start an execution of a workflow by its name, and print its id.

    A workflow that no worker serves waits, as pending, until one does.

    \b
    Example:
      holdfast workflow start research '{"symbol": "MSFT"}' --id msft-2026-11-15
      holdfast workflow start research '{"symbol": "MSFT"}' --wait 5m
    """
    given = None if input is None else parsed(input)
    async with session.space(create=True) as space:
        handle = await space.workflows.start(name, given, id=id, priority=whole_number(priority), key=key)
        if not await space.workflows.is_served(name):
            output.note(f"no worker serves {name!r}; the execution waits until one does", session.json)
        if wait is not None:
            output.value(await handle.result(wait), session.json)
            return
        output.value(output.plain(await handle.status()) if session.json else handle.id, session.json)


@command(commands)
async def signal(
    session: Session,
    id: Id,
    name: Annotated[str, Argument(metavar="NAME", help="The signal's name.", show_default=False)],
    value: Annotated[
        str | None, Argument(metavar="JSON", help="Its value; nothing is null.", show_default=False)
    ] = None,
) -> None:
    """Send an execution a value that it waits for, or will.

    \b
    Example:
      holdfast workflow signal msft-2026-11-15 approval '{"by": "ann"}'
    """
    given = None if value is None else parsed(value)
    async with session.space() as space:
        await (await space.workflows.get(id)).signal(name, given)
    _done(session, id, "signalled")


@command(commands)
async def pause(session: Session, id: Id) -> None:
    """Let an execution stay where it is; a step that is under way is done again when it goes on.

    \b
    Example:
      holdfast workflow pause msft-2026-11-15
    """
    async with session.space() as space:
        await (await space.workflows.get(id)).pause()
    _done(session, id, "pausing")


@command(commands)
async def resume(session: Session, id: Id) -> None:
    """Let a paused execution go on.

    \b
    Example:
      holdfast workflow resume msft-2026-11-15
    """
    async with session.space() as space:
        await (await space.workflows.get(id)).resume()
    _done(session, id, "resuming")


@command(commands)
async def cancel(session: Session, id: Id) -> None:
    """End an execution, and its children with it.

    \b
    Example:
      holdfast workflow cancel msft-2026-11-15
    """
    async with session.space() as space:
        await (await space.workflows.get(id)).cancel()
    _done(session, id, "cancelling")


FromStep = Annotated[
    str | None,
    Option("--from", metavar="STEP", help="The step, as show names it; name#1 is the second call of a name."),
]


@command(commands)
async def retry(session: Session, id: Id, from_step: FromStep = None) -> None:
    """Let an execution that has ended try again: what failed, or everything from a step on, whose state is taken back.

    \b
    Example:
      holdfast workflow retry msft-2026-11-15
      holdfast workflow retry msft-2026-11-15 --from analyse
    """
    async with session.space() as space:
        await (await space.workflows.get(id)).retry(from_step)
    _done(session, id, "pending")


@command(commands)
async def fork(
    session: Session,
    id: Id,
    from_step: FromStep = None,
    new: Annotated[str | None, Option("--id", metavar="ID", help="The new execution's id.")] = None,
    input: Annotated[str | None, Option(metavar="JSON", help="Another input.")] = None,
    state: Annotated[
        str | None, Option(metavar="JSON", help="An object: keys of the state, and what they are set to.")
    ] = None,
    without: Annotated[
        list[str] | None, Option(metavar="KEY", help="A key of the state to take away; repeat it for more.")
    ] = None,
) -> None:
    """Make a new execution that goes on from a step of another, with what was done before it; print its id.

    \b
    Example:
      holdfast workflow fork msft-2026-11-15 --from report --state '{"limit": 20}'
    """
    if from_step is None:
        raise InvalidInput("name the step to go on from with --from; holdfast workflow show lists them")
    edited = None if state is None else parsed(state)
    if edited is not None and not isinstance(edited, dict):
        raise InvalidInput("--state is a JSON object, such as '{\"limit\": 20}'")
    given: dict[str, Any] = {} if input is None else {"input": parsed(input)}
    async with session.space() as space:
        handle = await space.workflows.get(id)
        made = await handle.fork(from_step, id=new, state=edited, without=without or (), **given)
        output.value(output.plain(await made.status()) if session.json else made.id, session.json)


@command(commands)
async def history(
    session: Session,
    id: Id,
    after: Annotated[str, Option(metavar="NUMBER", help="Only points after this one.")] = "0",
    number: Number = str(POINTS),
) -> None:
    """Print what happened to an execution, point by point; with --json a line each, with the state after it.

    \b
    Example:
      holdfast workflow history msft-2026-11-15
      holdfast workflow history msft-2026-11-15 --json | jq .state
    """
    async with session.space() as space:
        handle = await space.workflows.get(id)
        points = await handle.history(after=whole_number(after), limit=whole_number(number))
    if session.json:
        for point in points:
            output.json_line(output.plain(point))
        return
    rows = [
        [
            str(point.number),
            output.moment(point.at) or "",
            point.event,
            point.path,
            point.by,
            ", ".join(point.changed)
            if point.error is None
            else f"{point.error['type']}: {point.error['message']}"[:80],
        ]
        for point in points
    ]
    output.table(("", "at", "event", "step", "by", "changed"), rows)


@command(commands)
async def diff(
    session: Session,
    id: Id,
    old: Annotated[str, Argument(metavar="POINT", help="A step, or a number of history.", show_default=False)],
    new: Annotated[str, Argument(metavar="POINT", help="Another.", show_default=False)],
) -> None:
    """Print what differs between the states after two points of an execution's history; 0 is its beginning.

    \b
    Example:
      holdfast workflow diff msft-2026-11-15 fetch report
      holdfast workflow diff msft-2026-11-15 0 17
    """
    async with session.space() as space:
        found = await (await space.workflows.get(id)).diff(_point(old), _point(new))
    if session.json:
        output.json_line([{"path": each.path, **output.plain(each)} for each in found])
        return
    for each in found:
        output.line(output.shown(str(each)))


def _point(text: str) -> int | str:
    return int(text) if text.isdigit() else text


@command(commands)
async def archive(
    session: Session,
    ids: Annotated[list[str], Argument(metavar="ID", help="Executions that have ended.", show_default=False)],
    keep: Keep = None,
) -> None:
    """Keep what there is of executions as blobs; nothing is deleted.

    \b
    Example:
      holdfast workflow archive msft-2026-11-15 --keep 365d
    """
    async with session.space() as space:
        for id in ids:
            made = await (await space.workflows.get(id)).archive(keep=keep)
            output.value(
                output.plain(made) if session.json else f"{output.shown(id)}: {made.blob.size:,} bytes", session.json
            )


@command(commands)
async def archives(session: Session, name: Name = None, number: Number = str(LISTED)) -> None:
    """List what was archived.

    \b
    Example:
      holdfast workflow archives --name research
    """
    async with session.space() as space:
        found = await space.workflows.archives(name=name, limit=whole_number(number))
    if session.json:
        output.json_line([output.plain(each) for each in found])
        return
    rows = [
        [each.id, each.name, each.status, output.moment(each.ended_at) or "", output.moment(each.archived_at) or ""]
        for each in found
    ]
    output.table(("id", "workflow", "status", "ended", "archived"), rows)


@command(commands)
async def restore(session: Session, id: Id) -> None:
    """Bring an archived execution back, as it was. It is kept as long as one that has just ended.

    \b
    Example:
      holdfast workflow restore msft-2026-11-15
    """
    async with session.space() as space:
        await space.workflows.restore(id)
    _done(session, id, "restored")


@command(commands)
async def cleanup(
    session: Session,
    older_than: Annotated[
        str | None, Option("--older-than", metavar="TIME", help="Those that ended so long ago, such as 12h.")
    ] = None,
    name: Name = None,
    keep: Keep = None,
    no_archive: Annotated[bool, Option("--no-archive", help="Do not archive them first.")] = False,
) -> None:
    """Remove executions that ended long ago, each after it was archived; an archive that fails deletes nothing.

    Without it, an execution is kept for 24 hours after its end, and is not archived.

    \b
    Example:
      holdfast workflow cleanup --older-than 12h --keep 365d
    """
    if older_than is None:
        raise InvalidInput("say with --older-than how long ago they ended, such as 12h")
    async with session.space() as space:
        done = await space.workflows.cleanup(older_than, name=name, archive=not no_archive, keep=keep)
    if session.json:
        output.json_line(output.plain(done))
        return
    output.line(f"removed {done.removed:,}, archived {done.archived:,}" + ("; there are more" if done.more else ""))


def _done(session: Session, id: str, status: str) -> None:
    """What was asked for is on its way; a worker does it."""
    output.value({"id": id, "status": status} if session.json else f"{output.shown(id)}: {status}", session.json)
