"""Reading what is kept of an execution: all of it, page by page, and its log with who wrote each line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

from holdfast.codec import decode, encode
from holdfast.engine import SCAN_MAX, Entry
from holdfast.errors import NotFound
from holdfast.layers.scope import Scope
from holdfast.layers.workflows.entries import (
    RETRIED,
    Execution,
    LogEvent,
    Meta,
    StepRecord,
    data_prefix,
    execution_key,
    execution_of,
    items_prefix,
    log_prefix,
    meta_key,
    meta_of,
    steps_prefix,
)


async def every(scope: Scope, prefix: str) -> AsyncIterator[Entry]:
    """All entries under a prefix, in order."""
    after: str | None = None
    while True:
        page = await scope.engine.scan(scope.space, prefix, after=after, limit=SCAN_MAX)
        for entry in page.entries:
            yield entry
        if not page.more:
            return
        after = page.entries[-1].key


async def standing_of(scope: Scope, id: str) -> tuple[Entry, Execution, Meta]:
    """How an execution stands, and what it is; NotFound when there is none."""
    entry, described = await scope.engine.get(scope.space, [execution_key(id), meta_key(id)])
    if entry is None or described is None:
        raise NotFound(f"there is no execution {id!r}; it was never started, or its record has expired")
    return entry, execution_of(entry), meta_of(described)


async def journal_of(scope: Scope, id: str) -> tuple[dict[str, StepRecord], list[LogEvent]]:
    """What is recorded of its steps, by path, and its log."""
    events, prefix = [event for _, event in await log_of(scope, id)], steps_prefix(id)
    records = told_in(events)
    async for entry in every(scope, prefix):
        records[entry.key[len(prefix) :]] = decode(entry.value, StepRecord)
    return dict(sorted(records.items())), events


def told_in(events: Iterable[LogEvent]) -> dict[str, StepRecord]:
    """What the log itself records of steps, by path: what no retry has taken back."""
    told: dict[str, StepRecord] = {}
    for event in events:
        if event.record is not None:
            told[event.path] = event.record
        elif event.event == RETRIED:
            for path in event.writes:
                told.pop(path, None)
    return told


async def state_of(scope: Scope, id: str) -> dict[str, Any]:
    """Its state, as it is stored."""
    prefix, found = data_prefix(id), dict[str, Any]()
    async for entry in every(scope, prefix):
        key = entry.key[len(prefix) :]
        if not entry.tag:
            found[key] = decode(entry.value)
            continue
        chunks = [
            item
            async for chunk in every(scope, items_prefix(id, key, decode(entry.value, str)))
            for item in decode(chunk.value, list)
        ]
        if entry.tag == "set":
            chunks = [decode(member) for member in sorted({encode(item) for item in chunks})]
        found[key] = chunks
    return found


async def log_of(scope: Scope, id: str) -> list[tuple[str, LogEvent]]:
    """What happened to it, in order, each with the digits of its key."""
    prefix = log_prefix(id)
    return [(entry.key[len(prefix) :], event_in(entry)) async for entry in every(scope, prefix)]


def event_in(entry: Entry) -> LogEvent:
    """A line of the log; who wrote it, its entry says."""
    event = decode(entry.value, LogEvent)
    return event if event.by else msgspec.structs.replace(event, by=entry.owner)
