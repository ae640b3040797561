"""Locks: who holds what, who waits for it, and taking it away."""

from __future__ import annotations

from typing import Annotated, Any

from holdfast.cli import output
from holdfast.cli.command import Argument, Option, command, group, topic
from holdfast.cli.session import Session
from holdfast.layers.standings import LockState, Stand

app = topic()
commands = topic()
app.add(commands, "locks")


@group(commands)
async def locks(
    session: Session,
    prefix: Annotated[str, Option(metavar="TEXT", help="Only names that begin with this.")] = "",
) -> None:
    """Show what is held, by whom, and who waits for it, in order.

    Locks, semaphores, read and write locks (rw), elections and pools. A holder has a token; a waiter has none.

    \b
    Example:
      holdfast locks
      holdfast locks --prefix portfolio/ --json
    """
    async with session.space() as space:
        found = await space.locks.list(prefix)
    if session.json:
        output.json_line([_told(state) for state in found])
        return
    columns = ("kind", "name", "", "agent", "instance", "token", "since", "expires")
    output.table(columns, [row for state in found for row in _rows(state)])


@command(commands, name="break")
async def break_(
    session: Session,
    name: Annotated[str, Argument(metavar="NAME", help="What is held.", show_default=False)],
    kind: Annotated[str, Option(metavar="KIND", help="lock, semaphore, rw, election or pool.")] = "lock",
) -> None:
    """Take something away from whoever holds it.

    The next in line has its turn. What the former holder still writes through its guard is refused. The audit tells who did it.

    \b
    Example:
      holdfast locks break portfolio/MSFT
    """
    async with session.space() as space:
        broken = await space.locks.break_(name, kind)  # type: ignore[arg-type]
    told = [_stand(stand) for stand in broken]
    output.value(told if session.json else "\n".join(stand.agent for stand in broken), session.json)


def _rows(state: LockState) -> list[list[str]]:
    stands = [("holds", stand) for stand in state.holders] + [("waits", stand) for stand in state.waiters]
    return [
        [
            state.kind,
            state.name,
            what,
            stand.agent,
            stand.instance,
            "" if stand.token is None else str(stand.token),
            output.moment(stand.since) or "",
            output.moment(stand.expires_at) or "",
        ]
        for what, stand in stands
    ]


def _told(state: LockState) -> dict[str, Any]:
    return {
        "kind": state.kind,
        "name": state.name,
        "size": state.size,
        "holders": [_stand(stand) for stand in state.holders],
        "waiters": [_stand(stand) for stand in state.waiters],
    }


def _stand(stand: Stand) -> dict[str, Any]:
    return {
        "agent": stand.agent,
        "instance": stand.instance,
        "id": stand.id,
        "token": stand.token,
        "since": output.moment(stand.since),
        "expires_at": output.moment(stand.expires_at),
        "units": stand.units,
        "shared": stand.shared,
    }
