"""What the fault tests of one process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import nursery


@pytest.fixture(scope="session", autouse=True)
def _no_nursery_outlives_the_tests() -> Iterator[None]:
    yield
    nursery.close()
