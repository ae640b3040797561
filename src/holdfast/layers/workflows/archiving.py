"""Archives: what is kept of an execution that has ended, as one blob; and cleaning up, which archives first.

    journal/archives/<id>     what it was, when it ended, the blob; as long as it is told, or for ever

The blob is JSON lines: what it is, then every entry of the execution, with its key. Large results are not copied: the archive
holds references to their blobs, under its own name. The commit that makes the archive's entry needs the execution to be as
it was read, so nothing that a retry did meanwhile is left out.

Of a workflow with `archive=True` nothing is removed that was not archived. Its executions end without a ttl, and the commit that ends one puts a
message to the queue `archives.<name>`: who has that archives it, and the commit that makes the archive is the one that gives the record its
ttl. Workers of the workflow do so; one that dies, or fails, leaves the message to the next.

Cleaning up takes those that ended before a time, the oldest first. Each is archived, and its record is deleted on condition that the
archive is there and the record is the one that was archived: an archive that fails deletes nothing. What the record leaves
behind, the collector removes (`collecting.py`). Restoring writes all of it back, the record first, so that the collector does not take
the rest for left behind; it then stays as long as one that has just ended.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from holdfast.clock import Duration, as_datetime, duration_ms
from holdfast.codec import decode, encode
from holdfast.engine import SCAN_MAX, Absent, Delete, Operation, Present, Put, VersionIs
from holdfast.errors import Conflict, Damaged, Error, InvalidInput, NotFound
from holdfast.layers.blobs import BlobRef, Blobs
from holdfast.layers.queues import Queue, split
from holdfast.layers.scope import Scope
from holdfast.layers.workflows.bulk import write_all
from holdfast.layers.workflows.entries import (
    JOURNAL,
    TYPE,
    WORKFLOWS,
    Meta,
    StepRecord,
    data_prefix,
    ended_key,
    execution_key,
    items_prefix,
    log_prefix,
    meta_key,
    meta_of,
    steps_prefix,
    tag_of,
)
from holdfast.layers.workflows.journal import Parts
from holdfast.layers.workflows.reading import event_in, every, standing_of

ARCHIVES: Final = JOURNAL.prefix("archives")
FORMAT: Final = "holdfast.execution/1"
CLEANED_MAX: Final = 10_000
"""Executions that one call cleans up; the next one goes on."""


class Archive(msgspec.Struct, frozen=True, omit_defaults=True):
    """An execution that was archived."""

    id: str
    name: str
    status: str
    ended_at: datetime
    archived_at: datetime
    entries: int
    blob: BlobRef


class Cleanup(msgspec.Struct, frozen=True):
    """What cleaning up did, and whether there is more to do."""

    archived: int
    removed: int
    more: bool


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry in an archive; the first line has the format instead."""

    key: str = ""
    value: msgspec.Raw = msgspec.Raw(b"null")
    tag: str = ""
    format: str = ""


def archive_key(id: str) -> str:
    return ARCHIVES + id


def archive_queue(workflow: str) -> str:
    """The queue of a workflow's executions that are to be archived."""
    return f"archives.{workflow}"


def ending(scope: Scope, queue: Queue, meta: Meta, status: str) -> tuple[int | None, Parts]:
    """How long one that ends is kept from now on, and what has it archived, if its workflow wants that."""
    if not meta.config.get("archive"):
        return scope.retention.ttl_ms(TYPE, status), ([], [])
    operations, conditions = split(queue.sibling(archive_queue(meta.name)).putting({"execution": meta.id}))
    return None, (list(operations), list(conditions))


async def archive_due(scope: Scope, blobs: Blobs, id: str) -> None:
    """Archive one that ended without a ttl, and give it that; nothing, if it does not need to be."""
    try:
        entry, execution, meta = await standing_of(scope, id)
    except NotFound:
        return
    if execution.ended and entry.expires_at is None:
        wanted = meta.config.get("archive")
        keep = None if isinstance(wanted, bool) or wanted is None else wanted / 1000
        await archive_execution(scope, blobs, id, keep, ttl_ms=scope.retention.ttl_ms(TYPE, execution.status))


async def archive_execution(
    scope: Scope, blobs: Blobs, id: str, keep: Duration | None = None, *, ttl_ms: int | None = None
) -> Archive:
    """Archive one that has ended; again, if it has changed since. Conflict while it lives. With a ttl it is kept so long from now on."""
    entry, execution, meta = await standing_of(scope, id)
    if not execution.ended or execution.ended_at is None:
        raise Conflict(f"execution {id!r} is {execution.status}; only what has ended is archived", key=entry.key)
    held: list[BlobRef] = [] if execution.blob is None else [execution.blob]
    count = 0

    async def lines() -> AsyncIterator[bytes]:
        nonlocal count
        yield encode(Line(format=FORMAT)) + b"\n"
        for key, value in ((execution_key(id), encode(execution)), (meta_key(id), encode(meta))):
            count += 1
            yield encode(Line(key, msgspec.Raw(value))) + b"\n"
        for prefix in _prefixes(id):
            async for each in every(scope, prefix):
                count += 1
                value = encode(event_in(each)) if prefix == log_prefix(id) else each.value
                if prefix == steps_prefix(id) and (blob := decode(each.value, StepRecord).blob) is not None:
                    held.append(blob)
                yield encode(Line(each.key, msgspec.Raw(value), each.tag)) + b"\n"

    blob = await blobs.put(lines())
    holder, keep_ms = archive_key(id), None if keep is None else duration_ms(keep, name="keep")
    references = [blobs.attach(each, holder, ttl=keep) for each in dict.fromkeys((*held, blob))]
    await write_all(scope, [(part.operations, part.conditions) for part in references[:-1]])
    now = scope.clock.now_ms()
    made = Archive(id, meta.name, execution.status, as_datetime(execution.ended_at), as_datetime(now), count, blob)
    last = references[-1]
    expiring: list[Operation] = []
    if ttl_ms is not None:
        ended = ended_key(meta.name, execution.ended_at, id)
        expiring = [Put(entry.key, entry.value, ttl_ms, entry.tag), Put(ended, encode(execution.status), ttl_ms)]
    await scope.commit(
        (*last.operations, Put(holder, encode(made), keep_ms), *expiring),
        (VersionIs(entry.key, entry.version), *last.conditions),
    )
    return made


async def restore_execution(scope: Scope, blobs: Blobs, id: str) -> None:
    """Write an archived execution back. Conflict when there is one of this id."""
    made = await archive_of(scope, id)
    try:
        lines = [decode(line, Line) for line in (await blobs.read(made.blob)).splitlines()]
    except InvalidInput as exc:
        raise Damaged(f"the archive of execution {id!r} cannot be read: {exc}") from exc
    allowed = (execution_key(id), meta_key(id), *_prefixes(id))
    if not lines or lines[0].format != FORMAT or not all(line.key.startswith(allowed) for line in lines[1:]):
        raise Damaged(f"the archive of execution {id!r} is none of {FORMAT}")
    record = execution_key(id)
    ttl_ms = scope.retention.ttl_ms(TYPE, made.status)
    ended_ms = round(made.ended_at.timestamp() * 1000)
    values = {line.key: bytes(line.value) for line in lines[1:3]}
    try:
        receipt = await scope.commit(
            (
                Put(record, values[record], ttl_ms, tag_of(made.status)),
                Put(meta_key(id), values[meta_key(id)]),
                Put(ended_key(made.name, ended_ms, id), encode(made.status), ttl_ms),
            ),
            (Absent(record), Present(archive_key(id))),
        )
    except Conflict as conflict:
        if conflict.key == record:
            raise Conflict(f"execution {id!r} is there; there is nothing to restore", key=record) from conflict
        raise
    await write_all(scope, [_line(blobs, id, line) for line in lines[3:]], VersionIs(record, receipt.version))
    left = sum([1 async for prefix in _each(_prefixes(id)) async for _ in every(scope, prefix)])
    if left < len(lines) - 3:  # a collector was at work on what the deleted record had left
        await write_all(scope, [_line(blobs, id, line) for line in lines[3:]], VersionIs(record, receipt.version))


async def archive_of(scope: Scope, id: str) -> Archive:
    [entry] = await scope.engine.get(scope.space, [archive_key(id)])
    if entry is None:
        raise NotFound(f"there is no archive of execution {id!r}; it was not archived, or is not kept any more")
    return decode(entry.value, Archive)


async def archives_in(scope: Scope, name: str | None, limit: int) -> list[Archive]:
    """Archives by id."""
    if type(limit) is not int or not 1 <= limit <= SCAN_MAX:
        raise InvalidInput(f"a listing shows between 1 and {SCAN_MAX:,} archives, not {limit!r}")
    found: list[Archive] = []
    async for entry in every(scope, ARCHIVES):
        made = decode(entry.value, Archive)
        if name is None or made.name == name:
            found.append(made)
            if len(found) == limit:
                break
    return found


async def clean_up(
    scope: Scope, blobs: Blobs, names: Sequence[str], older_than: Duration, *, archive: bool, keep: Duration | None
) -> Cleanup:
    """Remove those of these workflows that ended so long ago."""
    before = scope.clock.now_ms() - duration_ms(older_than, name="older_than")
    archived = removed = 0
    for name in names:
        prefix = WORKFLOWS.prefix("ended", name)
        async for entry in every(scope, prefix):
            at, _, id = entry.key[len(prefix) :].partition("/")
            if int(at) >= before:
                break
            if removed == CLEANED_MAX:
                return Cleanup(archived, removed, True)
            archived += await _clean(scope, blobs, id, entry.key, archive=archive, keep=keep)
            removed += 1
    return Cleanup(archived, removed, False)


async def _clean(scope: Scope, blobs: Blobs, id: str, listed: str, *, archive: bool, keep: Duration | None) -> bool:
    """Remove one; whether it was archived before that."""
    record = execution_key(id)
    entry, described = await scope.engine.get(scope.space, [record, meta_key(id)])
    if entry is None:
        await scope.commit((Delete(listed),))
        return False
    if described is not None and meta_of(described).config.get("archive") and entry.expires_at is None:
        archive = True  # its workflow wants that, and it was not done yet
    needed: list[Any] = [VersionIs(record, entry.version)]
    if archive:
        await archive_execution(scope, blobs, id, keep)
        needed.append(Present(archive_key(id)))
    await scope.commit((Delete(record), Delete(listed)), tuple(needed))
    return archive


def _prefixes(id: str) -> tuple[str, ...]:
    return steps_prefix(id), log_prefix(id), data_prefix(id), items_prefix(id)


async def _each(prefixes: tuple[str, ...]) -> AsyncIterator[str]:
    for prefix in prefixes:
        yield prefix


def _line(blobs: Blobs, id: str, line: Line) -> Parts:
    """An entry, as it was; with its own reference to the blob that it names."""
    put = Put(line.key, bytes(line.value), tag=line.tag)
    if line.key.startswith(steps_prefix(id)):
        try:
            blob = decode(bytes(line.value), StepRecord).blob
        except Error as exc:
            raise Damaged(f"the archive of execution {id!r} has a step that is none: {exc}") from exc
        if blob is not None:
            part = blobs.attach(blob, line.key)
            return [put, *part.operations], list(part.conditions)
    return [put], []
