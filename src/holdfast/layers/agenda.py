"""What an orchestrator has to do, and when: its picture of the open correlations, drawn from the feed. Nothing here waits or writes.

A correlation is due when its last signal is there, or when its time is over; what another orchestrator claimed is due when that
one is gone. Everybody who runs has the same picture, so they agree, by a hash of the correlation's id and their own, on who
goes first; the second follows a step later, if nothing has happened, and so on. A step is STEP_MS, or longer where commits take long:
otherwise all would come before the first is done, and make it slower still. Whose turn it is is found out when something is
due, not before: most of it is done by others, or changes, until then. That only saves work: what makes it safe that one decides is the compare-and-set in `orchestrator.py`, which also holds when two pictures differ.

Whether another orchestrator lives, its lease tells. Its end is in the feed, but only when somebody sweeps, and that it was kept
alive is not: so whoever holds a claim is looked at when its lease should have ended. `looks` says whom to look at.

Bounded: at most OPEN_MAX correlations are in the picture; `overfull` says that there are more, and that it has to be drawn anew
when there is room.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable
from typing import Final

from holdfast.codec import decode
from holdfast.engine import Change, ChangeSet, Entry
from holdfast.errors import Error
from holdfast.keys import unescape
from holdfast.layers.correlation_entries import (
    CONTEXTS,
    FINISHED,
    ORCHESTRATORS,
    OUTBOX,
    SIGNALS,
    STATES,
    Decision,
    Living,
    State,
    millis,
    status_in,
)
from holdfast.layers.sections import SECTIONS, SOLE
from holdfast.layers.signals import signal_of

OPEN_MAX: Final = 100_000
STEP_MS: Final = 150
"""How long the next in rank waits for the one before, at least."""
STEP_COMMITS: Final = 3
"""And at least as long as so many commits take; but not longer than half a lease."""
RANK_MAX: Final = 8
"""Nobody waits longer than so many steps."""
LOOK_MS_MIN: Final = 100
SENT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Signals that are kept as the feed told them. The others are read when they are needed."""
WEIGHT_MAX: Final = 2**64 - 1
MIXING: Final = 0x9E3779B97F4A7C15
"""Odd, and its bits look random: the upper bits of a product with it depend on all bits of the other factor."""
SIGNALLED: Final = SECTIONS.prefix(SIGNALS)


class Work:
    """Something to do about one correlation: to decide it, or to publish what was decided."""

    __slots__ = ("busy", "claimant", "corr_id", "planned_at", "retry_at", "since", "tries", "version")

    def __init__(self, corr_id: str) -> None:
        self.corr_id = corr_id
        self.version = 0
        """Of the entry it is about."""
        self.claimant: str | None = None
        self.busy = False
        """This process is at it."""
        self.since = 0
        """When it became due."""
        self.retry_at = 0
        self.tries = 0
        self.planned_at: int | None = None


class ToDecide(Work):
    """An open correlation, and whose signals are there."""

    __slots__ = ("is_told", "sent", "state")

    def __init__(self, state: State) -> None:
        super().__init__(state.corr_id)
        self.state = state
        self.sent: dict[str, Entry] = {}
        """Signals by agent: key, version and, as long as `is_told`, value."""
        self.is_told = True
        """The feed has told all there is of it, and it is all in `sent`: nothing has to be read to decide it."""

    @property
    def complete(self) -> bool:
        return len(self.sent) >= self.state.metadata.needed


class ToPublish(Work):
    """A decision in the outbox."""

    __slots__ = ("before", "decision", "noting")

    def __init__(self, corr_id: str, before: ToPublish | None = None) -> None:
        super().__init__(corr_id)
        self.before = before
        """What the outbox had of this id when it was begun."""
        self.decision: Decision | None = None
        """As far as it was read."""
        self.noting = False
        """It was published, and noting that is under way."""


class Agenda:
    """What one orchestrator knows."""

    def __init__(self, me: str, lease_ms: int, *, publishes: bool) -> None:
        self.me = me
        self.overfull = False
        self._lease_ms = lease_ms
        self._took_ms = 0.0
        """How long commits take, lately."""
        self._publishes = publishes
        self._open: dict[str, ToDecide] = {}
        self._sent_bytes = 0
        self._outbox: dict[str, ToPublish] = {}
        self._peers = {me: _number(me)}
        """Those who live, and what a hash makes of their ids."""
        self._silent: set[str] = set()
        """Those of them who do not publish."""
        self._claimed: dict[str, set[ToDecide | ToPublish]] = {}
        self._look_at: dict[str, int] = {}
        self._plan: list[tuple[int, int, ToDecide | ToPublish]] = []
        self.plans = 0
        """How often something was planned. As long as that is the same, nothing is due sooner than it was."""
        self._settled: dict[str, int] = {}
        """Keys and versions that this process wrote itself: what the feed tells of them up to there is old news."""
        self._settling: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_outgrown(self) -> bool:
        """There were more than it has room for, and there is room now."""
        return self.overfull and max(len(self._open), len(self._outbox)) < OPEN_MAX // 2

    def begin_anew(self, me: str, now: int) -> None:
        """Go on under another id, with the same picture: what the one before had claimed is free, as if it had died."""
        before, self.me = self.me, me
        self._peers[me] = _number(me)
        everything: list[ToDecide | ToPublish] = [*self._open.values(), *self._outbox.values()]
        for work in everything:
            work.busy = False
            if isinstance(work, ToPublish):
                work.noting = False
            self._replan(work, now)
        self.gone(before, now)

    # --- drawing the picture ---

    def load(self, entries: Iterable[Entry], now: int) -> None:
        """Entries as they were read: of orchestrators, states, signals, the outbox."""
        for entry in entries:
            change = Change("put", entry.key, True, entry.value, len(entry.value), tag=entry.tag)
            self._apply(entry.version, change, now)
            if entry.key.startswith(STATES) and (work := self._open.get(entry.key[len(STATES) :])) is not None:
                work.is_told = False

    def apply(self, commit: ChangeSet, now: int) -> None:
        """One commit of the feed."""
        version = commit.version
        for change in commit.changes:
            if self._settled.get(change.key, 0) < version:
                self._apply(version, change, now)
        while self._settling and self._settling[0][0] <= commit.version:
            version, key = heapq.heappop(self._settling)
            if self._settled.get(key) == version:
                del self._settled[key]

    def _settle(self, key: str, version: int) -> None:
        self._settled[key] = version
        heapq.heappush(self._settling, (version, key))

    def _apply(self, version: int, change: Change, now: int) -> None:
        key = change.key
        if key.startswith(SIGNALLED):
            self._signalled(version, change, now)
        elif key.startswith(STATES):
            self._moved(version, change, now)
        elif key.startswith(ORCHESTRATORS):
            peer = key[len(ORCHESTRATORS) :]
            if change.exists:
                self._peers[peer] = _number(peer)
                if not _publishes(change.value):
                    self._silent.add(peer)
                if self._claimed.get(peer):  # what it claimed was heard of before it was
                    self._look_at.setdefault(peer, now + self._lease_ms)
                    self.plans += 1
            else:
                self.gone(peer, now)
        elif key.startswith(OUTBOX) and self._publishes:
            self._sent_out(version, change, now)
        elif key.startswith(CONTEXTS) and (work := self._open.get(key[len(CONTEXTS) :])) is not None:
            work.is_told = False

    def _signalled(self, version: int, change: Change, now: int) -> None:
        name, _, whose = change.key[len(SIGNALLED) :].partition("/")
        work = self._open.get(unescape(name) if "%" in name else name)
        if work is None:
            return
        agent, _, instance = whose.partition("/")
        if instance != SOLE or not work.state.expects(agent):
            work.is_told = False  # it goes with the decision all the same
            return
        value = change.value
        before = work.sent.pop(agent, None)
        self._sent_bytes -= 0 if before is None else len(before.value)
        if not change.exists:
            return
        if signal_of(value, agent, work.state) is None:
            work.is_told = False  # of an earlier run, or no signal: that goes with the decision too
            return
        if self._sent_bytes + len(value) > SENT_BYTES_MAX:
            work.is_told, value = False, b""
        self._sent_bytes += len(value)
        work.sent[agent] = Entry(change.key, value, version, change.owner, now, now)
        if before is None and len(work.sent) == work.state.metadata.needed:
            work.since = now
            self._replan(work, now)

    def _forget_sent(self, work: ToDecide) -> None:
        self._sent_bytes -= sum([len(entry.value) for entry in work.sent.values()])

    def _moved(self, version: int, change: Change, now: int) -> None:
        corr_id = change.key[len(STATES) :]
        work = self._open.get(corr_id)
        if work is not None and version < work.version:  # a commit may claim and decide: its last step counts
            return
        if not change.exists or status_in(change.tag) in FINISHED:
            self.drop(corr_id)
            return
        try:
            state = decode(change.value, State)
        except Error:
            return  # no orchestrator wrote it
        if work is None or work.state.run != state.run:
            if len(self._open) >= OPEN_MAX:
                self.overfull = True
                return
            if work is not None:
                self._forget_sent(work)
            work = self._open[corr_id] = ToDecide(state)
        work.state, work.version = state, version
        self._claim(work, None if state.claim is None else state.claim.orchestrator, now)

    def _sent_out(self, version: int, change: Change, now: int) -> None:
        corr_id = change.key[len(OUTBOX) :]
        work = self._outbox.get(corr_id)
        if not change.exists:
            if work is not None and version > work.version:
                self._claim(work, None, now)
                self._outbox.pop(corr_id)
            return
        if work is not None and version <= work.version:
            return
        if work is None or work.noting:
            if len(self._outbox) >= OPEN_MAX:
                self.overfull = True
                return
            if work is not None:  # what is being noted is of the entry before
                self._claimed.get(work.claimant or "", set()).discard(work)
            work = self._outbox[corr_id] = ToPublish(corr_id)
        work.version = version
        self._claim(work, change.tag, now)

    def _claim(self, work: ToDecide | ToPublish, claimant: str | None, now: int) -> None:
        if work.claimant is not None:
            self._claimed.get(work.claimant, set()).discard(work)
        work.claimant = claimant
        if claimant is not None:
            self._claimed.setdefault(claimant, set()).add(work)
            if claimant in self._peers and claimant != self.me:
                self._look_at.setdefault(claimant, now + self._lease_ms)
                self.plans += 1
            elif claimant != self.me:
                work.since = now
        self._replan(work, now)

    # --- when ---

    def _replan(self, work: ToDecide | ToPublish, now: int) -> None:
        self._plan_for(work, None if work.busy else self._due_at(work, now))

    def _plan_for(self, work: ToDecide | ToPublish, at: int | None) -> None:
        if at is not None and at != work.planned_at:
            self.plans += 1
            heapq.heappush(self._plan, (at, self.plans, work))
        work.planned_at = at

    def _due_at(self, work: ToDecide | ToPublish, now: int, *, in_turn: bool = False) -> int | None:
        """When it is due; `in_turn`: for this orchestrator, after those who come before it."""
        if isinstance(work, ToPublish) and work.noting:
            return None
        if work.claimant == self.me:
            return max(now, work.retry_at)  # begun, and given up for now
        if work.claimant is not None:
            if work.claimant in self._peers:
                return None
            base = work.since
        elif isinstance(work, ToDecide):
            base = work.since if work.complete else millis(work.state.metadata.timeout_at)
        else:
            return None
        if in_turn and len(self._peers) > 1:
            before = self._before(work.corr_id)
            if isinstance(work, ToPublish):
                before = [peer for peer in before if peer not in self._silent]
            base += self.step_ms * min(len(before), RANK_MAX)
        return max(base, work.retry_at)

    @property
    def step_ms(self) -> int:
        """How long the next in rank waits for the one before."""
        return max(STEP_MS, min(round(STEP_COMMITS * self._took_ms), self._lease_ms // 2))

    def took(self, ms: int) -> None:
        """A commit took so long."""
        self._took_ms += (ms - self._took_ms) / 8

    def _before(self, corr_id: str) -> list[str]:
        """Those who come before this orchestrator."""
        number = _number(corr_id)
        mine = _weight(_number(self.me), number)
        return [peer for peer, of_peer in self._peers.items() if _weight(of_peer, number) > mine]

    def due(self, now: int, room: int) -> list[ToDecide | ToPublish]:
        """What is to be done now, at most so much of it; it is this process's until `release`."""
        found: list[ToDecide | ToPublish] = []
        while self._plan and self._plan[0][0] <= now and len(found) < room:
            at, _, work = heapq.heappop(self._plan)
            if work.planned_at != at or work.busy or not self._is_known(work):
                continue
            turn = self._due_at(work, now, in_turn=True)
            if turn is None or turn > now:
                self._plan_for(work, turn)
                continue
            work.planned_at = None
            work.busy = True
            found.append(work)
            if work.claimant is None and len(self._peers) > 1:
                self._suspect(work.corr_id, now)
        return found

    def _suspect(self, corr_id: str, now: int) -> None:
        """Those who should have done it before: whether they live."""
        for peer in self._before(corr_id):
            self._look_at[peer] = min(now, self._look_at.get(peer, now))

    def next_at(self) -> int | None:
        """When something is due next."""
        while self._plan and (self._plan[0][2].planned_at != self._plan[0][0] or not self._is_known(self._plan[0][2])):
            heapq.heappop(self._plan)
        at = self._plan[0][0] if self._plan else None
        if self._look_at:
            looked_at = min(self._look_at.values())
            return looked_at if at is None else min(at, looked_at)
        return at

    def _is_known(self, work: ToDecide | ToPublish) -> bool:
        known = self._open if isinstance(work, ToDecide) else self._outbox
        return known.get(work.corr_id) is work

    def release(self, work: ToDecide | ToPublish, now: int, retry_at: int = 0) -> None:
        """This process is not at it any more; if it is still open it is looked at again."""
        work.busy = False
        if retry_at and isinstance(work, ToPublish):
            work.noting = False
        work.retry_at = retry_at
        if self._is_known(work):
            self._replan(work, now)

    def drop(self, corr_id: str, version: int = 0) -> None:
        """It is decided, or gone; at this version, if this process did it."""
        if version:
            self._settle(STATES + corr_id, version)
        work = self._open.pop(corr_id, None)
        if work is None:
            return
        self._forget_sent(work)
        if work.claimant is not None:
            self._claimed.get(work.claimant, set()).discard(work)

    def publishing(self, corr_id: str, now: int) -> ToPublish:
        """A decision that this process is about to make, and to publish itself."""
        work = self._outbox[corr_id] = ToPublish(corr_id, self._outbox.get(corr_id))
        work.busy = True
        self._claim(work, self.me, now)
        return work

    def not_publishing(self, work: ToPublish, now: int) -> None:
        """It was not decided by this process after all: what is in the outbox, or was before, is there to be published."""
        before = work.before
        if work.version:  # the feed has told that there is one, whoever made it
            self.release(work, now)
            return
        is_known = self._is_known(work)
        self.published(work)
        if before is not None and is_known:
            self._outbox[work.corr_id] = before
            self._replan(before, now)

    def noting(self, work: ToPublish, version: int) -> bool:
        """It was published; its entry, of this version, is about to be taken out. False: another is there, to be published too."""
        if work.version > version:
            work.decision = None
            return False
        work.noting, work.version = True, version
        return True

    def published(self, work: ToPublish, version: int = 0) -> None:
        """It is not in the outbox any more, since this version, or never was."""
        if version:
            self._settle(OUTBOX + work.corr_id, version)
        if self._outbox.get(work.corr_id) is work:
            del self._outbox[work.corr_id]
        self._claimed.get(work.claimant or "", set()).discard(work)

    # --- the others ---

    def looks(self, now: int) -> list[str]:
        """Whose lease to look at now."""
        return [peer for peer, at in self._look_at.items() if at <= now]

    def alive(self, peer: str, until: int, now: int) -> None:
        """Its lease lasts until then."""
        if self._claimed.get(peer):
            self._look_at[peer] = max(until, now + LOOK_MS_MIN)
        else:
            self._look_at.pop(peer, None)

    def gone(self, peer: str, now: int) -> None:
        """It does not live any more: what it claimed is free."""
        self._peers.pop(peer, None)
        self._silent.discard(peer)
        self._look_at.pop(peer, None)
        for work in self._claimed.pop(peer, ()):
            work.since = now
            self._replan(work, now)


def _publishes(value: bytes) -> bool:
    try:
        return decode(value, Living).publishes
    except Error:
        return True


def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def _weight(orchestrator: int, correlation: int) -> int:
    """As good as a hash of both, from their hashes: it is asked for each orchestrator about each correlation that is due."""
    return (orchestrator ^ correlation) * MIXING & WEIGHT_MAX
