"""The history of a document: who wrote what, when, and from which inputs.

Keys: `history/documents/<name>/<19 digits>`, pushed in the commit that made the change and never changed after (the store
sees to that); kept for 7 days (type `document_history`), what was resolved for a year. The digits follow the order of
commits. An event's version is the commit's, so it is the etag of the body or the version of the section it tells of.

A change of the body is kept as its differences from the one before (`diffs.py`), with that one's etag, so the events of the
body are a chain: `diff` walks it back from what is there now. Only links of that chain count. A contribution is kept as it is. What is
over EVENT_BYTES_MAX is left out and `omitted` says how large it was.

Behind a policy agents append nothing but their own contributions (`middleware/history_claims.py`). An embedded store trusts its process, so
whoever reads is careful: what cannot be an event is passed over, and a deletion that did not happen is not believed.

How it fails. `diff` beyond what is still kept, or over a change that was left out, is NotFound.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

import msgspec

from holdfast.clock import as_datetime
from holdfast.codec import decode, encode
from holdfast.engine import ID_DIGITS, SCAN_MAX, Entry, Push
from holdfast.errors import Error, InvalidInput, NotFound
from holdfast.keys import Subspace
from holdfast.layers.diffs import Difference, differences, undone
from holdfast.layers.scope import Scope

HISTORY: Final = Subspace("history")
RETENTION: Final = "document_history"
EVENT_BYTES_MAX: Final = 256 * 1024
PAGE: Final = 100

Kind: TypeAlias = Literal["contributed", "withdrew", "body", "reducers", "resolved", "escalated", "deleted"]


class DocumentEvent(msgspec.Struct, frozen=True):
    """One change of a document. `by` is who wrote it; `section` whose it is, when it is a contribution."""

    id: str
    kind: Kind
    by: str
    at: datetime
    version: int
    section: str | None = None
    inputs: dict[str, int] = {}
    data: Any = None
    """What was contributed, declared or decided."""
    changes: list[Difference] = []
    """Of the body."""
    before: int | None = None
    """The etag of the body before; 0 when there was none."""
    omitted: int = 0
    """Bytes that were too many to be kept here."""


class _Stored(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: Kind
    section: str | None = None
    inputs: dict[str, int] = {}
    data: Any = None
    changes: list[Difference] = []
    before: int | None = None
    omitted: int = 0


class History:
    """The events of one document."""

    def __init__(self, scope: Scope, name: str) -> None:
        self._scope = scope
        self._name = name
        self._prefix = HISTORY.prefix("documents", name)

    async def contributed(self, section: str, value: bytes) -> Push:
        """The operation that tells of a contribution; its value is encoded already."""
        if len(value) > EVENT_BYTES_MAX:
            return await self._push(_Stored("contributed", section, omitted=len(value)))
        return await self._push(_Stored("contributed", section, data=msgspec.Raw(value)))

    async def changed(self, before: int, changes: list[Difference]) -> Push:
        """The operation that tells of a change of the body."""
        size = len(encode(changes))
        if size > EVENT_BYTES_MAX:
            return await self._push(_Stored("body", before=before, omitted=size))
        return await self._push(_Stored("body", before=before, changes=changes))

    async def told(self, kind: Kind, data: Any = None, section: str | None = None) -> Push:
        """The operation that tells of anything else."""
        if (size := len(encode(data))) > EVENT_BYTES_MAX:
            return await self._push(_Stored(kind, section, omitted=size))
        return await self._push(_Stored(kind, section, data=data))

    async def _push(self, stored: _Stored) -> Push:
        scope = self._scope
        volatile = await scope.durability() == "volatile"
        state = "resolved" if stored.kind == "resolved" else None
        return Push(self._prefix, encode(stored), scope.retention.ttl_ms(RETENTION, state, volatile=volatile))

    async def page(self, before: str | None, limit: int) -> list[DocumentEvent]:
        """The newest events, or those before an event's id, newest first."""
        if type(limit) is not int or not 0 < limit <= SCAN_MAX:
            raise InvalidInput(f"a page of history has between 1 and {SCAN_MAX:,} events, not {limit!r}")
        if before is not None and not (len(before) == ID_DIGITS and before.isascii() and before.isdigit()):
            raise InvalidInput(f"{before!r:.60} is no event's id: it has {ID_DIGITS} digits")
        found: list[DocumentEvent] = []
        async for event in self.backwards(before=before, limit=limit):
            found.append(event)
            if len(found) == limit:
                break
        return found

    def _event(self, entry: Entry) -> DocumentEvent | None:
        """None for what cannot be one: somebody may have appended it by hand."""
        try:
            stored = decode(entry.value, _Stored)
        except Error:
            return None
        data, inputs = stored.data, stored.inputs
        if stored.kind == "contributed" and isinstance(data, dict) and isinstance(data.get("inputs"), dict):
            inputs = data["inputs"]
        told = stored.section, inputs, data, stored.changes, stored.before, stored.omitted
        id = entry.key[len(self._prefix) :]
        return DocumentEvent(id, stored.kind, entry.owner, as_datetime(entry.updated_at), entry.version, *told)

    async def backwards(self, *, before: str | None = None, limit: int = PAGE) -> AsyncIterator[DocumentEvent]:
        """Every event, or every one before an event's id, newest first, read so many at a time."""
        after = None if before is None else self._prefix + before
        while True:
            page = await self._scope.engine.scan(
                self._scope.space, self._prefix, after=after, limit=limit, reverse=True
            )
            for entry in page.entries:
                if (event := self._event(entry)) is not None:
                    yield event
            if not page.more:
                return
            after = page.entries[-1].key

    async def diff(self, etag: int, body: Any, since: int | None, a: int, b: int) -> list[Difference]:
        """What changed after version `a` up to version `b`, given the body as it is now, with its etag.

        `since` is the version at which contributions began, which a deletion takes away: none has happened after it, and none
        between two links of the body's chain.
        """
        earlier, later = body, body
        sections: dict[str, tuple[Any, Any]] = {}
        async for event in self.backwards():
            if event.kind == "deleted" and event.version > a:
                if 0 < etag < event.version or (since is not None and since < event.version):
                    continue
                raise NotFound(
                    f"the document was deleted at version {event.version}, and what it was before cannot be compared with; "
                    "name versions after that"
                )
            if event.kind == "body" and event.version == etag and event.version > a:
                if event.omitted:
                    raise NotFound(
                        f"the body was changed at version {event.version} by {event.by!r} in more than {EVENT_BYTES_MAX:,} bytes, "
                        "which the history does not keep; compare versions that are both before or both after it"
                    )
                earlier = undone(earlier, event.changes)
                etag = event.before or 0
                if event.version > b:
                    later = earlier
            elif event.kind in ("contributed", "withdrew") and event.section is not None and event.version <= b:
                new, old = sections.get(event.section, (_UNSEEN, _UNSEEN))
                state = _data_of(event)
                if new is _UNSEEN:
                    new = state if event.version > a else _UNSEEN
                if event.version <= a and old is _UNSEEN:
                    old = state
                sections[event.section] = new, old
        if etag > a and etag != 0:
            raise NotFound(
                f"the history of the body reaches back to version {etag} and not to {a}: what is older is not kept any more"
            )
        found = list(differences(earlier, later, "body"))
        for section, (new, old) in sorted(sections.items()):
            if new is not _UNSEEN:
                found += differences(_state(section, old), _state(section, new), "contributions")
        return found


_UNSEEN: Final = object()
_GONE: Final = object()


def _data_of(event: DocumentEvent) -> Any:
    """A section's data after an event."""
    if event.kind == "withdrew":
        return _GONE
    if event.omitted:
        return {"omitted": event.omitted}
    return event.data.get("data") if isinstance(event.data, dict) else event.data


def _state(section: str, data: Any) -> dict[str, Any]:
    return {} if data is _UNSEEN or data is _GONE else {section: data}
