"""A research desk: four agents write one document about MSFT, two of them contradict each other, and it is settled.

The market analyst recommends to increase the position; risk, who has read that, recommends to reduce it. Both writes succeed,
because each agent has its own section. The contradiction is found, risk outranks the analyst, and both opinions stay. Then
compliance objects without saying how sure it is: no machine decides that, so it waits for a person, who has to say why.

python examples/research_desk.py
"""

from __future__ import annotations

import asyncio

import holdfast
from holdfast import Conflict, Store

NAME = "research/MSFT"


async def research(store: Store) -> None:
    """Each agent reads what is there, and contributes what it makes of it."""
    lead = store.space("contoso", agent="lead").document(NAME)
    await lead.declare({"cost_usd": "sum", "sources": "union"})
    await lead.replace({"task": "MSFT, third quarter", "round": 1}, etag=0)

    market = store.space("contoso", agent="market-analysis").document(NAME)
    view = await market.read()
    opinion = {"symbol": "MSFT", "outlook": "growth", "recommendation": "increase position size"}
    await market.contribute({**opinion, "cost_usd": 4, "sources": ["10-Q"]}, inputs=view.versions, confidence=0.8)

    risk = store.space("contoso", agent="risk").document(NAME)
    view = await risk.read()
    print(f"risk reads      {view.contributions['market-analysis'].data['outlook']} at version {view.versions}")
    opinion = {"symbol": "MSFT", "sector_risk": "elevated", "recommendation": "reduce exposure"}
    await risk.contribute({**opinion, "cost_usd": 3, "sources": ["10-Q", "VIX"]}, inputs=view.versions, confidence=0.9)

    reporting = store.space("contoso", agent="reporting").document(NAME)
    view = await reporting.read()
    await reporting.contribute({"summary": "two opinions"}, inputs=view.versions)


async def settle(store: Store) -> None:
    lead = store.space("contoso", agent="lead").document(NAME)
    [conflict] = await lead.conflicts()
    for party, value in conflict.values.items():
        print(f"conflict        {party} says: {value}")
    settled = await lead.resolve(conflict, by="priority")
    print(f"settled         {settled.winner}: {settled.reason}; kept are {sorted(settled.outputs)}")
    assert settled.winner == "risk/1"
    assert set((await lead.read()).contributions) == {"market-analysis", "risk", "reporting"}


async def escalate(store: Store) -> None:
    """What nobody is sure of waits for a person, however long that takes."""
    compliance = store.space("contoso", agent="compliance").document(NAME)
    await compliance.contribute({"symbol": "MSFT", "recommendation": "sell before the blackout period"})
    lead = store.space("contoso", agent="lead")
    [conflict] = await lead.document(NAME).conflicts()
    waiting = await lead.document(NAME).resolve(conflict, by="priority")
    print(f"escalated       {waiting.reason}")
    assert waiting.winner is None
    [entry] = await lead.documents.escalations()
    person = store.space("contoso", agent="alice").document(entry.document)
    decided = await person.resolve(
        entry.conflict, by="person", winner="compliance/1", justification="the blackout begins on Monday"
    )
    print(f"decided         {decided.winner} by {decided.by}: {decided.justification}")


async def go_on(store: Store) -> None:
    lead = store.space("contoso", agent="lead").document(NAME)
    before = await lead.read()
    await lead.update(lambda body: {**body, "round": body["round"] + 1})
    try:
        await lead.replace({"task": "lost?"}, etag=before.etag)
    except Conflict as conflict:
        print(f"refused         mine was for etag {conflict.mine.etag}, there is {conflict.theirs.etag}")
    view = await lead.read()
    print(f"together        {view.merged}")
    print(f"stale           {sorted({each.section for each in view.stale})}: they have not seen round 2")
    for change in await lead.diff(before.etag):
        print(f"changed         {change}"[:110])


async def main() -> None:
    async with holdfast.open("memory:") as store:
        await research(store)
        await settle(store)
        await escalate(store)
        await go_on(store)


if __name__ == "__main__":
    asyncio.run(main())
