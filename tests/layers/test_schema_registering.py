"""Registering: what is a schema, who may register it, what comes with Holdfast, and the two libraries that check."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from datetime import UTC, datetime
from typing import Annotated, Any, TypedDict

import msgspec
import pydantic
import pytest

import holdfast
from holdfast import (
    AccessDenied,
    Conflict,
    InvalidInput,
    ManualClock,
    MigrationFailed,
    NotFound,
    SchemaViolation,
    Space,
)
from holdfast.engine import Batch, Delete, Put
from holdfast.layers.catalogue import VERSIONS_MAX
from holdfast.layers.shipped_schemas import SHIPPED
from tests.layers.conftest import everything
from tests.layers.orders import ORDER_1, ORDER_2, ORDER_3, elsewhere, old_order, to_2

ONE_ENGINE = pytest.mark.parametrize("url", ["memory:"])
"""For what has nothing to do with where it is kept."""


# --- registering ---


async def test_registering_the_same_again_changes_nothing_and_another_schema_is_refused(boss: Space) -> None:
    await boss.schemas.register("order", "1.0.0", ORDER_1)
    before = await everything(boss)
    await boss.schemas.register("order", "v1.0.0", dict(reversed(ORDER_1.items())))
    with pytest.raises(Conflict, match="registered by boss") as caught:
        await boss.schemas.register("order", "1.0.0", ORDER_2, migrate_from={"0.1.0": to_2})
    assert caught.value.key == "schemas/order/1.0.0"
    assert await everything(boss) == before
    assert not (await boss.schemas.of_type("order")).knows("0.1.0")


async def test_an_agent_may_register_what_is_registered_and_brings_its_steps(boss: Space, space: Space) -> None:
    await old_order(boss, space)
    other = elsewhere(space)
    await other.schemas.register("order", "2.0.0", ORDER_2, migrate_from={"1.0.0": to_2})
    assert await other.records.get("o") == {"amount": 3}


async def test_agents_register_nothing_also_by_hand(boss: Space, space: Space, url: str) -> None:
    if url != "policed:":
        pytest.skip("without a policy everybody may")
    with pytest.raises(AccessDenied, match="orchestrators write it"):
        await space.schemas.register("order", "1.0.0", ORDER_1)
    await boss.schemas.register("order", "1.0.0", ORDER_1)
    before = await everything(boss)
    engine, key = space._scope.engine, "schemas/order/1.0.0"
    for actor in ("market", "boss"):
        for operation in (Put(key, b"{}"), Delete(key)):
            with pytest.raises(AccessDenied):
                await engine.commit("contoso", Batch(actor, (operation,)))
    assert await everything(boss) == before


@ONE_ENGINE
@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {"a": {"type": "strin"}}}, "at /properties/a/type"),
        ({"properties": {"a": {"pattern": "("}}}, "at /properties/a/pattern"),
        ({"$ref": "http://127.0.0.1:9/order.json"}, "nothing is fetched"),
        ({"$ref": "file:///etc/passwd"}, "nothing is fetched"),
        ({"$schema": "http://127.0.0.1:9/meta", "type": "object"}, "meta"),
        ({"description": "x" * 300_000}, "262,144 bytes"),
        ("order", "a dictionary or a class"),
        (object, "derived"),
        ({"enum": [float("nan")]}, "nan"),
    ],
)
async def test_a_bad_schema_is_refused_with_the_path_of_what_is_wrong(boss: Space, schema: Any, told: str) -> None:
    before = await everything(boss)
    with pytest.raises(InvalidInput, match=told):
        await boss.schemas.register("order", "1.0.0", schema)
    assert await everything(boss) == before


@ONE_ENGINE
async def test_a_schema_that_is_nested_without_end_is_refused_and_one_that_recurs_is_not(boss: Space) -> None:
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"properties": {"a": deep}}
    with pytest.raises(InvalidInput):
        await boss.schemas.register("deep", "1.0.0", deep)
    await boss.schemas.register("tree", "1.0.0", {"properties": {"child": {"$ref": "#"}, "n": {"type": "integer"}}})
    tree: dict[str, Any] = {"n": "not a number"}
    for _ in range(90):
        tree = {"n": 1, "child": tree}
    with pytest.raises(SchemaViolation) as caught:
        await boss.records.set("tree", tree, type="tree")
    assert caught.value.path == "/child" * 90 + "/n"


@ONE_ENGINE
@pytest.mark.parametrize("version", ["", "1", "1.0", "1.0.0.0", "V1.0.0", "1.0.0-rc1", "01.0.0", "1.0.x", 1, "٣.0.0"])
async def test_a_version_is_three_numbers(boss: Space, version: Any) -> None:
    with pytest.raises(InvalidInput, match="three numbers"):
        await boss.schemas.register("order", version, ORDER_1)


@ONE_ENGINE
@pytest.mark.parametrize("type", ["", "a:b", None, 3])
async def test_a_type_is_a_name(boss: Space, type: Any) -> None:
    with pytest.raises(InvalidInput):
        await boss.schemas.register(type, "1.0.0", ORDER_1)


@ONE_ENGINE
async def test_a_type_has_a_bounded_number_of_versions(boss: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    assert VERSIONS_MAX == 100
    monkeypatch.setattr("holdfast.layers.schemas.VERSIONS_MAX", 2)
    for version in ("1.0.0", "2.0.0", "2.0.0"):
        await boss.schemas.register("order", version, ORDER_1)
    with pytest.raises(InvalidInput, match="at most 2 versions"):
        await boss.schemas.register("order", "3.0.0", ORDER_1)


async def test_what_is_registered_can_be_seen(boss: Space, clock: ManualClock) -> None:
    assert await boss.schemas.list() == []
    for type, version in [("order", "1.10.0"), ("order", "1.9.0"), ("a/b", "1.0.0")]:
        await boss.schemas.register(type, version, ORDER_1)
    seen = [(each.type, each.version) for each in await boss.schemas.list()]
    assert seen == [("a/b", "1.0.0"), ("order", "1.9.0"), ("order", "1.10.0")]
    newest = await boss.schemas.get("order")
    assert (newest.version, newest.schema, newest.registered_by) == ("1.10.0", ORDER_1, "boss")
    assert newest.registered_at.tzinfo is not None
    assert (await boss.schemas.get("order", "v1.9.0")).version == "1.9.0"
    for type, version in [("trade", None), ("order", "7.0.0")]:
        with pytest.raises(NotFound):
            await boss.schemas.get(type, version)
    with pytest.raises(NotFound):
        await boss.schemas.of_type("trade")
    order = await boss.schemas.of_type("order")
    order.validate({"qty": 1})
    with pytest.raises(SchemaViolation):
        order.validate({"qty": 0}, "1.9.0")
    with pytest.raises(NotFound, match=r"1\.9\.0, 1\.10\.0"):
        order.validate({}, "7.0.0")


async def test_upgrade_leaves_its_argument_alone(boss: Space) -> None:
    def in_place(order: dict[str, Any]) -> dict[str, Any]:
        order["amount"] = order.pop("qty")
        return order

    await boss.schemas.register("order", "2.0.0", ORDER_2, migrate_from={"1.0.0": in_place})
    mine = {"qty": 1}
    assert (await boss.schemas.of_type("order")).upgrade(mine, "1.0.0") == {"amount": 1}
    assert mine == {"qty": 1}


# --- shipped ---

SIGNAL = {"agent_name": "momentum", "corr_id": "c-1", "enriched_at": "2026-01-31T08:00:00Z", "analysis": {"x": 1}}
CORRELATION = {
    "corr_id": "c-1",
    "status": "collecting",
    "signals": {"momentum": SIGNAL},
    "metadata": {"created_at": "2026-01-31T08:00:00Z", "expected_agents": ["momentum", "risk"]},
}


async def test_shipped_types_count_once_they_are_registered(boss: Space, space: Space) -> None:
    await space.records.set("c", "anything", type="correlation_state")
    await boss.schemas.register_shipped("correlation_state")
    await boss.schemas.register_shipped()
    types = {each.type: each.version for each in await boss.schemas.list()}
    assert types == {"audit_state": "1.0.0", "correlation_state": "1.1.0", "workflow_state": "1.0.0"}
    await space.records.set("c", CORRELATION, type="correlation_state", state="collecting")
    audit = {"actor": "a", "operation": "put", "key": "k", "at": "2026-01-31T08:00:00Z", "outcome": "committed"}
    await space.records.set("a", audit, type="audit_state")
    step = {"status": "completed", "started_at": None, "result": [1]}
    await space.records.set("w", {"workflow_id": "w", "status": "running", "steps": {"s": step}}, type="workflow_state")
    naive = {**CORRELATION, "metadata": {"created_at": "2026-01-31T08:00:00"}}
    no_name = {**CORRELATION, "signals": {"momentum": {"corr_id": "c-1"}}}
    for bad, path in [
        ({**CORRELATION, "status": "done"}, "/status"),
        (naive, "/metadata/created_at"),
        (no_name, "/signals/momentum"),
    ]:
        with pytest.raises(SchemaViolation) as caught:
            await space.records.set("c", bad, type="correlation_state")
        assert caught.value.path == path
    with pytest.raises(NotFound, match="workflow_state"):
        await boss.schemas.register_shipped("order")


async def test_the_shipped_step_names_the_pattern_in_every_process(boss: Space, space: Space) -> None:
    await boss.schemas.register("correlation_state", "1.0.0", SHIPPED["correlation_state"]["1.0.0"])
    await space.records.set("c", CORRELATION, type="correlation_state")
    await boss.schemas.register("correlation_state", "1.1.0", SHIPPED["correlation_state"]["1.1.0"])
    migrated = await elsewhere(space).records.get("c")
    assert migrated["metadata"] == {**CORRELATION["metadata"], "orchestration_pattern": "fan_in"}  # type: ignore[dict-item]


@ONE_ENGINE
async def test_the_shipped_step_leaves_other_schemas_of_that_name_alone(boss: Space, space: Space) -> None:
    await boss.schemas.register("correlation_state", "1.0.0", {})
    await space.records.set("c", {"metadata": {}}, type="correlation_state")
    await boss.schemas.register("correlation_state", "1.1.0", {})
    with pytest.raises(MigrationFailed, match="no step"):
        await space.records.get("c")


# --- classes ---


@dataclasses.dataclass
class PlainOrder:
    qty: int
    note: str = ""


class TypedOrder(TypedDict):
    qty: int


class StructOrder(msgspec.Struct):
    qty: Annotated[int, msgspec.Meta(ge=1)]
    at: datetime | None = None


class ModelOrder(pydantic.BaseModel):
    qty: int
    at: datetime | None = None


@ONE_ENGINE
@pytest.mark.parametrize("source", [PlainOrder, TypedOrder, StructOrder, ModelOrder])
async def test_a_schema_is_derived_from_a_class(boss: Space, source: Any) -> None:
    await boss.schemas.register("order", "1.0.0", source)
    await boss.schemas.register("order", "1.0.0", source)
    made = source(qty=3)
    await boss.records.set("k", made, type="order")
    assert await boss.records.get("k", as_type=source) == made
    with pytest.raises(SchemaViolation) as caught:
        await boss.records.set("k", {"qty": "three"}, type="order")
    assert caught.value.path == "/qty"
    if source in (StructOrder, ModelOrder):
        await boss.records.set("k", source(qty=3, at=datetime.now(UTC)), type="order")


# --- the libraries ---


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only jsonschema is installed."""
    monkeypatch.setitem(sys.modules, "jsonschema_rs", None)


@ONE_ENGINE
@pytest.mark.usefixtures("portable")
async def test_jsonschema_stands_in(boss: Space) -> None:
    await boss.schemas.register("order", "1.0.0", ORDER_1)
    await boss.records.set("k", {"qty": 1}, type="order")
    for value, path, keyword in [({"qty": "hunter2"}, "/qty", "type"), ({}, "", "required")]:
        with pytest.raises(SchemaViolation) as caught:
            await boss.records.set("k", value, type="order")
        assert (caught.value.path, caught.value.keyword) == (path, keyword)
        assert "hunter2" not in str(caught.value)
    for bad, told in [
        ({"properties": {"a": {"type": "strin"}}}, "at /properties/a/type"),
        ({"$ref": "http://127.0.0.1:9/order.json"}, "nothing is fetched"),
        ({"allOf": [{"$ref": "file:///etc/passwd"}]}, r"at /allOf/0/\$ref.*nothing is fetched"),
    ]:
        with pytest.raises(InvalidInput, match=told):
            await boss.schemas.register("bad", "1.0.0", bad)
    for odd in ({"$ref": "#"}, {"$ref": "#/$defs/absent"}):
        await boss.schemas.register("odd", f"{len(str(odd))}.0.0", odd)
        with pytest.raises(InvalidInput, match="cannot be applied"):
            await boss.records.set("k", 1, type="odd")


@ONE_ENGINE
async def test_without_a_library_a_typed_write_says_what_to_install(
    boss: Space, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    await old_order(boss, space)
    await space.records.set("new", {"amount": 1}, type="order")
    for name in ("jsonschema_rs", "jsonschema"):
        monkeypatch.setitem(sys.modules, name, None)
    other = elsewhere(space)
    for work in (
        lambda: other.records.set("k", {"amount": 1}, type="order"),
        lambda: other.schemas.register("order", "3.0.0", ORDER_3),
    ):
        with pytest.raises(InvalidInput, match=r"pip install 'holdfast\[schemas\]'"):
            await work()
    assert await other.records.get("new") == {"amount": 1}
    await other.records.set("k", 1, type="trade")


def test_neither_library_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, holdfast\n"
        "with holdfast.blocking.open('memory:', background=False) as store:\n"
        "    store.space('s').records.set('k', 1, type='order')\n"
        "print([name for name in ('jsonschema_rs', 'jsonschema') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_schemas_without_await() -> None:
    with holdfast.blocking.open("memory:", background=False) as store:
        space = store.space("contoso", agent="boss")
        space.schemas.register("order", "1.0.0", ORDER_1)
        space.records.set("o", {"qty": 1}, type="order")
        space.schemas.register("order", "2.0.0", ORDER_2, migrate_from={"1.0.0": to_2})
        assert space.records.get("o") == {"amount": 1}
        assert space.transact(lambda tx: tx.get("o")) == {"amount": 1}
        assert space.schemas.migrate("order", dry_run=True).migrated == 1
        assert space.schemas.of_type("order").newest == "2.0.0"
        with pytest.raises(SchemaViolation):
            space.records.set("o", {"qty": 1}, type="order")
