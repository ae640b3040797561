"""Hand-made batches about tasks: a state, an event, a count, an output that is not the sender's to write is refused, and nothing changed."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.codec import encode
from holdfast.engine import Batch, Delete, Increment, Operation, Push, Put, Touch
from holdfast.errors import AccessDenied
from holdfast.layers.redaction import Redaction
from holdfast.layers.task_spec import TaskSpec
from holdfast.layers.task_states import Parts, TaskState, state_of
from holdfast.layers.task_submission import submission
from tests.middleware.keeper import SPACE, Keeper, batch

TID = "1835008000000000001"
OTHER = "1835008000000000002"
NOW = 1_750_000_000_000
SPEC = TaskSpec(function="a:b", env={"API_KEY": "k-1"})
X = encode("x")


def submitting(tid: str, agent: str) -> Parts:
    return submission(tid, SPEC, None, owner=agent, now_ms=NOW, redaction=Redaction())


async def submitted(agent: str = "alice") -> Keeper:
    """A keeper with a task of that agent's."""
    keeper = Keeper()
    parts = submitting(TID, agent)
    await keeper.engine_of(agent).commit(SPACE, Batch(agent, parts.operations, parts.conditions))
    return keeper


async def state(keeper: Keeper) -> TaskState:
    [entry] = await keeper.engine_of("alice").get(SPACE, [f"tasks/states/{TID}"])
    assert entry is not None
    return state_of(entry)


def forged(status: str) -> bytes:
    told = {"tid": TID, "status": status, "owner": "mallory", "title": "t", "created_at": "2025-06-15T15:06:40Z"}
    return encode(told)


FORGERIES: list[tuple[str, tuple[Operation, ...]]] = [
    ("a state that only managers write", (Put(f"tasks/states/{TID}", forged("completed"), tag=":task:completed"),)),
    ("a state without a tag", (Put(f"tasks/states/{TID}", forged("completed")),)),
    ("a state created anew", (Put(f"tasks/states/{TID}", forged("created"), tag=":task:created"),)),
    ("a state of no spec", (Put(f"tasks/states/{OTHER}", forged("created"), tag=":task:created"),)),
    ("a state with a ttl", (Put(f"specs/{OTHER}", X), Put(f"tasks/states/{OTHER}", X, 5, ":task:created"))),
    ("the end of a task", (Delete(f"tasks/states/{TID}"),)),
    ("an event", (Push(f"tasks/log/{TID}/", X, tag=":task:completed"),)),
    ("an event of a change that is not made", (Push(f"tasks/log/{TID}/", X, tag=":task:cancelled"),)),
    ("an event of no kind", (Push(f"tasks/log/{TID}/", X),)),
    ("a count", (Increment("tasks/counts/completed", 5),)),
    ("a count of what was not submitted", (Increment("tasks/counts/created", 1),)),
    ("a count that falls", (Increment("tasks/counts/created", -1),)),
    ("an output", (Put(f"tasks/outbox/{TID}/0000000000", X),)),
    ("a result", (Put(f"tasks/results/{TID}", X),)),
    ("a manager", (Put(f"tasks/managers/{OTHER}", X, 10_000),)),
    ("a manager's heartbeat", (Touch(f"tasks/managers/{TID}", 10_000),)),
    ("a place in a manager's index", (Put(f"tasks/running/{OTHER}/{TID}", X),)),
    ("a place among the finished", (Put(f"tasks/finished/0000000000001/{TID}", X, tag=":task:cancelled"),)),
    ("an answer", (Put(f"tasks/ctrl_out/{TID}/1", X),)),
    ("a pipeline that has ended", (Put("tasks/pipelines/p", X, tag=":pipeline:completed"),)),
    ("the hands of a manager", (Put(f"reserved/T{TID}.inbox/{OTHER}/499/{TID}/@mallory", X),)),
    ("another spec", (Put(f"specs/{TID}", encode(SPEC)),)),
    ("no spec", (Delete(f"specs/{TID}"),)),
    ("something new under tasks", (Put("tasks/anything", X),)),
]


@pytest.mark.parametrize("agent", ["alice", "mallory"])
@pytest.mark.parametrize(("what", "operations"), FORGERIES)
async def test_an_agent_forges_nothing_not_even_about_its_own_task(
    agent: str, what: str, operations: tuple[Operation, ...]
) -> None:
    keeper = await submitted()
    before = await keeper.entries()
    with pytest.raises(AccessDenied):
        await keeper.engine_of(agent).commit(SPACE, batch(agent, *operations))
    assert await keeper.entries() == before
    assert keeper.denials


CANCEL: tuple[Operation, ...] = (
    Put(f"tasks/states/{TID}", forged("cancelled"), 1000, ":task:cancelled"),
    Push(f"tasks/log/{TID}/", X, tag=":task:cancelled"),
    Delete(f"tasks/waiting/{TID}"),
    Put(f"tasks/finished/{NOW + 1000:013d}/{TID}", X, tag=":task:cancelled"),
    Increment("tasks/counts/created", -1),
    Increment("tasks/counts/cancelled", 1),
)
STOP = Push(f"tasks/ctrl_in/{TID}/", encode({"command": "STOP"}))


@pytest.mark.parametrize("lacking", range(len(CANCEL)))
async def test_a_task_is_not_cancelled_by_halves(lacking: int) -> None:
    keeper = await submitted()
    before = await keeper.entries()
    with pytest.raises(AccessDenied):
        await keeper.engine_of("alice").commit(
            SPACE, batch("alice", *(op for number, op in enumerate(CANCEL) if number != lacking))
        )
    assert await keeper.entries() == before


@pytest.mark.parametrize("operations", [CANCEL, (STOP,)])
async def test_only_its_owner_cancels_and_controls_a_task(operations: tuple[Operation, ...]) -> None:
    keeper = await submitted()
    before = await keeper.entries()
    with pytest.raises(AccessDenied):
        await keeper.engine_of("mallory").commit(SPACE, batch("mallory", *operations))
    assert await keeper.entries() == before
    await keeper.engine_of("alice").commit(SPACE, batch("alice", *operations))


async def test_a_task_that_a_manager_has_taken_is_controlled_and_not_cancelled_by_its_owner() -> None:
    keeper = await submitted()
    boss = keeper.engine_of("boss", "orchestrator")
    await boss.commit(SPACE, batch("boss", Put(f"tasks/states/{TID}", forged("spawning"), tag=":task:spawning")))
    with pytest.raises(AccessDenied, match="boss"):
        await keeper.engine_of("alice").commit(SPACE, batch("alice", *CANCEL))
    await keeper.engine_of("alice").commit(SPACE, batch("alice", STOP))
    assert (await state(keeper)).status == "spawning"


async def test_a_command_for_a_task_that_is_not_there_is_refused() -> None:
    keeper = await submitted()
    push = Push(f"tasks/ctrl_in/{OTHER}/", encode({"command": "STOP"}))
    with pytest.raises(AccessDenied):
        await keeper.engine_of("alice").commit(SPACE, batch("alice", push))


async def test_readers_believe_the_tag_and_not_the_value() -> None:
    keeper = Keeper()
    parts = submitting(TID, "mallory")
    lie = tuple(
        msgspec.structs.replace(op, value=forged("completed"))
        if isinstance(op, Put) and op.key == f"tasks/states/{TID}"
        else op
        for op in parts.operations
    )
    await keeper.engine_of("mallory").commit(SPACE, Batch("mallory", lie, parts.conditions))
    assert (await state(keeper)).status == "created"


async def test_specs_are_read_by_orchestrators_alone() -> None:
    keeper = await submitted()
    for agent in ("alice", "mallory"):
        engine = keeper.engine_of(agent)
        with pytest.raises(AccessDenied):
            await engine.get(SPACE, [f"specs/{TID}"])
        with pytest.raises(AccessDenied):
            await engine.scan(SPACE, "specs/")
        with pytest.raises(AccessDenied):
            async for _ in engine.watch(SPACE, "specs/", live=False):
                pass
    [entry] = await keeper.engine_of("boss", "orchestrator").get(SPACE, [f"specs/{TID}"])
    assert entry is not None
    assert b"k-1" in entry.value
    page = await keeper.engine_of("alice").scan(SPACE, "tasks/")
    assert not any(b"k-1" in each.value for each in page.entries)


async def test_a_manager_neither_renews_nor_removes_another_one() -> None:
    keeper = await submitted()
    one, two = keeper.engine_of("one", "orchestrator"), keeper.engine_of("two", "orchestrator")
    key = f"tasks/managers/{OTHER}"
    await one.commit(SPACE, batch("one", Put(key, X, 10_000)))
    before = await keeper.entries()
    for operation in (Touch(key, 20_000), Delete(key), Put(key, X, 20_000)):
        with pytest.raises(AccessDenied, match="one"):
            await two.commit(SPACE, batch("two", operation))
    assert await keeper.entries() == before
    await one.commit(SPACE, batch("one", Delete(key)))


async def test_a_message_is_not_taken_out_of_the_hands_of_a_manager_that_lives() -> None:
    keeper = await submitted()
    one, two = keeper.engine_of("one", "orchestrator"), keeper.engine_of("two", "orchestrator")
    mine, theirs = "1835008000000000011", "1835008000000000012"
    tail = f"499/{TID}/@alice"
    ready, held = f"queues/ready/T{TID}.inbox/{tail}", f"reserved/T{TID}.inbox/{mine}/{tail}"
    stolen = f"reserved/T{TID}.inbox/{theirs}/{tail}"
    for engine, name, tid in ((one, "one", mine), (two, "two", theirs)):
        await engine.commit(SPACE, batch(name, Put(f"tasks/managers/{tid}", X, 10_000)))
    with pytest.raises(AccessDenied):  # made, and not moved
        await one.commit(SPACE, batch("one", Put(held, X)))
    with pytest.raises(AccessDenied):  # under another's name
        await two.commit(SPACE, batch("two", Delete(ready), Put(held, X)))
    await one.commit(SPACE, batch("one", Delete(ready), Put(held, X)))
    before = await keeper.entries()
    for operations in ((Delete(held), Put(stolen, X)), (Delete(held),)):
        with pytest.raises(AccessDenied):
            await two.commit(SPACE, batch("two", *operations))
    assert await keeper.entries() == before
    await one.commit(SPACE, batch("one", Delete(f"tasks/managers/{mine}")))
    await two.commit(SPACE, batch("two", Delete(held), Put(stolen, X)))
