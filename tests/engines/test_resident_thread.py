"""The resident engine passes the conformance suite also where COMMIT takes long, and therefore runs in a thread.

Normally those parts in which a thread can make a difference, in a soak all of it.
"""

import os

import pytest
from tests.engines.test_resident import engine_factory

from holdfast.engines import resident_commit
from holdfast.testing import conformance

PARTS = [
    "TestDurability",
    "TestFeed",
    "TestOneEvaluator",
    "TestOutcome",
    "TestRequests",
    "TestTotalOrder",
    "TestWatching",
]
globals().update(
    {
        name: getattr(conformance, name)
        for name in (conformance.__all__ if os.environ.get("HOLDFAST_SOAK") == "1" else [*PARTS, "subject"])
    }
)

__all__ = ["engine_factory"]


@pytest.fixture(autouse=True)
def _slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_commit, "INLINE_COMMIT_S", -1.0)
    monkeypatch.setattr(resident_commit, "PROBE_EVERY", 2)
