"""The blocking API: the same objects, waited for."""

from __future__ import annotations

import gc
import inspect
import os
import subprocess
import sys
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


def test_a_message_that_is_consumed_is_settled_without_await(tmp_path: Path) -> None:
    with blocking.open(str(tmp_path / "team.db"), background=False) as store:
        queue = store.space("contoso").queue("work")
        queue.put("first")
        for message in queue.consume(wait=0):
            assert message.body == "first"
            message.release()
            break
        assert queue.take().body == "first"


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


def all_end(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return not any(thread.is_alive() for thread in threads)


def test_any_number_of_transactions_may_use_the_store_at_once(tmp_path: Path) -> None:
    with blocking.open(str(tmp_path / "team.db"), background=False) as store:
        space, together = store.space("contoso"), threading.Barrier(40)

        def move(number: int) -> None:
            def work(tx: Any) -> None:
                together.wait(10)
                space.blobs.put(b"%d" % number)
                space.transact(lambda inner: inner.increment("inner"))
                tx.increment("outer")

            space.transact(work)

        assert all_end([threading.Thread(target=move, args=(number,), daemon=True) for number in range(40)])
        assert space.records.get_many(["inner", "outer"]) == {"inner": 40, "outer": 40}


def test_a_store_that_is_closed_says_so_and_may_be_closed_again(tmp_path: Path) -> None:
    store = blocking.open(str(tmp_path / "team.db"))
    records, watch = store.space("contoso").records, store.space("contoso").watch()
    store.close()
    for call in (lambda: records.set("a", 1), lambda: list(records.scan()), lambda: next(watch)):
        with pytest.raises(Unavailable, match="is closed"):
            call()
    store.close()


def test_a_call_that_waits_when_the_store_is_closed_ends(tmp_path: Path) -> None:
    store = blocking.open(str(tmp_path / "team.db"), background=False)
    told: list[str] = []

    def wait() -> None:
        try:
            with store.space("contoso", agent="other").lock("portfolio", wait=None):
                told.append("held")
        except Unavailable as exc:
            told.append(str(exc))

    store.space("contoso").lock("portfolio").__enter__()
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while not [held for held in store.space("contoso").locks.list() if held.waiters]:
        pass
    store.close()
    waiting.join(10)
    assert len(told) == 1
    assert "closed" in told[0]


def test_a_watch_that_nobody_holds_ends_in_whichever_thread_finds_it(tmp_path: Path) -> None:
    with blocking.open(str(tmp_path / "team.db"), background=False) as store:
        space = store.space("contoso")
        space.records.set("a", 1)
        circle: list[Any] = [space.watch(cursor="r0")]
        circle.append(circle)
        next(circle[0])
        del circle

        async def collect() -> None:
            gc.collect()

        collecting = threading.Thread(target=lambda: store._loop.run(collect()), daemon=True)
        assert all_end([collecting])


def test_a_function_that_the_store_calls_is_told_that_it_cannot_wait_for_it(tmp_path: Path) -> None:
    with blocking.open(str(tmp_path / "team.db"), background=False) as store:
        records = store.space("contoso").records

        async def called() -> None:
            records.set("a", 1)

        with pytest.raises(InvalidInput, match="would wait for itself"):
            store._loop.run(called())


def test_a_program_ends_although_a_watch_and_its_store_were_left_open() -> None:
    program = (
        "from holdfast import blocking; space = blocking.open('memory:').space('contoso'); space.records.set('a', 1);"
        "watch = space.watch(cursor='r0'); next(watch)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
