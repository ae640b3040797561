"""The shape of a workflow's state: the type that was declared for it, in which version, and how older states become newer.

    @workflow(state=Order, state_version="1.2.0", state_migrations={"1.0.0": add_currency, "1.1.0": to_cents})

A shape is a dataclass, TypedDict, pydantic model or msgspec struct; its fields are the keys of the state. What is written to a key is
checked against its field, at once. Fields with a default have it from the beginning; one without is absent until it is written, so no
field is `required` of a state. Each migration leads from its version to the next one that is named, the last to `state_version`:
a list that only grows. State that was written before there was a shape is of version 0.0.0.

The schema is registered by workers as that of the type `workflow.<name>` (`layers/schemas.py`), so that everybody can see it, and no two
shapes go under one version. Whole states are checked when they are migrated (`migrating.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import msgspec

from holdfast.codec import decode, encode
from holdfast.errors import InvalidInput, SchemaViolation
from holdfast.layers.schemas import checked_step
from holdfast.layers.state_type import Schema, StateType
from holdfast.layers.validation import Check, compile_schema, schema_of
from holdfast.layers.versions import Step, read_version, version_order
from holdfast.layers.workflows.state import APPEND, JOIN, KEYS_MAX, SET, Write, check_key

FIRST: Final = "1.0.0"
"""The version of a shape, unless told otherwise."""
UNTYPED: Final = "0.0.0"
"""Of state that was written before there was a shape."""
FIELDS_MAX: Final = KEYS_MAX
"""Of a shape: they are written by one commit. What has more is nested."""
COUNTED: Final = ("minItems", "maxItems", "uniqueItems")
"""What a schema says of a whole list, and not of what is added to it."""


class Shape:
    """What the state of one workflow looks like."""

    def __init__(self, workflow: str, model: Any, version: str, migrations: Mapping[str, Step]) -> None:
        if ":" in workflow:
            raise InvalidInput(f"a workflow that declares its state has no ':' in its name; {workflow!r} has")
        if not isinstance(model, type) or model is dict:
            raise InvalidInput(
                f"state of workflow {workflow!r} is a dataclass, TypedDict, pydantic model or msgspec struct, not {model!r:.60}"
            )
        self.workflow = workflow
        self.type = f"workflow.{workflow}"
        """Under which its schema is registered."""
        self.model = model
        self.version = read_version(version)
        self.document = _document(workflow, model)
        self.steps = _chain(workflow, migrations, self.version)
        self.defaults = _defaults(model)
        self._checks: dict[tuple[str, bool], Check] = {}

    @property
    def fields(self) -> dict[str, Any]:
        """Their schemas, by name."""
        found: dict[str, Any] = self.document["properties"]
        return found

    # --- what is written ---

    def check(self, key: str, value: Any) -> None:
        """Raise InvalidInput, which names the field, unless this may be written there."""
        self._look(key, value, added=False)

    def check_added(self, key: str, values: list[Any]) -> None:
        """The same for what is added to a list or set."""
        self._look(key, values, added=True)

    def check_name(self, key: str) -> None:
        """Raise InvalidInput unless there is such a field."""
        if key not in self.fields and not self.document["additionalProperties"]:
            raise InvalidInput(
                f"the state of workflow {self.workflow!r} ({self.version}) has no field {key!r:.60}; it has "
                f"{', '.join(self.fields) or 'none'}. Nothing was written"
            )

    def _look(self, key: str, value: Any, *, added: bool) -> None:
        self.check_name(key)
        if key not in self.fields:
            return
        check = self._checks.get((key, added))
        if check is None:
            field = {name: part for name, part in self.fields[key].items() if not (added and name in COUNTED)}
            check = compile_schema({**field, "$defs": self.document.get("$defs", {})})
            self._checks[key, added] = check
        if violations := check(value):
            first = violations[0]
            raise SchemaViolation(
                f"{key!r} of the state of workflow {self.workflow!r} ({self.version}) cannot be this: "
                f"{first.path + ': ' if first.path else ''}{first.text}. Nothing was written",
                type=self.type,
                version=self.version,
                path=f"/{key}{first.path}",
                keyword=first.keyword,
                violations=tuple(violations),
            )

    def writes(self, values: Mapping[str, Any]) -> dict[str, Write]:
        """What sets these fields; lists and sets so that can be added to them."""
        return {key: [self._kind(key, value), value] for key, value in values.items()}

    def _kind(self, key: str, value: Any) -> str:
        field = self.fields.get(key, {})
        if not isinstance(value, list) or field.get("type") != "array" or "prefixItems" in field:
            return SET
        return JOIN if field.get("uniqueItems") else APPEND

    def check_defaults(self) -> None:
        """Raise InvalidInput unless what fields are from the beginning is what they may be."""
        for key, value in self.defaults.items():
            self.check(key, value)

    # --- older states ---

    def state_type(self, known: Mapping[str, Schema]) -> StateType:
        """The type as this code knows it; `known` are the schemas of earlier versions that were registered."""
        earlier = {each: schema for each, schema in known.items() if version_order(each) < version_order(self.version)}
        return StateType(self.type, {**earlier, self.version: Schema(self.version, self.document)}, self.steps)

    def missing(self, data: dict[str, Any]) -> dict[str, Any]:
        """The defaults of fields that a state does not have."""
        return {key: value for key, value in self.defaults.items() if key not in data}


def is_earlier(version: str, than: str) -> bool:
    """Whether one version of a state comes before another; having none comes first."""
    return bool(than) and (not version or version_order(version) < version_order(than))


def _chain(workflow: str, migrations: Mapping[str, Step], version: str) -> dict[str, dict[str, Step]]:
    """Each step by where it comes from and where it leads: to the next version that is named."""
    if not isinstance(migrations, Mapping):
        raise InvalidInput(
            f"state_migrations of workflow {workflow!r} are functions by the version that they lead from"
        )
    steps = {read_version(here): checked_step(step) for here, step in migrations.items()}
    if len(steps) != len(migrations):
        raise InvalidInput(f"state_migrations of workflow {workflow!r} name a version twice")
    places = sorted((*steps, version), key=version_order)
    if version in steps or places[-1] != version:
        raise InvalidInput(
            f"state_migrations of workflow {workflow!r} lead from earlier versions to {version}; {places[-1]} is none"
        )
    return {here: {there: steps[here]} for here, there in pairwise(places)}


def _document(workflow: str, model: type[Any]) -> dict[str, Any]:
    """The schema of a state: the model's, without anything that is required, and without other fields."""
    schema = schema_of(model)
    definitions = schema.get("$defs", {})
    body = schema
    if (reference := schema.get("$ref", "")).startswith("#/$defs/"):
        body = definitions[reference.removeprefix("#/$defs/")]
    if not isinstance(body.get("properties"), dict):
        raise InvalidInput(f"state of workflow {workflow!r} is a type with fields; {model.__name__} has none")
    if len(body["properties"]) > FIELDS_MAX:
        raise InvalidInput(
            f"the state of a workflow has at most {FIELDS_MAX} fields; {model.__name__} has more. Nest some"
        )
    for key in body["properties"]:
        check_key(key)
    document = {
        "title": model.__name__,
        "type": "object",
        "properties": body["properties"],
        "additionalProperties": body.get("additionalProperties") is True,
    }
    return {**document, "$defs": definitions} if definitions else document


def _defaults(model: type[Any]) -> dict[str, Any]:
    """What fields are from the beginning, as plain data."""
    found: dict[str, Any] = {}
    if dataclasses.is_dataclass(model):
        for field in dataclasses.fields(model):
            if field.default is not dataclasses.MISSING:
                found[field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                found[field.name] = field.default_factory()
    elif issubclass(model, msgspec.Struct):
        for part in msgspec.structs.fields(model):
            if part.default is not msgspec.NODEFAULT:
                found[part.encode_name] = part.default
            elif part.default_factory is not msgspec.NODEFAULT:
                found[part.encode_name] = part.default_factory()
    else:
        for name, part in getattr(model, "model_fields", {}).items():  # pydantic, without importing it
            if not part.is_required():
                found[name] = part.get_default(call_default_factory=True)
    plain: dict[str, Any] = decode(encode(found))
    return plain
