"""How long the long tests are: HOLDFAST_SOAK=1 makes them longer, not different."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

SOAK = os.environ.get("HOLDFAST_SOAK") == "1"


def examples(count: int) -> int:
    """How many random examples a property is tried with: new ones in each run, ten times as many in a soak."""
    return 10 * count if SOAK else count


def in_turn(test: str, kinds: Sequence[str]) -> list[str]:
    """Where a test runs that is the same everywhere: on one of the kinds, all of them in a soak.

    Which one is told by the test's name, so it is the same in each run and each process, and each kind has its share of the tests.
    """
    return list(kinds) if SOAK else [kinds[zlib.crc32(test.encode()) % len(kinds)]]
