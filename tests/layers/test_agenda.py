"""The agenda of an orchestrator: what is due when, and for whom first. No store, no clock: only what the feed tells."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.clock import as_datetime
from holdfast.codec import encode
from holdfast.engine import Change, ChangeSet, Entry
from holdfast.layers import agenda as module
from holdfast.layers.agenda import RANK_MAX, STEP_MS, Agenda, ToDecide, ToPublish
from holdfast.layers.correlation_entries import (
    ORCHESTRATORS,
    OUTBOX,
    STATES,
    Claim,
    Metadata,
    Sent,
    State,
    Status,
    tag_of,
)

NOW = 1_750_000_000_000
LEASE_MS = 10_000
TIMEOUT_MS = 60_000


def sent(corr_id: str, agent: str, run: str = "run") -> bytes:
    """A signal as it is kept."""
    return encode(Sent(run, {"agent_name": agent, "corr_id": corr_id, "enriched_at": "2025-06-15T15:06:40+00:00"}))


class Feed:
    """A feed that agendas are told of."""

    def __init__(self, *agendas: Agenda) -> None:
        self.agendas = agendas
        self.version = 0

    def tell(self, *changes: Change, now: int = NOW) -> None:
        self.version += 1
        for agenda in self.agendas:
            agenda.apply(ChangeSet(self.version, now, "x", list(changes)), now)

    def state(self, corr_id: str, status: Status = "collecting", by: str | None = None, now: int = NOW) -> None:
        metadata = Metadata(as_datetime(NOW), as_datetime(NOW), ["a", "b"], as_datetime(NOW + TIMEOUT_MS), "fan_in", 2)
        claim = None if by is None else Claim(by, 1, as_datetime(NOW))
        value = encode(State(corr_id, status, "run", metadata, claim=claim))
        self.tell(Change("put", STATES + corr_id, True, value, tag=tag_of(status)), now=now)

    def signal(self, corr_id: str, agent: str, run: str = "run", now: int = NOW) -> None:
        key = f"sections/correlations/{corr_id}/{agent}/-"
        self.tell(Change("put", key, True, sent(corr_id, agent, run)), now=now)

    def lives(self, *orchestrators: str, now: int = NOW) -> None:
        for each in orchestrators:
            self.tell(Change("put", ORCHESTRATORS + each, True, b"{}"), now=now)

    def dies(self, orchestrator: str, now: int = NOW) -> None:
        self.tell(Change("expire", ORCHESTRATORS + orchestrator, False), now=now)


def one() -> tuple[Agenda, Feed]:
    agenda = Agenda("me", LEASE_MS, publishes=True)
    return agenda, Feed(agenda)


def ids(work: list[Any]) -> list[str]:
    return [each.corr_id for each in work]


def test_a_correlation_is_due_when_its_last_signal_is_there() -> None:
    agenda, feed = one()
    feed.state("c")
    feed.signal("c", "a")
    feed.signal("c", "a")
    feed.signal("c", "stranger")
    feed.signal("c", "b", run="an earlier one")
    assert agenda.due(NOW, 9) == []
    feed.signal("c", "b")
    assert ids(agenda.due(NOW, 9)) == ["c"]
    assert agenda.due(NOW, 9) == [], "it is under way"


def test_what_the_feed_has_told_whole_need_not_be_read() -> None:
    agenda, feed = one()
    feed.state("c")
    feed.signal("c", "a")
    feed.signal("c", "b")
    [work] = agenda.due(NOW, 9)
    assert isinstance(work, ToDecide)
    assert work.is_told
    assert {agent: (entry.version, entry.value) for agent, entry in work.sent.items()} == {
        "a": (2, sent("c", "a")),
        "b": (3, sent("c", "b")),
    }


@pytest.mark.parametrize(
    "key", ["correlations/context/c", "sections/correlations/c/a/x", "sections/correlations/c/z/-"]
)
def test_what_has_more_than_its_signals_is_read(key: str) -> None:
    agenda, feed = one()
    feed.state("c")
    feed.tell(Change("put", key, True, encode({})))
    assert not agenda._open["c"].is_told


def test_what_has_had_a_signal_of_an_earlier_run_is_read() -> None:
    agenda, feed = one()
    feed.state("c")
    feed.signal("c", "a")
    assert agenda._open["c"].is_told
    feed.signal("c", "b", run="an earlier one")
    assert not agenda._open["c"].is_told
    feed.signal("c", "b")
    [work] = agenda.due(NOW, 9)
    assert isinstance(work, ToDecide)
    assert not work.is_told, "what else is there is known to the store alone"


def test_what_was_there_before_the_feed_was_followed_is_read() -> None:
    agenda, feed = one()
    feed.state("c")
    state = agenda._open["c"].state
    later, _ = one()
    later.load([Entry(STATES + "c", encode(state), 1, "x", NOW, NOW, tag=tag_of("collecting"))], NOW)
    assert not later._open["c"].is_told


def test_no_more_signals_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(sent("c", "a"))
    monkeypatch.setattr(module, "SENT_BYTES_MAX", 3 * size)
    agenda, feed = one()
    for corr_id in ("c", "d"):
        feed.state(corr_id)
        feed.signal(corr_id, "a")
        feed.signal(corr_id, "a")
        feed.signal(corr_id, "b")
    assert [work.is_told for work in agenda._open.values()] == [True, False]
    assert ids(agenda.due(NOW, 9)) == ["c", "d"], "it is decided all the same"
    feed.state("c", "completed")
    feed.tell(Change("delete", "sections/correlations/d/a/-", False))
    feed.tell(Change("delete", STATES + "d", False))
    assert agenda._sent_bytes == 0


def test_without_its_signals_it_is_due_at_its_timeout() -> None:
    agenda, feed = one()
    feed.state("c")
    assert agenda.next_at() == NOW + TIMEOUT_MS
    assert agenda.due(NOW + TIMEOUT_MS - 1, 9) == []
    [work] = agenda.due(NOW + TIMEOUT_MS, 9)
    assert isinstance(work, ToDecide)
    assert not work.complete


def test_what_is_finished_or_gone_is_never_due() -> None:
    agenda, feed = one()
    for corr_id in ("c", "d"):
        feed.state(corr_id)
        feed.signal(corr_id, "a")
        feed.signal(corr_id, "b")
    feed.state("c", "completed")
    feed.tell(Change("delete", STATES + "d", False))
    feed.signal("c", "a")
    assert (agenda.due(NOW + TIMEOUT_MS, 9), len(agenda), agenda.next_at()) == ([], 0, None)


def test_what_was_claimed_and_decided_in_one_commit_is_never_due() -> None:
    agenda, feed = one()
    feed.lives("peer")
    feed.state("c")
    claimed = encode(
        State("c", "orchestrating", "run", agenda._open["c"].state.metadata, claim=Claim("peer", 1, as_datetime(NOW)))
    )
    feed.tell(
        Change("put", STATES + "c", True, claimed, tag=tag_of("orchestrating")),
        Change("put", STATES + "c", True, b"{}", tag=tag_of("completed")),
    )
    feed.dies("peer")
    assert (agenda.due(NOW + TIMEOUT_MS, 9), len(agenda), agenda.next_at()) == ([], 0, None)


def test_another_decision_in_the_outbox_is_published_while_the_one_before_is_noted() -> None:
    agenda, feed = one()
    work = agenda.publishing("c", NOW)
    assert agenda.noting(work, 1)
    agenda.release(work, NOW)
    assert agenda.due(NOW, 9) == [], "it has only to be noted"
    feed.tell(Change("put", OUTBOX + "c", True, b"{}", tag="me"))
    feed.tell(Change("put", OUTBOX + "c", True, b"{}", tag="me"))
    [other] = agenda.due(NOW, 9)
    assert (other is work, other.version, work.version) == (False, 2, 1)
    agenda.published(work)
    assert agenda._is_known(other)


def test_another_decision_that_comes_while_one_is_published_is_published_too() -> None:
    agenda, feed = one()
    work = agenda.publishing("c", NOW)
    work.decision = object()  # type: ignore[assignment]
    for _ in range(2):
        feed.tell(Change("put", OUTBOX + "c", True, b"{}", tag="me"))
    assert not agenda.noting(work, 1)
    agenda.release(work, NOW)
    assert (agenda.due(NOW, 9), work.decision, work.version) == ([work], None, 2), "it is read anew"


def test_what_another_has_decided_first_is_still_published_when_that_one_is_gone() -> None:
    agenda, feed = one()
    feed.lives("other")
    feed.tell(Change("put", OUTBOX + "c", True, b"{}", tag="other"))
    mine = agenda.publishing("c", NOW)
    agenda.not_publishing(mine, NOW)  # the state was not the one that was seen
    assert agenda.due(NOW, 9) == [], "the one that decided it publishes it"
    agenda.gone("other", NOW)
    assert [(work.corr_id, work.version) for work in agenda.due(NOW, 9)] == [("c", feed.version)]


def test_what_went_out_of_the_outbox_meanwhile_is_not_published() -> None:
    agenda, feed = one()
    feed.tell(Change("put", OUTBOX + "c", True, b"{}", tag="gone"))
    mine = agenda.publishing("c", NOW)
    feed.tell(Change("delete", OUTBOX + "c", False))
    agenda.not_publishing(mine, NOW)
    assert agenda.due(NOW, 9) == []


def test_what_comes_into_the_outbox_meanwhile_is_published_by_whom_it_names() -> None:
    agenda, feed = one()
    mine = agenda.publishing("c", NOW)
    feed.tell(Change("put", OUTBOX + "c", True, b"{}", tag="gone"))
    agenda.not_publishing(mine, NOW)
    assert agenda.due(NOW, 9) == [mine]


def test_of_many_one_goes_first_and_the_others_follow_one_by_one() -> None:
    many = [Agenda(f"o{number}", LEASE_MS, publishes=False) for number in range(20)]
    feed = Feed(*many)
    feed.lives(*(each.me for each in many))
    for number in range(100):
        feed.state(f"c{number}")
        feed.signal(f"c{number}", "a")
        feed.signal(f"c{number}", "b")
    at_once = [ids(each.due(NOW, 1000)) for each in many]
    assert sorted(each for some in at_once for each in some) == sorted(f"c{number}" for number in range(100)), (
        "each is one orchestrator's"
    )
    assert max(map(len, at_once)) < 30, "and they share the work"
    assert sum(len(each.due(NOW + STEP_MS, 1000)) for each in many) == 100
    everybody = [len(each.due(NOW + STEP_MS * RANK_MAX, 1000)) for each in many]
    assert sum(everybody) == 20 * 100 - 200, "in the end everybody would"


def test_where_commits_take_long_the_next_in_rank_waits_longer() -> None:
    agenda, feed = one()
    others = [f"peer {number}" for number in range(7)]
    feed.lives("me", *others)
    for number in range(100):
        feed.state(f"c{number}")
        feed.signal(f"c{number}", "a")
        feed.signal(f"c{number}", "b")
    first = len(agenda.due(NOW, 1000))
    assert 0 < first < 40
    for _ in range(100):
        agenda.took(1000)
    assert agenda.step_ms == min(3000, LEASE_MS // 2)
    assert agenda.due(NOW + agenda.step_ms - 1, 1000) == [], "planned when nothing was slow: found out when it is due"
    assert 0 < len(agenda.due(NOW + agenda.step_ms, 1000)) < 40
    for _ in range(100):
        agenda.took(2)
    assert agenda.step_ms == STEP_MS


def test_one_that_begins_anew_keeps_its_picture_and_what_it_had_is_due_again() -> None:
    agenda, feed = one()
    feed.lives("me")
    feed.state("c", "orchestrating", by="me")
    feed.state("waits")
    feed.tell(Change("put", OUTBOX + "p", True, b"{}", tag="me"))
    feed.tell(Change("put", OUTBOX + "q", True, b"{}", tag="me"))
    begun = agenda.due(NOW, 9)
    assert sorted(ids(begun)) == ["c", "p", "q"]
    [published] = [each for each in begun if each.corr_id == "q"]
    assert isinstance(published, ToPublish)
    assert agenda.noting(published, published.version)
    agenda.begin_anew("me again", NOW)
    assert len(agenda) == 2
    again = agenda.due(NOW, 9)
    assert (sorted(ids(again)), {each.claimant for each in again}) == (["c", "p", "q"], {"me"})
    feed.dies("me")
    assert agenda.due(NOW, 9) == []
    assert ids(agenda.due(NOW + TIMEOUT_MS, 9)) == ["waits"]


def test_what_another_claimed_is_left_to_it_until_it_is_gone() -> None:
    agenda, feed = one()
    feed.lives("me", "peer")
    feed.state("c", "orchestrating", by="peer")
    feed.tell(Change("put", OUTBOX + "p", True, b"{}", tag="peer"))
    assert agenda.due(NOW + TIMEOUT_MS, 9) == []
    assert agenda.looks(NOW + LEASE_MS - 1) == []
    assert agenda.looks(NOW + LEASE_MS) == ["peer"]
    agenda.alive("peer", NOW + 2 * LEASE_MS, NOW + LEASE_MS)
    assert agenda.looks(NOW + LEASE_MS) == []
    feed.dies("peer", now=NOW + 2 * LEASE_MS)
    assert sorted(ids(agenda.due(NOW + 2 * LEASE_MS, 9))) == ["c", "p"]


def test_a_claim_of_one_that_nobody_knows_is_free() -> None:
    agenda, feed = one()
    feed.state("c", "orchestrating", by="long gone")
    assert ids(agenda.due(NOW, 9)) == ["c"]


def test_who_should_have_acted_and_did_not_is_looked_at() -> None:
    agenda, feed = one()
    feed.lives("me", *(f"dead{number}" for number in range(50)))
    feed.state("c")
    feed.signal("c", "a")
    feed.signal("c", "b")
    later = NOW + STEP_MS * RANK_MAX
    assert ids(agenda.due(later, 9)) == ["c"]
    assert len(agenda.looks(later)) > 10
    for peer in agenda.looks(later):
        agenda.gone(peer, later)
    assert agenda.looks(later) == []


def test_what_this_process_did_itself_is_no_news() -> None:
    """The feed tells of the claim, the outbox and the end when all of it is over."""
    agenda, feed = one()
    feed.state("c")
    feed.signal("c", "a")
    feed.signal("c", "b")
    [work] = agenda.due(NOW, 9)
    publishing = agenda.publishing("c", NOW)
    agenda.drop("c", 5)
    agenda.published(publishing, 6)
    agenda.release(work, NOW)
    agenda.release(publishing, NOW)
    feed.state("c", "orchestrating", by="me")
    feed.tell(
        Change("put", OUTBOX + "c", True, b"{}", tag="me"), Change("put", STATES + "c", True, tag=tag_of("completed"))
    )
    assert (agenda.due(NOW + TIMEOUT_MS, 9), len(agenda), agenda._settled) == ([], 0, {OUTBOX + "c": 6})
    feed.tell(Change("delete", OUTBOX + "c", False))
    assert (agenda.due(NOW + TIMEOUT_MS, 9), agenda._settled, agenda.next_at()) == ([], {}, None)


def test_ones_own_that_failed_is_tried_again_later() -> None:
    agenda, feed = one()
    feed.tell(Change("put", OUTBOX + "c", True, b"{}", tag="me"))
    [work] = agenda.due(NOW, 9)
    assert isinstance(work, ToPublish)
    agenda.release(work, NOW, NOW + 500)
    assert agenda.next_at() == NOW + 500
    assert agenda.due(NOW + 499, 9) == []
    assert ids(agenda.due(NOW + 500, 9)) == ["c"]


def test_only_so_much_is_begun_as_there_is_room_for() -> None:
    agenda, feed = one()
    for number in range(5):
        feed.state(f"c{number}", "orchestrating", by="long gone")
    assert [len(agenda.due(NOW, 2)) for _ in range(4)] == [2, 2, 1, 0]


def test_the_picture_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPEN_MAX", 3)
    agenda, feed = one()
    for number in range(5):
        feed.state(f"c{number}")
    assert (len(agenda), agenda.overfull) == (3, True)
