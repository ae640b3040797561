"""Lists and sets: append, list, add, remove, members."""

from __future__ import annotations

from typing import Annotated, Any

from holdfast.cli import output, values
from holdfast.cli.command import Argument, command, topic
from holdfast.cli.records import AsText, RequestId, Ttl
from holdfast.cli.session import Session

app = topic()

Key = Annotated[str, Argument(metavar="KEY", help="The name of the list or set.", show_default=False)]
Items = Annotated[
    list[str],
    Argument(
        metavar="VALUE", help="Values, JSON or text; a single '-' reads one a line from stdin.", show_default=False
    ),
]


@command(app, dashes=True)
async def append(
    session: Session, key: Key, items: Items, text: AsText = False, ttl: Ttl = None, request_id: RequestId = None
) -> None:
    """Add values to the end of a list.

    They are added together and in this order; prints how many. From stdin, each 100 lines are added together. A ttl is the whole list's, and only extends.

    \b
    Example:
      holdfast append files a.csv b.csv
      ls | holdfast append files - --text
    """
    count, chunks = 0, values.several(items, as_text=text)
    async with session.space(create=True) as space:
        for number, chunk in enumerate(chunks):
            part = values.part_of(request_id, number)
            await space.records.append_to_list(key, *chunk, ttl=ttl, request_id=part)
            count += len(chunk)
    output.value({"key": key, "appended": count} if session.json else count, session.json)


@command(app, name="list")
async def list_(session: Session, key: Key) -> None:
    """Print the values of a list.

    One a line; with --json as one array.

    \b
    Example:
      holdfast list files
    """
    async with session.space() as space:
        _tell(await space.records.list(key), session.json)


@command(app, dashes=True)
async def add(
    session: Session, key: Key, items: Items, text: AsText = False, ttl: Ttl = None, request_id: RequestId = None
) -> None:
    """Add members to a set, and print how many were new.

    \b
    Example:
      holdfast add errors E1 E2
    """
    count, chunks = 0, values.several(items, as_text=text)
    async with session.space(create=True) as space:
        for number, chunk in enumerate(chunks):
            part = values.part_of(request_id, number)
            count += await space.records.add_to_set(key, *chunk, ttl=ttl, request_id=part)
    output.value({"key": key, "added": count} if session.json else count, session.json)


@command(app, dashes=True)
async def remove(session: Session, key: Key, items: Items, text: AsText = False, request_id: RequestId = None) -> None:
    """Remove members from a set, and print how many were there.

    \b
    Example:
      holdfast remove errors E1
    """
    count, chunks = 0, values.several(items, as_text=text)
    async with session.space() as space:
        for number, chunk in enumerate(chunks):
            part = values.part_of(request_id, number)
            count += await space.records.remove_from_set(key, *chunk, request_id=part)
    output.value({"key": key, "removed": count} if session.json else count, session.json)


@command(app)
async def members(session: Session, key: Key) -> None:
    """Print the members of a set.

    One a line; with --json as one array.

    \b
    Example:
      holdfast members errors
    """
    async with session.space() as space:
        _tell(await space.records.members(key), session.json)


def _tell(items: list[Any], json: bool) -> None:
    if json:
        output.json_line(items)
        return
    for item in items:
        output.line(output.shown(item) if isinstance(item, str) else output.as_json(item))
