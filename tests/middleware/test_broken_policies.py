"""The tests of the policy catch what they are for.

Each fault here is a policy with one thing left out, as it is easily left out. For each there is a test that names it: it
must fail with the fault. Without the fault it passes, or it would not be among the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase, settings
from msgspec.structs import replace

from holdfast.engine import Put
from holdfast.errors import Conflict, Error
from holdfast.identity import Identity
from holdfast.middleware import growth, policy, quotas, rates, verbs
from holdfast.middleware.growth import at_worst, in_truth
from tests.middleware import test_access, test_isolation, test_messages, test_ownership, test_quotas, test_rates

demands, claims, charge, alone = verbs.demands, verbs.claims, rates.Bucket.charge, quotas._alone
commit, failed, read = policy.PolicedEngine._commit, quotas.Quotas.failed, quotas.Quotas._read


@dataclass(frozen=True)
class Fault:
    name: str
    where: Any
    attribute: str
    broken: Any
    caught_by: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


async def trusts_the_actor(self: Any, space: str, batch: Any) -> Any:
    return await commit(
        self._policy.engine_for(Identity(batch.actor, self.identity.role, self.identity.space)), space, batch
    )


async def reads_without_what_is_in_flight(self: Any, space: str, agent: str, book: Any) -> Any:
    used = await read(self, space, agent, book)
    for tally, amount in zip((book, book.account(agent)), used, strict=True):
        tally.base = amount - tally.begun
    return used


FAULTS = [
    Fault("no ownership", policy, "claims", lambda batch, orchestrator: (),
          test_ownership.test_nobody_frees_extends_or_changes_the_lock_of_another, ("agent",)),
    Fault("no ownership, random", policy, "claims", lambda batch, orchestrator: (),
          test_ownership.test_hand_made_batches_do_not_break_the_ownership_of_lines),
    Fault("ownership without the line", policy, "claims",
          lambda batch, orchestrator: claims(replace(batch, operations=tuple(op for op in batch.operations if not isinstance(op, Put))),
                                             orchestrator=orchestrator),
          test_ownership.test_nobody_chooses_a_place_in_a_line, ("0",)),
    Fault("places before the line", verbs, "TERRITORIES",
          {**verbs.TERRITORIES, "locks": replace(verbs.TERRITORIES["locks"], elements=0)},
          test_ownership.test_nobody_chooses_a_place_in_a_line, ("0",)),
    Fault("orchestrators own everything", verbs, "TERRITORIES",
          {**verbs.TERRITORIES, "locks": replace(verbs.TERRITORIES["locks"], orchestrated=True)},
          test_ownership.test_nobody_frees_extends_or_changes_the_lock_of_another, ("orchestrator",)),
    Fault("sections in any name", verbs, "TERRITORIES",
          {**verbs.TERRITORIES, "sections": replace(verbs.TERRITORIES["sections"], ownership="own")},
          test_ownership.test_a_section_is_written_by_the_agent_it_is_named_after, (False,)),
    Fault("sections in any name, if one owns what is there", verbs, "TERRITORIES",
          {**verbs.TERRITORIES, "sections": replace(verbs.TERRITORIES["sections"], ownership="free")},
          test_ownership.test_a_section_is_written_by_the_agent_it_is_named_after, (True,)),
    Fault("places that take more", verbs, "check_place", lambda op, batch: None,
          test_ownership.test_a_place_that_is_written_anew_takes_what_it_took_and_pushes_nobody_out),
    Fault("sizes that are none", verbs, "size_claims", lambda op, orchestrator: [],
          test_ownership.test_the_size_of_a_line_is_a_number_that_everybody_can_read, ("agent",)),
    Fault("numbers that count nothing", verbs, "count_claims", lambda batch: [],
          test_messages.test_the_numbers_of_messages_are_what_there_is_whatever_is_sent_by_hand, ("agent",)),
    Fault("items without a record", verbs, "item_claims", lambda batch: [],
          test_quotas.test_no_number_of_lists_and_sets_that_are_made_by_hand_exceeds_the_quota_of_keys),
    Fault("items anywhere", verbs, "item_claims", lambda batch: [],
          test_quotas.test_items_are_written_under_the_record_that_stands_for_them_and_nowhere_else),
    Fault("sizes that are no keys", growth, "WITHOUT_KEYS", growth.WITHOUT_KEYS | {"permits"},
          test_quotas.test_by_hand_nobody_keeps_more_keys_than_its_quota_nor_a_list_or_set_that_is_none),
    Fault("entries for any owner", policy, "written_for", lambda op, actor, orchestrator: True,
          test_ownership.test_an_orchestrator_writes_the_section_of_another_and_it_stays_the_other_s),
    Fault("documents of everybody", verbs, "TERRITORIES",
          {**verbs.TERRITORIES, "documents": replace(verbs.TERRITORIES["documents"], by_orchestrators=False)},
          test_ownership.test_orchestrators_write_documents_and_correlations_and_agents_read_them, ("documents",)),
    Fault("history that is corrected", verbs, "TERRITORIES",
          {**verbs.TERRITORIES, "history": replace(verbs.TERRITORIES["history"], delete="Delete")},
          test_ownership.test_history_is_appended_to_and_never_changed),
    Fault("history that is made up", verbs, "TERRITORIES",
          {**verbs.TERRITORIES, "history": replace(verbs.TERRITORIES["history"], told=False)},
          test_ownership.test_an_agent_appends_to_history_only_what_it_does_in_the_same_batch),
    Fault("a sender that names itself", policy.PolicedEngine, "_commit", trusts_the_actor,
          test_access.test_a_sender_does_not_name_itself),
    Fault("only the first operation is checked", policy, "demands", lambda batch: itertools.islice(demands(batch), 1),
          test_access.test_a_denied_verb_does_not_hide_in_a_batch),
    Fault("the last verb is not checked", policy, "demands", lambda batch: list(demands(batch))[:-1],
          test_access.test_nothing_denied_reaches_the_engine_and_everything_allowed_does),
    Fault("conditions are not checked", policy, "demands", lambda batch: demands(replace(batch, conditions=())),
          test_access.test_a_condition_reads_its_key),
    Fault("any range may be found empty", verbs, "territory_under", lambda prefix: verbs.TERRITORIES["records"],
          test_access.test_a_watch_or_scan_outside_of_one_subspace_is_denied, ("system/",)),
    Fault("any prefix may be read", policy, "territory_under", lambda prefix: verbs.TERRITORIES["records"],
          test_access.test_a_watch_or_scan_outside_of_one_subspace_is_denied, ("",)),
    Fault("any prefix may be read, random", policy, "territory_under", lambda prefix: verbs.TERRITORIES["records"],
          test_access.test_nothing_that_may_not_be_read_is_read),
    Fault("every space is open", policy.PolicedEngine, "_enter", lambda self, space, verb, key, request_id=None: None,
          test_isolation.test_one_space_never_sees_another),
    Fault("a batch is charged once", rates.Bucket, "charge", lambda self, tokens, now_ms, **how: charge(self, 1, now_ms, **how),
          test_rates.test_a_batch_is_charged_by_its_operations),
    Fault("a batch is charged once, random", rates.Bucket, "charge", lambda self, tokens, now_ms, **how: charge(self, 1, now_ms, **how),
          test_rates.test_no_sequence_gets_more_than_the_burst_and_the_rate),
    Fault("a token too much", rates.Bucket, "charge",
          lambda self, tokens, now_ms, **how: charge(self, max(1, tokens - 1), now_ms, **how),
          test_rates.test_no_sequence_gets_more_than_the_burst_and_the_rate),
    Fault("no quota for those who are fast", quotas, "_fits",
          lambda book, accounts, growth, quota: book.base < quota.max_total_size,
          test_quotas.test_no_concurrent_requests_exceed_a_quota_together),
    Fault("what is in flight is forgotten by a reading", quotas.Quotas, "_read", reads_without_what_is_in_flight,
          test_quotas.test_no_concurrent_requests_exceed_a_quota_together),
    Fault("replaced values are not credited", quotas, "in_truth", lambda batch, entries, unsure: at_worst(batch),
          test_quotas.test_a_replaced_value_is_credited),
    Fault("an agent's batches do not wait for each other", quotas, "_alone",
          lambda tally: alone(tally) if isinstance(tally, quotas.Book) else contextlib.nullcontext(),
          test_quotas.test_no_history_of_many_exceeds_a_quota, (False,)),
    Fault("the space does not wait", quotas, "_alone",
          lambda tally: contextlib.nullcontext() if isinstance(tally, quotas.Book) else alone(tally),
          test_quotas.test_no_history_of_many_exceeds_a_quota, (False,)),
    Fault("others' numbers never go", quotas, "in_truth", lambda batch, entries, unsure: in_truth(batch, entries),
          test_quotas.test_an_increment_of_what_another_deletes_meanwhile_exceeds_nothing, (2,)),
    Fault("an unknown outcome is taken for a refusal", quotas.Quotas, "failed",
          lambda self, exc, parts: failed(self, Error(), parts),
          test_quotas.test_a_commit_that_may_still_happen_counts_until_it_cannot_any_more),
]  # fmt: skip


QUICKLY = settings(max_examples=500, phases=(Phase.generate,), deadline=None, database=None, derandomize=True)
"""Random tests only need to find the fault, not its smallest form."""


def run(fault: Fault) -> None:
    answer = fault.caught_by(*fault.arguments)
    if inspect.iscoroutine(answer):
        asyncio.run(answer)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_broken_policy_fails_the_test_that_names_its_fault(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(fault.caught_by, "hypothesis"):
        monkeypatch.setattr(fault.caught_by, "_hypothesis_internal_use_settings", QUICKLY)
    monkeypatch.setattr(fault.where, fault.attribute, fault.broken)
    with pytest.raises((AssertionError, pytest.fail.Exception, Conflict)):
        run(fault)
