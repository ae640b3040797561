"""Schemas through a keeper: orchestrators register, agents are held to it by their library, and nobody by hand changes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast import AccessDenied, Conflict, MigrationFailed, SchemaViolation
from holdfast.engine import Delete, Put, Touch
from holdfast.testing.servers.keeper import KeeperServer
from tests.server.live import SPACE, by_hand, client, command, http, make_token

ORDER_1 = {"type": "object", "required": ["qty"], "properties": {"qty": {"type": "integer"}}}
ORDER_2 = {"type": "object", "required": ["amount"]}
KEY = "schemas/trade/1.0.0"


@pytest.fixture(scope="module")
def keeper() -> Iterator[KeeperServer]:
    with KeeperServer.temporary() as running:
        yield running


async def test_a_fleet_shares_schemas_through_a_keeper(keeper: KeeperServer) -> None:
    async with client(keeper, "lead", role="orchestrator") as (_, lead), client(keeper, "worker") as (_, worker):
        with pytest.raises(AccessDenied, match="orchestrators write it"):
            await worker.schemas.register("order", "1.0.0", ORDER_1)
        await lead.schemas.register("order", "1.0.0", ORDER_1)
        with pytest.raises(Conflict, match="registered by lead"):
            await lead.schemas.register("order", "1.0.0", ORDER_2)
        with pytest.raises(SchemaViolation):
            await worker.records.set("o", {"qty": "x"}, type="order")
        await worker.records.set("o", {"qty": 1}, type="order", ttl="1h")
        async with http(keeper, await make_token(keeper, "web")) as web:
            refused = await web.put(f"/v1/spaces/{SPACE}/records/w", json={}, params={"type": "order"})
            assert (refused.status_code, refused.json()["error"]) == (400, "schema_violation")

        await lead.schemas.register("order", "2.0.0", ORDER_2, migrate_from={"1.0.0": lambda o: {"amount": o["qty"]}})
        assert await lead.records.get("o") == {"amount": 1}
        assert (await worker.schemas.of_type("order")).newest == "2.0.0"
        with pytest.raises(MigrationFailed, match="knows no step"):
            await worker.records.get("o")

    (keeper.folder / "desk.py").write_text(
        "def register(schemas):\n    schemas.add_step('order', '1.0.0', '2.0.0', lambda o: {'amount': o['qty']})\n"
    )
    told = command(keeper, "schema", "migrate", "order", "--module", "desk", "--space", SPACE, "--json").json
    assert (told["migrated"], told["failed"]) == (1, 0)
    described = command(keeper, "entry", "o", "--space", SPACE, "--json").json
    assert (described["value"], described["owner"], described["schema_version"]) == ({"amount": 1}, "worker", "2.0.0")


@pytest.mark.parametrize("role", ["agent", "orchestrator"])
async def test_by_hand_nobody_changes_what_is_registered(keeper: KeeperServer, role: str) -> None:
    async with client(keeper, "first", role="orchestrator") as (_, lead):
        await lead.schemas.register("trade", "1.0.0", ORDER_1)
    token = await make_token(keeper, f"mallory-{role}", role=role)  # type: ignore[arg-type]
    async with by_hand(keeper, token) as hand:
        for operation in (Put(KEY, b"{}"), Delete(KEY), Touch(KEY, 1000)):
            with pytest.raises(AccessDenied):
                await hand.commit(operation)
