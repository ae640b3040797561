"""Documents through a keeper that runs: each agent its section, orchestrators the rest, whatever frames are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import holdfast
from holdfast import AccessDenied
from holdfast.codec import encode
from holdfast.engine import Absent, Delete, Operation, Push, Put, Touch
from holdfast.testing.servers.keeper import KeeperServer
from tests.server.live import SPACE, by_hand, client, command, make_token

NAME = "research"
SECTION = f"sections/documents/{NAME}/"


@pytest.fixture(scope="module")
def keeper() -> Iterator[KeeperServer]:
    with KeeperServer.temporary() as running:
        yield running


async def test_a_research_desk_works_through_a_keeper(keeper: KeeperServer) -> None:
    async with (
        client(keeper, "market-analysis") as (_, market),
        client(keeper, "risk") as (_, risk),
        client(keeper, "lead", role="orchestrator") as (_, lead),
    ):
        doc = lead.document("desk")
        await doc.replace({"round": 1}, etag=0)
        opinion = {"symbol": "MSFT", "recommendation": "increase"}
        await market.document("desk").contribute(opinion, confidence=0.9)
        view = await risk.document("desk").read()
        against = {"symbol": "MSFT", "recommendation": "reduce"}
        await risk.document("desk").contribute(against, inputs=view.versions, confidence=0.4)
        [conflict] = await market.document("desk").conflicts()
        with pytest.raises(AccessDenied):
            await market.document("desk").resolve(conflict)
        assert (await doc.resolve(conflict, by="priority")).winner is None
        person = await make_token(keeper, "alice", role="orchestrator")
        listed = await asyncio.to_thread(command, keeper, "doc", "escalations", "--json", token=person)
        [waiting] = listed.json
        words = ("doc", "resolve", "desk", waiting["conflict"]["id"], "--winner", "risk/1", "--why", "looked at it")
        await asyncio.to_thread(command, keeper, *words, token=person)
        [settled] = await doc.resolutions()
        assert (settled.by, settled.winner, settled.justification) == ("alice", "risk/1", "looked at it")
        async with doc.locked(ttl="5s") as held:
            await held.update(lambda body: {**body, "round": 2})
        assert (await market.document("desk").read()).body == {"round": 2}


async def test_frames_made_by_hand_write_nobody_else_s_section(keeper: KeeperServer) -> None:
    async with client(keeper, "alice2") as (_, space), client(keeper, "lead2", role="orchestrator") as (_, lead):
        await space.document(NAME).contribute({"a": 1})
        await lead.document(NAME).replace({"a": 1}, etag=0)
        before = await lead.document(NAME).read()
        events = await lead.document(NAME).history()
        token = await make_token(keeper, "mallory")
        forged: list[Operation] = [
            Put(SECTION + "alice2/1", b"{}"),
            Put(SECTION + "alice2/1", b"{}", owner="alice2"),
            Put(SECTION + "absent/1", b"{}"),
            Put(SECTION + "absent/1", b"{}", owner="absent"),
            Delete(SECTION + "alice2/1"),
            Touch(SECTION + "alice2/1", 1000),
            Put(f"documents/bodies/{NAME}", b"{}"),
            Put(f"documents/heads/{NAME}", b"{}"),
            Put(f"documents/resolutions/{NAME}/0", b"{}"),
            Delete(f"documents/bodies/{NAME}"),
            Put(f"history/documents/{NAME}/{events[0].id}", b"{}"),
            Delete(f"history/documents/{NAME}/{events[0].id}"),
            Push(f"history/documents/{NAME}/{events[0].id}/", b"{}", 1000),
        ]
        async with by_hand(keeper, token) as hand:
            for operation in forged:
                for batch in ((operation,), (Put(SECTION + "mallory/1", b"{}"), operation)):
                    for conditions in ((), (Absent(SECTION + "absent/1"),)):
                        with pytest.raises(AccessDenied):
                            await hand.commit(*batch, when=conditions)
                        with pytest.raises(AccessDenied):
                            await hand.commit(*batch, actor="alice2", when=conditions)
        assert await lead.document(NAME).read() == before
        assert await lead.document(NAME).history() == events


async def test_frames_made_by_hand_tell_nothing_that_did_not_happen(keeper: KeeperServer) -> None:
    name, events = "told", "history/documents/told/"
    async with client(keeper, "carol") as (_, carol), client(keeper, "lead3", role="orchestrator") as (_, lead):
        doc = lead.document(name)
        a = (await doc.replace({"n": 1}, etag=0)).etag
        await carol.document(name).contribute({"n": 1})
        await doc.replace({"n": 2}, etag=a)
        before, diff = await doc.history(), await doc.diff(a)
        mine = Put(f"sections/documents/{name}/mallory/1", encode({"data": 1}))
        forged: list[object] = [
            {"kind": "resolved", "data": {"winner": "market/1", "method": "person"}},
            {"kind": "escalated", "data": {"reason": "ask me"}},
            {"kind": "deleted"},
            {"kind": "reducers", "data": {"n": "sum"}},
            {"kind": "body", "before": a, "changes": [{"op": "~", "steps": ["n"], "old": 7, "new": 2}]},
            {"kind": "contributed", "section": "carol/1", "data": {"data": 9}},
            {"kind": "withdrew", "section": "carol/1"},
            {"kind": "withdrew", "section": "mallory/1"},
            {"kind": "contributed", "section": "mallory/1", "data": {"data": 9}},
            {"kind": "contributed", "section": "mallory/1", "data": {"data": 1}, "inputs": {"carol/1": 1}},
            {},
            7,
        ]
        async with by_hand(keeper, await make_token(keeper, "mallory")) as hand:
            for told in forged:
                for batch in ((Push(events, encode(told), 60_000),), (mine, Push(events, encode(told), 60_000))):
                    with pytest.raises(AccessDenied, match="their own contribution"):
                        await hand.commit(*batch)
        assert (await doc.history(), await doc.diff(a)) == (before, diff)
        true = encode({"kind": "contributed", "section": "mallory/1", "data": {"data": 1}})
        async with by_hand(keeper, await make_token(keeper, "mallory")) as hand:
            await hand.commit(mine, Push(events, true, 60_000))
        assert [(each.by, each.section) for each in await doc.history(limit=1)] == [("mallory", "mallory/1")]


async def test_another_tenant_sees_nothing_of_a_document(keeper: KeeperServer) -> None:
    token = await make_token(keeper, "spy", "fabrikam", "orchestrator")
    async with holdfast.open(keeper.url, token=token) as store:
        foreign = store.space(SPACE).document(NAME)
        for attempt in (
            foreign.read(),
            foreign.history(),
            foreign.contribute(1),
            foreign.conflicts(),
            foreign.delete(),
        ):
            with pytest.raises(AccessDenied):
                await attempt
        assert (await store.space("fabrikam").document(NAME).read()).sections == {}
