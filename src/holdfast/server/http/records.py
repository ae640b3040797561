"""Records, counters, lists and sets over HTTP.

A record's value is the body, in both directions; what else is known of it is in the headers, its version as the ETag. A
list of records has all of it in the body. What is stored is JSON already: it is passed on as it is, and never read.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

import msgspec
from msgspec import Meta, Raw

from holdfast.codec import passed_on
from holdfast.engine import Condition, Entry, Operation
from holdfast.errors import Conflict, InvalidInput, LeaseLost, MigrationFailed, NotFound, QuotaExceeded
from holdfast.layers.batch import LIST, SET, absent, delete_, present, set_, version_is
from holdfast.layers.records import ITEMS_MAX, RecordTransaction, record_of
from holdfast.server.http.endpoint import Answer, Call, endpoint
from holdfast.server.http.failures import EtagMismatch
from holdfast.server.http.guards import under
from holdfast.server.http.limits import PAGE_BYTES_MAX
from holdfast.server.http.shapes import (
    At,
    Changing,
    Conditional,
    DurationText,
    InSpace,
    Int64,
    Key,
    Lifetime,
    PageSize,
    Prefix,
    Wire,
    Word,
    etag,
    shown,
    version_of,
)

SCAN_PAGE: Final = 64
"""Entries read at a time for a page with values: they may be large."""


class RecordHead(msgspec.Struct, frozen=True):
    """What is known of a record. A list or set has that as its type, and no value."""

    key: str
    version: int
    owner: str
    created_at: datetime
    updated_at: datetime
    expires_at: datetime | None
    type: str | None
    state: str | None
    value: Any = None
    """null unless values were asked for; as it is stored."""
    schema_version: str | None = None
    """The version of its type's schema under which it was written."""
    error: str | None = None
    """Why the value cannot be shown, if it cannot."""


class RecordPage(msgspec.Struct, frozen=True):
    """A part of the records, in the order of their keys."""

    records: list[RecordHead]
    next: str | None
    """What to pass as `after` for the next page; null when this was the last one."""


class RecordQuery(Wire, frozen=True):
    """Which records to list."""

    prefix: Prefix = ""
    after: Key | None = None
    limit: PageSize = 100
    values: Annotated[bool, Meta(description="With their values.")] = False


class WriteQuery(Wire, frozen=True):
    """How long a record lives: by itself, or by what it is."""

    ttl: DurationText | None = None
    type: Word | None = None
    state: Word | None = None


class Written(msgspec.Struct, frozen=True):
    """It was written."""

    version: int


class Deleted(msgspec.Struct, frozen=True):
    """Whether there was one."""

    deleted: bool


@endpoint("GET", "/v1/spaces/{space}/records")
async def list_records(call: Call, path: InSpace, query: RecordQuery) -> RecordPage:
    """The records of a space, page by page."""
    found: list[RecordHead] = []
    size, more = 0, False
    page = SCAN_PAGE if query.values else query.limit + 1
    records = call.space(path.space).records
    async for entry in records.entries(query.prefix, after=query.after, page=page):
        if len(found) == query.limit or size >= PAGE_BYTES_MAX:
            more = True
            break
        size += len(entry.value) if query.values else 0
        found.append(_head(entry, query.values))
    return RecordPage(found, found[-1].key if more else None)


def _head(entry: Entry, values: bool) -> RecordHead:
    record = record_of(msgspec.structs.replace(entry, value=b"null"))
    value, error = shown(entry.value) if values and entry.tag not in (LIST, SET) else (None, None)
    times = record.created_at, record.updated_at, record.expires_at
    known = record.key, record.version, record.owner, *times, record.type, record.state
    return RecordHead(*known, value, record.schema_version, error)


@endpoint("GET", "/v1/spaces/{space}/records/{key}", errors=(NotFound, MigrationFailed))
async def read_record(call: Call, path: At) -> Answer[Any]:
    """The value of a record, in its type's newest version. The ETag is the record's version; Holdfast-* headers tell the rest."""
    record = await call.space(path.space).records.entry(path.key, as_type=Raw)
    if record is None:
        raise NotFound(f"there is no record {path.key!r:.60}")
    known = {
        "Owner": record.owner,
        "Created-At": record.created_at.isoformat(),
        "Updated-At": record.updated_at.isoformat(),
        "Expires-At": None if record.expires_at is None else record.expires_at.isoformat(),
        "Type": record.type,
        "State": record.state,
        "Schema-Version": record.schema_version,
    }
    headers = {f"Holdfast-{name}": quote(text, safe=":+") for name, text in known.items() if text is not None}
    return Answer(passed_on(record.value), headers={"ETag": etag(record.version), **headers})


@endpoint("PUT", "/v1/spaces/{space}/records/{key}", errors=(Conflict, EtagMismatch, LeaseLost, QuotaExceeded))
async def write_record(call: Call, path: At, query: WriteQuery, headers: Conditional, body: Any) -> Answer[Written]:
    """Write a record: the body is its value. With If-Match only that version, with If-None-Match: * only if there is none."""
    put = set_(path.key, body, ttl=query.ttl, type=query.type, state=query.state)
    version, _ = await _change(call, path, headers, put)
    return Answer(Written(version), headers={"ETag": etag(version)})


@endpoint("DELETE", "/v1/spaces/{space}/records/{key}", errors=(Conflict, EtagMismatch, LeaseLost))
async def delete_record(call: Call, path: At, headers: Conditional) -> Deleted:
    """Remove a record, list or set."""
    _, existed = await _change(call, path, headers, delete_(path.key))
    return Deleted(bool(existed))


async def _change(call: Call, path: At, headers: Conditional, operation: Operation) -> tuple[int, Any]:
    conditions: list[Condition] = []
    if headers.if_match is not None:
        one = present(path.key) if headers.if_match == "*" else version_is(path.key, version_of(headers.if_match))
        conditions.append(one)
    if headers.if_none_match is not None:
        conditions.append(absent(path.key))
    space = await under(call.space(path.space), headers.guard)
    try:
        receipt = await space.commit(*conditions, operation, request_id=headers.request_id)
    except Conflict as conflict:
        if conditions:
            raise EtagMismatch(
                str(conflict), key=conflict.key, condition=conflict.condition, actual=conflict.actual
            ) from conflict
        raise
    return receipt.version, receipt.results[0]


# --- counters ---


class Increase(Wire, frozen=True):
    """How much to add."""

    delta: Int64 = 1
    ttl: Lifetime | None = None


class Number(msgspec.Struct, frozen=True):
    """The sum."""

    value: int


@endpoint("POST", "/v1/spaces/{space}/counters/{key}", errors=(Conflict, LeaseLost, QuotaExceeded), verb="Increment")
async def increment_record(call: Call, path: At, headers: Changing, body: Increase) -> Number:
    """Add to the 64-bit number of a record; one that does not exist counts as 0."""
    records = (await under(call.space(path.space), headers.guard)).records
    return Number(await records.increment(path.key, body.delta, ttl=body.ttl, request_id=headers.request_id))


# --- lists and sets ---

Values = Annotated[list[Any], Meta(min_length=1, max_length=ITEMS_MAX)]
Members = Annotated[list[Any], Meta(max_length=ITEMS_MAX)]


class ItemQuery(Wire, frozen=True):
    """Which part of a list or set."""

    after: (
        Annotated[str, Meta(max_length=600, pattern="^[^\\x00]*$", description="The `next` of the page before.")] | None
    ) = None
    limit: PageSize = 1000


class Items(msgspec.Struct, frozen=True):
    """A part of a list or set."""

    values: list[Any]
    next: str | None
    """What to pass as `after` for the next page; null when this was the last one."""


class Appending(Wire, frozen=True):
    """Values for the end of a list, together and in this order. A ttl is the whole list's, and only extends."""

    values: Values
    ttl: Lifetime | None = None


class MemberChange(Wire, frozen=True):
    """Members to add to a set and to remove from it, at once. A ttl is the whole set's, and only extends."""

    add: Members = msgspec.field(default_factory=list)
    remove: Members = msgspec.field(default_factory=list)
    ttl: Lifetime | None = None


class Appended(msgspec.Struct, frozen=True):
    """How many values were appended."""

    appended: int


class MembersChanged(msgspec.Struct, frozen=True):
    """How many members were new, and how many were there."""

    added: int
    removed: int


@endpoint("GET", "/v1/spaces/{space}/lists/{key}")
async def read_list(call: Call, path: At, query: ItemQuery) -> Items:
    """The values of a list in order; none if there is no list."""
    return await _items(call, path, query, "list")


async def _items(call: Call, path: At, query: ItemQuery, kind: Literal["list", "set"]) -> Items:
    values: list[Any] = []
    size, place = 0, None
    parts = call.space(path.space).records.parts(path.key, kind, after=query.after, page=SCAN_PAGE, as_type=Raw)
    async for here, value in parts:
        if len(values) == query.limit or size >= PAGE_BYTES_MAX:
            return Items(values, place)
        values.append(passed_on(value))
        size, place = size + memoryview(value).nbytes, here
    return Items(values, None)


@endpoint("POST", "/v1/spaces/{space}/lists/{key}", errors=(Conflict, LeaseLost, QuotaExceeded))
async def append_to_list(call: Call, path: At, headers: Changing, body: Appending) -> Appended:
    """Append values to a list, which is made if there is none. DELETE of the record ends it."""

    async def work(tx: RecordTransaction) -> int:
        await tx.append_to_list(path.key, *body.values, ttl=body.ttl)
        return len(body.values)

    space = await under(call.space(path.space), headers.guard)
    asked = ["append", path.key, body.values, body.ttl]
    return Appended(await space.records.transact(work, request_id=headers.request_id, asked=asked))


@endpoint("GET", "/v1/spaces/{space}/sets/{key}")
async def read_set(call: Call, path: At, query: ItemQuery) -> Items:
    """The members of a set, in the order of their JSON; none if there is no set."""
    return await _items(call, path, query, "set")


@endpoint("PATCH", "/v1/spaces/{space}/sets/{key}", errors=(Conflict, LeaseLost, QuotaExceeded))
async def change_set(call: Call, path: At, headers: Changing, body: MemberChange) -> MembersChanged:
    """Add members to a set, which is made if there is none, and remove others."""
    if not body.add and not body.remove:
        raise InvalidInput("name members to add or to remove")

    async def work(tx: RecordTransaction) -> list[int]:
        added = await tx.add_to_set(path.key, *body.add, ttl=body.ttl) if body.add else 0
        return [added, await tx.remove_from_set(path.key, *body.remove) if body.remove else 0]

    space = await under(call.space(path.space), headers.guard)
    asked = ["members", path.key, body.add, body.remove, body.ttl]
    return MembersChanged(*await space.records.transact(work, request_id=headers.request_id, asked=asked))


ENDPOINTS = (
    list_records,
    read_record,
    write_record,
    delete_record,
    increment_record,
    read_list,
    append_to_list,
    read_set,
    change_set,
)
