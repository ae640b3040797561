"""One space never sees another: whatever the agents of two tenants send, the engine hears of each in its own space only."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine import Absent, Delete, Increment, Push, Put, Take
from holdfast.errors import AccessDenied
from tests.middleware.keeper import FREELY, Keeper, batch, refusal
from tests.soak import examples

SPACES = ("contoso", "fabrikam")
aimed = st.sampled_from((*SPACES, "nowhere", "_holdfast", "*", "contoso/", "", "CONTOSO"))
call = st.one_of(
    st.tuples(st.just("commit"), st.sampled_from((
        (Put("records/k", b"1"),), (Delete("records/k"),), (Increment("records/n", 1),), (Push("locks/lock/l/", b"{}", 9),),
        (Put("records/k", b"1"), Put("records/l", b"2")), (Take("queues/a/", "queues/b/"),), (),
    ))),
    st.tuples(st.just("probe"), st.just(())),
    st.tuples(st.sampled_from(("get", "get_many", "scan", "watch", "spaces", "spaces_all", "create", "drop", "compact")), st.just(())),
)  # fmt: skip


async def send(engine: Any, agent: str, space: str, what: str, operations: tuple[Any, ...]) -> object:
    match what:
        case "commit":
            return await engine.commit(space, batch(agent, *operations))
        case "probe":
            return await engine.commit(space, batch(agent, when=(Absent("records/k"),)))
        case "get":
            return await engine.get(space, ["records/k"])
        case "get_many":
            return await engine.get(space, ["records/k", "locks/lock/l/1"])
        case "scan":
            return await engine.scan(space, "records/")
        case "watch":
            return [commit async for commit in engine.watch(space, "records/", live=False)]
        case "spaces":
            return await engine.spaces(space)
        case "spaces_all":
            return await engine.spaces()
        case "create":
            return await engine.create(space)
        case "drop":
            return await engine.drop(space)
    return await engine.compact(space, 1)


@settings(max_examples=examples(80), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(SPACES), st.sampled_from(("agent", "orchestrator")), aimed, call), max_size=20)
)
def test_one_space_never_sees_another(calls: list[tuple[str, Any, str, tuple[str, tuple[Any, ...]]]]) -> None:
    async def work() -> None:
        keeper = Keeper(FREELY)
        for home, role, space, (what, operations) in calls:
            keeper.witness.seen.clear()
            engine = keeper.engine_of(f"agent-of-{home}", role, home)
            refused = await refusal(send(engine, f"agent-of-{home}", space, what, operations))
            assert {where for where, _ in keeper.witness.seen} <= {home}
            if space != home and what != "spaces_all":
                assert isinstance(refused, AccessDenied)
                assert keeper.witness.seen == []
                assert not any(other in str(refused) for other in SPACES if other != home)

    asyncio.run(work())
