"""A full disk is in the log, once when it begins and once when it is over."""

from __future__ import annotations

import pytest

from holdfast.clock import ManualClock
from holdfast.engine import Batch, Put, Receipt
from holdfast.engines.memory import MemoryEngine
from holdfast.engines.remote import RemoteEngine
from holdfast.errors import StorageFull
from holdfast.server.config import Address, Config, Listen
from holdfast.server.fullness import FULL, QUIET_MS, Fullness
from holdfast.server.keeper import Keeper


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message.partition(":")[0] for record in caplog.records if "disk" in record.message]


BEGINS, OVER = "the disk of the store is full", "the disk of the store has room again"


def test_it_is_told_once_when_it_begins_and_once_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    fullness = Fullness(clock)
    fullness.heard("backup", FULL, 1)
    assert lines(caplog) == []
    for _ in range(100):
        fullness.heard("commit", FULL, 1)
        fullness.heard("commit", "ok", 1)  # a small one, for which there is room
        fullness.heard("get", "ok", 1)
        clock.advance(QUIET_MS // 2)
    assert lines(caplog) == [BEGINS]
    clock.advance(QUIET_MS)
    fullness.heard("get", "ok", 1)
    assert lines(caplog) == [BEGINS]
    fullness.heard("commit", "ok", 1)
    assert lines(caplog) == [BEGINS, OVER]
    assert caplog.records[-1].__dict__["refused"] == 100
    assert not fullness.is_full


async def test_a_disk_that_is_full_for_binary_clients_alone_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(store="memory:", listen=Listen(Address("127.0.0.1", 0), None))
    keeper = Keeper(config, background=False)
    await keeper.start()
    try:
        address = f"holdfast://127.0.0.1:{keeper.binary_port}"
        engine = await RemoteEngine.open(address, token=str(keeper.admin_token))

        async def commit(self: MemoryEngine, space: str, batch: Batch) -> Receipt:
            raise StorageFull("no room")

        monkeypatch.setattr(MemoryEngine, "commit", commit)
        for _ in range(3):
            with pytest.raises(StorageFull):
                await engine.commit("contoso", Batch("admin", (Put("records/k", b"1"),)))
        assert lines(caplog) == [BEGINS]
        assert keeper.ready() is None  # reads are served
        await engine.close()
    finally:
        monkeypatch.undo()
        await keeper.stop()
