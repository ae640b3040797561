"""The verdict: one line per promise, each checked from the store, the audit, and what the processes noted beside it.

A line that does not hold says by how much. Nothing here is taken from what the scenes printed.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from desk.books import Day
from desk.roles import MEMORY_MB, SIGNALS


class Line(NamedTuple):
    """One promise."""

    holds: bool
    subject: str
    text: str


def verdict(day: Day) -> list[Line]:
    """Every promise of the demo, and whether the day kept it."""
    checks = (orders, cut_off, leaders, research, conflict, decision, tasks, ownership, audit)
    return [check(day) for check in checks]


def orders(day: Day) -> Line:
    """Every order that was acknowledged is there, none twice, and no other."""
    told = {request: total for notes in day.notes.values() for request, total in notes.told.items()}
    lost, strange = told.keys() - day.orders.keys(), day.orders.keys() - told.keys()
    sums = sorted(told.values()) == list(range(1, len(told) + 1))
    text = f"{len(told):,} acknowledged, {len(day.orders):,} stored: {len(lost)} lost, {len(strange)} unexplained; "
    text += f"the counter stands at {day.counter:,}" + ("" if sums else ", but it was NOT told as 1, 2, 3, …")
    return Line(bool(told) and not lost and not strange and sums and day.counter == len(told), "orders", text)


def cut_off(day: Day) -> Line:
    """An order that was committed, and whose agent was killed before it knew, is there once."""
    told = {request for notes in day.notes.values() for request in notes.told}
    committed = [cut for cut in day.cuts if cut.committed]
    once = all(cut.request in told and times(day, cut.request) == 1 for cut in day.cuts)
    text = f"{len(day.cuts)} cut off by kill -9, {len(committed)} of them committed and unheard; "
    text += f"asked again under its request id, {'counted once' if once else 'and NOT counted once'}"
    return Line(bool(committed) and once, "cut off", text)


def times(day: Day, request: str) -> int:
    """How often the audit has an order."""
    return sum(count for (_, each), count in day.audited.items() if each == request)


def leaders(day: Day) -> Line:
    """Of each epoch one leader, epochs rise, and no beat is lost or doubled."""
    epochs = [beat.epoch for beat in day.beats]
    rising = all(earlier <= later for earlier, later in pairwise(epochs))
    one_each = len({(beat.epoch, beat.agent) for beat in day.beats}) == len(set(epochs))
    whole = [beat.number for beat in day.beats] == list(range(1, len(day.beats) + 1))
    seen = {beat.number: beat.epoch for beat in day.beats}
    kept = all(seen.get(number) == epoch for number, epoch in day.told_beats.items())
    text = f"{len(set(epochs))} epochs, {'rising' if rising else 'NOT rising'}, "
    text += f"{'one leader each' if one_each else 'NOT one leader each'}; {len(day.beats)} beats, "
    text += f"{'none' if whole else 'some'} missing or doubled" + ("" if kept else ", acknowledged ones LOST")
    return Line(rising and one_each and whole and kept and len(set(epochs)) > 1, "leaders", text)


def research(day: Day) -> Line:
    """The workflow came to its end over a worker's death; finished steps did not run again, and each counted once."""
    ended = {finish.step: finish.at for finish in day.finishes}
    once = Counter(finish.step for finish in day.finishes) == Counter(["fetch", *day.symbols, "report"])
    again = sorted({start.step for start in day.starts if start.at > ended.get(start.step, start.at)})
    workers = {finish.worker for finish in day.finishes}
    counted = day.state.get("analysed") == len(day.symbols) == len(set(day.state.get("symbols", ())))
    text = f"{day.status}: {len(day.finishes)} steps by {len(workers)} workers, {len(again)} finished ones run again; "
    text += f"{day.state.get('analysed')} of {len(day.symbols)} symbols counted"
    holds = day.status == "completed" and once and not again and counted and len(workers) > 1
    return Line(holds, "workflow", text)


def conflict(day: Day) -> Line:
    """The contradiction was settled once, by another leader than the one who found it, and nothing was discarded."""
    if len(day.resolutions) != 1 or day.open_conflicts:
        return Line(False, "conflict", f"{len(day.resolutions)} settled, {day.open_conflicts} open; it should be one")
    [settled] = day.resolutions
    parties = {section.partition("/")[0] for section in settled.outputs}
    kept = parties == {"market", "risk"} <= day.opinions.keys()
    taken_over = settled.by != day.seen_by
    text = f"found by {day.seen_by}, settled by {settled.by} for {settled.winner}; "
    text += "both opinions kept" if kept else "an opinion is GONE"
    return Line(kept and taken_over and settled.winner == "risk/1", "conflict", text)


def decision(day: Day) -> Line:
    """One decision, from all signals, acted on once."""
    if day.decision is None or day.decision.action == "timeout":
        return Line(False, "decision", "there is NONE")
    whole = set(day.decision.audit.input_signals) == set(SIGNALS)
    once = day.trades == [day.decision.id]
    text = f"{day.decision.action} {day.decision.direction} {day.decision.size:,.0f} from {len(SIGNALS)} signals"
    text += (
        f"{'' if whole else ', NOT all heard'}; acted on {len(day.trades)} time{'' if len(day.trades) == 1 else 's'}"
    )
    return Line(whole and once, "decision", text)


def tasks(day: Day) -> Line:
    """A task within its limits completes, and one that exceeds them is ended."""
    good, bad = day.tasks.get("backtest"), day.tasks.get("runaway")
    if good is None or bad is None:
        return Line(False, "limits", "a task is MISSING")
    peak = good.peak_memory_mb or 0
    within = good.status == "completed" and 0 < peak <= MEMORY_MB["backtest"]
    ended = bad.status == "killed" and (bad.reason or "").startswith("memory")
    text = f"backtest {good.status} with {peak:.0f} of {MEMORY_MB['backtest']} MB; "
    text += f"runaway {bad.status} at {bad.peak_memory_mb or 0:.0f} of {MEMORY_MB['runaway']} MB"
    return Line(within and ended, "limits", text)


def ownership(day: Day) -> Line:
    """An agent that writes what is not its own is refused, and that is in the audit."""
    foreign = sum(day.orders.get(request) != actor for actor, request in day.audited)
    text = f"an agent that wrote the leader's part was {'refused' if day.refused else 'NOT refused'}; "
    text += f"{day.denials} denial{'' if day.denials == 1 else 's'} in the audit, {foreign} orders in another's name"
    return Line(bool(day.refused) and day.denials > 0 and not foreign, "ownership", text)


def audit(day: Day) -> Line:
    """The chain is sound, and it tells of every order once."""
    if day.chain is None:
        return Line(False, "audit", "it was NOT verified")
    told = Counter({(agent, request): 1 for request, agent in day.orders.items()})
    whole = told == day.audited
    text = f"{day.chain.records:,} records in {day.chain.segments} segments, the chain is "
    text += "sound" if day.chain.sound else f"NOT sound: {day.chain.problems[0]}"
    text += f"; it has {'every order once' if whole else 'NOT every order once'}"
    return Line(day.chain.sound and day.chain.records > 0 and whole, "audit", text)
