"""Guarantee 8, usage: who keeps how many keys and bytes in which subspace, exact after every kind of change."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from holdfast.engine import Absent, Delete, Increment, Push, Put, Take, Touch
from holdfast.errors import Conflict, InvalidInput
from holdfast.keys import subspace_of
from holdfast.testing.conformance.subject import ALICE, BOB, ELSEWHERE, SPACE, Subject


def size(key: str, value: bytes) -> int:
    """What an entry counts: the bytes of its key and of its value."""
    return len(key.encode()) + len(value)


async def counted(subject: Subject, space: str = SPACE) -> dict[tuple[str, str], tuple[int, int]]:
    """The usage as it follows from the entries."""
    totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for entry in await subject.entries(space=space):
        total = totals[entry.owner, subspace_of(entry.key)]
        total[0] += 1
        total[1] += size(entry.key, entry.value)
    return {where: (keys, size) for where, (keys, size) in totals.items()}


class TestUsage:
    async def test_usage_counts_keys_and_bytes_by_owner_and_subspace(self, subject: Subject) -> None:
        await subject.commit(Put("a/1", b"12345"), Put("a/2", b"1"), Put("b/1", b"1"), Put("a/3", b"1", owner=BOB))
        assert await subject.usage() == {
            (ALICE, "a"): (2, size("a/1", b"12345") + size("a/2", b"1")),
            (ALICE, "b"): (1, size("b/1", b"1")),
            (BOB, "a"): (1, size("a/3", b"1")),
        }

    async def test_keys_count_in_bytes_of_utf_8(self, subject: Subject) -> None:
        await subject.commit(Put("\u00e9/\U0001f9ff", b'"\xc3\xa9"'))
        assert await subject.usage() == {(ALICE, "\u00e9"): (1, 2 + 1 + 4 + 4)}

    async def test_a_replaced_value_is_credited(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b'"' + b"x" * 1000 + b'"'))
        await subject.commit(Put("a/k", b"1"))
        assert await subject.usage() == {(ALICE, "a"): (1, size("a/k", b"1"))}
        await subject.commit(Put("a/k", b"12"), Put("a/k", b"123"), Put("a/k", b"1234"))
        assert await subject.usage() == {(ALICE, "a"): (1, size("a/k", b"1234"))}

    async def test_a_change_of_owner_moves_the_usage(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"12345"))
        await subject.commit(Put("a/k", b"123"), actor=BOB)
        assert await subject.usage() == {(BOB, "a"): (1, size("a/k", b"123"))}

    async def test_a_delete_is_credited_to_the_owner_whoever_deletes(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"), Put("a/l", b"1"))
        await subject.commit(Delete("a/k"), Delete("a/none"), actor=BOB)
        assert await subject.usage() == {(ALICE, "a"): (1, size("a/l", b"1"))}
        await subject.commit(Delete("a/l"), actor=BOB)
        assert await subject.usage() == {}

    async def test_an_increment_is_charged_to_the_owner_of_the_number(self, subject: Subject) -> None:
        await subject.commit(Put("a/n", b"9"))
        await subject.commit(Increment("a/n", 1), Increment("a/m", -1000), actor=BOB)
        assert await subject.usage() == {
            (ALICE, "a"): (1, size("a/n", b"10")),
            (BOB, "a"): (1, size("a/m", b"-1000")),
        }

    async def test_a_push_is_charged_to_the_actor(self, subject: Subject) -> None:
        receipt = await subject.commit(Push("q/", b"123"), actor=BOB)
        assert await subject.usage() == {(BOB, "q"): (1, size(str(receipt.results[0]), b"123"))}

    async def test_a_take_moves_the_usage_to_the_taker_and_the_target(self, subject: Subject) -> None:
        await subject.commit(Put("q/1", b"123"), Put("q/2", b"1"))
        await subject.commit(Take("q/", "reserved/bob/", target_counter="n/1"), actor=BOB)
        assert await subject.usage() == {
            (ALICE, "q"): (1, size("q/2", b"1")),
            (BOB, "reserved"): (1, size("reserved/bob/1", b"123")),
            (BOB, "n"): (1, size("n/1", b"1")),
        }

    async def test_an_expiry_is_credited_when_it_is_told(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"12345", ttl_ms=1000), Put("a/l", b"1"))
        subject.advance_ms(1000)
        await subject.commit()
        assert await subject.usage() == {(ALICE, "a"): (1, size("a/l", b"1"))}

    async def test_replacing_an_expired_entry_credits_its_old_owner(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"12345", ttl_ms=1000), Put("a/n", b"5", ttl_ms=1000))
        subject.advance_ms(1000)
        await subject.commit(Put("a/k", b"1"), Increment("a/n", 10), actor=BOB)
        assert await subject.usage() == {(BOB, "a"): (2, size("a/k", b"1") + size("a/n", b"10"))}

    async def test_a_touch_costs_nothing(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        before = await subject.usage()
        await subject.commit(Touch("a/k", 5000), actor=BOB)
        assert await subject.usage() == before

    async def test_a_repeated_request_is_charged_once(self, subject: Subject) -> None:
        for _ in range(3):
            await subject.commit(Put("a/k", b"1"), Push("q/", b"1"), request_id="r")
        assert await subject.usage() == await counted(subject)

    async def test_an_entry_that_came_and_went_in_one_batch_costs_nothing(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"), Put("a/k", b"22", owner=BOB), Delete("a/k"))
        assert await subject.usage() == {}

    async def test_refused_batches_cost_nothing(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b'"x"'))
        async with subject.refused(Conflict):
            await subject.commit(Put("a/l", b"1"), when=[Absent("a/k")])
        async with subject.refused(InvalidInput):
            await subject.commit(Put("a/l", b"1"), Increment("a/k", 1))
        assert await subject.usage() == {(ALICE, "a"): (1, size("a/k", b'"x"'))}

    async def test_usage_is_exact_under_concurrency(self, subject: Subject) -> None:
        await asyncio.gather(
            *(
                subject.commit(
                    Put(f"a/{i % 7}", b"%d" % 10**i),
                    Increment("n/1", i**5),
                    Push("q/", b"%d" % i),
                    *([Delete(f"a/{i % 5}")] if i % 3 else [Take("q/", "r/", n=3)]),
                    actor=(ALICE, BOB, "carol")[i % 3],
                )
                for i in range(60)
            )
        )
        assert await subject.usage() == await counted(subject)

    async def test_usage_of_spaces_is_separate(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"))
        await subject.commit(Put("a/k", b"12345"), space=ELSEWHERE)
        assert await subject.usage() == {(ALICE, "a"): (1, size("a/k", b"1"))}
        assert await subject.usage(ELSEWHERE) == {(ALICE, "a"): (1, size("a/k", b"12345"))}

    async def test_a_dropped_space_keeps_nothing(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"12345"))
        await subject.engine.drop(SPACE)
        await subject.commit(Put("b/k", b"1"))
        assert await subject.usage() == {(ALICE, "b"): (1, size("b/k", b"1"))}

    async def test_usage_is_the_same_through_another_engine_and_after_a_reopen(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"12345"), Put("b/k", b"1", owner=BOB), Push("q/", b"1"))
        before = await subject.usage()
        if subject.capabilities.shared:
            other = await subject.another()
            await subject.commit(Put("a/k", b"1"), engine=other)
            await subject.commit(Put("a/k", b"12345"), engine=subject.engine)
            assert (await other.spaces(SPACE))[0].usage == (await subject.info()).usage
        assert await subject.usage() == before
        await subject.reopen()
        assert await subject.usage() == before
