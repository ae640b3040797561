"""Tokens: who may use a keeper, as whom, and until when."""

from __future__ import annotations

from typing import Annotated, Any

from holdfast.cli import output
from holdfast.cli.command import Argument, Option, command, group, topic
from holdfast.cli.session import Session, check_admin
from holdfast.clock import SystemClock, as_datetime, optional_ms
from holdfast.identity import EVERY_SPACE, check_agent
from holdfast.layers.tokens import Token, Tokens, checked_space

app = topic()
commands = topic()
app.add(commands, "token")


@group(commands)
async def token(session: Session) -> None:
    """List the tokens of a keeper, or make and revoke them.

    They belong to the store: what is done here, on the store itself or through a keeper, takes effect in a running keeper at once.

    \b
    Example:
      holdfast token create worker-7 --space contoso
      holdfast token list
      holdfast token revoke worker-7
    """
    await list_(session)


@command(commands)
async def create(
    session: Session,
    name: Annotated[str, Argument(metavar="NAME", help="The agent's name.", show_default=False)],
    role: Annotated[str, Option(metavar="ROLE", help="agent, orchestrator, or admin (of every space).")] = "agent",
    ttl: Annotated[
        str | None, Option(metavar="TIME", help="Until when: 90s, 12h, 30d. Default: until it is revoked.")
    ] = None,
) -> None:
    """Make a token and print it, this once.

    Only a hash of it is kept: who loses it makes another. --space says where the agent works; an administrator has no space.

    \b
    Example:
      holdfast token create worker-7 --space contoso --role agent --ttl 30d
      HOLDFAST_TOKEN=$(holdfast token create root --role admin)
    """
    kind: Any = role
    where = session.given_space if role == "admin" else session.named_space
    check_agent(name)
    check_agent(session.agent)
    checked_space(where, kind)
    optional_ms(ttl)
    async with session.store(create=True) as store:
        check_admin(store, "token")
        text, made = await Tokens(store.engine, SystemClock(), session.agent_in(store)).create(name, where, kind, ttl)
    output.value({"token": str(text), **_told(made)} if session.json else str(text), session.json)
    if not session.json:
        until = f"until {output.moment(as_datetime(made.expires_at))}" if made.expires_at else "until it is revoked"
        place = "in every space" if made.space == EVERY_SPACE else f"in {made.space}"
        output.note(f"{made.name} is {made.role} {place} {until}; the token is not shown again", False)


@command(commands, name="list")
async def list_(session: Session) -> None:
    """List the tokens that are good, without their secrets.

    All of them, or those of the space that --space names. A line has the id, space, name, role, end, and who made it.

    \b
    Example:
      holdfast token list
      holdfast token list --space contoso --json
    """
    async with session.store() as store:
        check_admin(store, "token")
        found = await Tokens(store.engine, SystemClock(), session.agent_in(store)).list()
    found = [token for token in found if session.given_space in (None, token.space)]
    if session.json:
        output.json_line([_told(token) for token in found])
        return
    columns = ("id", "space", "name", "role", "expires_at", "created_by")
    rows = [_told(token) for token in found]
    output.table(columns, [[str(row[column] or "") for column in columns] for row in rows])


@command(commands)
async def revoke(
    session: Session,
    which: Annotated[str, Argument(metavar="ID|NAME", help="A token's id, or its agent's name.", show_default=False)],
) -> None:
    """End a token, or all tokens of an agent.

    A running keeper closes the connections that were opened with it. If several spaces have an agent of that name, --space says which is meant.

    \b
    Example:
      holdfast token revoke worker-7 --space contoso
    """
    async with session.store() as store:
        check_admin(store, "token")
        ended = await Tokens(store.engine, SystemClock(), session.agent_in(store)).revoke(
            which, space=session.given_space
        )
    told = [_told(token) for token in ended]
    output.value(told if session.json else "\n".join(token.id for token in ended), session.json)


def _told(token: Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "name": token.name,
        "space": token.space,
        "role": token.role,
        "created_at": output.moment(as_datetime(token.created_at)),
        "expires_at": None if token.expires_at is None else output.moment(as_datetime(token.expires_at)),
        "created_by": token.created_by,
    }
