"""What a hot tier tells Prometheus: what its statistics say, under names from a closed set."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import holdfast
from holdfast.middleware.cache_options import CacheStats
from holdfast.server.cache_metrics import RESULTS, CacheMetrics
from holdfast.server.metrics import Metrics


def told(text: str) -> dict[str, float]:
    """Value by name, with the label in braces where there is one."""
    return {
        sample.name + "".join(f"{{{label}}}" for label in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("holdfast_cache")
    }


def test_every_number_of_a_tier_is_told() -> None:
    stats = CacheStats(6, 3, 2, 1, 5, 4, 7, 8, spaces=9, behind=10, lag_ms=1500, proof_age_ms=2500, feeds_cut=3)
    assert told(Metrics("1", cache=lambda: stats, process=False).text().decode()) == {
        "holdfast_cache_reads_total{hit}": 6,
        "holdfast_cache_reads_total{shared_hit}": 3,
        "holdfast_cache_reads_total{miss}": 1,
        "holdfast_cache_negative_hits_total": 2,
        "holdfast_cache_fills_total": 5,
        "holdfast_cache_fills_refused_total": 4,
        "holdfast_cache_flushes_total": 7,
        "holdfast_cache_shared_errors_total": 8,
        "holdfast_cache_hit_ratio": 0.9,
        "holdfast_cache_spaces": 9,
        "holdfast_cache_behind_revisions": 10,
        "holdfast_cache_lag_seconds": 1.5,
        "holdfast_cache_proof_age_seconds": 2.5,
        "holdfast_cache_feeds_cut": 3,
    }


def test_without_a_tier_nothing_is_told() -> None:
    for metrics in (Metrics("1", process=False), Metrics("1", cache=lambda: None, process=False)):
        assert told(metrics.text().decode()) == {}


async def test_a_process_tells_of_its_own_tier_whatever_its_spaces_are_called(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    async with holdfast.open(str(tmp_path / "team.db"), cache="memory") as store:
        registry.register(CacheMetrics(lambda: None if store.cache is None else store.cache.stats))
        for number in range(20):
            records = store.space(f"tenant-{number}").records
            await records.set("n", 1)
            for _ in range(3):
                await records.get("n", consistency="session")
        text = generate_latest(registry).decode()
    found = told(text)
    assert "tenant" not in text
    assert {name for name in found if "{" in name} == {f"holdfast_cache_reads_total{{{each}}}" for each in RESULTS}
    assert (found["holdfast_cache_reads_total{hit}"], found["holdfast_cache_spaces"]) == (40, 20)
    assert found["holdfast_cache_hit_ratio"] == 2 / 3
