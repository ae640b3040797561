"""The benchmarks run, and what they print has the shape that its readers expect. How fast anything is, is no test."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import NAMES  # noqa: E402
from benchmarks.etcd_client import EtcdClient  # noqa: E402
from benchmarks.etcd_server import EtcdServer  # noqa: E402
from benchmarks.keeper_sides import Spent, cpu_s  # noqa: E402
from benchmarks.places import file_system, real_disk  # noqa: E402
from benchmarks.report import Goal, Line  # noqa: E402
from benchmarks.rounds import Rates  # noqa: E402

from tests.servers import started  # noqa: E402

MANDATORY = {"bench", "ours", "peer", "peer_name", "ratio", "unit", "goal", "ok", "runs", "load"}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def check_line(line: dict[str, Any]) -> None:
    assert set(line) >= MANDATORY
    assert line["ours"] > 0
    assert line["runs"] >= 1
    assert (line["peer"] is None) == (line["peer_name"] is None) == (line["ratio"] is None)
    assert (line["goal"] is None) == (line["ok"] is None)
    assert line["ok"] in (True, False, None)


def test_each_comparison_is_a_json_line_and_a_row_of_the_table(on_disk: Path) -> None:
    done = bench("--quick", "--folder", str(on_disk), "sqlite_get", "sqlite_set_processes")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        check_line(line)
    assert [line["bench"] for line in lines] == [
        "sqlite_get",
        "sqlite_get",
        "sqlite_set_processes",
        "sqlite_set_processes",
        "sqlite_set_processes_share",
    ]
    rows = [row for row in done.stderr.splitlines() if row.startswith("sqlite_")]
    assert len(rows) == len(lines)
    assert list(on_disk.iterdir()) == []


def test_an_unknown_benchmark_is_refused_by_name() -> None:
    done = bench("nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert done.stdout == ""


def test_every_named_benchmark_is_a_module_with_a_question() -> None:
    for name in NAMES:
        text = (ROOT / "benchmarks" / f"{name}.py").read_text()
        assert "async def run(plan: Plan) -> AsyncIterator[Line]:" in text
        assert "?" in text.split('"""')[1]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no folder in memory here")
def test_a_folder_in_memory_is_refused() -> None:
    if file_system(Path("/dev/shm")) != "tmpfs":
        pytest.skip("/dev/shm is on a disk here")
    with pytest.raises(OSError, match="on a disk"):
        real_disk(Path("/dev/shm"))


def test_a_ratio_is_the_median_of_the_rounds_and_overall_is_that_of_the_sums() -> None:
    ours, peer = Rates([10.0, 1.0, 40.0]), Rates([10.0, 10.0, 20.0])
    assert ours.ratio(peer) == 1.0
    assert ours.overall(peer) == pytest.approx(51 / 40)


def test_a_goal_is_judged_on_what_it_names() -> None:
    assert Line("b", 5.0, "x", 10.0, "p", 0.5, Goal("ratio", "at least", 0.5)).ok is True
    assert Line("b", 5.0, "x", 10.0, "p", 0.5, Goal("ratio", "at most", 0.4)).ok is False
    assert Line("b", 5.0, "ms", goal=Goal("ours", "at most", 20)).ok is True
    assert Line("b", 5.0, "x").ok is None


@pytest.mark.skipif(os.environ.get("HOLDFAST_SOAK") != "1", reason="HOLDFAST_SOAK=1: it starts every peer there is")
def test_a_keeper_is_measured_beside_every_peer_that_is_there(on_disk: Path) -> None:
    done = bench("--quick", "--folder", str(on_disk), "keeper_get")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    left_out = done.stderr.count("is left out of keeper_get")
    assert [line["bench"] for line in lines] == [
        f"keeper_get_{count}" for count in (1, 32, 256) for _ in range(3 - left_out)
    ]
    for line in lines:
        check_line(line)
        assert 0 < line["p50_ms"] <= line["p99_ms"]
        assert min(line[f"{side}server_cpu_us"] for side in ("", "peer_")) > 0
    assert list(on_disk.iterdir()) == []


@contextmanager
def etcd(folder: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


async def test_the_peers_client_of_etcd_reads_what_it_wrote_and_waits_for_a_lock(tmp_path: Path) -> None:
    with started(etcd(tmp_path)) as server:
        client = await EtcdClient.connect("127.0.0.1", server.port, connections=2)
        await client.put(b"key", b"x" * 256)
        assert await client.get(b"key") == b"x" * 256
        assert await client.get(b"other") is None
        lease = await client.lease(60)
        first = await client.lock(b"name", lease)
        other = await client.lease(60)
        waiting = asyncio.ensure_future(client.lock(b"name", other))
        await client.put(b"key", b"later")  # long enough for a lock that does not wait
        assert not waiting.done()
        await client.unlock(first)
        assert (await waiting).startswith(b"name/")
        with pytest.raises(RuntimeError, match="refused"):
            await client.lock(b"name", lease + 1)
        client.close()


def test_the_cost_of_an_operation_is_the_cpu_of_all_divided_by_their_number() -> None:
    spent = Spent([3000, 1000, 2000, 4000], server_s=0.0002, client_s=0.0001)
    assert spent.told("peer_") == {
        "peer_p50_ms": 3.0,
        "peer_p99_ms": 4.0,
        "peer_server_cpu_us": pytest.approx(50),
        "peer_client_cpu_us": pytest.approx(25),
    }


def test_the_cpu_of_a_process_is_counted_with_that_of_its_children() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            before, own = cpu_s(os.getpid()), time.process_time()
            while cpu_s(child.pid) < 0.2:
                time.sleep(0.01)
            own = time.process_time() - own
            assert cpu_s(os.getpid()) - before - own > 0.15
        finally:
            child.kill()
