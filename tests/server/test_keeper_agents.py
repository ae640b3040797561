"""Agents of a keeper: what a token lets one do, whose name one has, and how it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast import (
    AccessDenied,
    AuthenticationFailed,
    InvalidInput,
    LockAcquisitionError,
    NotFound,
    Space,
)
from holdfast.engine import Batch, Put
from holdfast.engines.remote import RemoteEngine
from holdfast.testing.servers.keeper import KeeperServer
from tests.server.live import SPACE, by_hand, client, command, http, make_token, revoke

ENDS_WITHIN_S = 2.0


@pytest.fixture(scope="module")
def keeper() -> Iterator[KeeperServer]:
    with KeeperServer.temporary() as running:
        yield running


async def test_tokens_are_made_listed_and_revoked_from_the_command_line(keeper: KeeperServer) -> None:
    made = command(keeper, "token", "create", "worker-7", "--space", "cli", "--json").json
    assert (made["name"], made["space"], made["role"], made["created_by"]) == ("worker-7", "cli", "agent", "admin")
    token = made["token"]
    listed = command(keeper, "token", "list", "--space", "cli", "--json").json
    assert [each["id"] for each in listed] == [made["id"]]
    assert token not in str(listed)
    assert command(keeper, "set", "k", "1", token=token).code == 0
    assert command(keeper, "get", "k", token=token).out.strip() == "1"
    assert "token is for administrators" in command(keeper, "token", "list", token=token, code=11).err
    lead = command(keeper, "token", "create", "lead", "--space", "cli", "--role", "orchestrator").out.strip()
    assert "records/k" in command(keeper, "audit", token=lead).out
    assert "do not allow" in command(keeper, "audit", token=token, code=11).err
    command(keeper, "token", "revoke", "lead")
    command(keeper, "token", "revoke", "worker-7", "--space", "cli")
    assert "not valid" in command(keeper, "get", "k", token=token, code=10).err
    assert command(keeper, "token", "list", "--space", "cli", "--json").json == []


async def test_an_agent_may_use_every_layer(keeper: KeeperServer) -> None:
    async with client(keeper, "every") as (store, space):
        records = space.records
        await records.set("a", {"b": [1, None, "é"]}, ttl="1h")
        assert await records.get("a") == {"b": [1, None, "é"]}
        assert await records.get_many(["a", "absent"]) == {"a": {"b": [1, None, "é"]}}
        entry = await records.entry("a")
        assert entry is not None
        assert entry.owner == "every"
        assert await records.increment("n", 5) == 5
        await records.compare_and_swap("a", 2, expect_version=entry.version)
        await records.append_to_list("l", 1, 2)
        await records.add_to_set("s", "x", "y")
        await records.remove_from_set("s", "x")
        assert (await records.list("l"), await records.members("s")) == ([1, 2], ["y"])
        assert set(await records.keys()) == {"a", "n", "l", "s"}
        assert await records.delete("l")

        async def double(tx: holdfast.Transaction) -> int:
            total = 2 * int(await tx.get("n"))
            tx.set("n", total)
            return total

        assert await space.transact(double) == 10
        start = await space.cursor()
        await records.set("watched", 1)
        async for changes in space.watch("watched", cursor=start):
            assert [change.key for change in changes] == ["watched"]
            break
        await _coordinate(space)
        assert [info.name for info in await store.spaces()] == ["contoso"]


async def _coordinate(space: Space) -> None:
    async with space.lock("l", ttl="5s") as guard:
        assert guard.holder == "every"
        await guard.space.records.set("locked", 1)
        await guard.renew()
        with pytest.raises(LockAcquisitionError):
            await space.lock("l").acquire()
    async with space.semaphore("gpu", permits=2), space.semaphore("gpu", permits=2):
        pass
    async with space.read_lock("book"), space.read_lock("book"):
        pass
    async with space.write_lock("book"):
        pass
    async with space.election("leader") as term:
        await term.space.records.set("led", term.epoch)
    async with space.pool("licences", size=3).allocate(2):
        pass
    assert await space.locks.list() == []


async def test_agents_share_a_queue_and_neither_ends_what_the_other_has(keeper: KeeperServer) -> None:
    names = ("queue-sender", "queue-worker")
    tokens = [await make_token(keeper, name, "queueing") for name in names]
    async with (
        holdfast.open(keeper.url, token=tokens[0]) as first,
        holdfast.open(keeper.url, token=tokens[1]) as second,
    ):
        sender, worker = first.space("queueing").queue("orders"), second.space("queueing").queue("orders")
        waiting = asyncio.create_task(worker.take(wait="20s"))
        await asyncio.sleep(0.1)
        await sender.put("a", dedup="a")
        message = await waiting
        with pytest.raises(AccessDenied):
            await sender.ack(message.id)
        await message.complete("done", to="results")
        assert [each.body for each in await first.space("queueing").queue("results").peek()] == ["done"]
        await sender.put("b")
        with pytest.raises(ValueError, match="b"):
            async with worker.reserve(wait="20s") as message:
                raise ValueError(message.body)
        with pytest.raises(AccessDenied):
            await sender.dead.retry()
        assert await worker.dead.retry() == 1


async def test_the_name_is_the_tokens_and_no_other(keeper: KeeperServer) -> None:
    async with client(keeper, "market") as (store, space):
        assert store.identity is not None
        assert store.identity.agent == "market"
        with pytest.raises(InvalidInput, match="cannot write as 'risk'"):
            store.space("contoso", agent="risk")
        with pytest.raises(AccessDenied, match="acts as nobody else"):
            await store.engine.commit("contoso", Batch("risk", (Put("records/k", b"1"),)))
        with pytest.raises(AccessDenied, match="writes for nobody else"):
            await store.engine.commit("contoso", Batch("market", (Put("records/k", b"1", owner="risk"),)))
        assert await space.records.get("k") is None


async def test_another_space_is_denied_in_the_same_words_whether_it_exists_or_not(keeper: KeeperServer) -> None:
    async with client(keeper, "owner", "exists") as (_, space):
        await space.records.set("k", 1)
    async with client(keeper, "curious") as (store, _):
        words = []
        for name in ("exists", "does-not-"):
            other = store.space(name)
            for attempt in (
                lambda other=other: other.records.get("k"),
                lambda other=other: other.records.set("k", 1),
                lambda other=other: other.records.keys(),
                lambda other=other: other.lock("l").acquire(),
                lambda other=other: anext(other.watch()),
                lambda name=name: store.engine.spaces(name),
                lambda name=name: store.engine.drop(name),
            ):
                with pytest.raises(AccessDenied) as caught:
                    await attempt()
                words.append(str(caught.value).replace(name, "NAME"))
        assert words[: len(words) // 2] == words[len(words) // 2 :]


@pytest.mark.parametrize("how", ["revoked", "expired"])
async def test_the_end_of_a_token_ends_its_connections_and_watches(keeper: KeeperServer, how: str) -> None:
    name = f"ends-{how}"
    token = await make_token(keeper, name, ttl="1500ms" if how == "expired" else None)
    made_at = time.monotonic()
    engine = await RemoteEngine.open(keeper.url, token=token)
    watch = asyncio.ensure_future(anext(engine.watch("contoso", "records/")))
    await engine.get("contoso", ["records/k"])
    async with by_hand(keeper, token) as hand, http(keeper, token) as web:
        assert (await web.get("/v1/spaces/contoso/records/absent")).status_code == 404
        if how == "revoked":
            await revoke(keeper, name)
            ended_at = time.monotonic()
        else:
            ended_at = made_at + 1.5
        with pytest.raises(AuthenticationFailed):
            await asyncio.wait_for(watch, 10)
        with pytest.raises(AuthenticationFailed):
            await hand.answer(1)
        with pytest.raises(EOFError):
            await hand.next()
        took = time.monotonic() - ended_at
        assert took < ENDS_WITHIN_S, f"{took:.1f} s"
        with pytest.raises(AuthenticationFailed):
            await engine.get("contoso", ["records/k"])
        assert (await web.get("/v1/spaces/contoso/records/absent")).status_code == 401
    await engine.close()


async def test_a_token_of_another_keeper_or_a_changed_one_is_refused_in_one_sentence(keeper: KeeperServer) -> None:
    token = await make_token(keeper, "forged")
    texts = set()
    for wrong in (token[:-1] + ("a" if token[-1] != "a" else "b"), f"hf_{'a' * 16}_{'b' * 52}", "hf_", "x" * 4000):
        with pytest.raises(AuthenticationFailed) as caught:
            await RemoteEngine.open(keeper.url, token=wrong)
        texts.add(str(caught.value))
    assert len(texts) == 1


async def test_denials_are_in_the_audit_of_the_space_and_bounded(keeper: KeeperServer) -> None:
    async with client(keeper, "denied", "audited") as (store, space):
        await space.records.set("k", 1)
        for _ in range(100):
            with pytest.raises(AccessDenied):
                await store.engine.get("audited", ["system/caretaker"])
        with pytest.raises(AccessDenied):
            await store.space("elsewhere").records.get("k")
    for _ in range(100):
        told = command(keeper, "audit", "--space", "audited", "--outcome", "denied", "--json").out.splitlines()
        if any("more refusals" in line for line in told):
            break
        await asyncio.sleep(0.1)
    assert any("system/caretaker" in line and '"denied"' in line for line in told)
    assert any("more refusals" in line for line in told)
    assert 1 < len(told) < 60, "one note for each refusal would let an agent fill the audit"
    with pytest.raises(NotFound):
        async with holdfast.open(keeper.url, token=keeper.admin) as store:
            await store.drop_space("elsewhere")


async def test_a_keeper_may_ask_for_strict_names(tmp_path: Path) -> None:
    keeper = KeeperServer(tmp_path / "keeper")
    keeper.start()
    try:
        before = await make_token(keeper, "worker-7")
        keeper.stop()
        keeper.settings["agent_names"] = "strict"
        keeper.write_settings()
        keeper.start()
        with pytest.raises(AuthenticationFailed, match=r"small letters and '_'.*make a token of another name"):
            await holdfast.open(keeper.url, token=before)
        async with http(keeper, before) as web:
            assert (await web.get(f"/v1/spaces/{SPACE}/records/a")).status_code == 401
        with pytest.raises(InvalidInput, match="agent_names: strict"):
            await make_token(keeper, "worker-8")
        async with client(keeper, "worker_seven") as (_, space):
            assert await space.records.set("a", 1)
    finally:
        keeper.stop()
