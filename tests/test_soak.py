"""What is left out of one run is in another."""

from __future__ import annotations

from collections import Counter

import pytest

from tests import soak


@pytest.mark.parametrize(("count", "share"), [(277, 48), (27, 12), (5, 20), (1, 6)])
def test_as_many_runs_as_a_share_has_take_every_case_once(
    monkeypatch: pytest.MonkeyPatch, count: int, share: int
) -> None:
    monkeypatch.setattr(soak, "SOAK", False)
    taken: Counter[int] = Counter()
    for seed in range(1000, 1000 + min(share, count)):
        monkeypatch.setattr(soak, "SEED", seed)
        chosen = soak.sample(count, share)
        assert chosen
        taken.update(chosen)
    assert taken == Counter(range(1, count + 1))
