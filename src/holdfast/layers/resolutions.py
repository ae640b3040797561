"""How contradictions are settled: by a rule, by agreement, or by a person; and what was decided, for good.

    for conflict in await doc.conflicts():
        await doc.resolve(conflict, by="priority")

A strategy is a function under a name, from a Case to a Verdict: which party wins and why, or nobody.

    priority     the agent that ranks highest, if one has a rank and no other has the same (PRIORITIES is a sample: compliance 100, risk 75, market-analysis 50, reporting 25)
    consensus    the position for which enough speak: "2/3", or "3/3", of at least so many; approvals count if there are any
    confidence   the position whose parties are together the surest
    escalate     nobody: a person decides
    person       the winner that is named

Parties that say the same stand together; those that contend for a resource each stand for themselves, also when they claim as much.
Where nobody wins, or the winner is not sure of itself (no confidence, or one below 0.5), the contradiction waits for a person.
What a person decides needs a justification, and so does whatever is decided anew about the same outputs, by whichever way; what a person
has decided, only a person overrides. A decision that is escalated is open again until somebody decides.

Keys: `documents/resolutions/<name>/<conflict>` is what was decided: the contradiction, every party's output, method, winner,
approvals, by whom; `documents/escalations/<name>/<conflict>` waits for a person, and is an entry like any other, so it survives
whatever process made it. Both are written by orchestrators, with an event of history in the same commit, and audited like
every write. Nothing is discarded: the parties' sections stay as they are.

How it fails. A decision is conditional on the outputs it is about and on what was decided before: Conflict when one of them has
changed. An unknown strategy, party or conflict, and an override without a justification, is InvalidInput or NotFound. A contradiction whose parties wrote again is open again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import datetime
from fractions import Fraction
from typing import Any, Final, Literal, TypeAlias

import msgspec

from holdfast.clock import as_datetime
from holdfast.codec import decode, encode
from holdfast.engine import SCAN_MAX, Absent, Condition, Entry, Put, VersionIs
from holdfast.errors import Conflict, InvalidInput, NotFound
from holdfast.keys import Subspace
from holdfast.layers.answers import answered, once
from holdfast.layers.conflicts import DETECTORS, Contradiction, Detector, found_in
from holdfast.layers.contributions import BODY, DocumentView
from holdfast.layers.history import History
from holdfast.layers.scope import Scope
from holdfast.layers.sections import SECTIONS
from holdfast.layers.transact import Transaction

DOCUMENTS: Final = Subspace("documents")
PRIORITIES: Final[Mapping[str, int]] = {"compliance": 100, "risk": 75, "market-analysis": 50, "reporting": 25}
"""A sample: which agent is heard first."""
CONFIDENCE_MIN: Final = 0.5
"""Below it nobody wins without a person."""
QUORUM: Final = "2/3"
OUTPUT_BYTES_MAX: Final = 256 * 1024
"""Of one party's output in a decision; of a larger one its size and hash are kept, and its section has it."""
PARTIES_MAX: Final = 200
"""Of one contradiction that is settled: each is a condition of the commit."""
TEXT_MAX: Final = 10_000
"""Characters of a justification."""


class Case(msgspec.Struct, frozen=True):
    """What a strategy is asked."""

    conflict: Contradiction
    view: DocumentView
    priorities: Mapping[str, int]
    quorum: str
    approvals: Mapping[str, str]
    """Approver → the party that is approved."""

    def position(self, party: str) -> str:
        """What a party stands for. Who contends for a resource stands for itself, and so does who says nothing."""
        conflict = self.conflict
        if party in conflict.positions:
            return conflict.positions[party]
        if conflict.kind == "resource-contention" or party not in conflict.values:
            return party
        return encode(conflict.values[party]).decode()

    def confidence(self, party: str) -> float | None:
        found = self.view.sections.get(party)
        return None if found is None else found.confidence

    def surest(self, parties: list[str]) -> str:
        """The one with the highest confidence; the first of them if several have it."""
        return max(parties, key=lambda party: self.confidence(party) or 0.0)


class Verdict(msgspec.Struct, frozen=True):
    """Who wins, and why; None when a person has to say."""

    winner: str | None
    reason: str


Strategy: TypeAlias = Callable[[Case], Verdict]


class Resolution(msgspec.Struct, frozen=True):
    """What was decided about a contradiction, with all that was said."""

    conflict: Contradiction
    method: str
    winner: str | None
    """None as long as it waits for a person."""
    reason: str
    outputs: dict[str, Any]
    """Every party's data, the winner's and the others'."""
    approvals: dict[str, str]
    justification: str | None
    by: str
    at: datetime
    document: str
    overrode: int | None = None
    """The version of the decision that this one replaced."""


class _Stored(msgspec.Struct, frozen=True):
    conflict: Contradiction
    method: str
    winner: str | None
    reason: str
    outputs: dict[str, Any]
    approvals: dict[str, str]
    justification: str | None = None
    overrode: int | None = None


class Judgement:
    """The detectors and strategies of a space, by name; plain dicts to add to. One for all views of it that a store gives."""

    def __init__(self) -> None:
        self.detectors: dict[str, Detector] = dict(DETECTORS)
        self.strategies: dict[str, Strategy] = dict(STRATEGIES)
        self.priorities: dict[str, int] = dict(PRIORITIES)


class Resolutions:
    """Decisions about one document."""

    def __init__(self, scope: Scope, name: str, history: History, judgement: Judgement) -> None:
        self._scope = scope
        self._name = name
        self._history = history
        self._judgement = judgement

    async def open_in(self, view: DocumentView) -> list[Contradiction]:
        """Contradictions that nobody has decided, or whose parties have written again since."""
        found = found_in(view, self._judgement.detectors)
        if not found:
            return []
        decided = {each.conflict.id: each for each in await self.stored("resolutions")}
        waiting = {each.conflict.id: each for each in await self.stored("escalations")}
        told = []
        for each in found:
            before, waits = (found.get(each.id) for found in (decided, waiting))
            escalated = waits is not None and waits.conflict.versions == each.versions
            if escalated or before is None or before.conflict.versions != each.versions:
                told.append(msgspec.structs.replace(each, escalated=escalated))
        return told

    async def stored(self, what: str) -> list[Resolution]:
        """Decisions ("resolutions") or what waits for a person ("escalations")."""
        return await stored(self._scope, what, self._name)

    async def resolve(
        self,
        view: DocumentView,
        conflict: Contradiction | str,
        by: str,
        winner: str | None,
        justification: str | None,
        approvals: Mapping[str, str],
        quorum: str,
        confidence_min: float | None,
        request_id: str | None,
    ) -> Resolution:
        """Decide, or let it wait for a person. What was decided under this request id before is told again."""
        id = conflict if isinstance(conflict, str) else conflict.id
        asked = ["resolve", self._name, id, by, winner if by == "person" else None, justification, dict(approvals)]
        before = await answered(Transaction(self._scope), request_id, asked)
        if before is not None and before.answer is not None:
            told = msgspec.structs.asdict(msgspec.convert(before.answer, _Stored))
            return Resolution(**told, by=self._scope.actor, at=as_datetime(before.at), document=self._name)
        if by not in (*self._judgement.strategies, "person"):
            known = ", ".join((*self._judgement.strategies, "person"))
            raise InvalidInput(f"{by!r:.60} is no way to resolve a conflict; there are {known}")
        here = await self._find(view, conflict)
        if (unknown := sorted(set(approvals.values()) - set(here.parties))) or len(approvals) > SCAN_MAX:
            raise InvalidInput(
                f"approvals name parties of the conflict, {', '.join(here.parties)}; not {unknown!r:.100}"
            )
        _check_justification(justification)
        if by == "person":
            verdict = _by_person(here, winner, justification)
        elif winner is not None:
            raise InvalidInput("only a person names the winner: resolve it with by='person'")
        else:
            case = Case(here, view, self._judgement.priorities, quorum, approvals)
            verdict = _sure(case, self._judgement.strategies[by](case), confidence_min)
        return await self._commit(view, here, by, verdict, dict(approvals), justification, request_id, asked)

    async def _find(self, view: DocumentView, conflict: Contradiction | str) -> Contradiction:
        """The contradiction as it is now; one that was decided may be decided anew."""
        id = conflict if isinstance(conflict, str) else conflict.id
        here = next((each for each in found_in(view, self._judgement.detectors) if each.id == id), None)
        if here is None:
            known = [each.conflict for what in ("escalations", "resolutions") for each in await self.stored(what)]
            here = next((each for each in known if each.id == id), None)
            if here is not None:  # it has dissolved; who closes it has seen what is there now
                versions = {party: view.versions[party] for party in here.parties if party in view.versions}
                here = msgspec.structs.replace(here, versions=versions)
        if here is None:
            raise NotFound(f"there is no conflict {id!r:.60} in {self._name!r}; list them with conflicts()")
        if not isinstance(conflict, str) and conflict.versions != here.versions:
            raise Conflict(
                f"the outputs of conflict {id} in {self._name!r} have changed since it was read; look at it again",
                mine=conflict,
                theirs=here,
            )
        return here

    async def _commit(
        self,
        view: DocumentView,
        conflict: Contradiction,
        method: str,
        verdict: Verdict,
        approvals: dict[str, str],
        justification: str | None,
        request_id: str | None,
        asked: list[Any],
    ) -> Resolution:
        id = conflict.id
        decided, waiting = (DOCUMENTS.key(what, self._name, id) for what in ("resolutions", "escalations"))
        if len(conflict.parties) > PARTIES_MAX:
            raise InvalidInput(
                f"a conflict of {len(conflict.parties)} parties cannot be settled at once; at most {PARTIES_MAX}"
            )
        said = {party: _output(value) for party, value in conflict.values.items()}
        settled = msgspec.structs.replace(conflict, values=said, escalated=verdict.winner is None)
        there = view.versions
        outputs = {party: _output(_said_by(view, party)) for party in conflict.parties if party in there}
        transaction, made = Transaction(self._scope), []

        async def decide() -> Any:
            [before, escalation] = await transaction.read(decided, waiting)
            transaction.conditions += self._unchanged(view, conflict)
            if before is not None:
                self._check_override(before, conflict, method, justification)
            overrode = None if before is None or verdict.winner is None else before.version
            decision = verdict.winner, verdict.reason, outputs, approvals, justification
            made.append(_Stored(settled, method, *decision, overrode))
            transaction.put(Put(waiting if verdict.winner is None else decided, encode(made[0])))
            if verdict.winner is not None and escalation is not None:
                transaction.delete(waiting)
            kind: Literal["escalated", "resolved"] = "escalated" if verdict.winner is None else "resolved"
            transaction.operations.append(await self._history.told(kind, made[0]))
            return made[0]

        await once(transaction, request_id, asked, decide)
        await transaction.commit()
        if made and transaction.receipt is not None:
            told = msgspec.structs.asdict(made[0])
            at = as_datetime(transaction.receipt.at)
            return Resolution(**told, by=self._scope.actor, at=at, document=self._name)
        found = [*await self.stored("resolutions"), *await self.stored("escalations")]
        return next(each for each in found if each.conflict.id == id)

    def _check_override(self, before: Entry, conflict: Contradiction, method: str, justification: str | None) -> None:
        """Refuse to decide anew what was decided about the same outputs, unless by who may, with a justification."""
        found = decode(before.value, _Stored)
        if found.conflict.versions != conflict.versions:
            return
        which = f"conflict {conflict.id} in {self._name!r}"
        if found.method == "person" and method != "person":
            raise Conflict(
                f"a person has decided {which}; only a person overrides that: by='person', with a justification",
                key=before.key,
                actual=before,
            )
        if justification is None:
            raise InvalidInput(
                f"{which} was decided by {found.method!r} already, for {found.winner}; to override that needs a justification: say why"
            )

    def _unchanged(self, view: DocumentView, conflict: Contradiction) -> list[Condition]:
        """That the outputs are those it was decided about."""
        conditions: list[Condition] = []
        for party, version in conflict.versions.items():
            if party in view.sections:
                conditions.append(VersionIs(SECTIONS.prefix("documents", self._name) + party, version))
            else:  # the body
                body = DOCUMENTS.key("bodies", self._name)
                conditions.append(VersionIs(body, version) if version else Absent(body))
        return conditions


async def stored(scope: Scope, what: str, name: str | None = None) -> list[Resolution]:
    """Decisions or escalations of one document, or of all."""
    prefix = DOCUMENTS.prefix(what) if name is None else DOCUMENTS.prefix(what, name)
    found: list[Resolution] = []
    after = None
    while True:
        page = await scope.engine.scan(scope.space, prefix, after=after, limit=200)
        found += [_read(entry, what) for entry in page.entries]
        if not page.more:
            return found
        after = page.entries[-1].key


def _read(entry: Entry, what: str) -> Resolution:
    told = msgspec.structs.asdict(decode(entry.value, _Stored))
    document = DOCUMENTS.split(entry.key, 3)[1]
    return Resolution(**told, by=entry.owner, at=as_datetime(entry.updated_at), document=document)


def _said_by(view: DocumentView, party: str) -> Any:
    return view.body if party == BODY else view.sections[party].data


def _output(data: Any) -> Any:
    value = encode(data)
    if len(value) <= OUTPUT_BYTES_MAX:
        return data
    return {"omitted": len(value), "sha256": hashlib.sha256(value).hexdigest()}


# --- strategies ---


def by_priority(case: Case) -> Verdict:
    """The agent that ranks highest; nobody if none of them has a rank, or the highest do not agree."""
    agents = {party: party.partition("/")[0] for party in case.conflict.parties}
    if not any(agent in case.priorities for agent in agents.values()):
        return Verdict(None, f"none of {', '.join(agents)} has a rank")
    ranks = {party: case.priorities.get(agent, 0) for party, agent in agents.items()}
    highest = max(ranks.values())
    first = [party for party, rank in ranks.items() if rank == highest]
    if len({case.position(party) for party in first}) > 1:
        return Verdict(None, f"{', '.join(first)} rank the same ({highest}) and do not agree")
    winner = case.surest(first)
    return Verdict(winner, f"{winner} ranks highest, with {highest}")


def by_consensus(case: Case) -> Verdict:
    """The position for which enough of those who speak do."""
    needed, voters = _quorum(case.quorum)
    votes = dict(case.approvals) or {party: party for party in case.conflict.parties}
    for_position: dict[str, list[str]] = {}
    for party in votes.values():
        for_position.setdefault(case.position(party), []).append(party)
    most = max(for_position.values(), key=len)
    tally = f"{len(most)} of {len(votes)}"
    if len(votes) < voters or Fraction(len(most), len(votes)) < Fraction(needed, voters):
        return Verdict(None, f"no consensus: {tally} agree, and {case.quorum} are needed")
    return Verdict(case.surest(most), f"{tally} agree")


def by_confidence(case: Case) -> Verdict:
    """The position whose parties are together the surest."""
    weights: dict[str, float] = {}
    for party in case.conflict.parties:
        sure = case.confidence(party)
        if sure is None:
            return Verdict(None, f"{party} does not say how sure it is")
        weights[case.position(party)] = weights.get(case.position(party), 0.0) + sure
    ranked = sorted(weights.values(), reverse=True)
    if len(ranked) > 1 and ranked[0] == ranked[1]:
        return Verdict(None, f"the sides are equally sure ({ranked[0]:g})")
    best = max(weights, key=lambda position: weights[position])
    winner = case.surest([party for party in case.conflict.parties if case.position(party) == best])
    return Verdict(winner, f"its side weighs {ranked[0]:g} of {sum(ranked):g}")


def escalate(case: Case) -> Verdict:
    """Nobody: a person decides."""
    return Verdict(None, "a person was asked for")


STRATEGIES: Final[Mapping[str, Strategy]] = {
    "priority": by_priority,
    "consensus": by_consensus,
    "confidence": by_confidence,
    "escalate": escalate,
}


def _sure(case: Case, verdict: Verdict, confidence_min: float | None) -> Verdict:
    """The verdict, unless its winner is not sure enough for a machine to decide."""
    if verdict.winner is None or confidence_min is None:
        return verdict
    if verdict.winner not in case.conflict.parties:
        raise InvalidInput(f"the strategy chose {verdict.winner!r:.60}, which is no party of the conflict")
    sure = case.confidence(verdict.winner)
    if sure is None:
        return Verdict(None, f"{verdict.reason}, but it does not say how sure it is")
    if sure < confidence_min:
        return Verdict(None, f"{verdict.reason}, but it is not sure enough: {sure:g}, below {confidence_min:g}")
    return verdict


def _by_person(conflict: Contradiction, winner: str | None, justification: str | None) -> Verdict:
    if winner not in conflict.parties:
        raise InvalidInput(f"name the winner, one of {', '.join(conflict.parties)}; not {winner!r:.60}")
    if justification is None:
        raise InvalidInput("a person's decision needs a justification: say why, for those who ask later")
    return Verdict(winner, "a person decided")


def _check_justification(text: str | None) -> None:
    if text is None:
        return
    if not isinstance(text, str) or not text.strip():
        raise InvalidInput("a justification is a text that says why, for those who ask later")
    if len(text) > TEXT_MAX:
        raise InvalidInput(f"a justification has at most {TEXT_MAX:,} characters, not {len(text):,}")


def _quorum(text: str) -> tuple[int, int]:
    needed, slash, voters = text.partition("/") if isinstance(text, str) else ("", "", "")
    if slash and needed.isdigit() and voters.isdigit() and 0 < int(needed) <= int(voters) <= SCAN_MAX:
        return int(needed), int(voters)
    raise InvalidInput(f"a quorum is such as '2/3' or '3/3', not {text!r:.60}")
