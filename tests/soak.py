"""How long the long tests are: HOLDFAST_SOAK=1 makes them longer, not different.

Where a run takes a sample of many cases, the next run takes another: HOLDFAST_SEED says which, is told at the end, and can be given
to have the same ones again.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Sequence

SOAK = os.environ.get("HOLDFAST_SOAK") == "1"
# Into the environment, for the processes that share the tests of a run.
SEED = int(os.environ.setdefault("HOLDFAST_SEED", str(random.randrange(1_000_000))))


def examples(count: int) -> int:
    """How many random examples a property is tried with: new ones in each run, ten times as many in a soak."""
    return 10 * count if SOAK else count


def in_turn(test: str, kinds: Sequence[str]) -> list[str]:
    """Where a test runs that is the same everywhere: on one of the kinds, all of them in a soak.

    Which one is told by the test's name, so it is the same in each run and each process, and each kind has its share of the tests.
    """
    return list(kinds) if SOAK else [kinds[zlib.crc32(test.encode()) % len(kinds)]]


def sample(count: int, share: int) -> range:
    """Of the cases 1 to `count` one of `share`, others in each run; in a soak all of them."""
    share = 1 if SOAK else min(share, count)
    return range(1 + SEED % share, count + 1, share)
