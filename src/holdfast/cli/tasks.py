"""Tasks: how they stand, what they printed and gave, and controlling them. `run.py` begins them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from holdfast.cli import output, values
from holdfast.cli.command import Argument, Option, command, group, topic
from holdfast.cli.session import Session
from holdfast.errors import Conflict, Error, InvalidInput, NotFound
from holdfast.layers.task_control import Command, ControlAnswer
from holdfast.layers.task_handle import TaskHandle
from holdfast.layers.task_launch import MANAGER
from holdfast.layers.task_states import ENDED, STATUSES, TaskEvent, TaskState
from holdfast.space import Space

app = topic()
commands = topic()
app.add(commands, "task")

LIVE: Final = tuple(status for status in STATUSES if status not in ENDED)
CONTROLLED_MAX: Final = 10_000
"""Tasks that --all or --pattern means at most."""
ANSWER_S: Final = "30s"

Tid = Annotated[str, Argument(metavar="TID", help="The task: its tid, or how it ends.", show_default=False)]
Tids = Annotated[list[str] | None, Argument(metavar="TID", help="The tasks, by their tids or how these end.")]
Every = Annotated[bool, Option("--all", help="All that have not ended; managers are not meant.")]
Pattern = Annotated[str | None, Option(metavar="PATTERN", help="Those whose name or tid fits, such as 'etl*'.")]
Wait = Annotated[str, Option(metavar="TIME", help="How long to wait for the answer; 0 not at all.")]


@command(app)
async def status(
    session: Session,
    tid: Annotated[
        str | None,
        Argument(metavar="TID", help="The task: its tid, or how it ends.", show_default=False),
    ] = None,
    watch: Annotated[bool, Option("--watch", "-w", help="Go on, and tell every change.")] = False,
) -> None:
    """Show how a task stands, or what runs and who runs it.

    With --watch a task is followed to its end, and all of them until it is interrupted.

    \b
    Example:
      holdfast status
      holdfast status 5678901234 --watch
      holdfast status 5678901234 --json | jq -r .status
    """
    async with session.space() as space:
        if tid is not None:
            handle = await space.tasks.get(tid)
            if watch:
                async for event in handle.events(live=True):
                    _tell_event(event, session.json)
            else:
                tell_state(await handle.state(), session.json)
            return
        if watch:
            async for seen in space.tasks.observe():
                _tell_event(seen.event, session.json)
            return
        counts, managers = await space.tasks.counts(), await space.tasks.managers()
        live = await space.tasks.list(status=LIVE)
    if session.json:
        output.json_line(
            {"counts": counts, "managers": output.plain(managers), "tasks": [output.plain(each) for each in live]}
        )
        return
    output.line("  ".join(f"{name} {number}" for name, number in counts.items()))
    for each in managers:
        drains = ", draining" if each.draining else ""
        output.line(f"manager {each.tid} on {each.host}, pid {each.pid}, up to {each.capacity} at once{drains}")
    _tell_list([each for each in live if not _is_manager(each)])


@command(app)
async def result(
    session: Session,
    tid: Tid,
    stream: Annotated[bool, Option("--stream", help="Print what it prints meanwhile, as it comes.")] = False,
    wait: Annotated[
        str | None, Option(metavar="TIME", help="How long to wait for its end. Default: as long as it takes.")
    ] = None,
) -> None:
    """Print what a task gave, when it has ended.

    That is a function's result as JSON, or what a command printed, as it was. The exit code is 25 when it did not complete, and 26 when it has not ended in the time to wait.

    \b
    Example:
      holdfast result 5678901234
      holdfast result 5678901234 --stream
      holdfast result 5678901234 --wait 0 --json
    """
    patience = None if wait is None else values.wait(wait)
    async with session.space() as space:
        handle = await space.tasks.get(tid)
        if stream and not session.json:
            await tell_output(handle, output.Stream(), follow=patience != 0)
            state = await handle.wait(patience)
            given = await handle.result(wait=0) if state.result is not None or state.status != "completed" else b""
        else:
            given = await handle.result(wait=patience)
        if session.json:
            output.json_line({**output.plain(await handle.state()), "result": readable(given)})
        elif isinstance(given, bytes):
            output.Stream().write(given)
        else:
            output.json_line(given)


@command(app)
async def logs(
    session: Session,
    tid: Tid,
    follow: Annotated[bool, Option("--follow", "-f", help="Go on until the task has ended.")] = False,
    events: Annotated[
        bool, Option("--events", help="What happened to it instead: states, failures, commands.")
    ] = False,
    raw: Annotated[bool, Option("--raw", help="As it was, also what a terminal obeys.")] = False,
) -> None:
    """Print what a task has printed so far.

    A task that does not stream shows its output when it has ended. With --json a line has one chunk: its number, its data as
    text, or as base64 if it is none, and whether it is the last.

    \b
    Example:
      holdfast logs 5678901234 -f
      holdfast logs 5678901234 --events --json
    """
    async with session.space() as space:
        handle = await space.tasks.get(tid)
        if events:
            async for event in handle.events(live=follow):
                _tell_event(event, session.json)
        else:
            await tell_output(handle, output.Stream(raw=raw), follow=follow, json=session.json)


async def tell_output(handle: TaskHandle, stream: output.Stream, *, follow: bool, json: bool = False) -> None:
    """Print what a task prints; without `follow`, what it has printed so far."""
    async for chunk in handle.stream(live=follow):
        if json:
            told: dict[str, Any] = {"chunk": chunk.number, "stream": chunk.stream, "attempt": chunk.attempt}
            output.json_line(told | encoded(chunk.data) | {"final": chunk.final})
            output.flush()
        elif chunk.data:
            stream.write(chunk.data, is_error=chunk.stream == "stderr")


# --- several of them ---


@group(commands)
async def task(session: Session) -> None:
    """List tasks; stop, kill, pause, resume, ping or retry them.

    \b
    Example:
      holdfast task list --status running
      holdfast task stop 5678901234
      holdfast task kill --pattern 'etl*'
    """
    await _list(session, None, None, 100)


@command(commands, name="list")
async def list_(
    session: Session,
    only: Annotated[
        list[str] | None,
        Option("--status", metavar="STATUS", help=f"{', '.join(STATUSES)}; repeat it for more."),
    ] = None,
    pattern: Pattern = None,
    number: Annotated[str, Option("-n", metavar="NUMBER", help="How many at most.")] = "100",
) -> None:
    """List tasks: those that live, then those that have ended, the newest first.

    \b
    Example:
      holdfast task list --status running --status spawning
      holdfast task list --pattern 'etl*' --json
    """
    await _list(session, only, pattern, values.whole_number(number))


async def _list(session: Session, only: list[str] | None, pattern: str | None, limit: int) -> None:
    async with session.space() as space:
        found = await space.tasks.list(status=only or None, pattern=pattern, limit=limit)  # type: ignore[arg-type]
    if session.json:
        output.json_line([output.plain(each) for each in found])
    else:
        _tell_list(found)


def _tell_list(found: list[TaskState]) -> None:
    rows = [
        [
            each.tid,
            "paused" if each.paused else each.status,
            each.title,
            each.owner,
            output.moment(each.started_at or each.created_at) or "",
            "" if each.return_code is None else str(each.return_code),
            each.reason or "",
        ]
        for each in found
    ]
    output.table(("tid", "status", "name", "owner", "since", "code", "reason"), rows)


@command(commands)
async def stop(
    session: Session, tids: Tids = None, every: Every = False, pattern: Pattern = None, wait: Wait = ANSWER_S
) -> None:
    """End tasks, politely first: they are cancelled. What has not begun is cancelled at once.

    \b
    Example:
      holdfast task stop 5678901234
      holdfast task stop --all
    """
    await _control(session, "STOP", tids, every, pattern, wait)


@command(commands)
async def kill(
    session: Session, tids: Tids = None, every: Every = False, pattern: Pattern = None, wait: Wait = ANSWER_S
) -> None:
    """End tasks at once, with all their processes.

    \b
    Example:
      holdfast task kill 5678901234
      holdfast task kill --pattern 'etl*'
    """
    await _control(session, "KILL", tids, every, pattern, wait)


@command(commands)
async def pause(
    session: Session, tids: Tids = None, every: Every = False, pattern: Pattern = None, wait: Wait = ANSWER_S
) -> None:
    """Let tasks rest: none of their processes runs until they are resumed.

    \b
    Example:
      holdfast task pause 5678901234
    """
    await _control(session, "PAUSE", tids, every, pattern, wait)


@command(commands)
async def resume(
    session: Session, tids: Tids = None, every: Every = False, pattern: Pattern = None, wait: Wait = ANSWER_S
) -> None:
    """Let tasks that were paused go on.

    \b
    Example:
      holdfast task resume 5678901234
    """
    await _control(session, "RESUME", tids, every, pattern, wait)


@command(commands)
async def ping(
    session: Session, tids: Tids = None, every: Every = False, pattern: Pattern = None, wait: Wait = ANSWER_S
) -> None:
    """Ask whether the manager of a task answers.

    \b
    Example:
      holdfast task ping 5678901234 --wait 2s
    """
    await _control(session, "PING", tids, every, pattern, wait)


@command(commands)
async def write(
    session: Session,
    tid: Tid,
    text: Annotated[
        str | None, Argument(metavar="TEXT", help="A line; - or nothing reads stdin.", show_default=False)
    ] = None,
    eof: Annotated[bool, Option("--eof", help="Nothing more is going to be written.")] = False,
) -> None:
    """Type a line into an interactive task.

    \b
    Example:
      holdfast task write 5678901234 yes
    """
    data = "" if text is None and eof else f"{values.given(text, as_text=True)}\n"
    async with session.space() as space:
        handle = await space.tasks.get(tid)
        answer = accepted(handle, await handle.write(data, eof=eof))
    _tell_answers([(handle.tid, answer)], session.json)


@command(commands)
async def retry(
    session: Session, tids: Annotated[list[str], Argument(metavar="TID", help="Tasks that have ended.")]
) -> None:
    """Submit tasks that have ended again, as new ones, and print the new tids.

    \b
    Example:
      holdfast task retry 5678901234
    """
    async with session.space() as space:
        for tid in tids:
            handle = await space.tasks.retry((await space.tasks.get(tid)).tid)
            output.value({"tid": handle.tid, "retry_of": tid} if session.json else handle.tid, session.json)


async def _control(
    session: Session, what: Command, tids: list[str] | None, every: bool, pattern: str | None, wait: str
) -> None:
    if bool(tids) + every + (pattern is not None) != 1:
        raise InvalidInput("name tasks by their tids, or by --pattern, or say --all")
    patience = values.wait(wait)
    async with session.space() as space:
        handles = await _meant(space, tids, pattern)

        async def control(handle: TaskHandle) -> ControlAnswer | Error:
            try:
                return accepted(handle, await handle.control(what, wait=patience))
            except Error as exc:
                return exc

        outcomes = await asyncio.gather(*map(control, handles))
    failed = [outcome for outcome in outcomes if isinstance(outcome, Error)]
    if len(outcomes) == 1 and failed:
        raise failed[0]
    _tell_answers(list(zip((each.tid for each in handles), outcomes, strict=True)), session.json)
    if failed:
        raise type(failed[0])(f"{len(failed)} of {len(outcomes)} tasks were not told to {what}; the first: {failed[0]}")


async def _meant(space: Space, tids: list[str] | None, pattern: str | None) -> list[TaskHandle]:
    if tids:
        return [await space.tasks.get(tid) for tid in tids]
    found = await space.tasks.list(status=LIVE, pattern=pattern, limit=CONTROLLED_MAX)
    meant = [await space.tasks.get(each.tid) for each in found if not _is_manager(each)]
    if not meant and pattern is not None:
        raise NotFound(f"no task that goes on has a name or tid that fits {pattern!r}")
    return meant


def accepted(handle: TaskHandle, answer: ControlAnswer) -> ControlAnswer:
    """The answer, if it is not a refusal."""
    if answer.status == "ok":
        return answer
    raise Conflict(f"task {handle.tid} was told to {answer.command} and did not: {answer.message or answer.status}")


def _tell_answers(answers: list[tuple[str, ControlAnswer | Error]], json: bool) -> None:
    for tid, answer in answers:
        if isinstance(answer, Error):
            told: dict[str, Any] = {"tid": tid, "status": answer.code, "message": str(answer)}
        else:
            told = {"tid": tid, **output.plain(answer)}
        if json:
            output.json_line(told)
        else:
            output.line(f"{tid}\t{told['status']}\t{output.shown(told.get('message') or '')}".rstrip())


# --- as text ---


def tell_state(state: TaskState, json: bool) -> None:
    if json:
        output.json_line(output.plain(state))
        return
    for name, told in output.plain(state).items():
        output.line(f"{name:<14}  {output.shown(told) if isinstance(told, str) else output.as_json(told)}")


def _tell_event(event: TaskEvent, json: bool) -> None:
    told = {name: each for name, each in event.fields.items() if name != "taskspec"}
    if json:
        state = None if event.state is None else output.plain(event.state)
        head = {"id": event.id, "tid": event.tid, "event": event.event, "at": output.moment(event.timestamp)}
        output.json_line(head | event.fields | {"state": state})
    else:
        status = event.status or ""
        told.pop("status", None)
        reason = event.state.reason or "" if event.state is not None else ""
        rest = output.brief(told) if told else reason
        output.line(f"{output.moment(event.timestamp)}  {event.tid}  {event.event:<14}  {status:<9}  {rest}".rstrip())
    output.flush()


def encoded(data: bytes) -> dict[str, Any]:
    """Bytes as JSON has them."""
    try:
        return {"encoding": "text", "data": data.decode()}
    except UnicodeDecodeError:
        import base64

        return {"encoding": "base64", "data": base64.b64encode(data).decode()}


def readable(given: Any) -> Any:
    """A result as JSON: text where it was bytes that are."""
    if not isinstance(given, bytes):
        return given
    told = encoded(given)
    return told["data"] if told["encoding"] == "text" else told


def _is_manager(state: TaskState) -> bool:
    return state.title == MANAGER and "manager" in state.tags
