"""What a store's hot tier does, for Prometheus: hit rate, staleness, flushes.

    registry.register(CacheMetrics(lambda: store.cache.stats))

A process with a tier registers it with its own registry. A keeper tells them of the store it serves, if that has a tier (one that is
opened from a configuration file has none: its clients have theirs).
The numbers are those of `store.cache.stats`, read when somebody asks. The one label is `result`, from a closed set;
spaces and keys are never labels, so that the number of series is bounded and one tenant learns nothing about another.

How it fails. While there is no tier (None), nothing is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.middleware.cache_options import CacheStats

RESULTS: Final = ("hit", "shared_hit", "miss")
"""Where a read was answered: from memory, from Redis, by the durable engine."""
COUNTED: Final = {
    "negative_hits": "Hits that said that there is nothing.",
    "fills": "What was read and kept.",
    "fills_refused": "What was read and not kept, since something newer was known.",
    "flushes": "How often all of a space was forgotten, because its feed had a gap.",
    "shared_errors": "How often Redis did not answer, or not with what was put there.",
}


class CacheMetrics(Collector):
    """The numbers of one tier."""

    def __init__(self, stats: Callable[[], CacheStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        reads = CounterMetricFamily("holdfast_cache_reads", "Reads, by where they were answered.", labels=["result"])
        for result, count in zip(RESULTS, (stats.hits, stats.shared_hits, stats.misses), strict=True):
            reads.add_metric([result], count)
        yield reads
        for name, what in COUNTED.items():
            yield CounterMetricFamily(f"holdfast_cache_{name}", what, getattr(stats, name))
        for name, what, value in (
            ("hit_ratio", "The share of reads that did not ask the durable engine.", stats.hit_rate),
            ("spaces", "Spaces whose feed is followed.", stats.spaces),
            ("behind_revisions", "Revisions that were heard of and have not come through the feed.", stats.behind),
            ("lag_seconds", "How long the latest commit took through the feed.", stats.lag_ms / 1000),
            (
                "proof_age_seconds",
                "How long ago the feed was last known to have told everything, where readers were answered since.",
                max(stats.proof_age_ms, 0) / 1000,
            ),
            ("feeds_cut", "Spaces whose feed has failed or stands still.", stats.feeds_cut),
        ):
            yield GaugeMetricFamily(f"holdfast_cache_{name}", what, value)
