"""A keeper that is killed or restarted: the same answer to the same request, leases that live on, and how soon it is ready."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast.engine import Batch, Increment, Push, Put
from holdfast.engines.remote import RemoteEngine
from holdfast.ids import new_id
from holdfast.testing.servers.keeper import KeeperServer
from tests.server.live import SPACE, by_hand, client, http, make_token

ROOT = Path(__file__).resolve().parents[2]
SOAK = os.environ.get("HOLDFAST_SOAK") == "1"


async def test_a_request_id_gives_the_identical_answer_after_kill_9(tmp_path: Path) -> None:
    keeper = KeeperServer(tmp_path)
    keeper.start()
    try:
        token = await make_token(keeper, "market")
        stands = Put("records/l", b'"1"', tag="list")
        operations = (Increment("records/n", 1), Put("records/k", b'"v"'), stands, Push("lists/l/1/", b"1"))
        rest = {"Idempotency-Key": "over-http"}
        generated = new_id()
        base = f"/v1/spaces/{SPACE}"
        message = {"id": "m-1", "type": "request", "payload": {"operation": "Increment", "key": "m", "delta": 1}}
        locking = {"id": "m-2", "type": "request", "payload": {"operation": "Lock", "key": "l", "timeout": "60s"}}

        async def ask() -> list[object]:
            answers: list[object] = []
            async with by_hand(keeper, token) as hand, http(keeper, token) as web:
                answers.append(await hand.commit(*operations, request_id="plain"))
                for id in (generated, "chosen"):
                    answers.append(await hand.commit(*operations, request_id=id, fresh=not answers_before))
                answers.append((await web.post(f"{base}/counters/c", json={}, headers=rest)).content)
                transaction = {"operations": [{"operation": "Increment", "key": "t", "delta": 3}]}
                headers = {"Idempotency-Key": "transaction"}
                answers.append((await web.post(f"{base}/transactions", json=transaction, headers=headers)).content)
                for each in (message, locking):
                    reply = await web.post("/v1/messages", json=each)
                    assert reply.status_code == 200, reply.text
                    answers.append({name: value for name, value in reply.json().items() if name != "timestamp"})
            return answers

        answers_before: list[object] = []
        answers_before = await ask()
        assert len({repr(answer) for answer in answers_before}) == len(answers_before)
        for _ in range(2):
            keeper.kill()
            keeper.start()
            assert await ask() == answers_before
        async with holdfast.open(keeper.url, token=token) as store:
            records = store.space(SPACE).records
            assert [await records.get(key) for key in ("n", "c", "t", "m")] == [3, 1, 3, 1]
    finally:
        keeper.stop()


@contextmanager
def holder(keeper: KeeperServer, token: str, ttl: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lock through the keeper."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.holder", keeper.url, "fenced", ttl],
        cwd=ROOT,
        env={**os.environ, "HOLDFAST_TOKEN": token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def write(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


async def test_a_restart_within_a_leases_time_does_not_lose_the_lease(tmp_path: Path) -> None:
    keeper = KeeperServer(tmp_path)
    keeper.start()
    try:
        token = await make_token(keeper, "paused", "fencing")
        with holder(keeper, token, "20s") as process:
            assert process.stdout is not None
            said, fence = process.stdout.readline().split()
            assert said == "held"
            for number, end in enumerate((keeper.stop, keeper.kill, keeper.stop)):
                end()
                keeper.start()
                assert write(process, f"life {number}") == "written"
            async with holdfast.open(keeper.url, token=keeper.admin) as store:
                space = store.space("fencing")
                [line] = await space.locks.list()
                assert [(stand.agent, str(stand.token)) for stand in line.holders] == [("paused", fence)]
                assert await space.records.get("k") == "life 2"
    finally:
        keeper.stop()


async def test_a_restart_after_a_leases_time_finds_it_lost(tmp_path: Path) -> None:
    keeper = KeeperServer(tmp_path)
    keeper.start()
    try:
        token = await make_token(keeper, "paused", "fencing")
        with holder(keeper, token, "200ms") as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("held")
            keeper.kill()
            await asyncio.sleep(0.25)
            keeper.start()
            assert write(process, "too late") == "LeaseLost"
            async with holdfast.open(keeper.url, token=keeper.admin) as store:
                assert await store.space("fencing").records.get("k") is None
                async with store.space("fencing").lock("l", wait="5s"):
                    pass
    finally:
        keeper.stop()


async def test_a_client_goes_on_over_restarts_and_sees_every_change_once(tmp_path: Path) -> None:
    keeper = KeeperServer(tmp_path)
    keeper.start()
    try:
        async with client(keeper, "market") as (_, space):
            seen: list[object] = []

            async def watch() -> None:
                async for changes in space.watch("n", cursor="r0"):
                    seen.extend(change.value for change in changes)

            watching = asyncio.create_task(watch())
            for number in range(1, 4):
                assert await space.records.increment("n") == number
                if number % 2:
                    keeper.kill()
                else:
                    keeper.stop()
                keeper.start()
            async with asyncio.timeout(20):
                while len(seen) < 3:
                    await asyncio.sleep(0.01)
            assert seen == [1, 2, 3]
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    finally:
        keeper.stop()


@pytest.mark.parametrize(
    ("operations", "bound_s"),
    [(100_000, 1.0), (1_000_000, 5.0)] if SOAK else [(20_000, 1.0)],
)
async def test_after_kill_9_it_is_ready_again_soon(tmp_path: Path, operations: int, bound_s: float) -> None:
    keeper = KeeperServer(tmp_path, limits={"in_flight": 512})
    keeper.start()
    try:
        engine = await RemoteEngine.open(keeper.url, token=keeper.admin)
        value, left = b'"' + b"x" * 254 + b'"', iter(range(operations))

        async def write() -> None:
            for number in left:
                batch = Batch("admin", (Put(f"records/{number}", value),), (), new_id(), True)
                await engine.commit(SPACE, batch)

        began = time.perf_counter()
        await asyncio.gather(*(write() for _ in range(256)))
        rate = operations / (time.perf_counter() - began)
        took = []
        for _ in range(2):
            keeper.kill()
            began = time.perf_counter()
            keeper.start()
            took.append((keeper.ready_s, time.perf_counter() - began))
        assert len((await engine.scan(SPACE, "records/", limit=10_000)).entries) == min(10_000, operations)
        [info] = await engine.spaces(SPACE)
        assert sum(usage.keys for usage in info.usage if usage.owner == "admin") == operations
        await engine.close()
        best = min(ready for ready, _ in took)
        shown = ", ".join(f"{ready:.2f} s ({whole:.2f} s with Python's start)" for ready, whole in took)
        print(f"{operations:,} operations at {rate:,.0f}/s; after kill -9 ready in {shown}")
        assert best < bound_s
    finally:
        keeper.stop()
