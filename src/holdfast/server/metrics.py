"""What a keeper counts, for Prometheus.

`observe(op, outcome, seconds, count)` is on the path of every request and adds to plain lists and dictionaries; they become
Prometheus's families when somebody asks (`text`), and gauges are read then by functions that were given in. Labels are
`op` and `outcome`, `port` of those who did not get in, `state` of messages, `status` of tasks and executions and `result` of a hot tier
(`cache_metrics.py`) alone, from closed sets: what is not in them is counted as "other". Names of spaces, agents, queues or keys are never labels, so that the number
of series is bounded and one tenant learns nothing about another.

How it fails. A gauge whose function raises is left out of that answer and logged. Counting is not meant for several
threads: `observe` belongs to the event loop, `text` too.
"""

from __future__ import annotations

import logging
import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast import errors
from holdfast.errors import InvalidInput
from holdfast.layers.queue_entries import STATES
from holdfast.layers.task_states import STATUSES
from holdfast.layers.workflows.entries import STATUSES as EXECUTION_STATUSES
from holdfast.middleware.cache_options import CacheStats
from holdfast.server.cache_metrics import CacheMetrics
from holdfast.server.refusals import PORTS, PortName

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

OTHER: Final = "other"
OK: Final = "ok"

OPERATIONS: Final = frozenset(
    {"commit", "get", "scan", "watch", "create", "spaces", "drop", "load", "compact", "inspect", "hello", "ping"}
    | {"set", "delete", "increment", "compare_and_swap", "append", "lock", "renew", "unlock", "transaction", "reserve"}
    | {"feed", "audit", "backup", "admin"}
)
"""What is asked of a keeper: the contract's operations, and document D's verbs over HTTP."""

OUTCOMES: Final = frozenset(
    {OK} | {item.code for item in vars(errors).values() if isinstance(item, type) and issubclass(item, errors.Error)}
)
"""How it ends: ok, or the code of an error."""

CONFLICTS: Final = (errors.Conflict.code, errors.LockAcquisitionError.code)

BOUNDS: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds of the histogram's buckets, in seconds."""

GAUGES: Final = {
    "state_bytes": "Bytes of all entries that are kept.",
    "queue_depth": "Messages that wait in queues.",
    "locks_held": "Locks, permits and leaderships that are held.",
    "connections": "Open connections.",
    "watchers": "Watches under way.",
    "in_flight": "Requests that were taken and are not answered yet.",
}

LABELLED: Final = {
    "queue_messages": ("Messages of all queues, by where they are.", "state", STATES),
    "tasks": ("Tasks by status, those that have ended as long as they are kept.", "status", STATUSES),
    "executions": (
        "Executions of workflows that are pending, running or paused, and those that ever completed, failed, were cancelled.",
        "status",
        EXECUTION_STATUSES,
    ),
}
"""Gauges with one label, and what it may say."""


class _Series:
    """What was counted of one operation."""

    __slots__ = ("buckets", "outcomes", "seconds")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS) + 1)
        self.outcomes = dict.fromkeys((*OUTCOMES, OTHER), 0)
        self.seconds = 0.0


class Metrics(Collector):
    """The counters of one keeper. `gauges` are functions by name (GAUGES), asked when somebody reads, and `labelled` such as
    give a number for each label (LABELLED); so is `cache`."""

    def __init__(
        self,
        version: str,
        gauges: Mapping[str, Callable[[], float]] | None = None,
        *,
        cache: Callable[[], CacheStats | None] | None = None,
        labelled: Mapping[str, Callable[[], Mapping[str, float]]] | None = None,
        process: bool = True,
    ) -> None:
        unknown = sorted((set(gauges or ()) - set(GAUGES)) | (set(labelled or ()) - set(LABELLED)))
        if unknown:
            known = ", ".join((*GAUGES, *LABELLED))
            raise InvalidInput(f"there is no gauge {', '.join(unknown)}; there are {known}")
        self._version = version
        self._gauges = dict(gauges or {})
        self._labelled = dict(labelled or {})
        self._strangers: dict[PortName, int] = dict.fromkeys(PORTS, 0)
        self._other = _Series()
        self._series = {op: _Series() for op in OPERATIONS} | {OTHER: self._other}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        if cache is not None:
            self.registry.register(CacheMetrics(cache))
        if process:
            ProcessCollector(registry=self.registry)

    def observe(self, op: str, outcome: str, seconds: float, count: int = 1) -> None:
        """Count one request, or several that came and ended together: what was asked, how it ended, how long it took."""
        series = self._series.get(op, self._other)
        series.buckets[bisect_left(BOUNDS, seconds)] += count
        series.seconds += seconds * count
        try:
            series.outcomes[outcome] += count
        except KeyError:
            series.outcomes[OTHER] += count

    def count_stranger(self, port: PortName) -> None:
        """Count one who showed no good token."""
        self._strangers[port] += 1

    def text(self) -> bytes:
        """Everything, as Prometheus reads it (CONTENT_TYPE)."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._counted()
        yield from self._asked()
        built = GaugeMetricFamily(
            "holdfast_build_info", "Which Holdfast this is; always 1.", labels=["version", "python"]
        )
        built.add_metric([self._version, platform.python_version()], 1)
        yield built

    def _counted(self) -> Iterator[Metric]:
        total = CounterMetricFamily(
            "holdfast_operations", "Requests, by what was asked and how it ended.", labels=["op", "outcome"]
        )
        took = HistogramMetricFamily(
            "holdfast_operation_seconds", "Time from request to answer, by what was asked.", labels=["op"]
        )
        conflicts = 0
        for op, series in sorted(self._series.items()):
            for outcome, count in sorted(series.outcomes.items()):
                if count:
                    total.add_metric([op, outcome], count)
            conflicts += sum(series.outcomes[outcome] for outcome in CONFLICTS)
            if any(series.buckets):
                took.add_metric([op], _cumulated(series.buckets), series.seconds)
        yield total
        yield took
        yield CounterMetricFamily(
            "holdfast_conflicts", "Requests refused because a condition did not hold or a lock was taken.", conflicts
        )

        failures = CounterMetricFamily(
            "holdfast_authentication_failures", "Those who showed no good token, by port.", labels=["port"]
        )
        for port, count in self._strangers.items():
            failures.add_metric([port], count)
        yield failures

    def _asked(self) -> Iterator[Metric]:
        for name, read in self._gauges.items():
            try:
                value = float(read())
            except Exception:
                logging.getLogger("holdfast.metrics").exception("the gauge %s cannot be read", name)
                continue
            yield GaugeMetricFamily(f"holdfast_{name}", GAUGES[name], value)
        for name, numbers in self._labelled.items():
            told, label, known = LABELLED[name]
            family = GaugeMetricFamily(f"holdfast_{name}", told, labels=[label])
            try:
                now = numbers()
                for each in known:
                    family.add_metric([each], float(now.get(each, 0)))
            except Exception:
                logging.getLogger("holdfast.metrics").exception("the gauge %s cannot be read", name)
                continue
            yield family


def _cumulated(buckets: list[int]) -> list[tuple[str, float]]:
    """Prometheus wants each bucket to count everything below its bound."""
    counts, so_far = [], 0
    for bound, count in zip((*map(str, BOUNDS), "+Inf"), buckets, strict=True):
        so_far += count
        counts.append((bound, float(so_far)))
    return counts
