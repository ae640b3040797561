"""The blocking API: the same objects, waited for."""

from __future__ import annotations

import inspect
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Conflict, InvalidInput, Unavailable, blocking
from holdfast.layers import audit, blobs, records
from holdfast.space import Space
from holdfast.store import Store


def test_the_tour_of_the_readme_works_without_await(tmp_path: Path) -> None:
    with blocking.open(str(tmp_path / "team.db")) as store:
        space = store.space("contoso", agent="market", instance="1")
        r = space.records
        r.set("regime", "risk-on", ttl="1h")
        assert r.get("regime") == "risk-on"
        assert r.entry("regime").owner == "market"
        assert r.increment("orders", 1) == 1
        r.compare_and_swap("leader", expect=holdfast.ABSENT, value="market")
        with pytest.raises(Conflict):
            r.compare_and_swap("leader", expect=holdfast.ABSENT, value="other")
        r.append_to_list("files", "a.csv", "b.csv")
        assert r.list("files") == ["a.csv", "b.csv"]
        assert [record.key for record in r.scan()] == ["files", "leader", "orders", "regime"]
        assert space.commit(holdfast.increment("orders"), holdfast.set_("x", 1)).results == [2, None]

        def move_cash(tx: Any) -> int:
            cash = tx.get("cash", 0)
            tx.set("cash", cash - 100)
            tx.increment("transfers")
            return int(cash)

        assert space.transact(move_cash) == 0
        assert r.transact(move_cash) == -100
        assert r.get_many(["cash", "transfers"]) == {"cash": -200, "transfers": 2}
        assert space.audit.seal() == 12
        assert space.audit.verify().sound
        ref = space.blobs.put(b"large")
        assert space.blobs.read(ref) == b"large"
        assert store.spaces()[0].name == space.name == "contoso"


def test_a_watch_is_an_ordinary_loop(tmp_path: Path) -> None:
    with blocking.open("memory:") as store:
        space = store.space("s")
        start = space.cursor()
        writer = threading.Thread(target=lambda: [space.records.set("k", number) for number in range(5)])
        seen = []
        writer.start()
        for commit in space.watch("k", cursor=start):
            seen += [change.value for change in commit]
            if len(seen) == 5:
                break
        writer.join()
        assert seen == [0, 1, 2, 3, 4]


def test_threads_share_a_store(tmp_path: Path) -> None:
    with blocking.open(str(tmp_path / "team.db")) as store:
        records = store.space("s").records
        threads = [threading.Thread(target=lambda: [records.increment("n") for _ in range(25)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert records.get("n") == 100


@pytest.mark.parametrize(
    ("original", "twin"),
    [
        (Store, blocking.Store),
        (Space, blocking.Space),
        (records.Records, blocking.Records),
        (records.RecordTransaction, blocking.RecordTransaction),
        (audit.Audit, blocking.Audit),
        (blobs.Blobs, blocking.Blobs),
    ],
)
def test_every_public_method_has_its_twin_with_the_same_words(original: type, twin: type) -> None:
    for name, member in vars(original).items():
        if not name.startswith("_") and inspect.isfunction(member):
            copy = getattr(twin, name)
            assert not inspect.iscoroutinefunction(copy)
            assert copy.__doc__ == member.__doc__ or name == "close"


def test_a_store_that_cannot_be_opened_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(holdfast.InvalidInput):
        blocking.open(str(tmp_path / "no" / "team.db"))
    assert threading.active_count() == before


def test_queues_work_without_await(tmp_path: Path) -> None:
    with blocking.open(str(tmp_path / "team.db")) as store:
        space = store.space("contoso", agent="market")
        queue = space.queue("orders")
        ids = [queue.put(number) for number in range(3)]
        with queue.reserve(wait="5s") as message:
            assert (message.id, message.body, message.attempts) == (ids[0], 0, 0)
            message.complete("done", to="results")
        with pytest.raises(ValueError, match="no"), queue.reserve():
            raise ValueError("no")
        assert [dead.body for dead in queue.dead.list()] == [1]
        assert queue.dead.retry() == 1
        assert [message.body for message in queue.consume(wait=0)] == [1, 2]
        with pytest.raises(holdfast.Empty), queue.reserve():
            pass
        assert [(stats.name, stats.ready) for stats in space.queues.list()] == [("orders", 0), ("results", 1)]
        assert [each.body for each in space.queue("results").peek()] == ["done"]


def test_tasks_and_pipelines_are_used_without_await(tmp_path: Path) -> None:
    with holdfast.blocking.open(str(tmp_path / "team.db"), background=False) as store:
        space = store.space("contoso")
        handle = space.tasks.submit(holdfast.TaskSpec(command=("true",)))
        assert handle.status() == "created"
        assert handle.stop().status == "ok"
        assert [event.status for event in handle.events()] == ["created", "cancelled"]
        assert list(handle.stream()) == []
        with pytest.raises(holdfast.TaskFailed):
            handle.result()
        assert space.tasks.get(handle.tid).tid == handle.tid
        assert [state.tid for state in space.tasks.list()] == [handle.tid]
        assert space.tasks.overview().counts["cancelled"] == 1
        assert len(list(space.tasks.observe(cursor="r0", live=False))) == 2
        stages = [{"name": "a", "spec": {"command": ["true"]}}]
        pipeline = space.tasks.pipelines.start({"name": "n", "stages": stages})
        assert space.tasks.pipelines.advance() == 1
        assert pipeline.state().stages["a"].status == "running"


def test_an_async_function_is_not_taken_for_a_transaction(tmp_path: Path) -> None:
    async def work(tx: Any) -> None:
        tx.set("cash", 900)

    with blocking.open(tmp_path / "team.db") as store:
        space = store.space("contoso")
        for call in (lambda: space.transact(work), lambda: space.transact(work=work)):
            with pytest.raises(InvalidInput, match="takes a plain function"):
                call()
        assert space.records.get("cash") is None
        assert space.transact(work=lambda tx: tx.set("cash", 1)) is None
        assert space.records.get("cash") == 1


def test_a_store_that_was_opened_before_a_fork_refuses_to_work_in_the_child(tmp_path: Path) -> None:
    with blocking.open(str(tmp_path / "team.db")) as store:
        records = store.space("contoso").records
        records.set("cash", 1)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                records.get("cash")
            except Unavailable as exc:
                os.write(write, str(exc).encode())
            finally:
                os._exit(0)
        os.close(write)
        told = os.read(read, 1000)
        os.waitpid(child, 0)
        os.close(read)
        assert b"opened before a fork" in told
        assert records.get("cash") == 1
