"""Locks over HTTP: acquire one and get a guard, renew and release by the guard, see who holds what.

The server does not know whether a client lives, so it renews nothing: a guard ends with its ttl unless it is renewed. Name
it in the header Holdfast-Guard of whatever changes something, and that is refused once it is held no more.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.errors import AccessDenied, Conflict, InvalidInput, LeaseLost, LockAcquisitionError, NotFound
from holdfast.keys import NAME_BYTES_MAX
from holdfast.layers.guards import Guard
from holdfast.layers.lines import Kind
from holdfast.layers.locks import Wanted
from holdfast.layers.standings import LockState, Stand
from holdfast.middleware.line_claims import UNITS_MAX
from holdfast.middleware.verbs import ADMIN
from holdfast.server.http.endpoint import Call, endpoint
from holdfast.server.http.guards import guard_text, read_guard
from holdfast.server.http.shapes import (
    DurationText,
    GuardText,
    HoldingTime,
    InSpace,
    Prefix,
    Repeatable,
    Wire,
    holding_ms,
)
from holdfast.space import Space

LockName = Annotated[
    str,
    Meta(min_length=1, max_length=NAME_BYTES_MAX, pattern="^[^\\x00]+$", description="What is locked."),
]
Units = Annotated[int, Meta(ge=1, le=UNITS_MAX)]
Zero = Annotated[float, Meta(ge=0, le=30)]


class LockAt(InSpace, frozen=True):
    """A path that names a lock."""

    name: LockName


class GuardAt(InSpace, frozen=True):
    """A path that names a guard."""

    guard: GuardText


class LockQuery(Wire, frozen=True):
    """Which locks to list."""

    prefix: Prefix = ""


class KindQuery(Wire, frozen=True):
    """What it is."""

    kind: Kind = "lock"


class Acquire(Wire, frozen=True):
    """What to acquire, for how long, and how long to stand in line for it (at most 30 s; 0 not at all)."""

    kind: Kind = "lock"
    ttl: HoldingTime = 30.0
    wait: DurationText | Zero = 0.0
    size: Units | None = None
    """Of a semaphore or pool; stored at first use, another one later is refused."""
    units: Units = 1
    """Of a pool: how many to take."""
    shared: bool = False
    """Of an rw: to read, together with others."""


class Renewal(Wire, frozen=True):
    """How long from now; never shorter than it was."""

    ttl: HoldingTime = 30.0


class Held(msgspec.Struct, frozen=True):
    """It is held. `token` grows from holder to holder: let systems outside refuse a smaller one than they have seen."""

    guard: str
    kind: Kind
    name: str
    token: int
    acquired_at: datetime
    expires_at: datetime


class Renewed(msgspec.Struct, frozen=True):
    """Until when it is held now."""

    guard: str
    expires_at: datetime


class Released(msgspec.Struct, frozen=True):
    """It was given up."""

    released: bool = True


class Standing(msgspec.Struct, frozen=True):
    """Who holds, or waits."""

    agent: str
    token: int | None
    since: datetime
    expires_at: datetime | None
    units: int
    shared: bool


class Line(msgspec.Struct, frozen=True):
    """Who holds something, and who waits for it, in order."""

    kind: Kind
    name: str
    size: int
    holders: list[Standing]
    waiters: list[Standing]


class Lines(msgspec.Struct, frozen=True):
    """Everything that is held or waited for."""

    locks: list[Line]


class Broken(msgspec.Struct, frozen=True):
    """From whom it was taken."""

    broken: list[Standing]


async def acquire(call: Call, space: Space, wanted: Wanted, request_id: str | None) -> Guard:
    """Hold it, or raise. Given up when the server stops or the client goes; the same request twice at once is one request."""
    if wanted.wait_ms is None or wanted.wait_ms > call.port.limits.lock_wait_ms_max:
        raise InvalidInput(
            f"wait is at most {call.port.limits.lock_wait_ms_max / 1000:g} s over HTTP; repeat the request to wait longer"
        )
    if request_id is None:
        return await call.unless_stopped(wanted.acquire())
    async with call.port.one_at_a_time(space.name, space.agent, request_id):
        return await call.unless_stopped(wanted.acquire(request_id=request_id))


def held(guard: Guard, kind: Kind, ttl_ms: int) -> Held:
    """A guard as it is told. By the store's clock, so that a repeated request is told the same."""
    until = guard.acquired_at + timedelta(milliseconds=ttl_ms)
    return Held(guard_text(kind, guard.name, guard.id), kind, guard.name, guard.token, guard.acquired_at, until)


@endpoint("POST", "/v1/spaces/{space}/locks/{name}", errors=(LockAcquisitionError,), verb="Lock")
async def acquire_lock(call: Call, path: LockAt, headers: Repeatable, body: Acquire) -> Held:
    """Acquire a lock, a permit of a semaphore, a read or write lock, a leadership, or units of a pool."""
    space = call.space(path.space)
    wanted = _wanted(space, path.name, body)
    guard = await acquire(call, space, wanted, headers.request_id)
    return held(guard, body.kind, wanted.ttl_ms)


def _wanted(space: Space, name: str, body: Acquire) -> Wanted:
    ttl, wait = holding_ms(body.ttl, "ttl") / 1000, body.wait
    meant = {"size": ("semaphore", "pool"), "units": ("pool",), "shared": ("rw",)}
    given = {"size": body.size is not None, "units": body.units != 1, "shared": body.shared}
    for field, kinds in meant.items():
        if given[field] and body.kind not in kinds:
            raise InvalidInput(f"{field} means nothing for the kind {body.kind!r}; it is for {' and '.join(kinds)}")
    if body.kind in ("semaphore", "pool"):
        if body.size is None:
            raise InvalidInput(f"a {body.kind} needs a size")
        if body.kind == "semaphore":
            return space.semaphore(name, permits=body.size, ttl=ttl, wait=wait)
        return space.pool(name, size=body.size).allocate(body.units, ttl=ttl, wait=wait)
    if body.kind == "rw":
        return (space.read_lock if body.shared else space.write_lock)(name, ttl=ttl, wait=wait)
    return (space.election if body.kind == "election" else space.lock)(name, ttl=ttl, wait=wait)


@endpoint("GET", "/v1/spaces/{space}/locks", verb="Lock")
async def list_locks(call: Call, path: InSpace, query: LockQuery) -> Lines:
    """Who holds what, and who waits for it."""
    return Lines([_line(state) for state in await call.space(path.space).locks.list(query.prefix)])


def _line(state: LockState) -> Line:
    holders, waiters = map(_standing, state.holders), map(_standing, state.waiters)
    return Line(state.kind, state.name, state.size, [*holders], [*waiters])


def _standing(stand: Stand) -> Standing:
    return Standing(stand.agent, stand.token, stand.since, stand.expires_at, stand.units, stand.shared)


@endpoint("DELETE", "/v1/spaces/{space}/locks/{name}", errors=(NotFound, Conflict), verb=ADMIN)
async def break_lock(call: Call, path: LockAt, query: KindQuery) -> Broken:
    """Take a lock away from whoever holds it. For administrators; the audit tells who did it."""
    call.require_admin("break a lock; its holder releases it with its guard")
    broken = await call.space(path.space).locks.break_(path.name, query.kind)
    return Broken([_standing(stand) for stand in broken])


@endpoint("PUT", "/v1/spaces/{space}/guards/{guard}", errors=(AccessDenied, LeaseLost), verb="Lock")
async def renew_guard(call: Call, path: GuardAt, headers: Repeatable, body: Renewal) -> Renewed:
    """Hold it longer. For the agent that acquired it."""
    guard = read_guard(path.guard)
    until = await call.space(path.space).locks.renew(
        *guard, holding_ms(body.ttl, "ttl") / 1000, request_id=headers.request_id
    )
    return Renewed(path.guard, until)


@endpoint("DELETE", "/v1/spaces/{space}/guards/{guard}", errors=(AccessDenied, LeaseLost), verb="Unlock")
async def release_guard(call: Call, path: GuardAt, headers: Repeatable) -> Released:
    """Give it up. For the agent that acquired it; lease_lost when it was over already."""
    await call.space(path.space).locks.release(*read_guard(path.guard), request_id=headers.request_id)
    return Released()


ENDPOINTS = (acquire_lock, list_locks, break_lock, renew_guard, release_guard)
