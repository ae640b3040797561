"""Watching a queue: the feed of a space, told in the words of queues.

Each item is one commit. A message that moves is told once, as where it is then: ready, delayed, reserved or dead; one that is nowhere
any more is done. Save `item.cursor` with the effect of the item and pass it back as `cursor=` to go on exactly there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from holdfast.clock import as_datetime
from holdfast.codec import decode
from holdfast.engine import Change
from holdfast.layers.queue_entries import (
    NO_LEASE,
    RESERVED,
    delayed_prefix,
    place_of,
    ready_prefix,
    rest_of,
)
from holdfast.layers.scope import Scope

MessageState = Literal["ready", "delayed", "reserved", "dead", "done"]


@dataclass(frozen=True, slots=True)
class MessageChange:
    """One message, and where it is from now on. `large` means that its body is over 64 KB and not told."""

    id: str
    state: MessageState
    owner: str
    attempts: int
    large: bool
    _raw: bytes

    @property
    def body(self) -> Any:
        """The message's body; None when it is done or large."""
        return decode(self._raw) if self._raw else None


@dataclass(frozen=True, slots=True)
class QueueCommit:
    """One commit: who, when, and what became of which messages."""

    version: int
    at: datetime
    actor: str
    request_id: str | None
    cursor: str
    changes: list[MessageChange]

    def __iter__(self) -> Iterator[MessageChange]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)


async def watch_queue(scope: Scope, name: str, cursor: str | None, live: bool) -> AsyncIterator[QueueCommit]:
    """The commits that change messages of a queue."""
    ready, delayed, reserved = ready_prefix(name), delayed_prefix(name), RESERVED.prefix(name)
    dead = RESERVED.prefix(name, NO_LEASE)
    async for commit in scope.engine.watch(scope.space, ready, delayed, reserved, cursor=cursor, live=live):
        told: dict[str, MessageChange] = {}
        for change in commit.changes:
            state: MessageState
            if not change.exists:
                state = "done"
            elif change.key.startswith(ready):
                state = "ready"
            elif change.key.startswith(delayed):
                state = "delayed"
            elif change.key.startswith(dead):
                state = "dead"
            elif change.key.startswith(reserved):
                state = "reserved"
            else:
                continue
            id = place_of(rest_of(change.key)).id
            if state != "done" or id not in told:
                told[id] = _changed(id, state, change)
        if told:
            at = as_datetime(commit.at)
            yield QueueCommit(commit.version, at, commit.actor, commit.request_id, commit.cursor, list(told.values()))


def _changed(id: str, state: MessageState, change: Change) -> MessageChange:
    tag = change.tag if change.exists else change.was
    attempts = int(tag) if tag.isascii() and tag.isdigit() and len(tag) <= 6 else 0
    large = change.size > 0 and not change.value
    return MessageChange(id, state, change.owner, attempts, large, change.value)
