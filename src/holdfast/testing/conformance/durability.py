"""Guarantee 3, durability: at the moment of a reply, what it shows is where it must be.

The tests look at the storage through a second engine, or by opening it again. That a disk has really written what the
engine asked it to write is beyond a test of this kind: the fault tests kill and break for that.
"""

from __future__ import annotations

import asyncio

import pytest

from holdfast.engine import Batch, ChangeSet, Delete, Durability, Increment, Push, Put, Receipt, Take, Touch
from holdfast.errors import OutcomeUnknown, Unavailable
from holdfast.testing.conformance.subject import BOB, ELSEWHERE, SPACE, Subject

KEPT: tuple[Durability, ...] = ("sync", "async")


class TestDurability:
    async def test_what_a_reply_shows_is_in_the_storage_at_that_moment(self, subject: Subject) -> None:
        other = await subject.another()
        for i in range(20):
            receipt = await subject.commit(Put("a/k", b"%d" % i), Increment("a/n", 1))
            [entry] = await other.get(SPACE, ["a/k"])
            assert entry is not None, "acknowledged and not in the storage"
            assert (entry.value, entry.version) == (b"%d" % i, receipt.version)

    async def test_every_reply_of_a_group_shows_what_is_in_the_storage_at_that_moment(self, subject: Subject) -> None:
        other = await subject.another()

        async def write(i: int) -> None:
            receipt = await subject.commit(Put(f"a/{i}", b"1"))
            [entry] = await other.get(SPACE, [f"a/{i}"])
            assert entry is not None, "acknowledged and not in the storage"
            assert entry.version == receipt.version

        await asyncio.gather(*(write(i) for i in range(40)))

    async def test_what_a_read_shows_is_in_the_storage_at_that_moment(self, subject: Subject) -> None:
        other = await subject.another()
        writing = asyncio.gather(*(subject.commit(Increment("a/n", 1)) for _ in range(40)))
        while not writing.done():
            [shown] = await subject.engine.get(SPACE, ["a/n"])
            [stored] = await other.get(SPACE, ["a/n"])
            if shown is not None:
                assert stored is not None, "shown and not in the storage"
                assert stored.version >= shown.version
            await asyncio.sleep(0)
        await writing

    async def test_what_a_watcher_is_told_is_in_the_storage_at_that_moment(self, subject: Subject) -> None:
        other = await subject.another()
        await subject.commit(Put("a/k", b"0"))
        watching = await subject.watch_from_now()
        writing = asyncio.gather(*(subject.commit(Put(f"a/{i}", b"1")) for i in range(40)))
        for _ in range(40):
            [change] = (await watching.next()).changes
            assert await subject.get(change.key, engine=other) is not None, "told and not in the storage"
        await writing

    @pytest.mark.parametrize("durability", KEPT)
    async def test_everything_is_there_after_a_reopen(self, subject: Subject, durability: Durability) -> None:
        await subject.engine.create(SPACE, durability, audit_reads=True)
        await subject.commit(Put("a/1", b'"a\\u0000b"', tag="kind", owner=BOB), Put("a/t", b"1", ttl_ms=9000))
        await subject.commit(*(Push("q/", b"%d" % i) for i in range(5)), request_id="r")
        await subject.commit(Take("q/", "r/", n=2, target_counter="n/1"), Delete("a/1"), actor=BOB)
        await subject.commit(Touch("a/t", 20_000))
        await subject.commit(Put("a/large", b'"' + b"x" * 100_000 + b'"'), space=ELSEWHERE)
        before = await subject.snapshot()
        await subject.reopen()
        assert await subject.snapshot() == before
        await subject.reopen()
        assert await subject.snapshot() == before

    async def test_a_space_keeps_its_life_across_a_reopen(self, subject: Subject) -> None:
        await subject.engine.create(SPACE, "async")
        await subject.commit(Put("a/k", b"1"))
        await subject.commit(Put("a/k", b"1"), space=ELSEWHERE)
        await subject.engine.compact(SPACE, await subject.revision())
        await subject.engine.drop(ELSEWHERE)
        before = await subject.info()
        await subject.reopen()
        assert await subject.engine.spaces() == [before]

    async def test_a_load_is_there_after_a_reopen(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1", ttl_ms=60_000), Put("b/k", b"2"))
        entries, revision = await subject.entries(), await subject.revision()
        await subject.engine.load(ELSEWHERE, entries, revision + 100)
        await subject.reopen()
        assert await subject.entries(space=ELSEWHERE) == entries
        assert await subject.revision(ELSEWHERE) == revision + 100

    async def test_closing_answers_everything_that_was_accepted(self, subject: Subject) -> None:
        commits = [asyncio.ensure_future(subject.commit(Put(f"a/{i}", b"1"))) for i in range(40)]
        await asyncio.sleep(0)
        await asyncio.wait_for(subject.engine.close(), subject.deadline_s)
        outcomes = await asyncio.wait_for(asyncio.gather(*commits, return_exceptions=True), subject.deadline_s)
        assert all(isinstance(outcome, Receipt | Unavailable | OutcomeUnknown) for outcome in outcomes)
        if subject.capabilities.survives_reopen:
            await subject.reopen()
            stored = set(await subject.keys())
            for i, outcome in enumerate(outcomes):
                if isinstance(outcome, Receipt):
                    assert f"a/{i}" in stored, "acknowledged and lost"
                elif isinstance(outcome, Unavailable):
                    assert f"a/{i}" not in stored, "refused and stored"

    async def test_a_closed_engine_refuses_everything(self, subject: Subject) -> None:
        engine = subject.engine

        async def watched() -> ChangeSet:
            return await subject.watch().next()

        await subject.commit(Put("a/k", b"1"))
        await engine.close()
        calls = [
            engine.commit(SPACE, Batch("a", (Put("a/k", b"2"),))),
            engine.get(SPACE, ["a/k"]),
            engine.scan(SPACE, ""),
            engine.spaces(),
            engine.create(ELSEWHERE),
            engine.drop(SPACE),
            engine.load(SPACE, [], 5),
            engine.compact(SPACE, 1),
            watched(),
        ]
        outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), subject.deadline_s)
        assert [type(outcome).__name__ for outcome in outcomes] == ["Unavailable"] * len(calls)
        if subject.capabilities.survives_reopen:
            await subject.reopen()
            assert await subject.value("a/k") == b"1"

    async def test_closing_twice_is_harmless(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"))
        await subject.engine.close()
        await subject.engine.close()

    async def test_closing_one_engine_leaves_the_others_at_work(self, subject: Subject) -> None:
        other = await subject.another()
        await subject.commit(Put("a/k", b"1"))
        watching = await subject.watch_from_now(engine=other)
        await subject.engine.close()
        receipt = await subject.commit(Increment("a/k", 1), engine=other)
        assert receipt.results == [2]
        assert (await watching.next()).version == receipt.version

    async def test_closing_leaves_no_task_behind(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"))
        watching = await subject.watch_from_now()
        await watching.close()
        await subject.engine.close()
        await subject.settle()
        assert asyncio.all_tasks() == {asyncio.current_task()}
