"""How long the long tests are: HOLDFAST_SOAK=1 makes them longer, not different."""

from __future__ import annotations

import os

SOAK = os.environ.get("HOLDFAST_SOAK") == "1"


def examples(count: int) -> int:
    """How many random examples a property is tried with: new ones in each run, ten times as many in a soak."""
    return 10 * count if SOAK else count
