"""Migrating everything at once: a dry run, the real one, and what comes between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast
from holdfast import (
    AccessDenied,
    ManualClock,
    Space,
    Store,
    set_,
)
from holdfast.engine import Batch, Put
from holdfast.middleware.wrapper import Wrapper
from tests.layers.conftest import everything
from tests.layers.orders import ORDER_1, ORDER_2, stored, to_2

# --- all at once ---


@pytest.fixture
async def fleet(boss: Space, space: Space, store: Store) -> Space:
    """70 orders of 1.0.0, one of 2.0.0, one without a version, and what is none of ours."""
    await space.records.set("early", {"qty": 9}, type="order")
    await boss.schemas.register("order", "1.0.0", ORDER_1)
    risk = store.space("contoso", agent="risk")
    orders = [
        set_(
            f"orders/{number:03}",
            {"qty": number + 1},
            type="order",
            **({"ttl": "10m"} if number % 2 else {"state": "open", "ttl": "1d"}),
        )
        for number in range(70)
    ]
    await risk.commit(*orders)
    await boss.schemas.register("order", "2.0.0", ORDER_2, migrate_from={"1.0.0": to_2})
    await space.records.set("new", {"amount": 1}, type="order")
    await space.records.set("trade", {"qty": 1}, type="trade")
    await space.records.set("untyped", {"qty": 1})
    return space


async def test_a_dry_run_tells_what_would_happen_and_changes_nothing(fleet: Space, boss: Space) -> None:
    before = await everything(fleet)
    report = await boss.schemas.migrate("order", dry_run=True)
    assert report.dry_run
    assert report.found == {"1.0.0": 70, "2.0.0": 1, "unversioned": 1}
    assert (report.type, report.newest, report.migrated, report.failed) == ("order", "2.0.0", 70, 0)
    assert (await boss.schemas.migrate("order", dry_run=True, prefix="orders/00")).found == {"1.0.0": 10}
    assert await everything(fleet) == before


async def test_everything_is_rewritten_once_and_keeps_owner_state_and_ttl(
    fleet: Space, admin: Space, clock: ManualClock
) -> None:
    before = {key: await stored(fleet, key) for key in await fleet.records.keys()}
    clock.advance("60s")
    seen: list[int] = []
    report = await admin.schemas.migrate("order", progress=lambda report: seen.append(report.migrated))
    assert (report.migrated, report.failed, report.dry_run) == (70, 0, False)
    assert seen[-1] == 70
    assert len(seen) == 2  # pages
    after = {key: await stored(fleet, key) for key in await fleet.records.keys()}
    for key, entry in before.items():
        if not key.startswith("orders/"):
            assert after[key] == entry
            continue
        new = after[key]
        assert new.value == b'{"amount":%d}' % (int(key[-3:]) + 1)
        assert new.tag == entry.tag.replace("1.0.0", "2.0.0")
        assert (new.owner, new.created_at, new.expires_at) == ("risk", entry.created_at, entry.expires_at)
    again = await admin.schemas.migrate("order")
    assert (again.found, again.migrated) == ({"2.0.0": 71, "unversioned": 1}, 0)


async def test_records_without_a_version_are_migrated_when_somebody_says_which_they_have(
    fleet: Space, admin: Space
) -> None:
    report = await admin.schemas.migrate("order", unversioned="v1.0.0", prefix="early")
    assert (report.found, report.migrated) == ({"unversioned": 1}, 1)
    assert await fleet.records.get("early") == {"amount": 9}
    await fleet._scope.commit((Put("records/odd", b"{}", tag=":order:"),))
    report = await admin.schemas.migrate("order", unversioned="2.0.0", prefix="odd")
    assert [(each.key, each.reason) for each in report.failures] == [("odd", "invalid_value")]


async def test_whoever_writes_meanwhile_wins(fleet: Space, admin: Space) -> None:
    raced: list[str] = []

    class Racing(Wrapper):
        """Another writer comes between the read of a record and its rewriting."""

        async def commit(self, space: str, batch: Batch) -> Any:
            key = "records/orders/005"
            if not raced and any(getattr(op, "key", "") == key for op in batch.operations):
                raced.append(key)
                await fleet.records.set("orders/005", {"amount": 555}, type="order")
            return await super().commit(space, batch)

    scope = admin._scope
    racing = admin._view(replace(scope, engine=Racing(scope.engine)))
    report = await racing.schemas.migrate("order")
    assert raced
    assert (report.migrated, report.failed) == (69, 0)
    assert await fleet.records.get("orders/005") == {"amount": 555}


async def test_a_pass_that_was_cut_off_is_run_again(fleet: Space, admin: Space) -> None:
    class Cut(Wrapper):
        commits = 0

        async def commit(self, space: str, batch: Batch) -> Any:
            self.commits += 1
            if self.commits > 30:
                raise holdfast.Unavailable("cut off")
            return await super().commit(space, batch)

    scope = admin._scope
    with pytest.raises(holdfast.Unavailable):
        await admin._view(replace(scope, engine=Cut(scope.engine))).schemas.migrate("order")
    report = await admin.schemas.migrate("order")
    assert report.migrated == 70 - 29  # the first commit asks for the time
    assert report.found == {"1.0.0": 41, "2.0.0": 30, "unversioned": 1}


async def test_a_record_that_fails_does_not_stop_the_others(fleet: Space, boss: Space, admin: Space) -> None:
    def picky(order: dict[str, Any]) -> dict[str, Any]:
        if order["qty"] in (3, 4):
            raise ValueError("three is too many")
        return to_2(order)

    boss.schemas.add_step("order", "1.0.0", "2.0.0", picky)
    report = await admin.schemas.migrate("order")
    assert (report.migrated, report.failed) == (68, 2)
    assert sorted(each.key for each in report.failures) == ["orders/002", "orders/003"]
    assert "three is too many" in report.failures[0].message
    assert (await stored(fleet, "orders/002")).value == b'{"qty":3}'


async def test_what_is_stored_can_be_checked(fleet: Space, admin: Space) -> None:
    assert (await admin.schemas.check("order")).failed == 0
    await fleet._scope.commit((Put("records/zz", b'{"amount":"x"}', tag=":order::2.0.0"),))
    await fleet._scope.commit((Put("records/zzz", b"{}", tag=":order::7.0.0"),))
    report = await admin.schemas.check("order")
    assert report.found == {"1.0.0": 70, "2.0.0": 2, "7.0.0": 1, "unversioned": 1}
    assert [(each.key, each.version) for each in report.failures] == [("zz", "2.0.0"), ("zzz", "7.0.0")]


async def test_under_a_policy_only_administrators_write_in_the_name_of_others(
    fleet: Space, boss: Space, url: str
) -> None:
    if url != "policed:":
        pytest.skip("without a policy everybody may")
    before = await everything(fleet)
    with pytest.raises(AccessDenied, match="writes for nobody else"):
        await boss.schemas.migrate("order")
    assert await everything(fleet) == before


async def test_a_clock_that_is_wrong_does_not_change_what_is_left_of_a_ttl(
    fleet: Space, admin: Space, clock: ManualClock
) -> None:
    scope = admin._scope
    wrong = ManualClock(clock.now_ms() - 3_600_000)
    before = await stored(fleet, "orders/001")
    await admin._view(replace(scope, clock=wrong)).schemas.migrate("order")
    assert (await stored(fleet, "orders/001")).expires_at == before.expires_at


@pytest.mark.parametrize("url", ["memory:"])
async def test_large_records_are_rewritten_a_few_at_a_time(
    boss: Space, admin: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.layers.migration.IN_FLIGHT_BYTES_MAX", 2_500)

    class Watching(Wrapper):
        under_way = 0
        most = 0

        async def commit(self, space: str, batch: Batch) -> Any:
            size = sum(len(op.value) for op in batch.operations if isinstance(op, Put))
            self.under_way += size
            self.most = max(self.most, self.under_way)
            await asyncio.sleep(0)
            self.under_way -= size
            return await super().commit(space, batch)

    await boss.schemas.register("large", "1.0.0", {})
    for number in range(12):
        await boss.records.set(f"l{number:02}", "x" * (9_998 if number == 5 else 998), type="large")
    await boss.schemas.register("large", "2.0.0", {}, migrate_from={"1.0.0": lambda text: text})
    scope = admin._scope
    engine = Watching(scope.engine)
    migrate = admin._view(replace(scope, engine=engine)).schemas.migrate
    assert (await migrate("large", prefix="l0", dry_run=True)).migrated == 10
    assert (await migrate("large", prefix="l1")).migrated == 2
    assert engine.most == 2_000
    assert (await migrate("large")).migrated == 10
    assert engine.most == 10_000
