"""The feed: watch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from holdfast.cli import output, values
from holdfast.cli.command import Argument, Option, command, topic
from holdfast.cli.session import Session
from holdfast.engine import cursor_at
from holdfast.errors import InvalidInput
from holdfast.layers.watching import RecordChange, RecordChanges

app = topic()


@command(app)
async def watch(
    session: Session,
    prefix: Annotated[
        str, Argument(metavar="PREFIX", help="Only names that begin like this.", show_default=False)
    ] = "",
    cursor: Annotated[
        str | None, Option(metavar="CURSOR", help="Go on where a --json line with this cursor stood.")
    ] = None,
    from_start: Annotated[bool, Option("--from-start", help="Begin with the oldest change still kept.")] = False,
    count: Annotated[str | None, Option("-n", "--count", metavar="N", help="End after this many changes.")] = None,
) -> None:
    """Print every change as it happens.

    A line has the time, who, what, the name and the value. Runs until it is interrupted. With --json each line has a cursor: keep it with what the line made you do, and give
    it to --cursor to go on there. The changes of one commit come together; all but the last of them carry the cursor
    before the commit, so going on in its middle repeats it rather than loses a part.

    \b
    Example:
      holdfast watch orders/
      holdfast watch --json --cursor "$(cat seen)"
    """
    if cursor is not None and from_start:
        raise InvalidInput("give one of --cursor and --from-start")
    left = values.count(count)
    async with session.space() as space:
        start = cursor or await space.cursor()
        if from_start:
            start = cursor_at(next((info.feed_floor for info in await _infos(space)), 0))
        async for commit in space.watch(prefix, cursor=start):
            for told in _lines(commit, start, session.json):
                output.line(told)
                output.flush()
                left = None if left is None else left - 1
                if left == 0:
                    return
            start = commit.cursor


async def _infos(space: Any) -> list[Any]:
    from holdfast.errors import NotFound

    try:
        return [await space.info()]
    except NotFound:
        return []


def _lines(commit: RecordChanges, before: str, json: bool) -> Iterator[str]:
    for number, change in enumerate(commit, 1):
        if json:
            yield output.as_json(_told(commit, change, before if number < len(commit) else commit.cursor))
        else:
            value = "(large: read it with get)" if change.large else output.brief(change.value)
            shown = value if change.exists or change.op == "remove" else ""
            at = output.moment(commit.at)
            yield f"{at}  {commit.actor:<12}  {change.op:<9}  {output.shown(change.key)}  {shown}".rstrip()


def _told(commit: RecordChanges, change: RecordChange, cursor: str) -> dict[str, Any]:
    return {
        "cursor": cursor,
        "version": commit.version,
        "at": output.moment(commit.at),
        "actor": commit.actor,
        "request_id": commit.request_id,
        "op": change.op,
        "key": change.key,
        "value": change.value,
        "large": change.large,
        "owner": change.owner,
        "expires_at": output.moment(change.expires_at),
        "type": change.type,
        "state": change.state,
    }
