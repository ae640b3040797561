"""The resident engine passes the conformance suite also where COMMIT takes long, and therefore runs in a thread."""

import pytest
from tests.engines.test_resident import engine_factory

from holdfast.engines import resident_commit
from holdfast.testing.conformance import *  # noqa: F403

__all__ = ["engine_factory"]


@pytest.fixture(autouse=True)
def _slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_commit, "INLINE_COMMIT_S", -1.0)
    monkeypatch.setattr(resident_commit, "PROBE_EVERY", 2)
