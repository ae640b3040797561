"""Shared documents: contributions that never conflict, a body that is never overwritten unseen."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast import (
    AccessDenied,
    Conflict,
    InvalidInput,
    LeaseLost,
    LockAcquisitionError,
    ManualClock,
    Outdated,
    Space,
    Store,
)
from holdfast.engine import Batch, Engine, Entry, Page, Receipt
from holdfast.middleware.wrapper import Wrapper
from tests.layers.conftest import everything

NAME = "research/MSFT"
AGENTS, TIMES = (20, 1000) if os.environ.get("HOLDFAST_SOAK") else (20, 25)


@pytest.fixture
def risk(store: Store) -> Space:
    return store.space("contoso", agent="risk")


@pytest.fixture
def boss(store: Store) -> Space:
    return store.space("contoso", agent="orchestrator")


# --- reading and contributing ---


async def test_a_document_that_nobody_wrote_to_is_empty(space: Space) -> None:
    before = await everything(space)
    view = await space.document(NAME).read()
    assert (view.etag, view.body, view.contributions, view.versions, view.stale) == (0, {}, {}, {"body": 0}, [])
    assert await space.documents.list() == []
    assert await space.document(NAME).history() == []
    assert await everything(space) == before


async def test_a_contribution_carries_what_it_is_made_of(space: Space, risk: Space, clock: ManualClock) -> None:
    doc = space.document(NAME)
    first = await doc.contribute({"outlook": "growth"}, confidence=0.8)
    view = await risk.document(NAME).read()
    clock.advance("1s")
    second = await risk.document(NAME).contribute(["elevated"], inputs=view.versions, confidence=1)
    view = await doc.read()
    market, other = view.contributions["market"], view.contributions["risk"]
    assert (market.data, market.version, market.instance, market.inputs) == ({"outlook": "growth"}, first, "1", {})
    assert (market.confidence, other.confidence) == (0.8, 1)
    assert other.inputs == {"body": 0, "market/1": first}
    assert (other.timestamp - market.timestamp).total_seconds() == 1
    assert view.versions == {"body": 0, "market/1": first, "risk/1": second}


async def test_a_contribution_that_rests_on_an_outdated_input_is_told(space: Space, risk: Space, boss: Space) -> None:
    market, other = space.document(NAME), risk.document(NAME)
    first = await market.contribute(1)
    await other.contribute(2, inputs=(await other.read()).versions)
    assert (await market.read()).stale == []
    second = await market.contribute(3, inputs=(await market.read()).versions)
    view = await market.read()
    assert view.stale == [Outdated("risk/1", "market/1", first, second)]
    body = await boss.document(NAME).replace({"round": 1}, etag=0)
    assert {(each.section, each.input, each.present) for each in (await market.read()).stale} == {
        ("market/1", "body", body.etag),
        ("risk/1", "body", body.etag),
        ("risk/1", "market/1", second),
    }
    await market.withdraw()
    assert Outdated("risk/1", "market/1", first, None) in (await market.read()).stale


async def test_instances_of_an_agent_are_both_kept_in_mode_merge(store: Store, space: Space) -> None:
    again = store.space("contoso", agent="market", instance="2")
    await space.document(NAME).contribute("a")
    await again.document(NAME).contribute("b")
    view = await space.document(NAME).read()
    assert {name: each.data for name, each in view.sections.items()} == {"market/1": "a", "market/2": "b"}
    assert view.contributions["market"].data == "b"


async def test_in_mode_reject_an_instance_that_has_not_seen_the_other_gets_both_versions(
    store: Store, space: Space
) -> None:
    one = space.document(NAME, mode="reject")
    two = store.space("contoso", agent="market", instance="2").document(NAME, mode="reject")
    first = await one.contribute("a")
    second = await one.contribute("b")
    before = await everything(space)
    with pytest.raises(Conflict, match="instance '1'") as caught:
        await two.contribute("c")
    assert (caught.value.mine, caught.value.theirs.data, caught.value.theirs.version) == ("c", "b", second)
    assert await everything(space) == before
    view = await two.read()
    assert second > first
    third = await two.contribute("c", inputs=view.versions)
    with pytest.raises(Conflict):
        await one.contribute("d")
    with pytest.raises(Conflict):
        await two.contribute("d", inputs=view.versions)  # it is not what it was any more
    assert (await one.read()).contributions["market"].instance == "2"
    assert await one.contribute("d") > third


async def test_in_mode_reject_two_processes_of_one_instance_are_told_so(store: Store, space: Space) -> None:
    await space.document(NAME, mode="reject").contribute("a")
    before = await everything(space)
    with pytest.raises(Conflict, match="same instance but has not seen that; processes of one agent need an instance="):
        await store.space("contoso", agent="market").document(NAME, mode="reject").contribute("b")
    assert await everything(space) == before


async def test_processes_that_name_no_instance_are_the_same_one(store: Store, space: Space) -> None:
    await space.document(NAME).contribute("a")
    await store.space("contoso", agent="market").document(NAME).contribute("b")
    assert {name: each.data for name, each in (await space.document(NAME).read()).sections.items()} == {"market/1": "b"}


async def test_in_mode_reject_a_repeated_request_is_answered_as_before(store: Store, space: Space) -> None:
    one = space.document(NAME, mode="reject")
    version = await one.contribute("a", request_id="r")
    before = await everything(space)
    assert await one.contribute("a", request_id="r") == version
    again = store.space("contoso", agent="market", instance="2").document(NAME, mode="reject")
    assert await again.contribute("a", request_id="r") == version, "by whichever instance"
    assert await everything(space) == before
    last = await one.contribute("b")
    assert await one.contribute("a", request_id="r") == version
    with pytest.raises(InvalidInput, match="used before for something else"):
        await one.contribute("c", request_id="r")
    assert (await one.read()).versions["market/-"] == last
    assert await one.contribute("d") > last, "what it has seen is what it wrote last"


async def test_in_mode_reject_the_same_request_twice_at_once_contributes_once(space: Space) -> None:
    docs = [space.document(NAME, mode="reject") for _ in range(4)]
    versions = await asyncio.gather(*(doc.contribute("a", request_id="r") for doc in docs))
    assert len(set(versions)) == 1
    assert [event.kind for event in await docs[0].history()] == ["contributed"]


async def test_in_mode_reject_a_section_that_has_ended_by_itself_is_free_for_who_wrote_it(
    store: Store, space: Space, clock: ManualClock
) -> None:
    one = space.document(NAME, mode="reject")
    two = store.space("contoso", agent="market", instance="2").document(NAME, mode="reject")
    await one.contribute("a", ttl="1m")
    clock.advance("2m")
    last = await one.contribute("b", ttl="1m")
    clock.advance("2m")
    await two.contribute("c")
    with pytest.raises(Conflict, match="instance '2'"):
        await one.contribute("d")
    await two.withdraw()
    assert last in one._seen.values()


async def test_in_mode_reject_an_orchestrator_sees_each_section_for_itself(space: Space, boss: Space) -> None:
    doc = boss.document(NAME, mode="reject")
    await doc.contribute("boss")
    await doc.contribute("a", agent="market")
    await doc.contribute("b", agent="market")
    with pytest.raises(Conflict):
        await space.document(NAME, mode="reject").contribute("c")
    await doc.contribute("boss again")
    assert {name: each.data for name, each in (await doc.read()).contributions.items()} == {
        "orchestrator": "boss again",
        "market": "b",
    }


async def test_contributions_of_many_agents_are_all_kept(store: Store) -> None:
    async def work(number: int) -> None:
        doc = store.space("contoso", agent=f"agent{number}").document(NAME)
        for turn in range(TIMES):
            await doc.contribute({"turn": turn})

    await asyncio.gather(*map(work, range(AGENTS)))
    space = store.space("contoso", agent="market")
    view = await space.document(NAME).read()
    assert {name: each.data for name, each in view.contributions.items()} == {
        f"agent{number}": {"turn": TIMES - 1} for number in range(AGENTS)
    }
    told: dict[str, list[int]] = {}
    before = None
    while events := await space.document(NAME).history(before=before, limit=300):
        before = events[-1].id
        for event in events:
            told.setdefault(event.by, []).append(event.data["data"]["turn"])
    assert told == {f"agent{number}": [*reversed(range(TIMES))] for number in range(AGENTS)}


async def test_in_mode_reject_every_loser_gets_a_conflict(store: Store) -> None:
    documents = [
        store.space("contoso", agent="market", instance=f"{number}").document(NAME, mode="reject")
        for number in range(10)
    ]
    for doc in documents:
        await doc.read()
    outcomes = await asyncio.gather(
        *(doc.contribute(number) for number, doc in enumerate(documents)), return_exceptions=True
    )
    won = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, int)]
    assert len(won) == 1
    assert all(isinstance(each, Conflict) for number, each in enumerate(outcomes) if number not in won)
    assert (await documents[0].read()).contributions["market"].data == won[0]


async def test_a_contribution_ends_with_its_ttl(space: Space, clock: ManualClock) -> None:
    await space.document(NAME).contribute(1, ttl="1m")
    clock.advance("61s")
    assert (await space.document(NAME).read()).contributions == {}


async def test_a_repeated_contribution_is_made_once(space: Space) -> None:
    doc = space.document(NAME)
    version = await doc.contribute(1, request_id="r1")
    assert await doc.contribute(1, request_id="r1") == version
    assert len(await doc.history()) == 1


WRONG: list[dict[str, Any]] = [
    {"confidence": 1.1}, {"confidence": -0.1}, {"confidence": True}, {"confidence": "high"}, {"inputs": {"body": "1"}},
    {"inputs": {"body": -1}}, {"inputs": {1: 1}}, {"agent": "a/b"}, {"instance": ""}, {"ttl": 0},
]  # fmt: skip


async def test_a_contribution_that_makes_no_sense_is_refused(space: Space) -> None:
    before = await everything(space)
    for wrong in WRONG:
        with pytest.raises(InvalidInput):
            await space.document(NAME).contribute(1, **wrong)
    assert await everything(space) == before


async def test_options_that_do_not_exist_are_refused(space: Space) -> None:
    with pytest.raises(InvalidInput, match="mode"):
        space.document(NAME, mode="overwrite")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="consistency"):
        await space.document(NAME).read(consistency="linear")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        space.document("")


async def test_an_odd_section_written_by_hand_does_not_break_readers(space: Space) -> None:
    doc = space.document(NAME)
    for number, odd in enumerate(
        [None, [1], {"inputs": 3, "confidence": "x"}, {"inputs": {"body": "x"}, "confidence": 7}]
    ):
        await space._scope.commit((doc._sections.put(odd, instance=f"{number}"),))
    view = await doc.read()
    assert [each.data for each in view.sections.values()] == [None, [1], None, None]
    assert view.stale == []
    assert {each.confidence for each in view.sections.values()} == {None}


# --- who may write what ---


async def test_behind_a_policy_agents_write_their_section_and_orchestrators_everything(
    space: Space, risk: Space, boss: Space, url: str
) -> None:
    if url != "policed:":
        pytest.skip("an embedded store trusts its agents")
    await risk.document(NAME).contribute(1)
    await boss.document(NAME).replace({"a": 1}, etag=0)
    before = await everything(space)
    doc = space.document(NAME)
    for attempt in (
        doc.contribute(2, agent="risk"),
        doc.contribute(2, agent="absent"),
        doc.withdraw(agent="risk"),
        doc.update(lambda body: {"a": 2}),
        doc.replace({"a": 2}, etag=(await doc.read()).etag),
        doc.declare({"a": "sum"}),
        doc.delete(),
    ):
        with pytest.raises(AccessDenied):
            await attempt
    assert await everything(space) == before


async def test_an_orchestrator_contributes_for_another_and_the_history_tells(space: Space, boss: Space) -> None:
    await boss.document(NAME).contribute({"a": 1}, agent="market")
    view = await space.document(NAME).read()
    assert view.contributions["market"].data == {"a": 1}
    [event] = await space.document(NAME).history()
    assert (event.by, event.section) == ("orchestrator", "market/1")


# --- the body ---


async def test_the_body_is_updated_on_what_is_there(boss: Space) -> None:
    doc = boss.document(NAME)
    first = await doc.update(lambda body: {**body, "round": body.get("round", 0) + 1})

    async def slowly(body: Any) -> Any:
        await asyncio.sleep(0)
        body["round"] += 1
        return body

    second = await doc.update(slowly)
    view = await doc.read()
    assert (first.body, second.body, view.body) == ({"round": 1}, {"round": 2}, {"round": 2})
    assert view.etag == second.etag > first.etag
    with pytest.raises(InvalidInput, match="return"):
        await doc.update(lambda body: None)
    assert (await doc.read()).etag == second.etag


async def test_replacing_a_body_that_has_changed_is_a_conflict_with_both_versions(boss: Space) -> None:
    doc = boss.document(NAME)
    first = await doc.replace({"a": 1}, etag=0)
    second = await doc.replace({"a": 2}, etag=first.etag)
    before = await everything(boss)
    for etag in (0, first.etag, second.etag + 1):
        with pytest.raises(Conflict) as caught:
            await doc.replace({"a": 3}, etag=etag)
        mine, theirs = caught.value.mine, caught.value.theirs
        assert (mine.etag, mine.body) == (etag, {"a": 3})
        assert (theirs.etag, theirs.body) == (second.etag, {"a": 2})
        assert caught.value.actual is not None
    assert await everything(boss) == before


async def test_an_update_that_always_meets_another_gives_up_with_both_versions(boss: Space, store: Store) -> None:
    doc, other = boss.document(NAME), store.space("contoso", agent="orchestrator", instance="2").document(NAME)
    runs = []

    async def late(body: Any) -> Any:
        runs.append(body)
        await other.update(lambda there: {"other": len(runs)})
        return {"mine": len(runs)}

    with pytest.raises(Conflict, match="was not written") as caught:
        await doc.update(late)
    assert runs == [{}, {"other": 1}, {"other": 2}, {"other": 3}]
    assert (caught.value.mine.body, caught.value.theirs.body) == ({"mine": 4}, {"other": 4})
    assert caught.value.mine.etag < caught.value.theirs.etag
    assert (await doc.read()).body == {"other": 4}


async def test_no_update_is_lost(boss: Space, store: Store) -> None:
    async def work() -> None:
        doc = store.space("contoso", agent="orchestrator").document(NAME)
        for _ in range(5):
            await doc.update(lambda body: {"n": body.get("n", 0) + 1}, attempts=100)

    await asyncio.gather(*(work() for _ in range(4)))
    assert (await boss.document(NAME).read()).body == {"n": 20}


async def test_a_repeated_change_of_the_body_is_made_once(boss: Space) -> None:
    doc = boss.document(NAME)
    first = await doc.replace({"a": 1}, etag=0, request_id="r")
    assert await doc.replace({"a": 1}, etag=0, request_id="r") == first
    await doc.update(lambda body: {"a": 2})
    assert (await doc.replace({"a": 1}, etag=0, request_id="r")).etag == first.etag
    with pytest.raises(InvalidInput, match="used before"):
        await doc.replace({"a": 3}, etag=0, request_id="r")
    assert (await doc.read()).body == {"a": 2}


async def test_no_body_is_no_body_and_its_writer_is_told_what_to_do(boss: Space) -> None:
    before = await everything(boss)
    with pytest.raises(InvalidInput, match=r"a body is not None; delete\(\) removes the document"):
        await boss.document(NAME).replace(None, etag=0)
    with pytest.raises(InvalidInput, match="the function gave no body"):
        await boss.document(NAME).update(lambda body: None)
    assert await everything(boss) == before


async def test_a_document_under_its_lock_is_written_by_its_holder_alone(boss: Space) -> None:
    doc = boss.document(NAME)
    lock = doc.locked(ttl="30s")
    held = await lock.__aenter__()
    await held.update(lambda body: {"a": 1})
    await held.contribute("seen")
    with pytest.raises(LockAcquisitionError):
        await doc.locked().__aenter__()  # waiting is explicit
    await doc.update(lambda body: {**body, "by": "who did not ask for the lock"})
    assert (await held.update(lambda body: {"a": 1})).body == {"a": 1}
    await boss.locks.break_(f"documents/{NAME}")
    before = await everything(boss)
    for attempt in (
        held.update(lambda body: {"a": 2}),
        held.replace({"a": 2}, etag=(await doc.read()).etag),
        held.contribute("late"),
        held.declare({"a": "sum"}),
    ):
        with pytest.raises(LeaseLost):
            await attempt
    assert await everything(boss) == before
    with pytest.raises(LeaseLost):
        await lock.__aexit__(None, None, None)
    async with doc.locked() as held:
        assert (await held.read()).body == {"a": 1}


async def test_documents_are_listed_without_their_bodies(
    boss: Space, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    etags = {}
    for name in ("b", "a/1", "a/2", "a%2F3"):
        etags[name] = (await boss.document(name).replace({"text": "x" * 1000}, etag=0)).etag
    await boss.document("a/1").declare({"n": "sum"})
    await boss.document("only-reducers").declare({"n": "sum"})
    heads = await space.documents.list()
    assert [(head.name, head.etag) for head in heads] == [
        ("a%2F3", etags["a%2F3"]), ("a/1", etags["a/1"]), ("a/2", etags["a/2"]), ("b", etags["b"]), ("only-reducers", 0),
    ]  # fmt: skip
    assert (heads[0].bytes, heads[0].by) == (1011, "orchestrator")
    assert [head.name for head in await space.documents.list("a/")] == ["a/1", "a/2"]
    assert [head.name for head in await space.documents.list(after="a/2", limit=1)] == ["b"]


async def test_documents_without_a_body_are_listed_by_their_first_contributor(
    boss: Space, space: Space, risk: Space
) -> None:
    await boss.document("b").replace({}, etag=0)
    for each in (space, risk):
        for name in ("a", "b", "c/1", "c/2"):
            await each.document(name).contribute(1)
    heads = await space.documents.list()
    assert [(head.name, head.etag > 0) for head in heads] == [("a", False), ("b", True), ("c/1", False), ("c/2", False)]
    assert (heads[0].by, heads[0].bytes) == (space.agent, 0)
    assert [head.name for head in await space.documents.list("c/")] == ["c/1", "c/2"]
    names: list[str] = []
    while page := await space.documents.list(after=names[-1] if names else None, limit=1):
        names += [head.name for head in page]
    assert names == ["a", "b", "c/1", "c/2"]
    await boss.document("a").delete()
    assert [head.name for head in await space.documents.list(limit=1)] == ["b"]


async def test_two_writers_with_different_modes_do_not_both_write(store: Store, space: Space, risk: Space) -> None:
    await space.document(NAME).contribute(1)
    before = await everything(space)
    for other in (space, risk):
        with pytest.raises(InvalidInput, match="in mode 'merge' since the first one, and this is 'reject'"):
            await other.document(NAME, mode="reject").contribute(2)
    assert await everything(space) == before
    with pytest.raises(InvalidInput, match="in mode 'merge'"):
        await space.document(NAME, mode="reject").withdraw()
    assert [each.data for each in (await space.document(NAME).read()).sections.values()] == [1]
    assert await space.document(NAME).withdraw()
    assert not await space.document("another", mode="reject").withdraw(), "there is nothing to withdraw, in any mode"
    assert [head.name for head in await space.documents.list()] == [NAME]


async def test_of_two_who_contribute_first_in_different_modes_one_is_told(space: Space, risk: Space) -> None:
    answers = await asyncio.gather(
        space.document(NAME).contribute(1), risk.document(NAME, mode="reject").contribute(2), return_exceptions=True
    )
    assert sorted(type(each).__name__ for each in answers) == ["InvalidInput", "int"]
    assert len((await space.document(NAME).read()).sections) == 1


async def test_after_the_first_a_contribution_is_one_commit_and_no_read(space: Space, risk: Space) -> None:
    await space.document(NAME).contribute(1)
    cursor = await space.cursor()
    counting = Counting(risk._scope.engine)
    view = Space(msgspec.structs.replace(risk._scope, engine=counting), risk._blob_folder, risk._coordination)
    await view.document(NAME).contribute(2)
    commits = [commit async for commit in space._scope.engine.watch(space.name, cursor=cursor, live=False)]
    assert (len(commits), counting.asked) == (1, ["commit"])


class Counting(Wrapper):
    """What an engine is asked."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.asked: list[str] = []

    async def commit(self, space: str, batch: Batch) -> Receipt:
        self.asked.append("commit")
        return await super().commit(space, batch)

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        self.asked.append("get")
        return await super().get(space, keys)

    async def scan(self, space: str, prefix: str, **options: Any) -> Page:
        self.asked.append("scan")
        return await super().scan(space, prefix, **options)


async def test_a_deleted_document_is_gone_with_its_contributions(boss: Space, space: Space) -> None:
    doc = boss.document(NAME)
    await doc.update(lambda body: {"a": 1})
    await space.document(NAME).contribute(1)
    await space.document(NAME + "2").contribute(1)
    assert await doc.delete()
    view = await doc.read()
    assert (view.etag, view.body, view.sections) == (0, {}, {})
    assert [head.name for head in await space.documents.list()] == [NAME + "2"]
    assert not await doc.delete()
    assert (await space.document(NAME + "2").read()).contributions["market"].data == 1


class Paused(Wrapper):
    """An engine that waits before it scans sections."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def scan(self, space: str, prefix: str, **options: Any) -> Page:
        if prefix.startswith("sections/"):
            self.reached.set()
            await self.go_on.wait()
        return await super().scan(space, prefix, **options)


async def test_what_is_written_while_a_document_is_being_deleted_belongs_to_its_next_life(
    boss: Space, space: Space
) -> None:
    await boss.document(NAME).update(lambda body: {"life": 1})
    await space.document(NAME).contribute(1)
    await space.document(NAME).contribute(1, instance="2")
    engine = Paused(boss._scope.engine)
    slow = Space(msgspec.structs.replace(boss._scope, engine=engine), boss._blob_folder, boss._coordination)
    deleting = asyncio.ensure_future(slow.document(NAME).delete())
    await engine.reached.wait()
    await boss.document(NAME).replace({"life": 2}, etag=0)
    await space.document(NAME).contribute(2)
    engine.go_on.set()
    assert await deleting
    view = await boss.document(NAME).read(consistency="strong")
    assert (view.body, {name: each.data for name, each in view.sections.items()}) == ({"life": 2}, {"market/1": 2})


# --- reducers ---


async def test_merges_of_many_reduce_into_one_body(boss: Space, store: Store) -> None:
    doc = boss.document(NAME)
    await doc.update(lambda body: {"note": "kept"})
    await doc.declare({"cost": "sum", "risk.worst": "max", "tags": "union", "log": "append", "phase": "last"})

    async def work(number: int) -> None:
        each = store.space("contoso", agent="orchestrator").document(NAME)
        await each.merge({"cost": number, "risk": {"worst": number}, "tags": [number % 3], "log": [number]})

    await asyncio.gather(*map(work, range(12)))
    await doc.merge({"phase": "done"})
    body = (await doc.read()).body
    assert (body["note"], body["cost"], body["risk"], body["phase"]) == ("kept", 66, {"worst": 11}, "done")
    assert (sorted(body["tags"]), sorted(body["log"])) == ([0, 1, 2], [*range(12)])
    before = await everything(boss)
    with pytest.raises(InvalidInput, match="no reducer is declared for 'other'"):
        await doc.merge({"cost": 1, "other": 2})
    with pytest.raises(InvalidInput, match="no number"):
        await doc.merge({"cost": "much"})
    assert await everything(boss) == before


async def test_contributions_reduce_into_the_body_for_whoever_reads(space: Space, risk: Space, boss: Space) -> None:
    await boss.document(NAME).declare({"cost": "sum", "worst": "max"})
    await boss.document(NAME).update(lambda body: {"cost": 100})
    await space.document(NAME).contribute({"cost": 5, "worst": 0.2, "private": 1})
    await risk.document(NAME).contribute({"cost": 7, "worst": 0.9})
    view = await boss.document(NAME).read()
    assert view.merged == {"cost": 112, "worst": 0.9}
    assert view.body == {"cost": 100}


# --- without await ---


def test_documents_without_await(tmp_path: Any) -> None:
    with holdfast.blocking.open(str(tmp_path / "b.db")) as store:
        market, boss = store.space("default", agent="market"), store.space("default", agent="boss")
        doc = market.document(NAME)
        doc.contribute({"symbol": "MSFT", "recommendation": "increase"}, confidence=0.9)
        boss.document(NAME).update(lambda body: {**body, "a": 1})
        with boss.document(NAME).locked() as held:
            held.update(lambda body: {**body, "b": 2})
        assert (doc.read().body, doc.name, doc.mode) == ({"a": 1, "b": 2}, NAME, "merge")
        assert [head.name for head in market.documents.list()] == [NAME]
        assert doc.conflicts() == []
        assert len(doc.history()) == 3
        market.judgement.detectors["none"] = lambda view: []
