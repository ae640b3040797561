"""Spaces, their audit, and who one is."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from holdfast.clock import as_datetime
from holdfast.engine import SpaceInfo
from holdfast.errors import AccessDenied, Conflict, NotFound
from holdfast.identity import EVERY_SPACE
from holdfast.layers.audit import AuditRecord
from holdfast.middleware.verbs import ADMIN
from holdfast.server.http.endpoint import Answer, Call, endpoint
from holdfast.server.http.shapes import InSpace, PageSize, Prefix, SpaceName, Version, Wire, Word
from holdfast.space import check_space


class WhoAmI(msgspec.Struct, frozen=True):
    """Whom the token speaks for. An administrator's space is `*`: every one."""

    agent: str
    role: str
    space: str


class KeptByAgent(msgspec.Struct, frozen=True):
    """What one owner keeps in one subspace."""

    owner: str
    subspace: str
    keys: int
    bytes: int


class SpaceShown(msgspec.Struct, frozen=True):
    """A space: how durable, how far, how much."""

    name: str
    durability: Literal["volatile", "async", "sync"]
    revision: int
    created_at: datetime
    audit_reads: bool
    usage: list[KeptByAgent]


class SpaceList(msgspec.Struct, frozen=True):
    """The spaces one may see."""

    spaces: list[SpaceShown]


class NewSpace(Wire, frozen=True):
    """A space to be made."""

    name: SpaceName
    durability: Literal["volatile", "async", "sync"] = "sync"
    audit_reads: bool = False


class Dropped(msgspec.Struct, frozen=True):
    """It is gone, with all it held."""

    dropped: str


class AuditQuery(Wire, frozen=True):
    """Which records of the audit."""

    actor: Word | None = None
    key: Annotated[Prefix, Meta(description="Only keys that begin with this, subspace included: records/orders/")] = ""
    operation: Word | None = None
    outcome: Literal["committed", "expired", "denied", "read", "lost"] | None = None
    since: Annotated[Version, Meta(description="Milliseconds since 1970, UTC.")] = 0
    until: Annotated[Version, Meta(description="Milliseconds since 1970, UTC; not included.")] | None = None
    after: Annotated[Version, Meta(description="The version after which to go on: the `next` of the page before.")] = 0
    limit: PageSize = 100


class AuditShown(msgspec.Struct, frozen=True):
    """One line of the audit, secrets redacted."""

    version: int
    at: datetime
    actor: str
    operation: str
    key: str
    outcome: str
    request_id: str | None
    value: Any
    size: int
    reason: str


class AuditPage(msgspec.Struct, frozen=True):
    """Records in order. A commit is never split, so there may be a few more than asked for."""

    records: list[AuditShown]
    next: int | None


@endpoint("GET", "/v1/whoami")
async def who_am_i(call: Call) -> WhoAmI:
    """Whom this token speaks for."""
    return WhoAmI(call.identity.agent, call.identity.role, call.identity.space)


@endpoint("GET", "/v1/spaces")
async def list_spaces(call: Call) -> SpaceList:
    """The token's space, if it exists yet; for an administrator every space."""
    own = None if call.identity.space == EVERY_SPACE else call.identity.space
    found = await call.port.keeper.engine_for(call.identity).spaces(own)
    return SpaceList([_shown(info) for info in found if not info.name.startswith("_")])


def _shown(info: SpaceInfo) -> SpaceShown:
    usage = [KeptByAgent(each.owner, each.subspace, each.keys, each.bytes) for each in info.usage]
    created_at = as_datetime(info.created_at)
    return SpaceShown(info.name, info.durability, info.revision, created_at, info.audit_reads, usage)


@endpoint("GET", "/v1/spaces/{space}", errors=(AccessDenied, NotFound))
async def read_space(call: Call, path: InSpace) -> SpaceShown:
    """One space: how durable it is, its revision, and who keeps how much in it."""
    return _shown(await call.space(path.space).info())


@endpoint("POST", "/v1/spaces", statuses={201: "it exists now"}, errors=(AccessDenied, Conflict), verb=ADMIN)
async def create_space(call: Call, body: NewSpace) -> Answer[SpaceShown]:
    """Make a space, or find it as it is. For administrators."""
    call.require_admin("make spaces")
    check_space(body.name)
    call.enter(body.name)
    engine = call.port.keeper.engine_for(call.identity)
    return Answer(_shown(await engine.create(body.name, body.durability, audit_reads=body.audit_reads)), 201)


@endpoint("DELETE", "/v1/spaces/{space}", errors=(AccessDenied, NotFound), verb=ADMIN)
async def drop_space(call: Call, path: InSpace) -> Dropped:
    """Delete a space with all it holds. For administrators."""
    call.require_admin("delete spaces")
    check_space(path.space)
    call.enter(path.space)
    engine = call.port.keeper.engine_for(call.identity)
    if not await engine.spaces(path.space):
        raise NotFound(f"there is no space {path.space!r}")
    await engine.drop(path.space)
    return Dropped(path.space)


@endpoint("GET", "/v1/spaces/{space}/audit", verb="Audit")
async def read_audit(call: Call, path: InSpace, query: AuditQuery) -> AuditPage:
    """Who did what, when, and what was denied."""
    found: list[AuditShown] = []
    audit = call.space(path.space).audit
    async for record in audit.records(
        actor=query.actor,
        key=query.key,
        operation=query.operation,
        outcome=query.outcome,
        since=query.since,
        until=query.until,
    ):
        if record.version <= query.after:
            continue
        if len(found) >= query.limit and record.version != found[-1].version:
            return AuditPage(found, found[-1].version)
        found.append(_audited(record))
    return AuditPage(found, None)


def _audited(record: AuditRecord) -> AuditShown:
    return AuditShown(
        record.version,
        as_datetime(record.at),
        record.actor,
        record.operation,
        record.key,
        record.outcome,
        record.request_id,
        record.value,
        record.size,
        record.reason,
    )


ENDPOINTS = (who_am_i, list_spaces, read_space, create_space, drop_space, read_audit)
