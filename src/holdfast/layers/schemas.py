"""Schemas: what the data of a type looks like, in which version, and how older data becomes newer.

    await space.schemas.register("order", "1.1.0", schema, migrate_from={"1.0.0": upgrade})

Keys. `schemas/<type>/<version>` holds the schema as JSON, so every process and the command line know it. It is written once:
registering the same again changes nothing, another schema under the same version is Conflict. Orchestrators and
administrators register, everybody reads. Steps are code: they stay in the process that registered them.

What it does. A record written with a type (`records.set(key, value, type="order")`, compare_and_swap, `set_` in a commit,
`tx.set`) is checked against the newest version before anything is sent, and remembers that version. Read by its name, a
record of an older version is brought to the newest one (`state_type.py`); what is stored stays as it is until it is written
again, or until `migrate` rewrites everything (`migration.py`). Scans and watches tell what is stored. The newest version is the
highest, not the last that was registered.

What it is not. The check is the library's, made where the write is made: a process with the library, or the keeper for what
arrives over HTTP. A client that speaks to the store by hand can write what it likes. Increments are not checked.

How it fails. A bad schema is InvalidInput, bad data SchemaViolation, older data that cannot be migrated MigrationFailed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from holdfast.clock import as_datetime
from holdfast.codec import decode, encode
from holdfast.engine import Absent, Entry, Put
from holdfast.errors import Conflict, InvalidInput, NotFound
from holdfast.layers.batch import type_tag
from holdfast.layers.catalogue import SCHEMAS, VERSIONS_MAX, Catalogue, schema_in
from holdfast.layers.migration import MigrationReport, check_records, migrate_records
from holdfast.layers.scope import Scope
from holdfast.layers.shipped_schemas import SHIPPED
from holdfast.layers.state_type import StateType
from holdfast.layers.validation import compile_schema, schema_of
from holdfast.layers.versions import Step, read_version, version_order

Items = list


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """One version of a type, who registered it and when."""

    type: str
    version: str
    schema: dict[str, Any]
    registered_by: str
    registered_at: datetime


class Schemas:
    """The types of a space, as `space.schemas`."""

    def __init__(self, scope: Scope, *, rehearses: bool = False) -> None:
        self._scope = scope
        self._rehearses = rehearses

    def rehearsal(self) -> Schemas:
        """The same schemas, to try something: what is registered here is known here alone, and `migrate` is a dry run."""
        scope = self._scope
        return Schemas(msgspec.structs.replace(scope, catalogue=Catalogue(scope.engine, scope.clock)), rehearses=True)

    @property
    def _catalogue(self) -> Catalogue:
        if self._scope.catalogue is None:
            raise InvalidInput("this view of the space has no schemas; take it from store.space(…)")
        return self._scope.catalogue

    async def register(
        self, type: str, version: str, schema: Any, *, migrate_from: Mapping[str, Step] | None = None
    ) -> StateType:
        """Make a version of a type known to the whole space, and the steps to it to this process.

        `schema` is a JSON Schema, or a class that it is derived from: a dataclass, TypedDict, pydantic model, msgspec struct.
        `migrate_from` has, for older versions, the function from their data to this version's.
        """
        _check_type(type)
        version = read_version(version)
        document = schema_of(schema)
        compile_schema(document)
        steps = {_other(here, version): checked_step(step) for here, step in (migrate_from or {}).items()}
        await self._keep(type, version, document)
        for here, step in steps.items():
            self._catalogue.add_step(self._scope.space, type, here, version, step)
        return await self._catalogue.reload(self._scope.space, type)

    async def register_shipped(self, *types: str) -> None:
        """Register what comes with Holdfast: all of correlation_state, workflow_state and audit_state, or those named."""
        for type in types or SHIPPED:
            if type not in SHIPPED:
                raise NotFound(f"no schema of {type!r:.60} comes with Holdfast; there are {', '.join(SHIPPED)}")
            for version, schema in SHIPPED[type].items():
                await self.register(type, version, schema)

    def add_step(self, type: str, from_version: str, to_version: str, step: Step) -> None:
        """Make a step known to this process alone: before its version is registered, or instead of registering it."""
        _check_type(type)
        there = read_version(to_version)
        here = _other(from_version, there)
        self._catalogue.add_step(self._scope.space, type, here, there, checked_step(step))

    async def list(self, type: str | None = None) -> Items[RegisteredSchema]:
        """Every registered version, or those of one type, from the oldest to the newest."""
        found: Items[RegisteredSchema] = []
        prefix, after = SCHEMAS.root if type is None else SCHEMAS.prefix(type), None
        while True:
            page = await self._scope.engine.scan(self._scope.space, prefix, after=after, limit=VERSIONS_MAX)
            found += [_registered(entry) for entry in page.entries if schema_in(entry) is not None]
            if not page.more:
                return sorted(found, key=lambda each: (each.type, version_order(each.version)))
            after = page.entries[-1].key

    async def get(self, type: str, version: str | None = None) -> RegisteredSchema:
        """One version, the newest if none is named; NotFound if there is none."""
        found = await self.list(type)
        for each in reversed(found):
            if version is None or each.version == read_version(version):
                return each
        what = f"type {type!r} has no schema" + ("" if version is None else f" of version {read_version(version)}")
        raise NotFound(f"{what}; register one, or see holdfast schema list")

    async def of_type(self, type: str) -> StateType:
        """The type as this process knows it: `versions`, `newest`, `validate(value)`, `upgrade(value, version)`."""
        known = await self._catalogue.reload(self._scope.space, type)
        if known.newest is None:
            raise NotFound(f"type {type!r:.60} has no schema in space {self._scope.space!r}; register one")
        return known

    async def validate(self, type: str, value: Any, version: str | None = None) -> None:
        """Raise SchemaViolation unless the value is as a version of its type, the newest if none is named, wants it."""
        (await self.of_type(type)).validate(value, version)

    async def migrate(
        self,
        type: str,
        *,
        dry_run: bool = False,
        prefix: str = "",
        unversioned: str | None = None,
        progress: Callable[[MigrationReport], None] | None = None,
    ) -> MigrationReport:
        """Rewrite every record of a type that is of an older version; with `dry_run` tell what would happen.

        Each is rewritten as long as nobody else changes it meanwhile, and keeps its owner, state and ttl. What cannot be
        migrated stays as it is and is reported. Interrupted, it is simply run again. `prefix` takes only records whose name
        begins so. `unversioned` names the version of records that were written before the type had a schema; without it
        they are counted and left. `progress` is called after each page.
        """
        known = await self.of_type(type)
        return await migrate_records(self._scope, known, dry_run or self._rehearses, prefix, unversioned, progress)

    async def check(self, type: str, *, prefix: str = "") -> MigrationReport:
        """Look whether every stored record of a type is as its own version's schema wants it; `failures` are those that are not."""
        return await check_records(self._scope, await self.of_type(type), prefix)

    async def _keep(self, type: str, version: str, document: dict[str, Any]) -> None:
        key, value = SCHEMAS.key(type, version), encode(document)
        scope = self._scope
        [there] = await scope.engine.get(scope.space, [key])
        if there is None:
            if len(await self.list(type)) >= VERSIONS_MAX:
                raise InvalidInput(f"a type has at most {VERSIONS_MAX} versions, and {type!r} has as many")
            if self._rehearses:
                self._catalogue.suppose(scope.space, type, version, document)
                return
            try:
                await scope.commit((Put(key, value),), (Absent(key),))
                return
            except Conflict as conflict:
                if conflict.key != key:
                    raise
                [there] = await scope.engine.get(scope.space, [key])  # another process was faster
        if there is None or there.value != value:
            by = "" if there is None else f", registered by {there.owner}"
            raise Conflict(
                f"type {type!r} has another schema under version {version}{by}; nothing was changed. Give yours a higher version",
                key=key,
                condition="absent",
                actual=there,
            )


def _check_type(type: Any) -> None:
    if not isinstance(type, str) or not type:
        raise InvalidInput(f"a type is a name, not {type!r:.60}")
    type_tag(type, None)


def _registered(entry: Entry) -> RegisteredSchema:
    type, version = SCHEMAS.split(entry.key, 2)
    return RegisteredSchema(type, version, decode(entry.value), entry.owner, as_datetime(entry.created_at))


def _other(from_version: str, to_version: str) -> str:
    here = read_version(from_version)
    if here == to_version:
        raise InvalidInput(f"a step leads from one version to another; this one stays at {here}")
    return here


def checked_step(step: Any) -> Step:
    """A function that can lead from one version to another; InvalidInput otherwise."""
    if not callable(step) or inspect.iscoroutinefunction(step):
        raise InvalidInput(f"a step is a plain function from data to data, not {step!r:.60}")
    function: Step = step
    return function
