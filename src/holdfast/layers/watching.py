"""Watching records: the feed of a space, told in the words of records.

Each item is one commit, so what happened together arrives together. Save `item.cursor` with the effect of the item and
pass it back as `cursor=` to go on exactly there. Lists and sets show their items: `append`, `add` and `remove`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import msgspec

from holdfast.clock import as_datetime
from holdfast.codec import decode
from holdfast.engine import SYSTEM_ACTOR, Change, ChangeSet
from holdfast.keys import Subspace, check_prefix, escape
from holdfast.layers.batch import LIST, RECORDS, SET, split_tag, tag_version
from holdfast.layers.records import LISTS, SETS
from holdfast.layers.scope import Scope

RecordOp = Literal["put", "increment", "delete", "expire", "append", "add", "remove"]


@dataclass(frozen=True, slots=True)
class RecordChange:
    """One record's change. `large` means that the value is over 64 KB and must be read with `get`."""

    op: RecordOp
    key: str
    owner: str
    large: bool
    expires_at: datetime | None
    type: str | None
    state: str | None
    _raw: bytes
    schema_version: str | None = None
    """The version of its type's schema under which it was written: values are told as they are stored."""

    @property
    def value(self) -> Any:
        """The new value, the appended item or the added member; None when it is gone or large."""
        return decode(self._raw) if self._raw else None

    @property
    def encoded(self) -> bytes:
        """The same as it is stored; empty when it is gone or large."""
        return self._raw

    @property
    def exists(self) -> bool:
        """Whether the record is there after the change."""
        return self.op not in ("delete", "expire")


@dataclass(frozen=True, slots=True)
class RecordChanges:
    """One commit: who, when, which request, and its changes in order."""

    version: int
    at: datetime
    actor: str
    request_id: str | None
    cursor: str
    changes: list[RecordChange]

    def __iter__(self) -> Iterator[RecordChange]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)


async def watch_records(
    scope: Scope, prefix: str, cursor: str | None, live: bool = True
) -> AsyncIterator[RecordChanges]:
    """The commits that change records, lists or sets whose name begins with the prefix."""
    check_prefix(prefix)
    prefixes = (RECORDS.root + prefix, LISTS.root + escape(prefix), SETS.root + escape(prefix))
    async for commit in scope.engine.watch(scope.space, *prefixes, cursor=cursor, live=live):
        changes = [told for change in commit.changes if (told := _tell(change, commit.actor)) is not None]
        if changes:
            yield _commit(commit, changes)


def _commit(commit: ChangeSet, changes: list[RecordChange]) -> RecordChanges:
    at = as_datetime(commit.at)
    return RecordChanges(commit.version, at, commit.actor, commit.request_id, commit.cursor, changes)


def _tell(change: Change, actor: str) -> RecordChange | None:
    if change.key.startswith(RECORDS.root):
        if change.tag in (LIST, SET):
            return None  # the record that stands for a list or set; its items tell the story
        return _change(change.op, change, change.key[len(RECORDS.root) :])  # type: ignore[arg-type]
    if change.key.startswith(LISTS.root):
        return _change("append", change, _name(LISTS, change)) if change.exists else None
    if change.exists:
        return _change("add", change, _name(SETS, change))
    if actor == SYSTEM_ACTOR:
        return None  # the members of a set that has ended, collected in the background; its end was told already
    parts = SETS.split(change.key, 3)
    if len(parts) < 3:
        return None  # no library makes such a key; whoever did must not end the watch of others
    member = parts[2]
    raw = b"" if member.startswith("#") else member.encode()
    return _change("remove", msgspec.structs.replace(change, value=raw), _name(SETS, change))


def _name(subspace: Subspace, change: Change) -> str:
    return subspace.split(change.key, 3)[0]


def _change(op: RecordOp, change: Change, key: str) -> RecordChange:
    type, state = split_tag(change.tag)
    expires_at = None if change.expires_at is None else as_datetime(change.expires_at)
    large = change.size > 0 and not change.value
    version = tag_version(change.tag)
    return RecordChange(op, key, change.owner, large, expires_at, type, state, change.value, version)
