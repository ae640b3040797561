"""The audit: who did what; its verification and sealing."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from holdfast.cli import output, values
from holdfast.cli.command import Option, command, group, topic
from holdfast.cli.session import Session
from holdfast.clock import SystemClock, as_datetime, instant_ms
from holdfast.errors import Damaged, NotFound, Unavailable
from holdfast.keys import escape
from holdfast.layers.audit import Audit, AuditRecord
from holdfast.layers.redaction import Redaction
from holdfast.layers.retention import Retention
from holdfast.layers.scope import Scope
from holdfast.layers.settings import SYSTEM_SPACE
from holdfast.store import Store

app = topic()
commands = topic()
app.add(commands, "audit")


@group(commands)
async def audit(
    session: Session,
    actor: Annotated[str | None, Option(metavar="NAME", help="Only what this agent did.")] = None,
    key: Annotated[
        str | None,
        Option(metavar="PREFIX", help="Only names, or full keys such as lists/…, that begin like this."),
    ] = None,
    operation: Annotated[
        str | None, Option(metavar="OP", help="Only put, delete, increment, push, expire, get, scan …")
    ] = None,
    outcome: Annotated[
        str | None, Option(metavar="OUTCOME", help="Only committed, expired, denied, read or lost.")
    ] = None,
    since: Annotated[
        str | None, Option(metavar="TIME", help="From then on: an ISO time, or 1h for an hour ago.")
    ] = None,
    until: Annotated[str | None, Option(metavar="TIME", help="Before then, in the same forms.")] = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Go on with what happens from now on.")] = False,
    count: Annotated[
        str | None,
        Option("-n", "--count", metavar="N", help="The newest so many; with --follow, end after so many."),
    ] = None,
    system: Annotated[bool, Option("--system", help="The store's own audit: spaces that were dropped.")] = False,
) -> None:
    """Print who did what, or verify and seal it.

    A line has the version, the time, who, the outcome, the operation, the key and the value; the oldest comes first.
    Secrets are shown as they are stored here: redacted.

    \b
    Example:
      holdfast audit --actor market --since 1h
      holdfast audit --key orders/ --follow --json
      holdfast audit verify
    """
    prefixes = () if key is None else (key, f"records/{key}", f"lists/{escape(key)}", f"sets/{escape(key)}")
    now_ms = SystemClock().now_ms()
    window = {
        name: instant_ms(text, now_ms, name=f"--{name}")
        for name, text in (("since", since), ("until", until))
        if text is not None
    }
    limit = values.count(count)
    async with _audit(session, system=system) as found:
        told_of: dict[str, Any] = {"actor": actor, "operation": operation, "outcome": outcome, **window}
        records = found.records(follow=follow, **told_of)
        newest: deque[AuditRecord] = deque(maxlen=limit)
        told = 0
        async for record in records:
            if prefixes and not record.key.startswith(prefixes):
                continue
            if limit is not None and not follow:
                newest.append(record)
                continue
            _tell(record, session.json)
            told += 1
            if follow:
                output.flush()
                if told == limit:
                    return
        for record in newest:
            _tell(record, session.json)


@command(commands)
async def verify(
    session: Session,
    expect: Annotated[
        str | None, Option(metavar="HASH", help="A head hash noted earlier; it must still be in the chain.")
    ] = None,
    no_seal: Annotated[bool, Option("--no-seal", help="Only look: seal nothing before.")] = False,
) -> None:
    """Prove that nobody changed the audit.

    Recomputes the chain of hashes, and compares it with what the feed still tells. What is not sealed yet is sealed first, unless a keeper does that, and after what is sealed was found sound; with --no-seal it is counted as unsealed: it is in the feed, and no hash covers it yet. Note the head hash elsewhere, and give it to --expect next time: then not even somebody who rewrites the whole store goes unnoticed. When the audit is not sound the exit code is 18.

    \b
    Example:
      holdfast audit verify
      holdfast audit verify --expect "$(cat head)"
    """
    async with session.store() as store:
        found = await _of_space(session, store)
        result = await found.verify(expect)
        # In this order: sealing adds to the chain, and somebody who looks for what is wrong with it wants it as it was.
        if result.sound and result.unsealed and store.identity is None and not no_seal:
            with suppress(Unavailable):  # a full disk, say: what is sealed is sound all the same, and the rest is told
                await found.seal()
            result = await found.verify(expect)
    if session.json:
        output.json_line({"sound": result.sound, **output.plain(result)})
    else:
        output.line(f"{'sound' if result.sound else 'NOT SOUND'}, up to version {result.upto}")
        output.line(f"head      {result.hash}")
        output.line(f"segments  {result.segments}")
        output.line(f"records   {result.records}")
        if result.unsealed:
            output.line(f"unsealed  {result.unsealed}: no hash covers them yet; {_sealer(store)}")
        for problem in result.problems:
            output.line(f"problem   {output.shown(problem)}")
    output.flush()
    if not result.sound:
        raise Damaged(f"the audit of space {session.space_name!r} is not sound: {len(result.problems)} problem(s)")


def _sealer(store: Store) -> str:
    return "holdfast tidy seals them" if store.identity is None else "the keeper seals them in a few seconds"


@command(commands)
async def seal(session: Session) -> None:
    """Seal what has happened since the last time.

    Prints the number of records sealed. A program that has the store open does this every few seconds.

    \b
    Example:
      holdfast audit seal
    """
    async with _audit(session) as found:
        sealed = await found.seal()
    output.value({"sealed": sealed} if session.json else sealed, session.json)


@asynccontextmanager
async def _audit(session: Session, *, system: bool = False) -> AsyncIterator[Audit]:
    async with session.store() as store:
        yield audit_of(store, SYSTEM_SPACE) if system else await _of_space(session, store)


async def _of_space(session: Session, store: Store) -> Audit:
    space = store.space(session.space_in(store), agent=session.agent_in(store))
    if not await store.engine.spaces(space.name):
        raise NotFound(f"there is no space {space.name!r}")
    return space.audit


def audit_of(store: Store, space: str) -> Audit:
    """The audit of any space, the store's own included."""
    return Audit(Scope(store.engine, space, "cli", "1", SystemClock(), Retention(), Redaction()))


def _tell(record: AuditRecord, json: bool) -> None:
    at = output.moment(as_datetime(record.at))
    if json:
        output.json_line(
            {
                "version": record.version,
                "at": at,
                "actor": record.actor,
                "operation": record.operation,
                "key": record.key,
                "outcome": record.outcome,
                "request_id": record.request_id,
                "value": record.value,
                "size": record.size,
                "reason": record.reason,
            }
        )
        return
    shown = "" if record.value is None else output.brief(record.value)
    words = f"{record.version:>6}  {at}  {record.actor:<12}  {record.outcome:<9}  {record.operation:<9}  "
    output.line(f"{words}{output.shown(record.key)}  {shown}  {output.shown(record.reason)}".rstrip())
