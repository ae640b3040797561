"""Orders in three versions, for the tests of schemas and migrations."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from holdfast import Space
from holdfast.engine import Entry
from holdfast.layers.catalogue import Catalogue

ORDER_1 = {"type": "object", "required": ["qty"], "properties": {"qty": {"type": "integer", "minimum": 1}}}
ORDER_2 = {"type": "object", "required": ["amount"], "properties": {"amount": {"type": "integer"}}}
ORDER_3 = {"type": "object", "required": ["amount", "unit"]}


def to_2(order: dict[str, Any]) -> dict[str, Any]:
    return {"amount": order["qty"]}


def to_3(order: dict[str, Any]) -> dict[str, Any]:
    return {**order, "unit": "piece"}


def elsewhere(space: Space) -> Space:
    """The same space in another process: it knows what is stored, and no step."""
    scope = space._scope
    return space._view(replace(scope, catalogue=Catalogue(scope.engine, scope.clock)))


async def stored(space: Space, key: str) -> Entry:
    [entry] = await space._scope.engine.get(space.name, [f"records/{key}"])
    assert entry is not None
    return entry


async def old_order(boss: Space, space: Space, key: str = "o", **options: Any) -> None:
    """An order of 1.0.0, when the newest version is 2.0.0."""
    await boss.schemas.register("order", "1.0.0", ORDER_1)
    await space.records.set(key, {"qty": 3}, type="order", **options)
    await boss.schemas.register("order", "2.0.0", ORDER_2, migrate_from={"1.0.0": to_2})
