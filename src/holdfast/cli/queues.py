"""Queues: put, look, reserve and acknowledge messages, and what failed for good."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Final

from holdfast.cli import output, values
from holdfast.cli.command import Argument, Option, command, group, topic
from holdfast.cli.session import Session
from holdfast.engine import cursor_at
from holdfast.errors import InvalidInput, NotFound
from holdfast.layers.queue_entries import Failure, Peeked
from holdfast.layers.queue_watching import MessageChange, QueueCommit
from holdfast.layers.queues import QueueStats
from holdfast.space import Space

app = topic()
commands = topic()
letters = topic()
app.add(commands, "queue")
app.add(letters, "dlq")

VIEW: Final = re.compile(r"T[0-9]{19}\.(outbox|ctrl_in|ctrl_out)|holdfast\.(tasks\.log|workers\.registry)")
"""What tasks show under the name of a queue, and is none."""

Name = Annotated[str, Argument(metavar="QUEUE", help="The queue.", show_default=False)]
Id = Annotated[str, Argument(metavar="ID", help="The message: 19 digits.", show_default=False)]
Ids = Annotated[list[str], Argument(metavar="ID", help="The messages: 19 digits each.", show_default=False)]
Some = Annotated[list[str] | None, Argument(metavar="ID", help="Which ones; all of them if none is named.")]
Number = Annotated[str, Option("-n", metavar="NUMBER", help="How many at most.")]
Pattern = Annotated[str, Option(metavar="PATTERN", help="Only names that fit, such as 'orders.*'.")]


@group(commands)
async def queue(session: Session) -> None:
    """List queues; put, reserve and acknowledge messages.

    \b
    Example:
      holdfast queue put orders '{"id": 1}' --priority 5
      holdfast queue reserve orders --wait 30s
      holdfast queue ack orders 1889012345678901234
    """
    await _list(session, "*")


@command(commands, name="list")
async def list_(session: Session, pattern: Pattern = "*") -> None:
    """List queues: how many messages are ready, delayed, reserved, dead, and when that last changed.

    \b
    Example:
      holdfast queue list
      holdfast queue list --pattern 'T*.inbox' --json
    """
    await _list(session, pattern)


async def _list(session: Session, pattern: str) -> None:
    async with session.space() as space:
        found = await space.queues.list(pattern)
    if session.json:
        output.json_line([_counted(each) for each in found])
        return
    output.table(_DEPTHS, [_row(each) for each in found])


@command(commands, dashes=True)
async def put(
    session: Session,
    name: Name,
    body: Annotated[
        list[str] | None,
        Argument(metavar="BODY", help="JSON, or text; - reads one a line from stdin.", show_default=False),
    ] = None,
    priority: Annotated[str, Option(metavar="NUMBER", help="-500 to 499; higher comes first.")] = "0",
    delay: Annotated[str | None, Option(metavar="TIME", help="It may be taken after so long.")] = None,
    dedup: Annotated[
        str | None, Option(metavar="KEY", help="Not again within 5 minutes under this key; gives the first's id.")
    ] = None,
    text: Annotated[bool, Option("--text", help="Take bodies as text, also when they are JSON.")] = False,
) -> None:
    """Append messages and print their ids.

    \b
    Example:
      holdfast queue put orders '{"id": 1}' --dedup order-1
      seq 1000 | holdfast queue put numbers - --delay 10s
    """
    rank = values.whole_number(priority)
    if dedup is not None and (body is None or len(body) != 1 or body == [values.STDIN]):
        raise InvalidInput("--dedup is for one message; give one body")
    groups = values.several(body, as_text=text) if body else None
    async with session.space(create=True) as space:
        q = space.queue(name)
        for bodies in groups or [[values.given(None, as_text=text)]]:
            if dedup is None:
                ids = await q.put_many(bodies, priority=rank, delay=delay)
            else:
                ids = [await q.put(bodies[0], priority=rank, delay=delay, dedup=dedup)]
            _tell_ids(ids, session.json)
            output.flush()


def _tell_ids(ids: Sequence[str], json: bool) -> None:
    for id in ids:
        output.value({"id": id} if json else id, json)


@command(commands)
async def peek(session: Session, name: Name, number: Number = "10") -> None:
    """Show the next messages; nothing happens to them.

    QUEUE.reserved shows what consumers of QUEUE have. Of a task: T<tid>.inbox, .reserved, .outbox, .ctrl_in, .ctrl_out; of all
    of them: holdfast.spawn.requests, holdfast.tasks.log and holdfast.workers.registry.

    \b
    Example:
      holdfast queue peek orders -n 3
      holdfast queue peek orders.reserved --json
    """
    limit = values.whole_number(number)
    async with session.space() as space:
        if VIEW.fullmatch(name):
            for told in await space.tasks.peek(name, limit):
                output.json_line(told)
            return
        found = await space.queue(name).peek(limit)
    _tell_messages(found, session.json)


@command(commands)
async def reserve(
    session: Session,
    name: Name,
    wait: Annotated[str, Option(metavar="TIME", help="How long to wait for one; 0 not at all.")] = "0",
    lease: Annotated[str, Option(metavar="TIME", help="How long it is yours.")] = "5m",
) -> None:
    """Take the next message and print its id and body.

    It is yours until the lease is over: acknowledge it with ack, give it back with release, or say that it failed with fail. If
    you do none of that it comes back to the queue, an attempt more counted. The exit code is 24 when there is nothing.

    \b
    Example:
      holdfast queue reserve orders --wait 30s --lease 10m
      holdfast queue reserve orders --json | jq -r .id
    """
    from holdfast.layers.deliveries import deliver

    async with session.space() as space:
        found = await deliver(space.queue(name), wait=values.wait(wait), lease=lease)
    if session.json:
        told = {"id": found.id, "body": found.body, "priority": found.priority, "attempts": found.attempts}
        moments = {"enqueued_at": output.moment(found.enqueued_at), "expires_at": output.moment(found.expires_at)}
        output.json_line(told | moments)
    else:
        output.line(f"{found.id}\t{output.as_json(found.body)}")


@command(commands)
async def ack(
    session: Session,
    name: Name,
    ids: Ids,
    result: Annotated[
        str | None, Option(metavar="JSON", help="What came of it; goes to --to in the same commit.")
    ] = None,
    to: Annotated[str | None, Option(metavar="QUEUE", help="Where the result goes.")] = None,
) -> None:
    """Acknowledge reserved messages: they are done.

    \b
    Example:
      holdfast queue ack orders 1889012345678901234
      holdfast queue ack orders 1889012345678901234 --result '"shipped"' --to done
    """
    from holdfast.layers.deliveries import settle_id

    if (result is None) != (to is None):
        raise InvalidInput("--result and --to belong together: the result is put into that queue")
    outcome = None if result is None else values.parsed(result)
    async with session.space() as space:
        q = space.queue(name)
        for id in ids:
            settling = await settle_id(q, id)
            if to is None:
                await settling.ack()
            else:
                await settling.complete(outcome, to=to)
            _tell_ids([id], session.json)


@command(commands)
async def release(
    session: Session,
    name: Name,
    ids: Ids,
    delay: Annotated[str | None, Option(metavar="TIME", help="It may be taken again after so long.")] = None,
) -> None:
    """Give reserved messages back. No attempt is counted.

    \b
    Example:
      holdfast queue release orders 1889012345678901234 --delay 1m
    """
    from holdfast.layers.deliveries import settle_id

    async with session.space() as space:
        q = space.queue(name)
        for id in ids:
            await (await settle_id(q, id)).release(delay=delay)
            _tell_ids([id], session.json)


@command(commands)
async def fail(
    session: Session,
    name: Name,
    id: Id,
    reason: Annotated[str, Option(metavar="TEXT", help="Why.")] = "failed",
    attempts: Annotated[
        str | None, Option(metavar="NUMBER", help="Deliver it again, with backoff, up to so many attempts.")
    ] = None,
) -> None:
    """Say that a reserved message could not be done: it becomes a dead letter, with its reason.

    \b
    Example:
      holdfast queue fail orders 1889012345678901234 --reason 'out of stock' --attempts 5
    """
    from holdfast.layers.deliveries import settle_id
    from holdfast.layers.queue_entries import Policy, Requeue

    policy: Policy = "keep" if attempts is None else Requeue(attempts=values.whole_number(attempts))
    async with session.space() as space:
        await (await settle_id(space.queue(name), id)).fail(reason, policy=policy)
    _tell_ids([id], session.json)


@command(commands)
async def move(
    session: Session,
    name: Name,
    ids: Ids,
    to: Annotated[str, Option(metavar="QUEUE", help="The other queue.")] = "",
) -> None:
    """Put messages that wait, or dead letters, at the end of another queue. They keep their ids.

    \b
    Example:
      holdfast queue move orders 1889012345678901234 --to orders.slow
    """
    if not to:
        raise InvalidInput("name the other queue with --to")
    async with session.space() as space:
        for id in ids:
            await space.queue(name).move(id, to=to)
            _tell_ids([id], session.json)


@command(commands)
async def delete(session: Session, name: Name, ids: Ids) -> None:
    """Remove messages that wait, or dead letters. What a consumer has is not touched.

    \b
    Example:
      holdfast queue delete orders 1889012345678901234
    """
    async with session.space() as space:
        for id in ids:
            await space.queue(name).delete(id)
            _tell_ids([id], session.json)


@command(commands)
async def stats(session: Session, name: Name) -> None:
    """Show how many messages a queue has.

    \b
    Example:
      holdfast queue stats orders
      holdfast queue stats orders --json | jq .ready
    """
    async with session.space() as space:
        found = await space.queue(name).stats()
    if session.json:
        output.json_line(_counted(found))
        return
    for what, told in _counted(found).items():
        output.line(f"{what:<13}  {told if isinstance(told, str) else output.as_json(told)}")


@command(commands)
async def watch(
    session: Session,
    name: Name,
    cursor: Annotated[
        str | None, Option(metavar="CURSOR", help="Go on where a --json line with this cursor stood.")
    ] = None,
    from_start: Annotated[bool, Option("--from-start", help="Begin with the oldest change still kept.")] = False,
    count: Annotated[str | None, Option("-n", "--count", metavar="N", help="End after this many changes.")] = None,
) -> None:
    """Print what happens to the messages of a queue, as it happens.

    A line has the time, who, where the message is from now on (ready, delayed, reserved, dead, done), its id and body.

    \b
    Example:
      holdfast queue watch orders
      holdfast queue watch orders --json --from-start -n 10
    """
    if cursor is not None and from_start:
        raise InvalidInput("give one of --cursor and --from-start")
    left = values.count(count)
    async with session.space() as space:
        start = cursor or await _start(space, from_start)
        async for line in _changes(space, name, start, session.json):
            output.line(line)
            output.flush()
            left = None if left is None else left - 1
            if left == 0:
                return


async def _start(space: Space, from_start: bool) -> str:
    if not from_start:
        return await space.cursor()
    try:
        return cursor_at((await space.info()).feed_floor)
    except NotFound:
        return cursor_at(0)


async def _changes(space: Space, name: str, start: str, json: bool) -> AsyncIterator[str]:
    async for commit in space.queue(name).watch(cursor=start):
        for number, change in enumerate(commit, 1):
            # In the middle of a commit the cursor is that before it: going on there repeats rather than loses.
            cursor = commit.cursor if number == len(commit) else start
            yield output.as_json(_changed(commit, change, cursor)) if json else _line(commit, change)
        start = commit.cursor


def _line(commit: QueueCommit, change: MessageChange) -> str:
    body = "(large)" if change.large else "" if change.state == "done" else output.brief(change.body)
    return f"{output.moment(commit.at)}  {commit.actor:<12}  {change.state:<8}  {change.id}  {body}".rstrip()


def _changed(commit: QueueCommit, change: MessageChange, cursor: str) -> dict[str, Any]:
    return {
        "cursor": cursor,
        "version": commit.version,
        "at": output.moment(commit.at),
        "actor": commit.actor,
        "id": change.id,
        "state": change.state,
        "body": change.body,
        "large": change.large,
        "attempts": change.attempts,
    }


# --- dead letters ---


@group(letters)
async def dlq(session: Session) -> None:
    """List queues with dead letters: messages that failed for good.

    \b
    Example:
      holdfast dlq
      holdfast dlq list orders
      holdfast dlq retry orders
    """
    async with session.space() as space:
        found = [each for each in await space.queues.list() if each.dead]
    if session.json:
        output.json_line([{"name": each.name, "dead": each.dead} for each in found])
        return
    output.table(("queue", "dead"), [[each.name, str(each.dead)] for each in found])


@command(letters, name="list")
async def list_dead(session: Session, name: Name, number: Number = "100") -> None:
    """Show the dead letters of a queue, with the reasons why each of them failed.

    \b
    Example:
      holdfast dlq list orders
      holdfast dlq list orders --json | jq '.[].reasons'
    """
    async with session.space() as space:
        found = await space.queue(name).dead.list(values.whole_number(number))
    _tell_messages(found, session.json)


@command(letters)
async def retry(
    session: Session,
    name: Name,
    ids: Some = None,
    anew: Annotated[bool, Option("--anew", help="At the end of the line, as if they had never failed.")] = False,
) -> None:
    """Deliver dead letters once more, and print how many. Their attempts still count, unless they begin --anew.

    \b
    Example:
      holdfast dlq retry orders
      holdfast dlq retry orders 1889012345678901234 --anew
    """
    async with session.space() as space:
        dead = space.queue(name).dead
        done = await (dead.move_back if anew else dead.retry)(*(ids or ()))
    output.value({"retried": done} if session.json else str(done), session.json)


@command(letters)
async def clear(
    session: Session,
    name: Name,
    ids: Some = None,
    every: Annotated[bool, Option("--all", help="All of them.")] = False,
) -> None:
    """Remove dead letters for good, and print how many.

    \b
    Example:
      holdfast dlq clear orders 1889012345678901234
      holdfast dlq clear orders --all
    """
    if bool(ids) == every:
        raise InvalidInput("name the dead letters to remove, or say --all")
    async with session.space() as space:
        done = await space.queue(name).dead.clear(*(ids or ()))
    output.value({"cleared": done} if session.json else str(done), session.json)


# --- as text ---

_DEPTHS: Final = ("queue", "ready", "delayed", "reserved", "dead", "last activity")


def _row(stats: QueueStats) -> list[str]:
    depths = stats.ready, stats.delayed, stats.reserved, stats.dead
    return [stats.name, *map(str, depths), output.moment(stats.last_activity) or ""]


def _counted(stats: QueueStats) -> dict[str, Any]:
    return {
        "name": stats.name,
        "message_count": stats.message_count,
        "has_pending": stats.has_pending,
        "last_activity": output.moment(stats.last_activity),
        "ready": stats.ready,
        "delayed": stats.delayed,
        "reserved": stats.reserved,
        "dead": stats.dead,
    }


def _tell_messages(found: Sequence[Peeked], json: bool) -> None:
    if json:
        output.json_line([_message(each) for each in found])
        return
    rows = [
        [
            each.id,
            each.state,
            str(each.priority),
            str(each.attempts),
            each.owner,
            each.reasons[-1].reason if each.reasons else "",
            output.brief(each.body),
        ]
        for each in found
    ]
    output.table(("id", "state", "priority", "failed", "owner", "reason", "body"), rows)


def _message(each: Peeked) -> dict[str, Any]:
    return {
        "id": each.id,
        "body": each.body,
        "state": each.state,
        "priority": each.priority,
        "attempts": each.attempts,
        "owner": each.owner,
        "enqueued_at": output.moment(each.enqueued_at),
        "due_at": output.moment(each.due_at),
        "reasons": [_reason(why) for why in each.reasons],
    }


def _reason(why: Failure) -> dict[str, Any]:
    from holdfast.clock import as_datetime

    at = output.moment(as_datetime(why.at))
    return {"attempt": why.attempt, "at": at, "agent": why.agent, "reason": why.reason}
