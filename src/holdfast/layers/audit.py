"""Audit: who did what, when, and proof that nobody rewrote it.

Every commit is in the feed already. The sealer, off the commit path, turns the feed into audit records (secrets
redacted), packs them into segments and chains the segments by hash:

    audit/log/<last version>    {"after", "upto", "previous", "records": […], "hash"}
    audit/head                  {"cursor", "hash", "segments", "records"}    where the sealer stands; moves with each segment
    audit/anchor                {"upto", "hash", "segments"}                  what pruning left of the beginning
    audit/notes/<id>            a denial or an audited read, appended by whoever refused or read; sealed like a commit

A segment's hash covers its content and the hash before it, so a change, a removal or an insertion anywhere breaks the
chain from there on. Somebody who can rewrite the whole file can rewrite the whole chain; note the head's hash elsewhere
and give it to `verify(expect=…)` to exclude that too. Two sealers never fork the chain: the head moves by
compare-and-set.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from itertools import groupby
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from holdfast.clock import Instant, elapsed_s, instant_ms
from holdfast.codec import decode, encode
from holdfast.engine import (
    SCAN_MAX,
    SYSTEM_ACTOR,
    Batch,
    Change,
    ChangeSet,
    Delete,
    Engine,
    Entry,
    Push,
    Put,
    cursor_at,
    cursor_revision,
)
from holdfast.errors import Compacted, Conflict, Damaged, InvalidInput
from holdfast.identity import hidden
from holdfast.keys import unescape
from holdfast.layers.batch import RECORDS
from holdfast.layers.consumer import Consumer
from holdfast.layers.records import LISTS, SETS
from holdfast.layers.redaction import REDACTED
from holdfast.layers.scope import Scope
from holdfast.middleware.audited_reads import NOTE_TTL_MS, NOTES, UNNOTED

HEAD: Final = "audit/head"
ANCHOR: Final = "audit/anchor"
LOG: Final = "audit/log/"
GENESIS: Final = "0" * 64
SEGMENT_RECORDS_MAX: Final = 200
SEGMENT_BYTES_MAX: Final = 4 * 1024 * 1024
COMMIT_RECORDS_MAX: Final = 5_000
"""Of one commit; of what it tells beyond there are a number and a hash. No batch does as much, but it may meet what has expired."""
BEHIND_MS: Final = 600_000
"""When sealing is so far behind it takes twice its share of the time; with each such time once more, up to SHARE_MAX."""
SHARE_MAX: Final = 0.5
SHOWN_BYTES_MAX: Final = 4096
"""Longer values are told by size and hash."""
REPEATED_BYTES_MIN: Final = 256
"""What a commit tells twice is looked for among values of at least this size: a decision is, in its entry and in the outbox."""
HIDDEN: Final = ("specs/", "tasks/ctrl_in/")
"""What may hold secrets anywhere: the specs of tasks, and what is typed into them."""
_UNNOTED: Final = tuple(f"{subspace}/" for subspace in UNNOTED)
UNREADABLE: Final = "a note that cannot be read: it is told by its size and hash"
"""The reason of a record that stands for a note nobody can decode."""
PRUNE_MAX: Final = 100
PROBLEMS_MAX: Final = 100

_Noted = tuple[ChangeSet, Change]
Outcome = Literal["committed", "expired", "denied", "read", "lost"]


class AuditRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the audit."""

    version: int
    at: int
    actor: str
    operation: str
    key: str
    outcome: Outcome = "committed"
    request_id: str | None = None
    value: Any = None
    size: int = 0
    reason: str = ""


class _Note(msgspec.Struct):
    """What is appended under `audit/notes/`."""

    actor: str
    operation: str
    key: str
    outcome: Outcome
    reason: str = ""
    request_id: str | None = None


class Segment(msgspec.Struct, frozen=True):
    """Consecutive records, and the hash that chains them to what came before."""

    after: int
    upto: int
    at: int
    previous: str
    records: list[AuditRecord]
    hash: str = ""

    def digest(self) -> str:
        return _digest(self, encode(self.records, known=True))


class _Sealed(NamedTuple):
    """The records of one version, and where the segment that has them begins."""

    after: int
    version: int
    records: list[AuditRecord]


class Verification(msgspec.Struct, frozen=True):
    """What a check of the chain found; sound when there are no problems."""

    segments: int
    records: int
    upto: int
    hash: str
    problems: list[str]
    unsealed: int = 0
    """Records in the feed that the sealer has not reached yet."""
    after: int = 0
    """What is older was not looked at: it was pruned, or only the newest segments were asked for."""

    @property
    def sound(self) -> bool:
        return not self.problems


def pressed(share: float, behind_ms: int) -> float:
    """The share of the time that sealing takes when the oldest of what is to be sealed is so old."""
    return min(share * (1 + max(behind_ms, 0) / BEHIND_MS), max(share, SHARE_MAX))


class _Reading:
    """The feed, read once although it is sealed in parts."""

    def __init__(self, engine: Engine, space: str) -> None:
        self._engine = engine
        self._space = space
        self._commits: AsyncIterator[ChangeSet] | None = None
        self._read = -1

    async def after(self, revision: int) -> AsyncIterator[ChangeSet]:
        """The commits after a revision; where it was left last, it goes on."""
        if self._commits is None or revision != self._read:
            self._commits = self._engine.watch(self._space, cursor=cursor_at(revision), live=False)
        self._read = revision
        async for commit in self._commits:
            self._read = commit.version
            yield commit


class Audit:
    """The audit of a space, as `space.audit`."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._engine: Engine = scope.engine
        self._space = scope.space

    # --- reading ---

    async def records(
        self,
        *,
        actor: str | None = None,
        key: str = "",
        operation: str | None = None,
        outcome: str | None = None,
        since: Instant = 0,
        until: Instant | None = None,
        follow: bool = False,
    ) -> AsyncIterator[AuditRecord]:
        """The records in order, sealed and not yet sealed ones. `key` is a prefix.

        `since` and `until` are a datetime, a time or a duration ago as text ("1h"), or milliseconds since 1970. With `follow` it
        goes on with what happens from then on.
        """
        now_ms = self._scope.clock.now_ms()
        since = instant_ms(since, now_ms, name="since")
        until = None if until is None else instant_ms(until, now_ms, name="until")
        for name, given in (("actor", actor), ("key", key), ("operation", operation)):
            if not isinstance(given, str) and (given is not None or name == "key"):
                raise InvalidInput(f"{name} must be text, not {given!r:.60}")
        if outcome is not None:
            _check_outcome(outcome)
        upto, floor = 0, -1
        last: Segment | None = None
        while floor < (floor := await self._floor()):  # what was forgotten while segments were read is in one by now
            async for segment in self._segments(last):
                last, upto = segment, segment.upto
                for record in segment.records:
                    if _matches(record, actor, key, operation, outcome, since, until):
                        yield record
            upto = max(upto, floor)
        async for commit in self._engine.watch(self._space, cursor=cursor_at(upto), live=follow):
            for record in self._told(_noted(commit)):
                if _matches(record, actor, key, operation, outcome, since, until):
                    yield record

    async def note(
        self, outcome: Outcome, operation: str, key: str, *, reason: str = "", actor: str | None = None
    ) -> None:
        """Append what left no commit: a denial, or a read in a space that audits reads."""
        _check_outcome(outcome)
        note = _Note(actor or self._scope.actor, operation, key, outcome, reason)
        for name in ("actor", "operation", "key", "reason"):
            if not isinstance(text := getattr(note, name), str):
                raise InvalidInput(f"{name} must be text, not {text!r:.60}")
        value = encode(note)
        await self._engine.commit(self._space, Batch(SYSTEM_ACTOR, (Push(NOTES, value, NOTE_TTL_MS),)))

    # --- sealing ---

    async def seal(self, *, share: float = 1.0) -> int:
        """Seal everything committed before this call; gives the number of records. Safe to run in several processes.

        With a `share` below 1 it takes only that part of the time while others commit, so that they hardly notice it; the more, the
        longer it has been falling behind.
        """
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise InvalidInput(f"share must be a part of the time, more than 0 and at most 1, not {share!r:.60}")
        consumer = Consumer(self._engine, self._space, HEAD)
        found = await self._engine.spaces(self._space)
        goal = found[0].revision if found else 0
        sealed, reading = 0, _Reading(self._engine, self._space)
        while True:
            step, cursor, began = consumer.version, await consumer.load(), elapsed_s()
            try:
                segment = await self._next_segment(consumer, reading, cursor_revision(cursor), goal)
                if segment is None:
                    return sealed
                await self._append(consumer, segment)
            except Conflict:
                continue  # another process sealed this part
            sealed += len(segment.records)
            quiet = consumer.version == step + 1  # nothing was committed between the last two segments
            if share < 1 and not quiet:
                behind_ms = self._scope.clock.now_ms() - segment.records[-1].at
                await asyncio.sleep((elapsed_s() - began) * (1 / pressed(share, behind_ms) - 1))

    async def _next_segment(self, consumer: Consumer, reading: _Reading, after: int, goal: int) -> Segment | None:
        previous, now = str(consumer.state.get("hash", GENESIS)), self._scope.clock.now_ms()
        noted: list[_Noted] = []
        start = upto = after
        size, floor = 0, await self._floor()
        if start < floor:
            if (start + 1, consumer.version) != (floor, floor):  # more is gone than the sealer's own last step: say so
                reason = f"versions {start + 1} to {floor} were forgotten before they were sealed"
                lost = AuditRecord(floor, now, SYSTEM_ACTOR, "compact", "", "lost", reason=reason)
                return Segment(after, floor, now, previous, [lost])
            start = floor
        async for commit in reading.after(start):
            if commit.version > goal:
                break
            if changes := _noted(commit):
                noted += changes
                upto = commit.version
                size += sum([change.size for _, change in changes])
                if len(noted) >= SEGMENT_RECORDS_MAX or size >= SEGMENT_BYTES_MAX:
                    break
        return Segment(after, upto, now, previous, self._told(noted, {})) if noted else None

    async def _append(self, consumer: Consumer, segment: Segment) -> None:
        segments, records = consumer.state.get("segments", 0), consumer.state.get("records", 0)
        told = encode(segment.records, known=True)  # once, to be hashed and to be kept
        hash = _digest(segment, told)
        sealed = {**msgspec.structs.asdict(segment), "records": msgspec.Raw(told), "hash": hash}
        await consumer.advance(
            cursor_at(segment.upto),
            Put(_key_of(segment.upto), encode(sealed, known=True)),
            hash=hash,
            segments=segments + 1,
            records=records + len(segment.records),
        )

    async def sealed_upto(self) -> int:
        """The version up to which everything is sealed."""
        return cursor_revision(await Consumer(self._engine, self._space, HEAD).load())

    # --- pruning and checking ---

    async def prune(self, before: Instant) -> int:
        """Remove segments sealed before an instant, given as for `records`; the anchor keeps the hash the rest hangs on."""
        before = instant_ms(before, self._scope.clock.now_ms(), name="before")
        pruned = 0
        anchor = Consumer(self._engine, self._space, ANCHOR)
        while True:
            await anchor.load()  # before what it is to stand for is read: another may prune too
            page = await self._engine.scan(self._space, LOG, limit=PRUNE_MAX)
            old = []
            for entry in page.entries[:-1] if not page.more else page.entries:  # the newest always stays
                segment = _segment(entry)
                if segment.at >= before:
                    break
                old.append((entry, segment))
            if not old:
                return pruned
            last = old[-1][1]
            removals = tuple(Delete(entry.key) for entry, _ in old)
            count = anchor.state.get("segments", 0) + len(old)
            try:
                await anchor.advance(cursor_at(last.upto), *removals, hash=last.hash, segments=count)
            except Conflict:
                continue  # another process pruned this part
            pruned += len(old)

    async def verify(self, expect: str | None = None, *, newest: int | None = None) -> Verification:
        """Recompute the chain from its beginning, or from what pruning left, to the head.

        `expect` is a head hash noted earlier: it must still be part of the chain. With `newest` only so many segments are
        looked at, from the end, and of what is not sealed yet as many records as they hold: for a look that must not take long.
        """
        if newest is not None and (type(newest) is not int or not 0 < newest < SCAN_MAX):
            raise InvalidInput(f"newest must be a number of segments below {SCAN_MAX:,}, not {newest!r:.60}")
        while True:
            anchor, floor = Consumer(self._engine, self._space, ANCHOR), await self._floor()
            await anchor.load()
            pruned = anchor.version
            try:
                verification = await self._verified(anchor, expect, newest)
            except Compacted:
                if floor == await self._floor():
                    raise
                continue  # the feed was forgotten while it was read
            await anchor.load()
            if anchor.version == pruned:  # otherwise the beginning was pruned while it was read
                return verification

    async def _verified(self, anchor: Consumer, expect: str | None, newest: int | None) -> Verification:
        """What a look at the chain finds, from the anchor to where the head stands as it begins: sealing goes on meanwhile."""
        head = Consumer(self._engine, self._space, HEAD)
        sealed = stands = cursor_revision(await head.load())
        goal = str(head.state.get("hash", GENESIS))
        start = upto = cursor_revision(str(anchor.state.get("cursor", cursor_at(0))))
        previous = str(anchor.state.get("hash", GENESIS))
        base = None if newest is None else await self._before(newest)
        if base is not None:
            start, upto, previous = base.upto, base.upto, base.hash
        problems: list[str] = []
        seen = {previous}
        segments = records = 0
        async for segment in self._segments(base):
            if segment.upto > sealed:
                sealed = cursor_revision(await head.load())
                if segment.upto > sealed:  # nobody has sealed it
                    goal = ""
                break
            segments += 1
            records += len(segment.records)
            where = f"segment of versions {segment.after + 1} to {segment.upto}"
            if segment.previous != previous or segment.after != upto:
                problems.append(f"the {where} does not follow what is before it: something was removed or inserted")
            if segment.digest() != segment.hash:
                problems.append(f"the {where} was changed after it was sealed")
            previous, upto = segment.hash, segment.upto
            seen.add(previous)
        if goal != previous or stands != upto:
            problems.append(
                "the end of the chain does not match its head: the newest segments were removed or replaced"
            )
        if expect is not None and expect not in seen:
            problems.append(f"hash {expect} is not part of this chain")
        at_most = None if newest is None else newest * SEGMENT_RECORDS_MAX
        differing, unsealed = await self._compare_with_feed(start, base, at_most)
        return Verification(segments, records, upto, previous, problems + differing, unsealed, start)

    async def _before(self, newest: int) -> Segment | None:
        """The segment that the newest so many hang on; None when there are no more than these."""
        page = await self._engine.scan(self._space, LOG, limit=newest + 1, reverse=True)
        is_all = not page.more and len(page.entries) <= newest
        return None if is_all else _segment(page.entries[-1])

    async def _compare_with_feed(self, start: int, base: Segment | None, at_most: int | None) -> tuple[list[str], int]:
        """What the feed still tells must be what was sealed; both are read in order, side by side.

        Values, members of sets among them, are left out of the comparison: what counts as secret may have changed since, and
        the chain covers them. Of what is not sealed about `at_most` records are counted.
        """
        problems: list[str] = []
        unsealed = 0
        upto, sealed = await self.sealed_upto(), self._sealed_by_version(base)
        at = await anext(sealed, None)
        start = max(start, await self._floor())
        async for commit in self._engine.watch(self._space, cursor=cursor_at(start), live=False):
            told = self._told(_noted(commit))
            if commit.version > upto:
                unsealed += len(told)
                if at_most is not None and unsealed >= at_most:
                    break
            elif told:
                while at is not None and at.version < commit.version:
                    at = await anext(sealed, None)
                if at is None or at.after >= commit.version:
                    problems.append(f"version {commit.version} is not sealed any more: the segment with it was removed")
                elif (at.version, at.records) != (commit.version, [_without_value(record) for record in told]):
                    problems.append(f"version {commit.version} was sealed differently from what the feed tells")
        return problems[:PROBLEMS_MAX], unsealed

    async def _sealed_by_version(self, base: Segment | None) -> AsyncIterator[_Sealed]:
        async for segment in self._segments(base):
            for version, records in groupby(segment.records, key=lambda record: record.version):
                yield _Sealed(segment.after, version, [_without_value(record) for record in records])
            if not segment.records:  # nobody seals nothing
                yield _Sealed(segment.after, segment.upto, [])

    # --- in between ---

    async def _floor(self) -> int:
        found = await self._engine.spaces(self._space)
        return found[0].feed_floor if found else 0

    async def _segments(self, base: Segment | None = None) -> AsyncIterator[Segment]:
        """The segments behind one of them, or all."""
        after = None if base is None else _key_of(base.upto)
        while True:
            page = await self._engine.scan(self._space, LOG, after=after, limit=PRUNE_MAX)
            for entry in page.entries:
                yield _segment(entry)
            if not page.more:
                return
            after = page.entries[-1].key

    def _shown(self, name: str, value: bytes, shown: dict[bytes, Any] | None) -> Any:
        if self._scope.redaction.is_secret_key(name):
            return REDACTED
        if shown is None or len(value) < REPEATED_BYTES_MIN:
            return self._disclosed(value)
        if value not in shown:
            shown[value] = self._disclosed(value)
        return shown[value]

    def _disclosed(self, value: bytes, plain: bool = False) -> Any:
        """A value under a name that is no secret."""
        if len(value) <= SHOWN_BYTES_MAX:
            try:
                return self._scope.redaction.disclosed(value, plain)
            except Damaged:  # a client that bypassed the library wrote what is no JSON
                pass
        return {"sha256": hashlib.sha256(value).hexdigest()}

    def _key(self, key: str) -> str:
        """A key as it may be shown. That of a set's member has the member in it, which is a value like any other."""
        if not key.startswith(SETS.root):
            return hidden(key)
        name, member, redaction = _name(key), _member(key), self._scope.redaction
        if member and redaction.is_secret_key(name):
            return _without_member(key) + REDACTED
        if member[:1] in ("", "#"):
            return hidden(key)
        try:
            return _without_member(key) + encode(redaction.read(name, member.encode())).decode()
        except Damaged:  # no library made this key
            return hidden(key)

    def _told(self, noted: list[_Noted], shown: dict[bytes, Any] | None = None) -> list[AuditRecord]:
        """The records of changes. `shown` is for who only writes them down: what is told twice is looked at once.

        Mostly nothing in all of them looks like a secret; then no key and no value has to be looked at by itself.
        """
        plain = self._scope.redaction.is_plain(_text(noted))
        return [self._record(commit, change, shown, plain) for commit, change in noted]

    def _record(self, commit: ChangeSet, change: Change, shown: dict[bytes, Any] | None, plain: bool) -> AuditRecord:
        key: str = change.key
        if key.startswith(NOTES):
            try:
                note = decode(change.value, _Note)
            except (InvalidInput, Damaged):  # no library wrote it; the audit tells of it, and goes on
                unread = {"sha256": hashlib.sha256(change.value).hexdigest()}
                return AuditRecord(
                    commit.version,
                    commit.at,
                    commit.actor,
                    change.op,
                    key,
                    value=unread,
                    size=change.size,
                    reason=UNREADABLE,
                )
            key = self._key(note.key)
            told = (commit.version, commit.at, note.actor, note.operation, key, note.outcome, note.request_id)
            return AuditRecord(*told, reason=note.reason)
        value: Any = None
        if change.value:
            if key.startswith(HIDDEN):
                value = REDACTED
            else:
                value = self._disclosed(change.value, True) if plain else self._shown(_name(key), change.value, shown)
        if not plain or key.startswith(SETS.root):
            key = self._key(key)
        outcome: Outcome = "expired" if change.op == "expire" else "committed"
        return AuditRecord(
            commit.version, commit.at, commit.actor, change.op, key, outcome, commit.request_id, value, change.size
        )


def _check_outcome(outcome: str) -> None:
    if outcome not in get_args(Outcome):
        raise InvalidInput(f"an outcome is one of {', '.join(get_args(Outcome))}, not {outcome!r:.60}")


def _noted(commit: ChangeSet) -> list[_Noted]:
    """The changes of a commit that are in the audit; notes are, when they are made."""
    noted = [
        (commit, change)
        for change in commit.changes
        if not change.key.startswith(_UNNOTED) or (change.key.startswith(NOTES) and change.op == "push")
    ]
    if rest := [change.key for _, change in noted[COMMIT_RECORDS_MAX:]]:
        told = encode({"more": len(rest), "sha256": hashlib.sha256("\0".join(rest).encode()).hexdigest()})
        noted[COMMIT_RECORDS_MAX:] = [(commit, Change("expire", "", False, told, len(told)))]
    return noted


def _text(noted: list[_Noted]) -> str | None:
    """Everything that these changes show; None if there is something that is no text."""
    values = [change.value for _, change in noted if len(change.value) <= SHOWN_BYTES_MAX]
    try:
        return "\n".join([*[change.key for _, change in noted], b"\n".join(values).decode()])
    except UnicodeDecodeError:
        return None


def _key_of(upto: int) -> str:
    """Where the segment is that ends with a revision."""
    return f"{LOG}{upto:019d}"


def _without_value(record: AuditRecord) -> AuditRecord:
    return msgspec.structs.replace(record, value=None, key=_without_member(hidden(record.key)))


def _name(key: str) -> str:
    """What an entry is named by its user, by which it is judged secret: for an item of a list or set the name of that."""
    subspace, _, rest = key.partition("/")
    if subspace in (LISTS.name, SETS.name):
        rest = rest.partition("/")[0]
    return rest if subspace == RECORDS.name else unescape(rest)


def _member(key: str) -> str:
    """The member of a set that its key tells; empty where it tells none."""
    parts = SETS.split(key, 3)
    return parts[2] if len(parts) == 3 else ""


def _without_member(key: str) -> str:
    return key.removesuffix(_member(key)) if key.startswith(SETS.root) else key


def _digest(segment: Segment, records: bytes) -> str:
    """The hash of a segment whose encoded records these are."""
    head = encode([segment.after, segment.upto, segment.at, segment.previous], known=True)
    return hashlib.sha256(head[:-1] + b"," + records + b"]").hexdigest()


def _segment(entry: Entry) -> Segment:
    try:
        return decode(entry.value, Segment)
    except InvalidInput as exc:
        raise Damaged(f"{entry.key!r} is no segment of the audit any more: it was changed after it was sealed") from exc


def _matches(
    record: AuditRecord,
    actor: str | None,
    key: str,
    operation: str | None,
    outcome: str | None,
    since: int,
    until: int | None,
) -> bool:
    return (
        (actor is None or record.actor == actor)
        and record.key.startswith(key)
        and (operation is None or record.operation == operation)
        and (outcome is None or record.outcome == outcome)
        and record.at >= since
        and (until is None or record.at < until)
    )
