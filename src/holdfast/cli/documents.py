"""Shared documents: what is in them, who wrote it, what contradicts what, and settling that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from holdfast.cli import output, values
from holdfast.cli.command import Argument, Option, command, group, topic
from holdfast.cli.session import Session
from holdfast.errors import InvalidInput, NotFound
from holdfast.layers.conflicts import Contradiction
from holdfast.layers.contributions import DocumentView
from holdfast.layers.history import DocumentEvent
from holdfast.layers.resolutions import Resolution

if TYPE_CHECKING:
    from holdfast.space import Space

app = topic()
commands = topic()
app.add(commands, "doc")

Name = Annotated[str, Argument(metavar="NAME", help="The document.", show_default=False)]
Value = Annotated[
    str | None, Argument(metavar="VALUE", help="JSON, or text; - reads it from stdin.", show_default=False)
]
Limit = Annotated[str, Option("-n", metavar="NUMBER", help="How many at most.")]


@group(commands)
async def doc(
    session: Session,
    prefix: Annotated[str, Option(metavar="TEXT", help="Only names that begin with this.")] = "",
    after: Annotated[str | None, Option(metavar="NAME", help="Only names after this one.")] = None,
    limit: Limit = "100",
) -> None:
    """List shared documents, look into one, settle conflicts.

    Those that have only contributions, and no body yet, are at etag 0.

    \b
    Example:
      holdfast doc
      holdfast doc show research/MSFT
      holdfast doc conflicts research/MSFT
    """
    async with session.space() as space:
        found = await space.documents.list(prefix, after=after, limit=values.count(limit) or 100)
    if session.json:
        told = [{"name": each.name, "etag": each.etag, "by": each.by, "bytes": each.bytes} for each in found]
        moments = [{"updated_at": output.moment(each.updated_at)} for each in found]
        output.json_line([{**one, **two} for one, two in zip(told, moments, strict=True)])
        return
    rows = [
        [each.name, str(each.etag), each.by, str(each.bytes), output.moment(each.updated_at) or ""] for each in found
    ]
    output.table(("name", "etag", "by", "bytes", "updated"), rows)


@command(commands)
async def show(session: Session, name: Name) -> None:
    """Show the body, every contribution, and which of them rest on outdated inputs.

    If there is no such document the exit code is 4; history also knows documents that were deleted.

    \b
    Example:
      holdfast doc show research/MSFT
      holdfast doc show research/MSFT --json | jq .contributions
    """
    async with session.space() as space:
        view = await space.document(name).read(consistency="strong")
        if not view.etag:
            await _check_there(space, name)
    if session.json:
        output.json_line(_view(view))
        return
    output.line(f"etag {view.etag}")
    output.line(f"body {output.brief(view.body)}")
    stale = {each.section for each in view.stale}
    rows = [
        [
            section,
            str(each.version),
            output.moment(each.timestamp) or "",
            "" if each.confidence is None else f"{each.confidence:g}",
            "stale" if section in stale else "",
            _cell(each.data),
        ]
        for section, each in view.sections.items()
    ]
    output.table(("contribution", "version", "at", "confidence", "", "data"), rows)
    for each in view.stale:
        present = "gone" if each.present is None else f"at version {each.present}"
        output.line(
            f"stale: {output.shown(each.section)} read {output.shown(each.input)} at {each.read}; it is {present}"
        )


@command(commands)
async def contribute(
    session: Session,
    name: Name,
    value: Value = None,
    confidence: Annotated[str | None, Option(metavar="NUMBER", help="How sure, between 0 and 1.")] = None,
    behalf: Annotated[str | None, Option("--for", metavar="AGENT", help="Whose section; for orchestrators.")] = None,
    instance: Annotated[str, Option(metavar="NAME", help="Which process of the agent it is.")] = "1",
) -> None:
    """Write the agent's own section, resting on the document as it is now.

    What the same instance of the agent contributed before is replaced.

    \b
    Example:
      holdfast doc contribute research/MSFT '{"recommendation": "increase"}' --confidence 0.8 --agent market
    """
    data = values.given(value)
    async with session.space(create=True) as space:
        document = space.document(name)
        view = await document.read(consistency="strong")
        version = await document.contribute(
            data, inputs=view.versions, confidence=_number(confidence, "--confidence"), agent=behalf, instance=instance
        )
    output.value({"version": version} if session.json else str(version), session.json)


@command(commands)
async def replace(
    session: Session,
    name: Name,
    value: Value = None,
    etag: Annotated[str, Option(metavar="ETAG", help="The etag it must be at; 0 when there is none yet.")] = "0",
) -> None:
    """Write the body, if it is still at that etag.

    \b
    Example:
      holdfast doc replace research/MSFT '{"round": 2}' --etag 17
    """
    body = values.given(value)
    async with session.space(create=True) as space:
        written = await space.document(name).replace(body, etag=values.whole_number(etag))
    output.value({"etag": written.etag} if session.json else str(written.etag), session.json)


@command(commands)
async def history(
    session: Session,
    name: Name,
    before: Annotated[str | None, Option(metavar="ID", help="Only what is older than this event.")] = None,
    limit: Limit = "100",
) -> None:
    """Show who wrote what, when, and from which inputs; newest first.

    Documents that were deleted have one too, for as long as it is kept. If there is none the exit code is 4.

    \b
    Example:
      holdfast doc history research/MSFT -n 10
    """
    async with session.space() as space:
        events = await space.document(name).history(before=before, limit=values.count(limit) or 100)
        if not events and before is None:
            await _check_there(space, name)
    if session.json:
        for event in events:
            output.json_line(_event(event))
        return
    rows = [
        [
            str(event.version),
            output.moment(event.at) or "",
            event.by,
            event.kind,
            event.section or "",
            _told(event),
            ", ".join(f"{name} {version}" for name, version in event.inputs.items()),
        ]
        for event in events
    ]
    output.table(("version", "at", "by", "", "section", "", "inputs"), rows)


@command(commands)
async def diff(
    session: Session,
    name: Name,
    first: Annotated[str, Argument(metavar="VERSION", help="From after this version on.", show_default=False)],
    second: Annotated[
        str | None,
        Argument(metavar="VERSION", help="Up to this one; now if it is left out.", show_default=False),
    ] = None,
) -> None:
    """Show what changed between two versions: + new, - gone, ~ another.

    \b
    Example:
      holdfast doc diff research/MSFT 17 23
    """
    a, b = values.whole_number(first), None if second is None else values.whole_number(second)
    async with session.space() as space:
        document = space.document(name)
        found = await document.diff(a, b)
        if not found and not await document.history(limit=1):
            await _check_there(space, name)
    for each in found:
        if session.json:
            output.json_line({"op": each.op, "path": each.path, "old": each.old, "new": each.new})
        else:
            output.line(output.shown(str(each)))


@command(commands)
async def conflicts(session: Session, name: Name) -> None:
    """Show contributions that contradict each other and are not settled.

    \b
    Example:
      holdfast doc conflicts research/MSFT
    """
    async with session.space() as space:
        found = await space.document(name).conflicts()
        if not found:
            await _check_there(space, name)
    if session.json:
        output.json_line([_conflict(each) for each in found])
        return
    rows = [_row(each) for each in found]
    output.table(("conflict", "kind", "rule", "about", "", "parties"), rows)


@command(commands)
async def escalations(session: Session) -> None:
    """Show what waits for a person, in every document of the space.

    \b
    Example:
      holdfast doc escalations
    """
    async with session.space() as space:
        found = await space.documents.escalations()
    if session.json:
        output.json_line([_resolution(each) for each in found])
        return
    rows = [[each.document, *_row(each.conflict), each.reason] for each in found]
    output.table(("document", "conflict", "kind", "rule", "about", "", "parties", "why"), rows)


@command(commands)
async def resolutions(session: Session, name: Name) -> None:
    """Show what was decided about a document's conflicts, by whom and why.

    \b
    Example:
      holdfast doc resolutions research/MSFT --json
    """
    async with session.space() as space:
        found = await space.document(name).resolutions()
    if session.json:
        output.json_line([_resolution(each) for each in found])
        return
    rows = [
        [
            each.conflict.id,
            each.winner or "",
            each.method,
            each.by,
            output.moment(each.at) or "",
            "" if each.overrode is None else str(each.overrode),
            each.justification or each.reason,
        ]
        for each in found
    ]
    output.table(("conflict", "winner", "method", "by", "at", "overrode", "why"), rows)


@command(commands)
async def resolve(
    session: Session,
    name: Name,
    conflict: Annotated[str, Argument(metavar="CONFLICT", help="Its id, as conflicts shows it.", show_default=False)],
    by: Annotated[str | None, Option(metavar="METHOD", help="priority, consensus, confidence or escalate.")] = None,
    winner: Annotated[str | None, Option(metavar="PARTY", help="Who is right, as a person decides it.")] = None,
    why: Annotated[
        str | None, Option(metavar="TEXT", help="The justification, for a person's decision or an override.")
    ] = None,
    quorum: Annotated[str, Option(metavar="K/N", help="For consensus: so many of so many.")] = "2/3",
    approve: Annotated[
        list[str] | None, Option(metavar="NAME=PARTY", help="For consensus: who approves of whom. Repeatable.")
    ] = None,
) -> None:
    """Settle a conflict by a method, or as a person with --winner and --why.

    What a method cannot settle waits for a person. What was decided already is decided anew only with --why, and what a person has
    decided by a person. Nothing that was said is removed.

    \b
    Example:
      holdfast doc resolve research/MSFT 2ff6767fac36e4b8 --by priority
      holdfast doc resolve research/MSFT 2ff6767fac36e4b8 --winner risk/1 --why "the regulator called"
    """
    if by is not None and winner is not None:
        raise InvalidInput("either a method settles it (--by) or a person does (--winner and --why)")
    method = by or ("person" if winner is not None or why is not None else "priority")
    votes = {}
    for text in approve or []:
        voter, equals, party = text.partition("=")
        if not equals or not voter:
            raise InvalidInput(f"--approve is NAME=PARTY, such as alice=risk/1; not {text!r}")
        votes[voter] = party
    async with session.space() as space:
        settled = await space.document(name).resolve(
            conflict, by=method, winner=winner, justification=why, approvals=votes, quorum=quorum
        )
    if session.json:
        output.json_line(_resolution(settled))
    elif settled.winner is None:
        output.line(output.shown(f"waits for a person: {settled.reason}"))
    else:
        instead = "" if settled.overrode is None else f"; overrode the decision of version {settled.overrode}"
        output.line(output.shown(f"{settled.winner}: {settled.reason}{instead}"))


async def _check_there(space: Space, name: str) -> None:
    if [each.name for each in await space.documents.list(name, limit=1)] != [name]:
        raise NotFound(f"there is no document {name!r} in space {space.name!r}; holdfast doc lists them")


def _cell(value: Any) -> str:
    """A value in a table, which quotes text that could be taken for something else."""
    return value[: output.SHOWN_MAX] if isinstance(value, str) else output.brief(value)


def _number(text: str | None, option: str) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise InvalidInput(f"{option} {text!r} is no number") from None


def _told(event: DocumentEvent) -> str:
    if event.omitted:
        return f"({event.omitted} bytes)"
    if event.kind == "body":
        return "; ".join(map(str, event.changes))
    if event.kind == "contributed" and isinstance(event.data, dict):
        return _cell(event.data.get("data"))
    if event.kind in ("resolved", "escalated") and isinstance(event.data, dict):
        return str(event.data.get("winner") or event.data.get("reason") or "")
    return "" if event.data is None else output.brief(event.data)


def _row(conflict: Contradiction) -> list[str]:
    said = "; ".join(f"{party}: {output.brief(conflict.values.get(party))}" for party in conflict.parties)
    waits = "waits for a person" if conflict.escalated else ""
    return [conflict.id, conflict.kind, conflict.rule, conflict.subject, waits, said]


def _view(view: DocumentView) -> dict[str, Any]:
    return {
        "name": view.name,
        "etag": view.etag,
        "body": view.body,
        "contributions": {
            section: {
                "agent": each.agent,
                "instance": each.instance,
                "data": each.data,
                "version": each.version,
                "timestamp": output.moment(each.timestamp),
                "inputs": each.inputs,
                "confidence": each.confidence,
            }
            for section, each in view.sections.items()
        },
        "stale": view.stale,
        "reducers": view.reducers,
    }


def _event(event: DocumentEvent) -> dict[str, Any]:
    changes = [{"op": each.op, "path": each.path, "old": each.old, "new": each.new} for each in event.changes]
    return {
        "id": event.id,
        "kind": event.kind,
        "by": event.by,
        "at": output.moment(event.at),
        "version": event.version,
        "section": event.section,
        "inputs": event.inputs,
        "data": event.data,
        "changes": changes,
        "omitted": event.omitted,
    }


def _conflict(conflict: Contradiction) -> dict[str, Any]:
    return {
        "id": conflict.id,
        "kind": conflict.kind,
        "rule": conflict.rule,
        "subject": conflict.subject,
        "parties": conflict.parties,
        "values": conflict.values,
        "versions": conflict.versions,
        "escalated": conflict.escalated,
    }


def _resolution(each: Resolution) -> dict[str, Any]:
    return {
        "document": each.document,
        "conflict": _conflict(each.conflict),
        "method": each.method,
        "winner": each.winner,
        "reason": each.reason,
        "outputs": each.outputs,
        "approvals": each.approvals,
        "justification": each.justification,
        "by": each.by,
        "at": output.moment(each.at),
        "overrode": each.overrode,
    }
