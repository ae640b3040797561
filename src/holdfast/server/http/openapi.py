"""The OpenAPI document, written from the endpoints' own types (`endpoint.py`): there is no other description."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import msgspec

from holdfast.errors import (
    AccessDenied,
    AuthenticationFailed,
    DurabilityUnavailable,
    Error,
    InvalidInput,
    OutcomeUnknown,
    RateLimitExceeded,
    StorageFull,
    Unavailable,
)
from holdfast.server.http.endpoint import NOT_MODIFIED, Endpoint
from holdfast.server.http.failures import BodyTooLarge, BodyTooSlow, Failure, NotJSON
from holdfast.server.http.table import ENDPOINTS

TITLE: Final = "Holdfast keeper"
REFERENCE: Final = "#/components/schemas/{name}"
ALWAYS: Final[tuple[type[Error], ...]] = (Error, InvalidInput, RateLimitExceeded, Unavailable)
WITH_TOKEN: Final[tuple[type[Error], ...]] = (AuthenticationFailed, AccessDenied, DurabilityUnavailable, OutcomeUnknown)
WITH_BODY: Final[tuple[type[Error], ...]] = (BodyTooLarge, BodyTooSlow, NotJSON)
WHERE: Final = {"path": "path", "query": "query", "headers": "header"}


def document(endpoints: tuple[Endpoint, ...] = ENDPOINTS) -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas = _Schemas(endpoints)
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for each in endpoints:
        paths[each.path][each.method.lower()] = _operation(each, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": TITLE,
            "version": "1",
            "description": "Shared state of agents: records, locks, transactions and the feed of a space.",
        },
        "security": [{"token": []}],
        "paths": dict(paths),
        "components": {
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "A token that begins with hf_."}
            },
            "schemas": schemas.components,
        },
    }


class _Schemas:
    """The schemas of all types, each once."""

    def __init__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self._types: list[Any] = [Failure]
        for each in endpoints:
            self._types += [*each.failures, each.body_shown, each.types.get("return")]
            for part in WHERE:
                if part in each.types:
                    self._types += [field.type for field in msgspec.structs.fields(each.types[part])]
        shown, self.components = msgspec.json.schema_components(self._types, ref_template=REFERENCE)
        self._shown = list(shown)

    def of(self, type_: Any) -> dict[str, Any]:
        return dict(
            next(
                shown for known, shown in zip(self._types, self._shown, strict=True) if known is type_ or known == type_
            )
        )


def _operation(each: Endpoint, schemas: _Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": each.run.__name__,
        "summary": each.summary,
        "tags": [_tag(each.path)],
        "parameters": [
            parameter
            for part, where in WHERE.items()
            if part in each.types
            for parameter in _parameters(each.types[part], where, schemas)
        ],
        "responses": {**_successes(each, schemas), **_failures(each, schemas)},
    }
    if each.is_open:
        described["security"] = []
    if each.body_shown is not None:
        content = {"application/json": {"schema": schemas.of(each.body_shown)}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _tag(path: str) -> str:
    parts = [part for part in path.split("/") if part and not part.startswith("{") and part != "v1"]
    return parts[1] if len(parts) > 1 else parts[0]


def _parameters(struct: Any, where: str, schemas: _Schemas) -> list[dict[str, Any]]:
    found = []
    for field in msgspec.structs.fields(struct):
        if where == "header" and field.encode_name == "Accept":
            continue  # OpenAPI has it as the media types of the answers
        schema = _not_null(schemas.of(field.type))
        description = schema.pop("description", "")
        parameter = {"name": field.encode_name, "in": where, "required": field.required, "schema": schema}
        if field.default is not msgspec.NODEFAULT and field.default is not None:
            schema["default"] = field.default
        found.append({**parameter, "description": description} if description else parameter)
    return found


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter that is left out is not null: it is not there."""
    options = schema.get("anyOf")
    if options is None:
        return schema
    others = [dict(option) for option in options if option != {"type": "null"}]
    return others[0] if len(others) == 1 else {**schema, "anyOf": others}


def _successes(each: Endpoint, schemas: _Schemas) -> dict[str, Any]:
    schema = schemas.of(each.types["return"])
    content = {media: {"schema": schema if media == "application/json" else {"type": "string"}} for media in each.media}
    return {
        str(status): {"description": text, **({} if status == NOT_MODIFIED else {"content": content})}
        for status, text in each.statuses.items()
    }


def _failures(each: Endpoint, schemas: _Schemas) -> dict[str, Any]:
    errors = [*ALWAYS, *each.errors]
    if not each.is_open:
        errors += WITH_TOKEN
    if each.method != "GET" and not each.is_open:
        errors.append(StorageFull)
    if "body" in each.types:
        errors += WITH_BODY
    by_status: dict[int, list[type[Error]]] = defaultdict(list)
    for error in errors:
        if error not in by_status[error.http_status]:
            by_status[error.http_status].append(error)
    return {
        str(status): {
            "description": " ".join(_meaning(error) for error in by_status[status]),
            "content": {"application/json": {"schema": _either([schemas.of(type_) for type_ in each.failures])}},
            **({"headers": _HEADERS[status]} if status in _HEADERS else {}),
        }
        for status in sorted(by_status)
    }


def _either(options: list[dict[str, Any]]) -> dict[str, Any]:
    return options[0] if len(options) == 1 else {"anyOf": options}


def _meaning(error: type[Error]) -> str:
    text = (error.__doc__ or "").strip().splitlines()[0]
    return f"`{error.code}`: {text}"


_HEADERS: Final[dict[int, Any]] = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"type": "string", "enum": ["Bearer"]}}},
    429: {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}},
}
