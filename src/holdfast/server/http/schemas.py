"""The schemas of a space over HTTP, to be read. Writes of records are checked against them, by the keeper."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast.errors import NotFound
from holdfast.layers.schemas import RegisteredSchema
from holdfast.server.http.endpoint import Call, endpoint
from holdfast.server.http.shapes import InSpace, Wire, Word

VersionText = Annotated[
    str,
    Meta(pattern=r"^v?(0|[1-9][0-9]{0,8})(\.(0|[1-9][0-9]{0,8})){2}$", description="A version.", examples=["1.1.0"]),
]


class TypeAt(InSpace, frozen=True):
    """A path that names a type."""

    type: Word


class VersionQuery(Wire, frozen=True):
    """Which version of it; without one, the newest."""

    version: VersionText | None = None


class SchemaShown(msgspec.Struct, frozen=True):
    """One version of a type."""

    type: str
    version: str
    schema: dict[str, Any]
    registered_by: str
    registered_at: datetime


class SchemaList(msgspec.Struct, frozen=True):
    """Every version of every type, from the oldest to the newest."""

    schemas: list[SchemaShown]


@endpoint("GET", "/v1/spaces/{space}/schemas")
async def list_schemas(call: Call, path: InSpace) -> SchemaList:
    """The registered schemas of a space."""
    return SchemaList([_shown(each) for each in await call.space(path.space).schemas.list()])


@endpoint("GET", "/v1/spaces/{space}/schemas/{type}", errors=(NotFound,))
async def read_schema(call: Call, path: TypeAt, query: VersionQuery) -> SchemaShown:
    """One version of a type, with its schema."""
    return _shown(await call.space(path.space).schemas.get(path.type, query.version))


def _shown(each: RegisteredSchema) -> SchemaShown:
    return SchemaShown(each.type, each.version, each.schema, each.registered_by, each.registered_at)


ENDPOINTS = (list_schemas, read_schema)
