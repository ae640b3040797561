"""Guarantee 7, outcome: who does not get his reply can find out by his request id, and disturbs nobody else.

What an engine does when its disk or its connection fails is a matter of the fault tests; here the caller fails.
"""

from __future__ import annotations

import asyncio

from holdfast.engine import SCAN_MAX, Increment, Push, Put, Receipt
from holdfast.testing.conformance.subject import SPACE, Subject


class TestOutcome:
    async def test_a_cancelled_committer_does_not_break_the_replies_of_others(self, subject: Subject) -> None:
        await subject.commit(Put("a/first", b"1"))
        for turns in range(6):
            commits = [asyncio.ensure_future(subject.commit(Increment(f"a/{turns}", 1))) for _ in range(20)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for commit in commits[::3]:
                commit.cancel()
            outcomes = await asyncio.wait_for(asyncio.gather(*commits, return_exceptions=True), subject.deadline_s)
            kept = [outcome for i, outcome in enumerate(outcomes) if i % 3]
            assert all(isinstance(outcome, Receipt) for outcome in kept)
            assert len({outcome.version for outcome in kept if isinstance(outcome, Receipt)}) == len(kept)
            total = int(await subject.value(f"a/{turns}") or b"0")
            acknowledged = sum(isinstance(outcome, Receipt) for outcome in outcomes)
            assert acknowledged <= total <= len(commits)

    async def test_a_cancelled_commit_is_whole_or_not_at_all(self, subject: Subject) -> None:
        await subject.commit(Put("a/first", b"1"))
        for turns in range(12):
            commit = asyncio.ensure_future(
                subject.commit(Put(f"a/{turns}/left", b"1"), Put(f"a/{turns}/right", b"1"), Push("q/", b"1"))
            )
            for _ in range(turns):
                await asyncio.sleep(0)
            commit.cancel()
            await asyncio.gather(commit, return_exceptions=True)
        await subject.commit(Put("a/last", b"1"))
        # What was cancelled may still be on its way, and then it comes whole: one page is one moment.
        page = await subject.engine.scan(SPACE, "", limit=SCAN_MAX)
        whole = sum(entry.key.startswith("q/") for entry in page.entries)
        assert sum(entry.key.startswith("a/") for entry in page.entries) == 2 + 2 * whole
        assert {len(commit.changes) for commit in await subject.feed()} <= {1, 3}

    async def test_a_cancelled_commit_is_resolved_by_its_request_id(self, subject: Subject) -> None:
        await subject.commit(Put("a/first", b"1"))
        for turns in range(12):
            request = f"request-{turns}"
            commit = asyncio.ensure_future(subject.commit(Increment("a/n", 1), request_id=request))
            for _ in range(turns):
                await asyncio.sleep(0)
            commit.cancel()
            await asyncio.gather(commit, return_exceptions=True)
            receipt = await subject.commit(Increment("a/n", 1), request_id=request)
            assert receipt.results == [turns + 1]
            assert await subject.commit(Increment("a/n", 1), request_id=request) == receipt
        assert await subject.value("a/n") == b"12"
