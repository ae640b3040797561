"""The contract between what Holdfast does and where it keeps it.

An engine keeps spaces. A space is an ordered map of entries with one history: every commit gets the next revision, and
that revision is the version of everything the commit wrote. Everything else (records, locks, documents, queues,
workflows) is built on the operations below, in `layers/`, and works on every engine.

What every engine guarantees, by the names under which `holdfast.testing.conformance` proves it:

 1. total order        the commits of a space are totally ordered and strictly serializable; a refused batch changed nothing
 2. versions           a version never falls and is never reused: not after delete, expiry, crash, compaction or drop
 3. durability         what a reply shows, reads included, is as durable as the space asks (sync, async, volatile)
 4. time               an expired entry is invisible from that instant and its expiry is in the feed exactly once; value
                       and ttl are set together; touch only extends, is refused on an expired entry, and is no write;
                       now = max(clock, time of the last commit): a space's time never falls
 5. feed               every change exactly once, in commit order, a batch never split; a cursor resumes exactly; a
                       removed cursor raises Compacted; values over FEED_VALUE_BYTES_MAX appear as key and version only
 6. requests           the same request id of the same actor gives the identical receipt and no second effect within
                       REQUEST_WINDOW_MS; the same id with other content is InvalidInput; refusals are not remembered
 7. outcome            a failure inside a commit is OutcomeUnknown, or resolved by the request id; never a guess
 8. usage              (space, owner, subspace) → keys and bytes, exact
 9. one evaluator      the memory engine's evaluation is the specification the others are compared with

Values are opaque bytes (canonical JSON, made by `codec.py`), except that increment and AtLeast read a canonical signed
64-bit decimal, and ValueIs compares bytes. Keys are text in the order of their UTF-8 bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, Literal, Protocol, TypeAlias

import msgspec

from holdfast.errors import Compacted, InvalidInput

OPERATIONS_MAX: Final = 128
CONDITIONS_MAX: Final = 256
BATCH_BYTES_MAX: Final = 16 * 1024 * 1024
VALUE_BYTES_MAX: Final = 10 * 1024 * 1024
FEED_VALUE_BYTES_MAX: Final = 64 * 1024
TAG_BYTES_MAX: Final = 256
REQUEST_ID_BYTES_MAX: Final = 128
NAME_BYTES_MAX: Final = 128
TAKE_MAX: Final = 256
SCAN_MAX: Final = 10_000
ID_DIGITS: Final = 19
ID_SHIFT: Final = 20
"""An assigned id is the commit's millisecond, shifted, plus a counter: 64 bits until the year 2248."""
REQUEST_WINDOW_MS: Final = 3_600_000
FEED_WINDOW_MS: Final = 24 * 3_600_000
PATIENCE_MS_MAX: Final = 50
LOSS_JUMP: Final = 2**32
"""By how much revisions jump where commits may be lost that nobody can count: none of their versions is given again."""
COMMITS_PER_MS_MAX: Final = 16
"""As many as a space can make for days on end."""

Durability: TypeAlias = Literal["volatile", "async", "sync"]
DURABILITIES: Final = ("volatile", "async", "sync")

SYSTEM_ACTOR: Final = "holdfast"
"""Who acts when the store does something by itself: expiry, sealing, collecting. No agent may have this name."""


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a key holds. Instants are milliseconds since 1970, UTC; `tag` says what the value is, for the layer it belongs to."""

    key: str
    value: bytes
    version: int
    owner: str
    created_at: int
    updated_at: int
    expires_at: int | None = None
    tag: str = ""


# --- conditions: they name keys, one of them a range, and all of them hold or the batch is refused ---


class Absent(msgspec.Struct, frozen=True, array_like=True, tag="absent", gc=False):
    key: str


class Present(msgspec.Struct, frozen=True, array_like=True, tag="present", gc=False):
    key: str


class VersionIs(msgspec.Struct, frozen=True, array_like=True, tag="version", gc=False):
    key: str
    version: int


class ValueIs(msgspec.Struct, frozen=True, array_like=True, tag="value", gc=False):
    key: str
    value: bytes


class AtLeast(msgspec.Struct, frozen=True, array_like=True, tag="at_least", gc=False):
    """The number under `key` is at least `number`; an absent key counts as 0, as it does for Increment."""

    key: str
    number: int


class Mine(msgspec.Struct, frozen=True, array_like=True, tag="mine", gc=False):
    """Nobody else has it: the key is absent, or its owner is the batch's actor. What the ownership rule is made of."""

    key: str


class Empty(msgspec.Struct, frozen=True, array_like=True, tag="empty", gc=False):
    """No entry is under this prefix, which ends in a slash. Its refusal names, and shows, the first one that is."""

    prefix: str


Condition: TypeAlias = Absent | Present | VersionIs | ValueIs | AtLeast | Mine | Empty


# --- operations, applied in order ---


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put", gc=False):
    """Write the value, its ttl (None: it never expires) and its tag together. `owner` defaults to the actor."""

    key: str
    value: bytes
    ttl_ms: int | None = None
    tag: str = ""
    owner: str | None = None


class Delete(msgspec.Struct, frozen=True, array_like=True, tag="delete", gc=False):
    """Remove the entry; its result says whether there was one."""

    key: str


class Increment(msgspec.Struct, frozen=True, array_like=True, tag="increment", gc=False):
    """Add to a number and give the sum. An absent key counts as 0. Keeps owner and tag, and the expiry unless `ttl_ms` sets it."""

    key: str
    delta: int
    ttl_ms: int | None = None


class Touch(msgspec.Struct, frozen=True, array_like=True, tag="touch", gc=False):
    """Extend the life of an entry to now + ttl, never shorten it. Refused (Conflict) when the entry is gone. No write: no version, no event."""

    key: str
    ttl_ms: int


class Push(msgspec.Struct, frozen=True, array_like=True, tag="push", gc=False):
    """Write under `prefix` + a 19-digit id that is assigned at commit: unique in the space, ordered by commit, and by time."""

    prefix: str
    value: bytes
    ttl_ms: int | None = None
    tag: str = ""


class Take(msgspec.Struct, frozen=True, array_like=True, tag="take", gc=False):
    """Move the first `n` entries under `source` (keys below `upto`, if given) under `target`; their owner is the taker.

    Gives the moved entries. `source_counter` falls and `target_counter` grows by their number.
    """

    source: str
    target: str
    n: int = 1
    upto: str | None = None
    source_counter: str | None = None
    target_counter: str | None = None


Operation: TypeAlias = Put | Delete | Increment | Touch | Push | Take
Result: TypeAlias = bool | int | str | list[Entry] | None


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Conditions and operations, committed all or nothing.

    `fresh` promises that the request id was generated for this batch and is sent for the first time, so an engine need
    not ask whether it was answered before. It can be repeated all the same, without `fresh`.

    `patience_ms` says that the sender would rather go with somebody else's commit than have an fsync of its own, and waits so
    long for one. An engine that groups commits heeds it, up to PATIENCE_MS_MAX, and one that sends them to a keeper for a
    moment; for the others it means nothing.
    """

    actor: str
    operations: tuple[Operation, ...] = ()
    conditions: tuple[Condition, ...] = ()
    request_id: str | None = None
    fresh: bool = False
    patience_ms: int = 0


class Receipt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The answer to a batch: the space's revision after it, its time, and one result per operation.

    Put: None. Delete: whether it was there. Increment: the sum. Touch: the new expiry. Push: the key. Take: the entries.
    """

    version: int
    at: int
    results: list[Result] = []


# --- the feed ---


class Change(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One entry's change. `value` is empty when the entry is gone or its value is over FEED_VALUE_BYTES_MAX (`size` tells)."""

    op: Literal["put", "delete", "increment", "push", "take", "expire"]
    key: str
    exists: bool = True
    value: bytes = b""
    size: int = 0
    owner: str = ""
    tag: str = ""
    was: str = ""
    """The tag of the entry this one replaced or removed."""
    expires_at: int | None = None


class ChangeSet(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One commit: who, when, what, which request."""

    version: int
    at: int
    actor: str
    changes: list[Change]
    request_id: str | None = None

    @property
    def cursor(self) -> str:
        """Where a watch continues after this commit."""
        return cursor_at(self.version)


class Page(msgspec.Struct, frozen=True, array_like=True):
    """A part of a scan, from one snapshot at `revision`; `more` says whether there is a next one (after the last key)."""

    entries: list[Entry]
    more: bool
    revision: int


class Usage(msgspec.Struct, frozen=True):
    """What one owner keeps in one subspace."""

    owner: str
    subspace: str
    keys: int
    bytes: int


class SpaceInfo(msgspec.Struct, frozen=True):
    """A space as it is: how durable, how far, how much."""

    name: str
    durability: Durability
    revision: int
    created_at: int
    audit_reads: bool = False
    feed_floor: int = 0
    """The feed holds the commits after this revision."""
    next_expiry: int | None = None
    usage: list[Usage] = []


class Finding(msgspec.Struct, frozen=True):
    """One line of a doctor's report: what was looked at, what it means, and what to do when it is not well."""

    level: Literal["ok", "note", "warning", "error"]
    subject: str
    message: str
    advice: str = ""


class Engine(Protocol):
    """Where spaces are kept. The first five methods serve the layers, the rest the life of a space."""

    async def commit(self, space: str, batch: Batch) -> Receipt:
        """All or nothing. Raises Conflict when a condition does not hold. An empty batch sweeps what has expired."""
        ...

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        """The entries of these keys, from one snapshot."""
        ...

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        """Entries under a prefix in key order; `after` is the last key already seen. One snapshot per page."""
        ...

    def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        """Commits that touch these prefixes, from the cursor on, or from when the iteration begins.

        Without end; or, with `live=False`, until everything committed so far has been told.
        """
        ...

    async def close(self) -> None:
        """Finish what was accepted and let go of everything."""
        ...

    async def create(self, space: str, durability: Durability = "sync", *, audit_reads: bool = False) -> SpaceInfo:
        """Make the space, or find it; one that exists with another durability is InvalidInput. Committing to an unknown space makes it, sync."""
        ...

    async def spaces(self, name: str | None = None) -> list[SpaceInfo]:
        """Every space, or the one of that name if it exists."""
        ...

    async def drop(self, space: str) -> None:
        """Remove a space and all it holds. Its revision lives on: versions are not reused if the name comes back."""
        ...

    async def load(self, space: str, entries: list[Entry], revision: int) -> None:
        """Write entries exactly as given, versions and times included, and raise the revision to at least `revision`.

        For copies into a space nobody else writes to: it bypasses the feed. Ids that are assigned later come behind theirs.
        """
        ...

    async def compact(self, space: str, upto: int) -> None:
        """Forget the feed, and its request ids, up to and including this revision."""
        ...

    async def inspect(self) -> list[Finding]:
        """What this store guarantees as it is configured, and what is wrong with it.

        What a durability means here has the subject "durability sync", "durability async" or "durability volatile".
        """
        ...


# --- revisions and cursors ---


def beyond(revision: int, ms: int) -> int:
    """A revision that no space can have reached which stood at this one so many milliseconds ago."""
    return revision + LOSS_JUMP + max(0, ms) * COMMITS_PER_MS_MAX


def cursor_at(revision: int) -> str:
    return f"r{revision}"


def cursor_revision(cursor: str) -> int:
    """The revision a cursor stands at; cursors are opaque to everybody but engines."""
    digits = cursor[1:] if isinstance(cursor, str) and cursor[:1] == "r" else ""
    if not digits.isascii() or not digits.isdigit() or len(digits) > 19:
        raise InvalidInput(f"{cursor!r} is not a cursor of this store")
    return int(digits)


def resume_revision(cursor: str, floor: int, revision: int) -> int:
    """Where a watch with this cursor starts, or Compacted if the feed does not reach back to it."""
    start = cursor_revision(cursor)
    if start < floor:
        raise Compacted(
            f"the feed begins after revision {floor} and the cursor is at {start}; read the state afresh and watch from now"
        )
    if start > revision:
        raise Compacted(
            f"the cursor is at revision {start}, ahead of the space ({revision}): it belongs to another store or to one "
            "that was restored from a backup; read the state afresh and watch from now"
        )
    return start
