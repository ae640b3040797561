"""Messages against hand-made batches: what the library would never send is refused by the store, and nothing changed."""

from __future__ import annotations

import pytest

from holdfast import AccessDenied, Conflict
from holdfast.engine import Absent, Delete, Engine, Increment, Operation, Present, Push, Put, Take, Touch
from holdfast.identity import Role
from tests.middleware.keeper import SPACE, Keeper, batch, counted

ALICE, MALLORY = "a" * 30, "b" * 30
LINE = "queues/ready/in/499/"
HERS, HIS = f"reserved/in/{ALICE}/", f"reserved/in/{MALLORY}/"


async def reserving(keeper: Keeper) -> tuple[str, Engine, Engine]:
    """Alice has a message, and so has Mallory; one more waits. Gives the key of hers, and their engines."""
    alice, mallory = keeper.engine_of("alice"), keeper.engine_of("mallory")
    await alice.commit(SPACE, batch("alice", *(Push(LINE, b'"x"') for _ in range(3)), Increment("depths/in/ready", 3)))
    for engine, agent, lease in ((alice, "alice", ALICE), (mallory, "mallory", MALLORY)):
        await engine.commit(SPACE, batch(agent, Put(f"consumers/in/{lease}", b"{}", 30_000)))
        await engine.commit(SPACE, batch(agent, *counted(Take("queues/ready/in/", f"reserved/in/{lease}/"))))
    [key] = await keeper.entries(HERS)
    return key, alice, mallory


async def test_no_batch_forges_takes_or_ends_the_reservation_of_another() -> None:
    keeper = Keeper()
    hers, alice, mallory = await reserving(keeper)
    [his] = await keeper.entries(HIS)
    rest, id = hers.removeprefix(HERS), hers[-19:]
    attempts: list[tuple[Operation, ...]] = [
        (Delete(hers),),  # acknowledge another's
        (Delete(hers), Put(f"queues/ready/in/{rest}", b'"x"')),  # give back another's
        (Delete(hers), Put(f"reserved/in/-/{rest}", b'"x"', None, "1")),  # let another's fail
        (Put(hers, b'"forged"'),),  # change another's
        (Put(HIS + rest, b'"forged"'),),  # make a reservation of one's own
        (Put(f"{HERS}499/{id}/@mallory", b'"x"'), Increment("depths/in/reserved", 1)),  # into the hands of another
        (Put(f"reserved/in/-/{rest}", b'"forged"'),),  # make a dead letter
        (Put(f"{LINE}{id}", b'"forged"'),),  # make a message that would take the place of hers
        (Put(f"{LINE}{id}/@alice", b'"forged"'),),
        (Put(f"{LINE}{id}", b'"forged"'), Delete(his)),  # …giving up another one for it
        (Push(HERS, b'"x"'),),
        (Push(f"{HERS}499/", b'"x"'),),
        (Touch(hers, 1000),),
        (Increment(hers, 1),),
        (Take(HERS, HIS),),  # steal from a living consumer
        (Take(HERS, "queues/ready/in/"),),
        (Take(HIS, HERS),),  # press on another
        (Take("queues/ready/in/", HERS),),  # reserve for another
        (Take("queues/ready/in/", f"reserved/in/{'c' * 30}/"),),  # reserve without a lease
        (Take("queues/ready/in/", "reserved/in/-/"),),  # let what waits be dead
        (Take("queues/ready/in/", f"reserved/out/{MALLORY}/"),),  # into another queue
        (Take("queues/ready/in/499/", HIS),),  # without its priority
        (Take("queues/delayed/in/499/", LINE),),  # before its time, whatever it is
        (Take("queues/delayed/in/499/", "queues/ready/in/000/", 1, "queues/delayed/in/499/1"),),
        (Take("queues/ready/in/", HIS, source_counter="depths/in/other"),),
        (Put(f"consumers/in/{ALICE}", b"{}", 1),),  # end her lease
        (Delete(f"consumers/in/{ALICE}"),),
        (Touch(f"consumers/in/{ALICE}", 10**9),),
        (Put(f"consumers/in/{'d' * 30}", b"{}"),),  # a lease without end
        (Put("consumers/in/-", b"{}", 1000),),  # a life for dead letters
        (Put("depths/in/ready", b"7"),),
        (Increment("depths/in/ready", 1, 5),),
        (Delete("depths/in/reserved"),),
        (Put(f"reasons/in/{id}", b"[]"),),
        (Delete(f"reasons/in/{id}"),),
        (Put(f"reasons/in/{id}", b"[]"), Delete(his)),
        (Put("dedup/in/x", b'"1"'),),
        (Put("queues/ready/in/499", b"1"),),
        (Put("queues/elsewhere/in/1", b"1"),),
        (Push("queues/ready/in/", b"1"),),
        (Push("queues/ready/in/4/", b"1"),),
        (Push("queues/delayed/in/499/", b"1"),),
        (Push("queues/ready/in/499/1/", b"1"),),
    ]
    before = await keeper.entries()
    for operations in attempts:
        for sent in (operations, (Put("records/k", b"1"), *operations), counted(*operations)):
            with pytest.raises((AccessDenied, Conflict)) as caught:
                await mallory.commit(SPACE, batch("mallory", *sent))
            assert isinstance(caught.value, AccessDenied) or operations[0] == Delete("depths/in/reserved"), operations
            assert await keeper.entries() == before, operations
    await alice.commit(SPACE, batch("alice", *counted(Delete(hers)), when=(Present(hers),)))


async def test_what_a_dead_consumer_left_can_be_taken_and_what_a_living_one_has_cannot() -> None:
    keeper = Keeper()
    hers, alice, mallory = await reserving(keeper)
    take = Take(HERS, HIS)
    with pytest.raises(AccessDenied, match="another's"):
        await mallory.commit(SPACE, batch("mallory", take))
    with pytest.raises(Conflict):  # as the library asks, it is told what is so
        await mallory.commit(SPACE, batch("mallory", take, when=(Absent(f"consumers/in/{ALICE}"),)))
    keeper.clock.advance("29s")
    await mallory.commit(SPACE, batch("mallory", Touch(f"consumers/in/{MALLORY}", 30_000)))
    keeper.clock.advance("1s")
    await mallory.commit(SPACE, batch("mallory", take))
    with pytest.raises(AccessDenied):  # hers no longer: it is gone from where it was, and is another's where it is
        await alice.commit(SPACE, batch("alice", *counted(Delete(HIS + hers.removeprefix(HERS)))))


async def test_what_was_taken_ahead_begins_only_under_the_same_lease_of_one_s_own() -> None:
    keeper = Keeper()
    _, alice, mallory = await reserving(keeper)
    ahead = f"reserved/in/{ALICE}~/"
    await alice.commit(SPACE, batch("alice", *counted(Take("queues/ready/in/", ahead))))
    [key] = await keeper.entries(ahead)
    rest = key.removeprefix(ahead)
    before = await keeper.entries()
    for engine, agent, operations in (
        (mallory, "mallory", (Delete(key), Put(HERS + rest, b'"x"'))),  # begin it for her
        (mallory, "mallory", (Delete(key), Put(HIS + rest, b'"x"'))),  # take it from her
        (mallory, "mallory", (Take(ahead, HIS),)),
        (alice, "alice", (Put(HERS + rest, b'"x"'),)),  # have it twice
        (alice, "alice", (Delete(key), Put(HIS + rest, b'"x"'))),  # press it on him
        (alice, "alice", (Delete(key), Put(HERS + rest, b'"x"', 1000))),  # let it vanish
        (alice, "alice", (Delete(key), Put(f"reserved/in/{ALICE}~~/{rest}", b'"x"'))),
    ):
        with pytest.raises(AccessDenied):
            await engine.commit(SPACE, batch(agent, *counted(*operations)))
        assert await keeper.entries() == before
    await alice.commit(SPACE, batch("alice", Delete(key), Put(HERS + rest, b'"x"', None, "0"), when=(Present(key),)))
    assert HERS + rest in await keeper.entries(HERS)


async def test_one_s_own_message_is_put_under_one_s_own_lease_where_nobody_stands_in_line() -> None:
    keeper = Keeper()
    hers, alice, _ = await reserving(keeper)
    new, one_more = f"{HERS}499/{int(hers[-19:]) + 7}/@alice", Increment("depths/in/reserved", 1)
    with pytest.raises(Conflict) as refused:
        await alice.commit(SPACE, batch("alice", Put(new, b"1"), one_more))
    assert refused.value.condition == "empty"
    await alice.commit(SPACE, batch("alice", *counted(Take("queues/ready/in/", HERS))))
    attempts: list[tuple[Operation, ...]] = [
        (Put(new, b"1"),),  # without counting it
        (Put(new, b"1"), Increment("depths/out/reserved", 1)),
        (Put(new, b"1", 1000), one_more),  # for a while
        (Put(new.replace("alice", "mallory"), b"1"), one_more),  # in another's name
        (Put(new.partition("/@")[0], b"1"), one_more),
        (Put(new.replace(ALICE, "c" * 30), b"1"), one_more),  # without a lease
        (Put(new.replace(ALICE, MALLORY), b"1"), one_more),
    ]
    before = await keeper.entries()
    for operations in attempts:
        with pytest.raises((AccessDenied, Conflict)):
            await alice.commit(SPACE, batch("alice", *operations))
        assert await keeper.entries() == before, operations
    await alice.commit(SPACE, batch("alice", Put(new, b"1"), one_more))
    assert new in await keeper.entries(HERS)
    with pytest.raises((AccessDenied, Conflict)):  # it is there
        await alice.commit(SPACE, batch("alice", Put(new, b"2"), one_more))


async def test_a_lease_that_has_ended_takes_nothing() -> None:
    keeper = Keeper()
    _, alice, _ = await reserving(keeper)
    keeper.clock.advance("30s")
    before = await keeper.entries("reserved/")
    with pytest.raises(AccessDenied):
        await alice.commit(SPACE, batch("alice", *counted(Take("queues/ready/in/", HERS))))
    assert await keeper.entries("reserved/") == before


async def test_orchestrators_move_and_clear_what_waits_or_is_dead_and_not_what_a_consumer_has() -> None:
    keeper = Keeper()
    hers, alice, _ = await reserving(keeper)
    rest = hers.removeprefix(HERS)
    boss = keeper.engine_of("boss", "orchestrator")
    for operations in ((Delete(hers),), (Delete(hers), Put(f"queues/ready/in/{rest}", b'"x"'))):
        with pytest.raises(AccessDenied):
            await boss.commit(SPACE, batch("boss", *counted(*operations)))
    dead = f"reserved/in/-/{rest}"
    await alice.commit(SPACE, batch("alice", *counted(Delete(hers), Put(dead, b'"x"', None, "1"))))
    mallory = keeper.engine_of("mallory")
    with pytest.raises(AccessDenied):
        await mallory.commit(SPACE, batch("mallory", *counted(Delete(dead), Put(f"queues/ready/in/{rest}", b'"x"'))))
    await boss.commit(SPACE, batch("boss", *counted(Delete(dead), Put(f"queues/ready/in/{rest}", b'"x"'))))
    waiting = await keeper.entries(LINE)
    assert len(waiting) == 2
    for key in waiting:
        await boss.commit(SPACE, batch("boss", *counted(Delete(key))))
    assert await keeper.entries(LINE) == {}


async def test_one_s_own_chosen_id_is_one_s_own() -> None:
    keeper = Keeper()
    alice, mallory = keeper.engine_of("alice"), keeper.engine_of("mallory")
    key = f"{LINE}{'1' * 19}/@alice"
    await alice.commit(SPACE, batch("alice", *counted(Put(key, b"1")), when=(Absent(key),)))
    before = await keeper.entries()
    for operations in ((Put(key, b"2"),), (Delete(key),)):
        with pytest.raises(AccessDenied):
            await mallory.commit(SPACE, batch("mallory", *counted(*operations)))
    assert await keeper.entries() == before
    await alice.commit(SPACE, batch("alice", *counted(Delete(key))))


@pytest.mark.parametrize("role", ["agent", "orchestrator"])
async def test_the_numbers_of_messages_are_what_there_is_whatever_is_sent_by_hand(role: Role) -> None:
    keeper = Keeper()
    hers, _, _ = await reserving(keeper)
    eve = keeper.engine_of("eve", role)
    own, other = f"{LINE}{'1' * 19}/@eve", f"{LINE}{'2' * 19}/@eve"
    lease = "e" * 30
    await eve.commit(SPACE, batch("eve", Put(f"consumers/in/{lease}", b"{}", 30_000)))
    await eve.commit(SPACE, batch("eve", *counted(Put(own, b"1"))))
    ready, reserved, dead = (f"depths/in/{state}" for state in ("ready", "reserved", "dead"))
    mine = f"reserved/in/{lease}/"
    attempts: list[tuple[Operation, ...]] = [
        (Increment(ready, 1000),),
        (Increment(ready, -7000),),
        (Increment(dead, 1),),
        (Increment(ready, 1), Increment(ready, -2)),
        (Push(LINE, b"1"), Increment(ready, 2)),
        (Push(LINE, b"1"), Increment(reserved, 1)),
        (Push(LINE, b"1"), Increment("depths/out/ready", 1)),
        (Push(LINE, b"1"),),  # and not counted
        (Push(LINE, b"1", 1000), Increment(ready, 1)),  # to vanish by itself
        (Put(own, b"2"), Increment(ready, 1)),  # it is there already
        (Put(other, b"1"), Put(other, b"2"), Increment(ready, 2)),
        (Put(other, b"1"), Delete(other)),  # which leaves none
        (Delete(own),),
        (Delete(own), Increment(ready, -2)),
        (Delete(own), Delete(own), Increment(ready, -2)),
        (Delete(other), Increment(ready, -1)),  # it is not there
        (Delete(own), Put(own, b"2"), Increment(ready, 1)),
        (Push(LINE, b"1"), Increment(ready, 1), Delete(ready)),
        (Take("queues/ready/in/", mine),),  # not counted
        (Take("queues/ready/in/", mine, 1, None, ready),),
        (Take("queues/ready/in/", mine, 1, None, None, reserved),),
        (Take("queues/ready/in/", mine, 1, None, "depths/out/ready", "depths/out/reserved"),),
        (Take("queues/ready/in/", mine, 1, None, reserved, ready),),
        (Take("queues/ready/in/", mine, 1, None, ready, reserved), Delete(own), Increment(ready, -1)),
    ]
    before = await keeper.entries()
    for operations in attempts:
        for sent in (operations, (Put("records/k", b"1"), *operations)):
            with pytest.raises((AccessDenied, Conflict)):
                await eve.commit(SPACE, batch("eve", *sent))
            assert await keeper.entries() == before, operations
    for right in (
        (Delete(own), Put(own, b"2")),  # the same message, as it is now
        (Push(LINE, b"1"), Put(other, b"1"), Increment(ready, 1), Increment(ready, 1)),
        (Delete(other), Delete(own), Increment(ready, -2)),
        (Take("queues/ready/in/", mine, 9, None, ready, reserved),),
    ):
        await eve.commit(SPACE, batch("eve", *right))
    after = await keeper.entries()
    assert hers in after
    for number, prefix in ((ready, "queues/ready/in/"), (reserved, "reserved/in/")):
        assert int(after[number].value) == len([key for key in after if key.startswith(prefix)])
