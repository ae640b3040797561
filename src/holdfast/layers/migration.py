"""Looking at all records of a type: rewriting those of an older version, or checking what is stored.

A pass reads records in pages, smaller ones where values are large, and keeps no more than one. Each record to be rewritten is
read again in a transaction and written on condition that it is still the same, IN_FLIGHT_MAX at a time; whoever writes it
meanwhile wins, and wrote it under the newest version. It keeps owner, state and what is left of its ttl: that is told by the store's clock, which an empty
commit shows, so that this machine's may be wrong. Behind a keeper only an administrator writes in the name of others.

How it fails. A record that cannot be migrated stays as it is, is counted, and does not stop the others. A pass that was
interrupted is run again and finds less to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.codec import decode, encode
from holdfast.engine import Entry, Put
from holdfast.errors import Damaged, InvalidInput, MigrationFailed, SchemaViolation
from holdfast.keys import check_prefix
from holdfast.layers.batch import RECORDS, split_tag, tag_version, type_tag
from holdfast.layers.scope import Scope
from holdfast.layers.state_type import StateType
from holdfast.layers.transact import Transaction, transact
from holdfast.layers.transfer import pages
from holdfast.layers.versions import read_version

IN_FLIGHT_MAX: Final = 16
IN_FLIGHT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Unless a single record has more."""
FAILURES_MAX: Final = 100
"""Failures that a report lists; it counts them all."""
UNVERSIONED: Final = "unversioned"


@dataclass(frozen=True, slots=True)
class MigrationFailure:
    """A record that could not be migrated, or is not as its schema wants it, and why."""

    key: str
    version: str
    reason: str
    message: str


@dataclass(slots=True)
class MigrationReport:
    """What a pass over the records of a type found and did."""

    type: str
    newest: str
    dry_run: bool
    found: dict[str, int] = field(default_factory=dict)
    """How many records there are of each version; `unversioned` are those without one."""
    migrated: int = 0
    """Rewritten, or in a dry run: would be."""
    failed: int = 0
    failures: list[MigrationFailure] = field(default_factory=list)
    """The first of them, at most 100."""

    def note_failure(self, entry: Entry, version: str, exc: Exception) -> None:
        self.failed += 1
        if len(self.failures) < FAILURES_MAX:
            reason = exc.reason if isinstance(exc, MigrationFailed) else "invalid_value"
            key = entry.key.removeprefix(RECORDS.root)
            self.failures.append(MigrationFailure(key, version, reason, str(exc)))


async def migrate_records(
    scope: Scope,
    known: StateType,
    dry_run: bool,
    prefix: str,
    unversioned: str | None,
    progress: Callable[[MigrationReport], None] | None,
) -> MigrationReport:
    """One pass: every record of the type, page by page."""
    report = MigrationReport(known.name, known.newest or "", dry_run)
    work = _Pass(scope, known, report, None if unversioned is None else read_version(unversioned))
    if not dry_run:
        work.ahead_ms = (await scope.commit(())).at - scope.clock.now_ms()
    async for page in _pages(scope, known.name, prefix, report):
        due = [entry for entry in page if work.is_due(entry)]
        for some in _portions(due):
            for ended in await asyncio.gather(*map(work.rewrite, some), return_exceptions=True):
                if ended is not None:
                    raise ended
        if progress is not None:
            progress(report)
    return report


async def check_records(scope: Scope, known: StateType, prefix: str) -> MigrationReport:
    """Every record of the type against the schema of its own version."""
    report = MigrationReport(known.name, known.newest or "", dry_run=True)
    async for page in _pages(scope, known.name, prefix, report):
        for entry in page:
            version = tag_version(entry.tag)
            if version is None:
                continue
            try:
                if version not in known.schemas:
                    raise InvalidInput(f"version {version} of type {known.name!r} has no schema")
                known.check(decode(entry.value), version, entry.key)
            except (SchemaViolation, InvalidInput, Damaged) as exc:
                report.note_failure(entry, version, exc)
    return report


async def _pages(scope: Scope, type: str, prefix: str, report: MigrationReport) -> AsyncIterator[list[Entry]]:
    """The records of the type, counted by version."""
    root = RECORDS.root + check_prefix(prefix)
    async for entries, _ in pages(scope.engine, scope.space, prefix=root):
        found = [entry for entry in entries if split_tag(entry.tag)[0] == type]
        for entry in found:
            version = tag_version(entry.tag) or UNVERSIONED
            report.found[version] = report.found.get(version, 0) + 1
        yield found


def _portions(entries: list[Entry]) -> Iterator[list[Entry]]:
    """As many as may be under way at once."""
    portion: list[Entry] = []
    size = 0
    for entry in entries:
        size += len(entry.value)
        if portion and (len(portion) == IN_FLIGHT_MAX or size > IN_FLIGHT_BYTES_MAX):
            yield portion
            portion, size = [], len(entry.value)
        portion.append(entry)
    if portion:
        yield portion


class _Pass:
    """What rewriting needs to know."""

    def __init__(self, scope: Scope, known: StateType, report: MigrationReport, unversioned: str | None) -> None:
        self._scope = scope
        self._known = known
        self._report = report
        self._unversioned = unversioned
        self.ahead_ms = 0
        """How far the store's clock is ahead of ours."""

    def is_due(self, entry: Entry) -> bool:
        version = tag_version(entry.tag)
        return (version is not None or self._unversioned is not None) and version != self._known.newest

    async def rewrite(self, entry: Entry) -> None:
        """Bring one record to the newest version, or note why not."""
        version = tag_version(entry.tag) or self._unversioned or ""
        try:
            if self._report.dry_run:
                self._upgraded(entry)
                self._report.migrated += 1
            elif await transact(lambda: Transaction(self._scope), lambda tx: self._write(tx, entry.key)):
                self._report.migrated += 1
        except (MigrationFailed, InvalidInput, Damaged) as exc:
            self._report.note_failure(entry, version, exc)

    async def _write(self, transaction: Transaction, key: str) -> bool:
        [entry] = await transaction.read(key)
        if entry is None or split_tag(entry.tag)[0] != self._known.name or not self.is_due(entry):
            return False  # somebody else deleted or rewrote it
        ttl_ms = None
        if entry.expires_at is not None:
            ttl_ms = max(1, entry.expires_at - (self._scope.clock.now_ms() + self.ahead_ms))
        tag = type_tag(*split_tag(entry.tag), self._known.newest)
        owner = None if entry.owner == self._scope.actor else entry.owner
        transaction.put(Put(key, self._upgraded(entry), ttl_ms, tag, owner))
        return True

    def _upgraded(self, entry: Entry) -> bytes:
        version = tag_version(entry.tag) or self._unversioned or ""
        data: Any = decode(entry.value)
        if version == self._known.newest:
            self._known.check(data, version, entry.key)
            return entry.value
        return encode(self._known.upgraded(data, version, entry.key))
