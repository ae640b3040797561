"""What a process knows of the types of its spaces: their schemas, read from the store, and the steps it registered.

Keys: `schemas/<type>/<version>`, the schema itself, written once (`schemas.py`).

A type is looked up at the first read or write that needs it, with one scan, and again when REFRESH_MS have passed and it is
needed; a write pays for no read of its own. Data of a version that is not known yet is a sign that something was registered
elsewhere, and is looked up at once. So a process writes under a version that is superseded for at most REFRESH_MS: such data
is valid for the version that stands in its tag, and is migrated when it is read. A type without a schema is remembered as
such in the same way.

Reads go to the store's own engine: they are none of an agent's, and are not audited. Behind a keeper they are the token's; where
it may not read, the type counts as one without a schema, so what it writes is not checked.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from holdfast.clock import Clock
from holdfast.codec import decode
from holdfast.engine import Engine, Entry
from holdfast.errors import AccessDenied, Damaged, InvalidInput
from holdfast.keys import Subspace
from holdfast.layers.shipped_schemas import SHIPPED, SHIPPED_STEPS
from holdfast.layers.state_type import Schema, StateType
from holdfast.layers.versions import Step, read_version

SCHEMAS: Final = Subspace("schemas")
REFRESH_MS: Final = 5_000
VERSIONS_MAX: Final = 100
"""Of one type."""
KNOWN_MAX: Final = 1_000
"""Types that are remembered; agents choose the names of theirs."""

log = logging.getLogger("holdfast.schemas")


class Catalogue:
    """The types of a store's spaces. Shared by all views of them in this process."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._known: dict[tuple[str, str], _Known] = {}
        self._steps: dict[tuple[str, str], dict[str, dict[str, Step]]] = {}
        self._supposed: dict[tuple[str, str], dict[str, Schema]] = {}
        self._loading = asyncio.Lock()

    async def of(self, space: str, type: str) -> StateType:
        """The type as it was at most REFRESH_MS ago."""
        known = self._known.get((space, type))
        if known is None:
            async with self._loading:  # many begin at once; one of them looks
                if (known := self._known.get((space, type))) is None:
                    known = await self._load(space, type)
            return known.type
        now = self._clock.now_ms()
        if not 0 <= now - known.at < REFRESH_MS:
            before, known.at = known.at, now  # the others go on with what is known
            try:
                known = await self._load(space, type)
            except BaseException:
                known.at = before
                raise
        return known.type

    async def reload(self, space: str, type: str) -> StateType:
        """The type as it is now."""
        return (await self._load(space, type)).type

    def add_step(self, space: str, type: str, here: str, there: str, step: Step) -> None:
        """How this process brings data of one version to another."""
        self._steps.setdefault((space, type), {}).setdefault(here, {})[there] = step

    def suppose(self, space: str, type: str, version: str, document: dict[str, Any]) -> None:
        """Act as if this were registered, in this catalogue alone."""
        self._supposed.setdefault((space, type), {})[version] = Schema(version, document)

    async def _load(self, space: str, type: str) -> _Known:
        at = self._clock.now_ms()
        try:
            page = await self._engine.scan(space, SCHEMAS.prefix(type), limit=VERSIONS_MAX)
        except AccessDenied as exc:
            if (space, type) not in self._known:
                log.warning("the schema of type %s cannot be read, so what is written is not checked: %s", type, exc)
            entries: list[Entry] = []
        else:
            entries = page.entries
        before = self._known.pop((space, type), None)
        schemas = {schema.version: schema for entry in entries if (schema := schema_in(entry)) is not None}
        schemas |= self._supposed.get((space, type), {})
        if before is not None:
            for version, schema in schemas.items():  # what was compiled stays so
                old = before.type.schemas.get(version)
                if old is not None and old.document == schema.document:
                    schemas[version] = old
        steps = self._steps.setdefault((space, type), {}) if schemas else {}
        for (here, there), step in SHIPPED_STEPS.get(type, {}).items():
            if there in schemas and schemas[there].document == SHIPPED[type][there]:
                steps.setdefault(here, {}).setdefault(there, step)
        known = self._known[space, type] = _Known(StateType(type, schemas, steps), at)
        while len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]
        return known


class _Known:
    __slots__ = ("at", "type")

    def __init__(self, type: StateType, at: int) -> None:
        self.type = type
        self.at = at


def schema_in(entry: Entry) -> Schema | None:
    """A stored schema; an administrator may have written something else there, which is no schema."""
    version = SCHEMAS.split(entry.key, 2)[-1]
    try:
        document: Any = decode(entry.value)
        if read_version(version) == version and isinstance(document, dict):
            return Schema(version, document)
    except (Damaged, InvalidInput):
        pass
    log.warning("%s is no schema and is left out", entry.key)
    return None
