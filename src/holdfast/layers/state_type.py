"""One type of state as this process knows it: the schemas of its versions, and the steps between them.

`validate` checks data against the newest version. `upgrade` brings data of an older version to the newest one, along the
shortest chain of steps (`versions.py`); what each step gives is checked against the schema of its version, so a faulty step is
named and its result goes nowhere. A step is code: it is known to the processes that registered it and stored nowhere.

How it fails. SchemaViolation: the data is not as the schema wants it. MigrationFailed: the version is unknown, a step is
missing in this process, raised, or gave something that its version's schema refuses; `reason` tells which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from holdfast.codec import decode, encode
from holdfast.errors import InvalidInput, MigrationFailed, MigrationReason, NotFound, SchemaViolation, Violation
from holdfast.keys import shown
from holdfast.layers.validation import Check, compile_schema
from holdfast.layers.versions import Step, read_version, shortest_chain, version_order


class Schema:
    """The schema of one version. It is compiled when the first value is checked."""

    __slots__ = ("_check", "document", "version")

    def __init__(self, version: str, document: dict[str, Any], check: Check | None = None) -> None:
        self.version = version
        self.document = document
        self._check = check

    def violations(self, value: Any) -> list[Violation]:
        if self._check is None:
            self._check = compile_schema(self.document)
        return self._check(value)


class StateType:
    """A type of state: its versions in order, `newest`, and what can be done with its data. Made by `space.schemas.of_type`."""

    def __init__(self, name: str, schemas: Mapping[str, Schema], steps: Mapping[str, Mapping[str, Step]]) -> None:
        self.name = name
        self.schemas = dict(sorted(schemas.items(), key=lambda item: version_order(item[0])))
        self.steps = steps
        self.newest: str | None = next(reversed(self.schemas), None)

    @property
    def versions(self) -> list[str]:
        """From the oldest to the newest."""
        return list(self.schemas)

    def knows(self, version: str) -> bool:
        """Whether data of this version can be made sense of."""
        return version in self.schemas or version in self.steps

    def validate(self, value: Any, version: str | None = None) -> None:
        """Raise SchemaViolation unless the value is as this version, the newest if none is named, wants it."""
        self.check(decode(encode(value)), self.newest if version is None else read_version(version))

    def check(self, data: Any, version: str | None, key: str | None = None) -> None:
        """`validate` for plain data; `key` is where it is to be kept."""
        schema = self.schemas.get(version or "")
        if schema is None:
            raise NotFound(f"type {self.name!r} has no schema of version {version}; it has {self._told_versions()}")
        if violations := schema.violations(data):
            _refuse(self.name, schema.version, violations, key)

    def upgrade(self, value: Any, version: str) -> Any:
        """The value, which is of this version, as the newest one wants it; its argument stays as it is."""
        return self.upgraded(decode(encode(value)), read_version(version))

    def upgraded(self, data: Any, version: str, key: str | None = None) -> Any:
        """`upgrade` for plain data that nobody else holds: steps may change it in place."""
        return self.between(data, version, self.newest, key)

    def between(self, data: Any, version: str, newest: str | None, key: str | None = None) -> Any:
        """The same for another version than the newest."""
        if version == newest:
            return data
        if newest is None or not self.knows(version):
            self._fail(
                "unknown_version",
                f"version {version} is unknown here; there is {self._told_versions()}. Register its schema, or the step from it",
                (version, newest),
                key,
            )
        chain = shortest_chain(self.steps, version, newest)
        if chain is None:
            self._fail(
                "missing_step",
                f"this process knows no step that leads from {version} to {newest}. Register it, with migrate_from= or "
                f"add_step, or rewrite what is stored where it is known: holdfast schema migrate {self.name} --module …",
                (version, newest),
                key,
            )
        for there in chain:
            data = self._stepped(data, version, there, key)
            version = there
        return data

    def _stepped(self, data: Any, here: str, there: str, key: str | None) -> Any:
        step, between = self.steps[here][there], (here, there)
        try:
            given = step(data)
        except Exception as exc:
            text = f"the step from {here} to {there} raised {type(exc).__name__}: {exc}"
            self._fail("step_raised", text, between, key, exc)
        try:
            data = decode(encode(given))
        except InvalidInput as exc:
            self._fail(
                "invalid_result", f"the step from {here} to {there} gave what is no JSON: {exc}", between, key, exc
            )
        schema = self.schemas.get(there)
        violations = [] if schema is None else schema.violations(data)
        if violations:
            hint = "; does it return what it changed?" if given is None else ""
            what = _told(violations)
            self._fail(
                "invalid_result", f"what the step from {here} to {there} gave is refused: {what}{hint}", between, key
            )
        return data

    def _told_versions(self) -> str:
        return ", ".join(self.schemas) or "none"

    def _fail(
        self,
        reason: MigrationReason,
        text: str,
        between: tuple[str, str | None],
        key: str | None,
        cause: Exception | None = None,
    ) -> NoReturn:
        what = "data" if key is None else shown(key)
        raise MigrationFailed(
            f"{what} of type {self.name!r} cannot be migrated: {text}. What is stored stays as it is",
            reason=reason,
            type=self.name,
            from_version=between[0],
            to_version=between[1],
            key=key,
        ) from cause


def _told(violations: list[Violation]) -> str:
    first, more = violations[0], len(violations) - 1
    return f"{first.path or 'the whole'}: {first.text}" + (f" (and {more} more)" if more else "")


def _refuse(type: str, version: str, violations: list[Violation], key: str | None) -> NoReturn:
    what, so = ("the value", "") if key is None else (f"the value of {shown(key)}", ". Nothing was written")
    raise SchemaViolation(
        f"{what} is no {type} {version}: {_told(violations)}{so}",
        type=type,
        version=version,
        path=violations[0].path,
        keyword=violations[0].keyword,
        violations=tuple(violations),
    )
