"""Which documents there are: what a listing shows of them, without their bodies.

Keys. `documents/heads/<name>` is written with each body: by whom, how large, and the reducers (`reducers.py`). A document that has
contributions only is found by its mode (`modes.py`). So a listing reads two ranges, of one entry per document each.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from holdfast.clock import as_datetime
from holdfast.codec import decode
from holdfast.engine import Entry
from holdfast.keys import check_prefix
from holdfast.layers.modes import MODES_OF_DOCUMENTS
from holdfast.layers.resolutions import DOCUMENTS, Resolution, stored
from holdfast.layers.scope import Scope

Items = list


class DocumentHead(msgspec.Struct, frozen=True):
    """A document in a listing; at etag 0 when it has no body."""

    name: str
    etag: int
    by: str
    bytes: int
    updated_at: datetime


class StoredHead(msgspec.Struct, frozen=True):
    """A head as it is kept."""

    by: str = ""
    bytes: int = 0
    etag: int | None = None
    """Of the body, when the head was written without one; None: they were written together."""
    reducers: dict[str, str] = {}


class Documents:
    """The documents of a space, as `space.documents`."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    async def list(self, prefix: str = "", *, after: str | None = None, limit: int = 100) -> list[DocumentHead]:
        """Names, etags and sizes in the order of names, without reading the bodies; `after` is the last name seen.

        Those that have contributions only are at etag 0, by whoever contributed first.
        """
        check_prefix(prefix)
        found: dict[str, DocumentHead] = {}
        for start in (MODES_OF_DOCUMENTS, DOCUMENTS.prefix("heads")):  # a head tells more, and replaces what was found
            since = None if after is None else start + after
            page = await self._scope.engine.scan(self._scope.space, start + prefix, after=since, limit=limit)
            for entry in page.entries:
                name = entry.key[len(start) :]
                found[name] = _head(entry, name) if start != MODES_OF_DOCUMENTS else _bodiless(entry, name)
        return [found[name] for name in sorted(found)[:limit]]

    async def escalations(self) -> Items[Resolution]:
        """What waits for a person, in any document."""
        return await stored(self._scope, "escalations")


def stored_head(entry: Entry | None) -> StoredHead:
    return StoredHead() if entry is None else decode(entry.value, StoredHead)


def _bodiless(entry: Entry, name: str) -> DocumentHead:
    return DocumentHead(name, 0, entry.owner, 0, as_datetime(entry.updated_at))


def _head(entry: Entry, name: str) -> DocumentHead:
    stored = stored_head(entry)
    etag = entry.version if stored.etag is None else stored.etag
    return DocumentHead(name, etag, stored.by, stored.bytes, as_datetime(entry.updated_at))
