"""What a keeper counts: right, from closed sets, and cheaply."""

from __future__ import annotations

import timeit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import holdfast
from holdfast import InvalidInput, ManualClock, TaskSpec
from holdfast.errors import Conflict, LockAcquisitionError, QuotaExceeded
from holdfast.server.gauges import Gauges
from holdfast.server.metrics import BOUNDS, GAUGES, OPERATIONS, OTHER, OUTCOMES, Metrics

OBSERVE_NS_MAX = 1000


def read(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What Prometheus's own parser understands: value by name and labels."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return read(metrics).get((name, tuple(sorted(labels.items()))))


def test_requests_are_counted_by_what_was_asked_and_how_it_ended() -> None:
    metrics = Metrics("1.2.3")
    for _ in range(3):
        metrics.observe("commit", "ok", 0.001)
    metrics.observe("commit", QuotaExceeded.code, 0.001)
    metrics.observe("get", "ok", 0.001)
    assert value(metrics, "holdfast_operations_total", op="commit", outcome="ok") == 3
    assert value(metrics, "holdfast_operations_total", op="commit", outcome="quota_exceeded") == 1
    assert value(metrics, "holdfast_operations_total", op="get", outcome="ok") == 1
    assert value(metrics, "holdfast_conflicts_total") == 0


def test_times_fall_into_the_bucket_of_their_bound() -> None:
    metrics = Metrics("1.2.3")
    for seconds in (0.0, 0.00005, 0.00006, 0.3, 10.0, 11.0):
        metrics.observe("get", "ok", seconds)

    def upto(bound: str) -> float | None:
        return value(metrics, "holdfast_operation_seconds_bucket", op="get", le=bound)

    assert [upto(bound) for bound in ("5e-05", "0.0001", "0.25", "0.5", "10.0", "+Inf")] == [2, 3, 3, 4, 5, 6]
    assert value(metrics, "holdfast_operation_seconds_count", op="get") == 6
    assert value(metrics, "holdfast_operation_seconds_sum", op="get") == pytest.approx(21.30011)
    assert (BOUNDS[0], BOUNDS[-1]) == (0.00005, 10.0)
    assert list(BOUNDS) == sorted(BOUNDS)


def test_refused_conditions_and_taken_locks_are_conflicts() -> None:
    metrics = Metrics("1.2.3")
    metrics.observe("commit", Conflict.code, 0.001)
    metrics.observe("lock", LockAcquisitionError.code, 0.001)
    metrics.observe("lock", "lease_lost", 0.001)
    assert value(metrics, "holdfast_conflicts_total") == 2


def test_gauges_are_asked_when_somebody_reads(caplog: pytest.LogCaptureFixture) -> None:
    now = {"connections": 1.0}

    def fails() -> float:
        raise ZeroDivisionError

    metrics = Metrics("1.2.3", {"connections": lambda: now["connections"], "watchers": fails, "locks_held": lambda: 5})
    assert value(metrics, "holdfast_connections") == 1
    now["connections"] = 2
    assert value(metrics, "holdfast_connections") == 2
    assert value(metrics, "holdfast_locks_held") == 5
    assert value(metrics, "holdfast_watchers") is None
    assert "the gauge watchers cannot be read" in caplog.text
    with pytest.raises(InvalidInput, match="there is no gauge tenants"):
        Metrics("1.2.3", {"tenants": lambda: 1})
    told = read(Metrics("1.2.3", dict.fromkeys(GAUGES, lambda: 7)))
    assert all(told[f"holdfast_{name}", ()] == 7 for name in GAUGES)


def test_build_and_process_are_told() -> None:
    told = read(Metrics("1.2.3"))
    [labels] = [dict(labels) for name, labels in told if name == "holdfast_build_info"]
    assert labels["version"] == "1.2.3"
    assert any(name == "process_resident_memory_bytes" for name, _ in told)


def test_two_keepers_in_one_process_count_apart() -> None:
    one, two = Metrics("1"), Metrics("2")
    one.observe("get", "ok", 0.1)
    assert value(two, "holdfast_operations_total", op="get", outcome="ok") is None


@given(st.lists(st.tuples(st.text() | st.sampled_from(sorted(OPERATIONS)), st.text(), st.floats(0, 100)), max_size=30))
@settings(max_examples=50, deadline=None)
def test_labels_come_from_closed_sets_whatever_is_observed(observed: list[tuple[str, str, float]]) -> None:
    metrics = Metrics("1.2.3", process=False)
    for op, outcome, seconds in observed:
        metrics.observe(op, outcome, seconds)
    told = read(metrics)
    for name, labels in told:
        assert set(dict(labels)) <= {"op", "outcome", "port", "le", "version", "python"}, name
        assert dict(labels).get("op", OTHER) in OPERATIONS | {OTHER}
        assert dict(labels).get("outcome", OTHER) in OUTCOMES | {OTHER}
    counted = sum(count for (name, _), count in told.items() if name == "holdfast_operations_total")
    assert counted == len(observed)


def test_counting_costs_less_than_a_microsecond() -> None:
    observe, number = Metrics("1.2.3").observe, 10_000
    best = min(timeit.repeat(lambda: observe("commit", "ok", 0.0004), number=number, repeat=50))
    assert best / number * 1e9 < OBSERVE_NS_MAX


def test_messages_and_tasks_are_told_by_labels_from_closed_sets() -> None:
    labelled = {"queue_messages": lambda: {"ready": 3, "odd": 9}, "tasks": lambda: {"running": 2}}
    metrics = Metrics("1.2.3", labelled=labelled, process=False)
    assert value(metrics, "holdfast_queue_messages", state="ready") == 3
    assert value(metrics, "holdfast_queue_messages", state="dead") == 0
    assert value(metrics, "holdfast_tasks", status="running") == 2
    assert value(metrics, "holdfast_queue_messages", state="odd") is None
    with pytest.raises(InvalidInput):
        Metrics("1.2.3", labelled={"secrets": dict})


def test_a_labelled_gauge_that_fails_is_left_out() -> None:
    def broken() -> dict[str, float]:
        raise RuntimeError

    metrics = Metrics("1.2.3", labelled={"tasks": broken, "queue_messages": lambda: {"ready": 1}}, process=False)
    assert value(metrics, "holdfast_tasks", status="running") is None
    assert value(metrics, "holdfast_queue_messages", state="ready") == 1


async def test_messages_and_tasks_of_all_spaces_are_added_up_without_counting_them() -> None:
    clock = ManualClock()
    async with holdfast.open("memory:", clock=clock, background=False) as store:
        for name in ("contoso", "fabrikam"):
            space = store.space(name, agent="market")
            await space.queue("orders").put_many([1, 2, 3])
            await space.queue("later").put(1, delay="1h")
            message = await space.queue("orders").take()
            await message.fail("broken")
            handle = await space.tasks.submit(TaskSpec(command=("true",)))
            await space.tasks.submit(TaskSpec(command=("true",)))
            await handle.stop()
        gauges = Gauges(store, clock)
        await gauges.count()
        assert gauges.messages == {"ready": 2 * (2 + 1), "delayed": 2, "reserved": 0, "dead": 2}
        assert (gauges.tasks["created"], gauges.tasks["cancelled"], gauges.tasks["running"]) == (2, 2, 0)
