"""Shared documents over HTTP: the body under its ETag, contributions, history, contradictions and their settlement.

The ETag of a document begins with its body's version: `"17"`. What was read with contributions or reducers has a fingerprint of them behind that,
`"17-0123456789abcdef"`, so that who asks with If-None-Match is told 304 only if nothing of it has changed. Writing a body needs If-Match with either,
of which the body's version counts, or If-None-Match: * when there is none yet; what does not hold is 412 and tells the present version. Who may write what is decided by the store: agents their own contribution,
orchestrators everything else. What waits for a person is listed under escalations, and settled like any other conflict.
"""

from __future__ import annotations

import hashlib
import re
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from holdfast.codec import encode
from holdfast.errors import Conflict, InvalidInput, LeaseLost, NotFound, QuotaExceeded
from holdfast.keys import NAME_BYTES_MAX
from holdfast.layers.conflicts import Contradiction
from holdfast.layers.contributions import Contribution, DocumentView, Outdated
from holdfast.layers.diffs import Difference
from holdfast.layers.history import DocumentEvent
from holdfast.layers.history import Kind as EventKind
from holdfast.layers.modes import Mode
from holdfast.layers.resolutions import QUORUM, TEXT_MAX, Resolution
from holdfast.server.http.endpoint import NOT_MODIFIED, Answer, Call, endpoint
from holdfast.server.http.failures import EtagMismatch
from holdfast.server.http.guards import under
from holdfast.server.http.limits import PAGE_BYTES_MAX
from holdfast.server.http.shapes import (
    Changing,
    Conditional,
    InSpace,
    Lifetime,
    PageSize,
    Prefix,
    Version,
    Wire,
    etag,
    version_of,
)

SCAN_PAGE: Final = 64
"""Events and contributions read at a time: they may be large."""
FINGERPRINT_CHARS: Final = 16
_FINGERPRINT: Final = re.compile(r'-[0-9a-f]{16}"$')

DocumentName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=NAME_BYTES_MAX,
        pattern="^[^\\x00]+$",
        description="The document. Slashes are part of its name.",
        examples=["research/MSFT"],
    ),
]
AgentName = Annotated[str, Meta(pattern="^[A-Za-z0-9_][A-Za-z0-9_-]{0,127}$", description="An agent, or an instance.")]
EventId = Annotated[str, Meta(pattern="^[0-9]{19}$", description="The last event of the page before.")]
BodyEtag = Annotated[
    str,
    Meta(
        pattern=r'^(\*|"[0-9]{1,18}(-[0-9a-f]{16})?")$',
        description="The ETag of a document; the body's version in it counts.",
        examples=['"17"'],
    ),
]
Party = Annotated[str, Meta(max_length=300, description="A section, agent/instance.", examples=["risk/1"])]


class DocumentAt(InSpace, frozen=True):
    """A path that names a document."""

    name: DocumentName


# --- documents ---


class DocumentQuery(Wire, frozen=True):
    """Which documents to list."""

    prefix: Prefix = ""
    after: DocumentName | None = None
    limit: PageSize = 100


class DocumentLine(msgspec.Struct, frozen=True):
    """A document in a list."""

    name: str
    etag: int
    by: str
    bytes: int
    updated_at: datetime


class DocumentPage(msgspec.Struct, frozen=True):
    """The documents, in the order of their names; at etag 0 those that have contributions only."""

    documents: list[DocumentLine]
    next: str | None
    """What to pass as `after` for the next page; null when this was the last one."""


class SectionShown(msgspec.Struct, frozen=True):
    """What one instance of an agent contributed."""

    agent: str
    instance: str
    data: Any
    version: int
    timestamp: datetime
    inputs: dict[str, int]
    confidence: float | None


class DocumentShown(msgspec.Struct, frozen=True):
    """A document: its body, contributions by agent/instance, and which of them rest on outdated inputs.

    Contributions come in pages of about 4 MiB. On a page of several, `versions` and `stale` tell of what is on that page, and the
    body is on the first.
    """

    name: str
    etag: int
    body: Any
    contributions: dict[str, SectionShown]
    versions: dict[str, int]
    """What was read, as a contribution takes it for its inputs."""
    stale: list[Outdated]
    reducers: dict[str, str]
    next: str | None
    """What to pass as `after` for more contributions; null when these were the last ones."""


class ReadQuery(Wire, frozen=True):
    """How fresh it must be, and after which contribution to go on."""

    consistency: Literal["strong", "session", "eventual"] = "session"
    after: Party | None = None


class Unchanged(Wire, frozen=True, rename={"if_none_match": "If-None-Match"}):
    """What the reader has."""

    if_none_match: (
        Annotated[str, Meta(max_length=1000, description="ETags of what is known already; if it is one of them, 304.")]
        | None
    ) = None


class AtBody(Conditional, frozen=True):
    """The headers of what changes a body."""

    if_match: BodyEtag | None = None


class BodyWritten(msgspec.Struct, frozen=True):
    """It was written."""

    etag: int


class Gone(msgspec.Struct, frozen=True):
    """Whether there was one."""

    deleted: bool


class Declaration(Wire, frozen=True):
    """How values of these paths of the body meet."""

    reducers: dict[str, Literal["sum", "max", "union", "append", "last"]]


class Declared(msgspec.Struct, frozen=True):
    """What is declared now."""

    reducers: dict[str, str]


@endpoint("GET", "/v1/spaces/{space}/documents")
async def list_documents(call: Call, path: InSpace, query: DocumentQuery) -> DocumentPage:
    """The documents of a space, without their bodies."""
    listed = call.space(path.space).documents.list(query.prefix, after=query.after, limit=query.limit + 1)
    found = [DocumentLine(each.name, each.etag, each.by, each.bytes, each.updated_at) for each in await listed]
    return DocumentPage(found[: query.limit], found[query.limit - 1].name if len(found) > query.limit else None)


@endpoint("GET", "/v1/spaces/{space}/documents/{name}", statuses={200: "done", 304: "it is as the ETag says"})
async def read_document(call: Call, path: DocumentAt, query: ReadQuery, headers: Unchanged) -> Answer[DocumentShown]:
    """A document with its contributions, a page at a time. One that nobody wrote to is empty, at version 0."""
    document = call.space(path.space).document(path.name)
    found: dict[str, Contribution] = {}
    size, more = 0, False
    async for view in document.pages(after=query.after, limit=SCAN_PAGE, consistency=query.consistency):
        for name, each in view.sections.items():
            if more := size >= PAGE_BYTES_MAX:  # a page has one at least, so that who goes on gets somewhere
                break
            found[name] = each
            size += len(encode(each, known=True))
        if more:
            break
    whole = not more and query.after is None
    shown = DocumentView(view.name, view.etag, view.body if query.after is None else None, found, view.reducers)
    tag = _tag(shown)
    known = (each.strip() for each in (headers.if_none_match or "").split(","))
    told = _shown(shown, next(reversed(found)) if more else None, whole=whole)
    return Answer(told, NOT_MODIFIED if tag in known else 200, {"ETag": tag})


def _tag(view: DocumentView) -> str:
    """Of what is shown, all of it: contributions and reducers are at no version of the body's."""
    if not view.sections and not view.reducers:
        return etag(view.etag)
    told = hashlib.sha256(encode([view.versions, view.reducers], known=True)).hexdigest()
    return f'"{view.etag}-{told[:FINGERPRINT_CHARS]}"'


def _shown(view: DocumentView, after: str | None, *, whole: bool) -> DocumentShown:
    sections = {
        name: SectionShown(
            each.agent, each.instance, each.data, each.version, each.timestamp, each.inputs, each.confidence
        )
        for name, each in view.sections.items()
    }
    # An input that is not on this page may be on another: nobody can tell from here that it is gone.
    stale = [each for each in view.stale if whole or each.present is not None]
    return DocumentShown(view.name, view.etag, view.body, sections, view.versions, stale, view.reducers, after)


@endpoint("PUT", "/v1/spaces/{space}/documents/{name}", errors=(Conflict, EtagMismatch, LeaseLost, QuotaExceeded))
async def replace_document(call: Call, path: DocumentAt, headers: AtBody, body: Any) -> Answer[BodyWritten]:
    """Write the body, at the etag of If-Match, or with If-None-Match: * if there is none. For orchestrators."""
    if headers.if_none_match is not None:
        expected = 0
    elif headers.if_match is None or headers.if_match == "*":
        raise InvalidInput(
            'name the etag the body must be at, If-Match: "17", or If-None-Match: * if there is none yet'
        )
    else:
        expected = version_of(_FINGERPRINT.sub('"', headers.if_match))
    if body is None:
        raise InvalidInput("a body is not null; DELETE removes the document")
    document = (await under(call.space(path.space), headers.guard)).document(path.name)
    try:
        written = await document.replace(body, etag=expected, request_id=headers.request_id)
    except Conflict as conflict:
        raise EtagMismatch(
            str(conflict), key=conflict.key, condition=conflict.condition, actual=conflict.actual
        ) from conflict
    return Answer(BodyWritten(written.etag), headers={"ETag": etag(written.etag)})


@endpoint("PATCH", "/v1/spaces/{space}/documents/{name}", errors=(Conflict, LeaseLost, QuotaExceeded))
async def merge_into_document(
    call: Call, path: DocumentAt, headers: Changing, body: dict[str, Any]
) -> Answer[BodyWritten]:
    """Reduce values into the body, by the reducers declared for their paths. For orchestrators."""
    document = (await under(call.space(path.space), headers.guard)).document(path.name)
    written = await document.merge(body, request_id=headers.request_id)
    return Answer(BodyWritten(written.etag), headers={"ETag": etag(written.etag)})


@endpoint("DELETE", "/v1/spaces/{space}/documents/{name}", errors=(LeaseLost,))
async def delete_document(call: Call, path: DocumentAt, headers: Changing) -> Gone:
    """Remove a document with its contributions and what waits for a person in it. For orchestrators."""
    document = (await under(call.space(path.space), headers.guard)).document(path.name)
    return Gone(await document.delete(request_id=headers.request_id))


@endpoint("PUT", "/v1/spaces/{space}/reducers/{name}", errors=(Conflict, LeaseLost, QuotaExceeded))
async def declare_reducers(call: Call, path: DocumentAt, headers: Changing, body: Declaration) -> Declared:
    """Declare how values of a document's paths meet; replaces what was declared. For orchestrators."""
    document = (await under(call.space(path.space), headers.guard)).document(path.name)
    await document.declare(body.reducers, request_id=headers.request_id)
    return Declared(dict(body.reducers))


# --- contributions ---


class Contributing(Wire, frozen=True):
    """What to contribute, from which inputs, and how surely. `agent` is for orchestrators.

    `instance` tells processes of one agent apart, each of which has a contribution of its own in mode merge. Those that name none are the
    same one, "1": the later contribution replaces the earlier.
    """

    data: Any
    inputs: dict[str, Version] | None = None
    confidence: Annotated[float, Meta(ge=0, le=1)] | None = None
    agent: AgentName | None = None
    instance: AgentName | None = None
    mode: Mode = "merge"
    """With reject, an agent has one section, and its version must be among the inputs. The first contribution settles it."""
    ttl: Lifetime | None = None


class Contributed(msgspec.Struct, frozen=True):
    """It was contributed."""

    section: str
    version: int


class WithdrawQuery(Wire, frozen=True):
    """Whose contribution; one's own unless it is named."""

    agent: AgentName | None = None
    instance: AgentName | None = None
    mode: Mode = "merge"


@endpoint("PUT", "/v1/spaces/{space}/contributions/{name}", errors=(Conflict, LeaseLost, QuotaExceeded))
async def contribute(call: Call, path: DocumentAt, headers: Changing, body: Contributing) -> Contributed:
    """Write one's section of a document. Contributions of different agents never conflict."""
    space = await under(call.space(path.space), headers.guard)
    version = await space.document(path.name, mode=body.mode).contribute(
        body.data,
        inputs=body.inputs,
        confidence=body.confidence,
        agent=body.agent,
        instance=body.instance,
        ttl=body.ttl,
        request_id=headers.request_id,
    )
    instance = "-" if body.mode == "reject" else body.instance or space.instance
    return Contributed(f"{body.agent or space.agent}/{instance}", version)


@endpoint("DELETE", "/v1/spaces/{space}/contributions/{name}", errors=(LeaseLost,))
async def withdraw(call: Call, path: DocumentAt, query: WithdrawQuery, headers: Changing) -> Gone:
    """Take a contribution back; the history keeps what was said."""
    document = (await under(call.space(path.space), headers.guard)).document(path.name, mode=query.mode)
    gone = await document.withdraw(agent=query.agent, instance=query.instance, request_id=headers.request_id)
    return Gone(gone)


# --- history ---


class HistoryQuery(Wire, frozen=True):
    """Which part of the history."""

    before: EventId | None = None
    limit: PageSize = 100


class DifferenceShown(msgspec.Struct, frozen=True):
    """One place at which something changed."""

    op: Literal["+", "-", "~"]
    path: str
    old: Any
    new: Any


class EventShown(msgspec.Struct, frozen=True):
    """One change of a document: who, when, what, from which inputs."""

    id: str
    kind: EventKind
    by: str
    at: datetime
    version: int
    section: str | None
    inputs: dict[str, int]
    data: Any
    changes: list[DifferenceShown]
    omitted: int
    """Bytes that were too many to be kept in the history."""


class HistoryPage(msgspec.Struct, frozen=True):
    """A part of the history, newest first."""

    events: list[EventShown]
    next: str | None
    """What to pass as `before` for the next page; null when this was the last one."""


class DiffQuery(Wire, frozen=True, rename={"after": "from", "upto": "to"}):
    """Between which versions; up to now when only the first is named."""

    after: Version = 0
    upto: Version | None = None


class Differences(msgspec.Struct, frozen=True):
    """What changed: + new, - gone, ~ another."""

    changes: list[DifferenceShown]


@endpoint("GET", "/v1/spaces/{space}/history/{name}")
async def read_history(call: Call, path: DocumentAt, query: HistoryQuery) -> HistoryPage:
    """Who wrote what to a document, when, and from which inputs; newest first."""
    document = call.space(path.space).document(path.name)
    found: list[EventShown] = []
    before, size = query.before, 0
    while page := await document.history(before=before, limit=SCAN_PAGE):
        for event in page:
            if len(found) == query.limit or size >= PAGE_BYTES_MAX:
                return HistoryPage(found, found[-1].id)
            found.append(_event(event))
            size += len(encode(found[-1], known=True))
        before = page[-1].id
    return HistoryPage(found, None)


@endpoint("GET", "/v1/spaces/{space}/diffs/{name}", errors=(NotFound,))
async def read_diff(call: Call, path: DocumentAt, query: DiffQuery) -> Differences:
    """What changed in a document after one version up to another. NotFound where the history does not reach back."""
    found = await call.space(path.space).document(path.name).diff(query.after, query.upto)
    return Differences([_difference(each) for each in found])


def _difference(each: Difference) -> DifferenceShown:
    return DifferenceShown(each.op, each.path, each.old, each.new)


def _event(event: DocumentEvent) -> EventShown:
    changes = [_difference(each) for each in event.changes]
    who = event.id, event.kind, event.by, event.at, event.version, event.section
    return EventShown(*who, event.inputs, event.data, changes, event.omitted)


# --- contradictions ---


class ConflictShown(msgspec.Struct, frozen=True):
    """Contributions that contradict each other."""

    id: str
    kind: Literal["resource-contention", "output-inconsistency", "deadline"]
    rule: str
    subject: str
    parties: list[str]
    values: dict[str, Any]
    versions: dict[str, int]
    escalated: bool
    """It waits for a person."""


class ConflictList(msgspec.Struct, frozen=True):
    """What is not settled."""

    conflicts: list[ConflictShown]


class ResolutionShown(msgspec.Struct, frozen=True):
    """What was decided, with every party's output; the winner is null as long as it waits for a person."""

    document: str
    conflict: ConflictShown
    method: str
    winner: str | None
    reason: str
    outputs: dict[str, Any]
    approvals: dict[str, str]
    justification: str | None
    by: str
    at: datetime
    overrode: int | None
    """The version of the decision that this one replaced."""


class ResolutionList(msgspec.Struct, frozen=True):
    """What was decided, or waits for a person."""

    resolutions: list[ResolutionShown]


class Settlement(Wire, frozen=True):
    """Which conflict, and how: by a method, or by a person who names the winner and says why.

    What was decided already is decided anew only with a justification.
    """

    conflict: Annotated[str, Meta(pattern="^[0-9a-f]{16}$", description="Its id.")]
    by: Literal["priority", "consensus", "confidence", "escalate", "person"] = "priority"
    winner: Party | None = None
    justification: Annotated[str, Meta(max_length=TEXT_MAX)] | None = None
    approvals: dict[str, Party] = msgspec.field(default_factory=dict)
    """Who approves of which party; for consensus."""
    quorum: Annotated[str, Meta(pattern="^[1-9][0-9]{0,2}/[1-9][0-9]{0,2}$")] = QUORUM


@endpoint("GET", "/v1/spaces/{space}/conflicts/{name}")
async def list_conflicts(call: Call, path: DocumentAt) -> ConflictList:
    """Contributions to a document that contradict each other and are not settled, by the rules that are shipped."""
    return ConflictList([_conflict(each) for each in await call.space(path.space).document(path.name).conflicts()])


@endpoint("GET", "/v1/spaces/{space}/resolutions/{name}")
async def list_resolutions(call: Call, path: DocumentAt) -> ResolutionList:
    """What was decided about a document's conflicts."""
    found = await call.space(path.space).document(path.name).resolutions()
    return ResolutionList([_resolution(each) for each in found])


@endpoint("POST", "/v1/spaces/{space}/resolutions/{name}", errors=(NotFound, Conflict, LeaseLost, QuotaExceeded))
async def settle(call: Call, path: DocumentAt, headers: Changing, body: Settlement) -> ResolutionShown:
    """Settle a conflict, or let it wait for a person. For orchestrators."""
    document = (await under(call.space(path.space), headers.guard)).document(path.name)
    settled = await document.resolve(
        body.conflict,
        by=body.by,
        winner=body.winner,
        justification=body.justification,
        approvals=body.approvals,
        quorum=body.quorum,
        request_id=headers.request_id,
    )
    return _resolution(settled)


@endpoint("GET", "/v1/spaces/{space}/escalations")
async def list_escalations(call: Call, path: InSpace) -> ResolutionList:
    """What waits for a person, in every document of the space."""
    found = await call.space(path.space).documents.escalations()
    return ResolutionList([_resolution(each) for each in found])


def _conflict(each: Contradiction) -> ConflictShown:
    said = each.rule, each.subject, list(each.parties), each.values, each.versions, each.escalated
    return ConflictShown(each.id, each.kind, *said)


def _resolution(each: Resolution) -> ResolutionShown:
    said = each.outputs, each.approvals, each.justification
    return ResolutionShown(
        each.document,
        _conflict(each.conflict),
        each.method,
        each.winner,
        each.reason,
        *said,
        each.by,
        each.at,
        each.overrode,
    )


ENDPOINTS = (
    list_documents,
    read_document,
    replace_document,
    merge_into_document,
    delete_document,
    declare_reducers,
    contribute,
    withdraw,
    read_history,
    read_diff,
    list_conflicts,
    list_resolutions,
    settle,
    list_escalations,
)
