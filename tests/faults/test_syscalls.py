"""The disk fails, fills up, or the process dies, at every write and every fsync of a scripted run in turn.

`strace` makes the n-th system call on one of the store's files fail (EIO, ENOSPC) or kills the process with SIGKILL as
it enters it. Afterwards the file is opened again and compared with what the memory engine makes of the same script:

 - every acknowledged commit is there, with the receipt it was acknowledged with, and nothing else, except the one commit
   whose outcome was open, which is there completely or not at all
 - after an error that promises "nothing was changed" it is not there, also after the process died
 - repeating every request gives the receipts of an undisturbed run, and in the end its entries, feed and usage
 - SQLite's own integrity check passes

A run takes one call of so many, and the next run others; HOLDFAST_SOAK=1 tries every call (`tests/soak.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import apsw
import msgspec
import pytest

from holdfast.engine import Engine, Entry, Receipt, Usage
from holdfast.engines.memory import MemoryEngine
from tests.faults.scripted import SPACE, STEPS, Line, clock_at, open_store
from tests.soak import SOAK, sample

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60
WRITES = "pwrite64"
FSYNCS = "fdatasync"
READS = "pread64"
OTHERS = ("ftruncate", "unlink")
UNUSED = ("write", "writev", "pwritev", "fsync", "sync_file_range")
"""Calls that would need faults of their own if the store began to use them on its files."""
FILES = ("store.db", "store.db-wal", "store.db-shm", "store.db-journal", "store.db-lock", "store.db-turn")
PROMISES = {"Unavailable", "StorageFull"}
"""Errors that say: nothing was changed."""


@pytest.fixture(scope="module", autouse=True)
def strace() -> str:
    """The path of a strace that may trace; without one these tests skip, and fail in CI."""
    found = shutil.which("strace")
    problem = "strace is not installed"
    if found:
        tried = subprocess.run([found, "-f", "-e", "trace=none", "true"], capture_output=True, text=True, check=False)
        problem = "" if tried.returncode == 0 else f"strace does not work here: {tried.stderr.strip()}"
    if problem:
        if os.environ.get("CI") == "true":
            pytest.fail(problem)
        pytest.skip(problem)
    assert found
    return found


class Fault(NamedTuple):
    """What happens at which call: `inject` in the words of strace."""

    call: str
    inject: str
    n: int
    lasting: bool = False
    mode: str = "recover"
    engine: str = "sqlite"

    @property
    def expression(self) -> str:
        return f"{self.call}:{self.inject}:when={self.n}{'+' if self.lasting else ''}"


def run_script(folder: Path, fault: Fault | None, engine: str) -> tuple[int, str]:
    """The script under strace: its exit code, or 128 + the signal that ended it, and the calls on the store's files."""
    trace = folder / "trace"
    command = [
        "strace",
        "-f",
        "-qq",
        "-o",
        str(trace),
        "-e",
        f"trace={','.join((WRITES, FSYNCS, READS, *OTHERS, *UNUSED))}",
    ]
    if fault is None or "signal" not in fault.inject:
        command.append("--seccomp-bpf")  # faster, but it loses injected signals
    for name in FILES:
        command += ["-P", str(folder / name)]
    if fault is not None:
        command += ["-e", f"inject={fault.expression}"]
    mode = fault.mode if fault else "recover"
    # Without `site`, which takes longer than the rest of the script.
    command += [
        sys.executable,
        "-S",
        "-m",
        "tests.faults.scripted",
        str(folder / "store.db"),
        str(folder / "log"),
        mode,
        engine,
    ]
    paths = [str(ROOT), str(ROOT / "src"), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]
    # A session of its own: killing strace alone would let the script run on.
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, complaint = process.communicate(timeout=TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    assert code in (0, 137), f"{fault}: ended with {code}\n{complaint[-4000:]}"
    return code, trace.read_text()


# --- what the script must lead to ---


class Held(NamedTuple):
    """What a space holds, in a form that can be compared."""

    revision: int
    entries: list[Entry]
    usage: list[Usage]


async def held(engine: Engine) -> Held:
    page = await engine.scan(SPACE, "", limit=1000)
    usage = [each for info in await engine.spaces(SPACE) for each in info.usage]
    return Held(page.revision, page.entries, sorted(usage, key=lambda each: (each.owner, each.subspace)))


async def feed_of(engine: Engine) -> list[bytes]:
    """All commits, up to the last one, which must be one that changed something."""
    revision = (await engine.scan(SPACE, "", limit=1)).revision
    feed = []
    async with asyncio.timeout(TIMEOUT_S):
        async for commit in engine.watch(SPACE, cursor="r0"):
            feed.append(msgspec.json.encode(commit))
            if commit.version >= revision:
                break
    return feed


class Undisturbed(NamedTuple):
    """What the script leads to: its receipts, its feed, and what is held after `done` steps at the time of step `at`."""

    receipts: list[Receipt]
    feed: list[bytes]
    after: dict[tuple[int, int], Held]


@functools.cache
def undisturbed() -> Undisturbed:
    async def run() -> Undisturbed:
        clock = clock_at(-1)
        engine = MemoryEngine(clock=clock)
        receipts: list[Receipt] = []
        after = {(0, -1): await held(engine)}
        for n, step in enumerate(STEPS):
            clock.advance(step.advance)
            after[n, n] = await held(engine)
            receipts.append(await engine.commit(SPACE, step.batch))
            after[n + 1, n] = await held(engine)
        return Undisturbed(receipts, await feed_of(engine), after)

    with ThreadPoolExecutor(1) as thread:  # a test may be running on a loop of this thread
        return thread.submit(asyncio.run, run()).result()


# --- what it did lead to ---


class Seen(NamedTuple):
    """The log of a run, summed up."""

    acknowledged: int
    open: bool
    """Whether the step after the acknowledged ones may have taken effect."""
    at: int
    """The step at whose time the run ended."""
    errors: list[str]


def read_log(path: Path) -> Seen:
    lines = [msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines()] if path.exists() else []
    assert [line.lie for line in lines if line.lie] == []
    answers = [line for line in lines if line.receipt]
    assert [line.n for line in answers] == list(range(len(answers)))
    assert [line.receipt for line in answers] == undisturbed().receipts[: len(answers)]
    tries = [line for line in lines if line.n == len(answers)]
    # An attempt is open until an error closes it, and only one that promises something does.
    promised = bool(tries) and all(line.error in PROMISES for line in tries[1::2]) and len(tries) % 2 == 0
    at = max([-1, *(line.n for line in lines)])
    return Seen(len(answers), bool(tries) and not promised, at, [line.error for line in lines if line.error])


async def inspect_file(path: Path, seen: Seen, kind: str) -> None:
    """Open the store after a run and hold it against the undisturbed one, then finish the script and do it again."""
    model = undisturbed()
    clock = clock_at(seen.at)
    engine = await open_store(kind, path, clock)
    try:
        found = await held(engine)
        allowed = [model.after[seen.acknowledged, seen.at]]
        if seen.open:
            allowed.append(model.after[seen.acknowledged + 1, seen.at])
        assert found in allowed, f"{seen}: {found} is none of {allowed}"
        for n, step in enumerate(STEPS):
            if n > seen.at:
                clock.advance(step.advance)
            assert await engine.commit(SPACE, step.batch) == model.receipts[n], f"{seen}: step {n}"
        assert await held(engine) == model.after[len(STEPS), len(STEPS) - 1]
        assert await feed_of(engine) == model.feed
    finally:
        await engine.close()
    with contextlib.closing(apsw.Connection(str(path))) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def attempt(folder: Path, fault: Fault) -> tuple[int, Seen]:
    """One run with one fault. Raises when anything is wrong afterwards."""
    folder.mkdir()
    code, _ = run_script(folder, fault, fault.engine)
    seen = read_log(folder / "log")
    try:
        asyncio.run(inspect_file(folder / "store.db", seen, fault.engine))
    except Exception as exc:
        raise AssertionError(f"{fault}, {seen.errors}, in {folder}: {exc!r:.2000}") from exc
    shutil.rmtree(folder)
    return code, seen


def sweep(folder: Path, faults: Iterable[Fault]) -> list[tuple[int, Seen]]:
    """Many runs, two at a time for every core: they mostly wait for each other's disk."""
    with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as threads:
        jobs = [threads.submit(attempt, folder / str(number), fault) for number, fault in enumerate(faults)]
        try:
            return [job.result() for job in jobs]
        finally:
            threads.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    return count_calls(tmp_path_factory.mktemp("undisturbed"), "sqlite")


def count_calls(folder: Path, engine: str) -> Counter[str]:
    """How often an undisturbed run makes each call on the store's files."""
    code, trace = run_script(folder, None, engine)
    assert code == 0
    assert read_log(folder / "log") == Seen(len(STEPS), False, len(STEPS) - 1, [])
    asyncio.run(inspect_file(folder / "store.db", read_log(folder / "log"), engine))
    assert len(set(re.findall(r"^\d+", trace, re.MULTILINE))) == 1, "the script has threads, which strace counts apart"
    counts = Counter(re.findall(r"^\d+ +(\w+)\(", trace, re.MULTILINE))
    assert counts[WRITES] > 100
    assert counts[FSYNCS] > len(STEPS)
    assert not counts.keys() & set(UNUSED), "the store uses a call that no fault is injected into"
    return counts


@pytest.mark.parametrize("call", [WRITES, FSYNCS, *OTHERS])
def test_a_process_killed_at_any_write_or_fsync_leaves_what_it_acknowledged(
    tmp_path: Path, calls: Counter[str], call: str
) -> None:
    chosen = sample(calls[call], 48 if call == WRITES else 6)
    runs = sweep(tmp_path, [Fault(call, "signal=SIGKILL", n) for n in chosen])
    assert {code for code, _ in runs} == {137}
    if SOAK and call in (FSYNCS, WRITES):
        assert {seen.acknowledged for _, seen in runs} >= set(range(len(STEPS)))


@pytest.mark.parametrize("mode", ["recover", "die"])
@pytest.mark.parametrize(
    ("call", "error"), [(WRITES, "EIO"), (WRITES, "ENOSPC"), (FSYNCS, "EIO"), (FSYNCS, "ENOSPC"), (READS, "EIO")]
)
def test_an_error_of_the_disk_is_told_as_it_is(
    tmp_path: Path, calls: Counter[str], call: str, error: str, mode: str
) -> None:
    """One call fails, and the next ones work again."""
    chosen = sample(calls[call], {FSYNCS: 12, READS: 13}.get(call, 72))
    runs = sweep(tmp_path, [Fault(call, f"error={error}", n, mode=mode) for n in chosen])
    errors = Counter(name for _, seen in runs for name in seen.errors)
    # SQLite calls a page it cannot read damaged, and does not say whether it may be readable again.
    assert set(errors) <= PROMISES | {"Damaged" if call == READS else "OutcomeUnknown"}
    assert errors, "no fault was noticed by anybody"
    if (call, error) == (WRITES, "ENOSPC"):
        assert errors["StorageFull"], errors
        assert not errors["OutcomeUnknown"], errors
    if mode == "recover":
        assert all(seen.acknowledged == len(STEPS) for _, seen in runs)


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("call", [WRITES, FSYNCS])
def test_a_disk_that_stays_broken_never_acknowledges_and_never_lies(
    tmp_path: Path, calls: Counter[str], call: str, error: str
) -> None:
    chosen = sample(calls[call], 160 if call == WRITES else 20)
    runs = sweep(tmp_path, [Fault(call, f"error={error}", n, lasting=True) for n in chosen])
    assert all(code == 0 for code, _ in runs)
    assert any(seen.errors for _, seen in runs)
    assert {name for _, seen in runs for name in seen.errors} <= PROMISES | {"OutcomeUnknown"}
