"""Hand-made requests against correlations: an agent writes its own signal, sees signals and the context, and nothing else."""

from __future__ import annotations

import pytest

from holdfast.engine import Absent, Batch, Condition, Delete, Increment, Operation, Present, Push, Put, Take, Touch
from holdfast.errors import AccessDenied, Error
from holdfast.identity import Role
from holdfast.middleware.rules import AccessRule, Rules
from tests.middleware.keeper import SPACE, Keeper, batch

STATE = "correlations/states/c-1"
MADE = "decisions/made/c-1"
OUTBOX = "decisions/outbox/c-1"
CONTEXT = "correlations/context/c-1"
LIVES = "correlations/orchestrators/o-1"
PUBLISHING = "correlations/publishing"
SIGNAL = "sections/correlations/c-1/{}/-"


async def desk() -> Keeper:
    """A keeper with a correlation, a decision, an orchestrator that lives, and a signal of risk."""
    keeper = Keeper()
    lead = keeper.engine_of("lead", "orchestrator")
    await lead.commit(
        SPACE, batch("lead", *(Put(key, b"{}") for key in (STATE, MADE, OUTBOX, CONTEXT)), Put(LIVES, b"{}", 60_000))
    )
    await keeper.engine_of("risk").commit(SPACE, batch("risk", Put(SIGNAL.format("risk"), b"{}")))
    return keeper


def everything_one_can_do(key: str) -> list[Operation]:
    return [Put(key, b"1"), Delete(key), Touch(key, 99_000), Increment(key, 1), Push(key + "/", b"1")]


@pytest.mark.parametrize("key", [STATE, MADE, OUTBOX, CONTEXT, LIVES, PUBLISHING])
async def test_an_agent_writes_neither_state_nor_decision_whether_or_not_there_is_one(key: str) -> None:
    keeper = await desk()
    before = await keeper.entries()
    mallory = keeper.engine_of("mallory")
    for target in (key, key.replace("c-1", "c-2").replace("o-1", "o-2")):
        conditions: list[tuple[Condition, ...]] = [()]
        if target.startswith("correlations/"):
            conditions += [(Absent(target),), (Present(target),)]
        for operation in everything_one_can_do(target):
            for needed in conditions:
                with pytest.raises(AccessDenied):
                    await mallory.commit(SPACE, Batch("mallory", (operation,), needed))
    for move in (Take("records/", key + "/"), Take(key[: key.rindex("/") + 1], "records/")):
        with pytest.raises(AccessDenied):
            await mallory.commit(SPACE, batch("mallory", move))
    assert await keeper.entries() == before


async def test_an_agent_signals_in_its_own_name_only() -> None:
    keeper = await desk()
    before = await keeper.entries()
    mallory = keeper.engine_of("mallory")
    for group in ("correlations", "late"):
        for agent in ("risk", "momentum"):
            key = SIGNAL.format(agent).replace("correlations", group, 1)
            for operation in everything_one_can_do(key):
                with pytest.raises(AccessDenied):
                    await mallory.commit(SPACE, batch("mallory", operation))
    with pytest.raises(AccessDenied):
        await mallory.commit(SPACE, batch("mallory", Put(SIGNAL.format("mallory"), b"{}", owner="risk")))
    with pytest.raises(AccessDenied):
        await mallory.commit(SPACE, batch("risk", Put(SIGNAL.format("risk"), b"{}")))
    assert await keeper.entries() == before
    await mallory.commit(SPACE, batch("mallory", Put(SIGNAL.format("mallory"), b"{}")))


async def test_an_agent_sees_signals_and_context_and_no_decision() -> None:
    keeper = await desk()
    risk = keeper.engine_of("risk")
    assert all(await risk.get(SPACE, [STATE, CONTEXT, SIGNAL.format("risk")]))
    assert len((await risk.scan(SPACE, "sections/correlations/c-1/")).entries) == 1
    with pytest.raises(AccessDenied, match="is for orchestrators"):
        await risk.get(SPACE, [MADE])
    with pytest.raises(AccessDenied):
        await risk.scan(SPACE, "decisions/")
    with pytest.raises(AccessDenied):
        await anext(aiter(risk.watch(SPACE, "decisions/outbox/", cursor="r0")))
    with pytest.raises(AccessDenied, match="is for orchestrators"):  # a condition would tell it too
        await risk.commit(SPACE, Batch("risk", (Put("records/k", b"1"),), (Present(MADE),)))


@pytest.mark.parametrize("role", ["orchestrator", "admin"])
async def test_orchestrators_and_administrators_see_and_write_decisions(role: Role) -> None:
    keeper = await desk()
    other = keeper.engine_of("other", role)
    assert all(await other.get(SPACE, [STATE, MADE, OUTBOX]))
    await other.commit(SPACE, batch("other", Put(STATE, b"1"), Put(MADE, b"1"), Delete(OUTBOX), Touch(LIVES, 90_000)))


async def test_rules_that_take_reading_and_writing_from_an_orchestrator_take_decisions_too() -> None:
    keeper = await desk()
    keeper.policy.reload(Rules(access_control=(AccessRule("*", ("Get", "Watch"), ()),), rate_limits=(), quotas=()))
    lead = keeper.engine_of("lead", "orchestrator")
    with pytest.raises(AccessDenied):
        await lead.get(SPACE, [MADE])
    keeper.policy.reload(Rules(access_control=(AccessRule("*", ("*",), ()),), rate_limits=(), quotas=()))
    assert all(await lead.get(SPACE, [MADE]))
    with pytest.raises(AccessDenied):
        await keeper.engine_of("risk").get(SPACE, [MADE])


async def test_another_tenant_sees_nothing_of_it() -> None:
    keeper = await desk()
    for role in ("agent", "orchestrator"):
        foreign = keeper.engine_of("lead", role, "fabrikam")  # type: ignore[arg-type]
        for work in (foreign.get(SPACE, [STATE]), foreign.scan(SPACE, "correlations/"), foreign.get(SPACE, [MADE])):
            with pytest.raises(Error):
                await work
