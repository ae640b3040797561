"""Spaces: list, create, drop."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from holdfast.checking import check_durability
from holdfast.cli import output, values
from holdfast.cli.command import Argument, Ended, Option, command, group, topic
from holdfast.cli.session import Session
from holdfast.clock import as_datetime
from holdfast.engine import SpaceInfo
from holdfast.errors import InvalidInput, NotFound
from holdfast.layers.batch import RECORDS
from holdfast.space import check_space

app = topic()
commands = topic()
app.add(commands, "spaces")

Name = Annotated[str, Argument(metavar="NAME", help="The space's name.", show_default=False)]


@group(commands)
async def spaces(session: Session) -> None:
    """List the spaces, or create and drop one.

    A line has the name, durability, revision, keys and bytes. A list or set counts as one key; bytes count everything the space keeps, its audit included. What has expired is counted until it is swept, which a program that has the store open does at once, and else the next write or holdfast tidy; nobody can read it meanwhile.

    \b
    Example:
      holdfast spaces
      holdfast spaces --json | jq -r '.[].name'
    """
    async with session.store() as store:
        found = [_told(info) for info in await store.spaces()]
    if session.json:
        output.json_line(found)
        return
    columns = ("name", "durability", "revision", "keys", "bytes")
    output.table(columns, [[str(info[column]) for column in columns] for info in found])


@command(commands)
async def create(
    session: Session,
    name: Name,
    durability: Annotated[
        str, Option(metavar="KIND", help="sync (on disk before the reply), async or volatile; fixed for good.")
    ] = "sync",
    audit_reads: Annotated[bool, Option("--audit-reads", help="Every read leaves an audit record.")] = False,
) -> None:
    """Make a space with settings of its own.

    Not needed for the usual ones: the first write makes a space with sync durability.

    \b
    Example:
      holdfast spaces create metrics --durability async
    """
    check_space(name)
    check_durability(durability)
    kind: Any = durability
    async with session.store(create=True) as store:
        info = await store.engine.create(name, kind, audit_reads=audit_reads)
    output.value(_told(info) if session.json else info.name, session.json)


@command(commands)
async def drop(
    session: Session,
    name: Name,
    yes: Annotated[bool, Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a space with all it holds.

    At a terminal it asks first; the exit code is 1 if the answer is no. That it was deleted, and by whom, stays: see holdfast audit --system.

    \b
    Example:
      holdfast spaces drop scratch --yes
    """
    check_space(name)
    async with session.store() as store:
        if not await store.engine.spaces(name):
            raise NotFound(f"there is no space {name!r}")
        if not yes:
            if session.json or not (sys.stdin and sys.stdin.isatty()):
                raise InvalidInput(f"dropping space {name!r} cannot be undone; add --yes if you mean it")
            if not values.confirmed(f"Delete space {name!r} with all it holds? [y/N] "):
                raise Ended(1)
        await store.drop_space(name, agent=session.agent_in(store))
    output.value({"dropped": name} if session.json else name, session.json)


def _told(info: SpaceInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "durability": info.durability,
        "revision": info.revision,
        "keys": sum(usage.keys for usage in info.usage if usage.subspace == RECORDS.name),
        "bytes": sum(usage.bytes for usage in info.usage),
        "created_at": output.moment(as_datetime(info.created_at)),
        "audit_reads": info.audit_reads,
    }
