"""What only the resident engine has: one owner, a file it shares its format of with the SQLite engine, a state in which it stops."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import apsw
import pytest

from holdfast.clock import SystemClock
from holdfast.engine import Batch, ChangeSet, Delete, Engine, Increment, Put, Receipt, cursor_at
from holdfast.engines import resident_feed, resident_file, resident_log
from holdfast.engines.registry import open_engine
from holdfast.engines.resident import ResidentEngine
from holdfast.engines.sqlite import SqliteEngine
from holdfast.engines.sqlite_file import in_doubt, translate
from holdfast.errors import Damaged, OutcomeUnknown, StorageFull, Unavailable
from holdfast.ids import new_id

VOLATILE = "passing"
LARGE = b'"' + b"x" * 5_000 + b'"'


def put(value: bytes, key: str = "records/k", **extra: object) -> Batch:
    return Batch("a", (Put(key, value),), **extra)  # type: ignore[arg-type]


async def everything(engine: Engine) -> list[object]:
    """All that a store shows, but for its volatile space."""
    held: list[object] = []
    for info in await engine.spaces():
        if info.name != VOLATILE:
            entries = (await engine.scan(info.name, "", limit=10_000)).entries
            feed = [c async for c in engine.watch(info.name, cursor=cursor_at(info.feed_floor), live=False)]
            usage = sorted(info.usage, key=lambda each: (each.owner, each.subspace))
            held += [
                (info.name, info.durability, info.revision, info.created_at, info.next_expiry),
                usage,
                entries,
                feed,
            ]
    return held


async def write_something(engine: Engine, round: int) -> None:
    await engine.create("relaxed", "async", audit_reads=True)
    await engine.create(VOLATILE, "volatile")
    for space in ("strict", "relaxed", VOLATILE):
        await engine.commit(space, put(b"%d" % round, f"records/{round}", request_id=f"r{round}"))
        await engine.commit(space, put(LARGE if round % 2 else b"1", "records/large"))
        await engine.commit(space, Batch("b", (Increment("counts/n", round), Put("records/t", b"1", ttl_ms=60_000))))
    await engine.commit("gone", put(b"1"))
    await engine.drop("gone")
    await engine.compact("relaxed", 2)


# --- the file ---


async def test_a_file_written_by_either_engine_is_opened_by_the_other(tmp_path: Path) -> None:
    path = tmp_path / "team.db"
    kinds = (SqliteEngine, ResidentEngine, SqliteEngine, ResidentEngine, ResidentEngine, SqliteEngine)
    before: list[object] = []
    for round, kind in enumerate(kinds):
        engine: Engine = await kind.open(path)
        assert await everything(engine) == before
        for past in range(round):
            again = await engine.commit("strict", put(b"%d" % past, f"records/{past}", request_id=f"r{past}"))
            assert again.version == 1 + 3 * past
        await write_something(engine, round)
        before = await everything(engine)
        findings = await engine.inspect()
        assert [finding for finding in findings if finding.level == "error"] == []
        await engine.close()
    engine = await ResidentEngine.open(path)
    assert await engine.spaces("gone") == []
    assert (await engine.commit("gone", put(b"1"))).version == 2 * len(kinds) + 1
    await engine.close()


async def test_a_url_names_the_engine(tmp_path: Path) -> None:
    engine = await open_engine(f"resident:{tmp_path / 'team.db'}", SystemClock())
    assert isinstance(engine, ResidentEngine)
    assert await engine.spaces() == []
    await engine.close()


async def test_what_was_acknowledged_survives_kill_9_and_a_request_is_answered_the_same_afterwards(
    tmp_path: Path,
) -> None:
    path = tmp_path / "team.db"
    told = await asyncio.to_thread(_killed_after, path, 200)
    engine = await ResidentEngine.open(path)
    for number, version in enumerate(told):
        [entry] = await engine.get("s", [f"records/{number}"])
        assert entry is not None
        assert entry.version == version
        chosen, fresh = f"chosen-{number}", f"{number:030x}"
        again = Batch("a", (Put(f"records/{number}", b"1"),), request_id=fresh if number % 2 else chosen)
        assert (await engine.commit("s", again)).version == version
    assert (await engine.commit("s", put(b"2"))).version > told[-1]
    await engine.close()


def _killed_after(path: Path, count: int) -> list[int]:
    """What an owner in a process of its own had acknowledged when it was killed."""
    with subprocess.Popen([sys.executable, "-c", _OWNER, str(path)], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            return [int(child.stdout.readline()) for _ in range(count)]
        finally:
            child.kill()


_OWNER = """
import asyncio, sys
from holdfast.engine import Batch, Put
from holdfast.engines.resident import ResidentEngine

async def main():
    engine = await ResidentEngine.open(sys.argv[1])
    for number in range(10**9):
        fresh = bool(number % 2)
        id = f"{number:030x}" if fresh else f"chosen-{number}"
        batch = Batch("a", (Put(f"records/{number}", b"1"),), request_id=id, fresh=fresh)
        print((await engine.commit("s", batch)).version, flush=True)

asyncio.run(main())
"""


# --- the owner ---


async def test_a_second_owner_is_refused_and_told_who_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_file, "CLAIM_WAIT_S", 0.05)
    engine = await ResidentEngine.open(tmp_path / "team.db")
    with pytest.raises(Unavailable, match=f"owned by process {os.getpid()}"):
        await ResidentEngine.open(tmp_path / "team.db")
    assert (await engine.commit("s", put(b"1"))).version == 1
    await engine.close()
    again = await ResidentEngine.open(tmp_path / "team.db")
    await again.close()


async def test_an_owner_waits_a_moment_for_the_one_before_it(tmp_path: Path) -> None:
    engine = await ResidentEngine.open(tmp_path / "team.db")
    waiting = asyncio.ensure_future(ResidentEngine.open(tmp_path / "team.db"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await engine.close()
    await (await waiting).close()


async def test_others_read_the_file_of_an_owner_and_hear_of_its_commits(tmp_path: Path) -> None:
    engine = await ResidentEngine.open(tmp_path / "team.db")
    await engine.commit("s", put(b"1"))
    reader = await SqliteEngine.open(tmp_path / "team.db")
    watching = reader.watch("s", cursor="r1")
    for number in range(2, 6):
        await engine.commit("s", put(b"%d" % number))
        assert (await asyncio.wait_for(anext(watching), 10)).version == number
        assert (await reader.get("s", ["records/k"]))[0] == (await engine.get("s", ["records/k"]))[0]
    await reader.close()
    assert (await engine.commit("s", put(b"9"))).version == 6
    await engine.close()


async def test_a_child_has_nothing_of_its_parents_store_and_does_not_keep_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "team.db"
    command = [sys.executable, "-c", _FORKS, str(path)]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("Unavailable\n", "", 0)
    engine = await ResidentEngine.open(path)  # while the grandchild still runs
    assert (await engine.get("s", ["records/k"]))[0] is not None
    await engine.close()


_FORKS = """
import asyncio, os, sys, time
from holdfast.engine import Batch, Put
from holdfast.engines.resident import ResidentEngine
from holdfast.errors import Error

async def main():
    engine = await ResidentEngine.open(sys.argv[1])
    await engine.commit("s", Batch("a", (Put("records/k", b"1"),)))
    if os.fork() == 0:
        try:
            await engine.get("s", ["records/k"])
        except Error as exc:
            os.write(1, type(exc).__name__.encode() + b"\\n")
        await engine.close()
        for standard in (0, 1, 2):
            os.close(standard)
        time.sleep(5)
        os._exit(0)
    time.sleep(0.5)
    os._exit(0)

asyncio.run(main())
"""


# --- failure ---


async def test_an_error_in_commit_stops_the_engine_and_tells_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    engine = await ResidentEngine.open(tmp_path / "team.db", on_failure=reasons.append)
    await engine.commit("s", put(b"1"))
    watching = asyncio.ensure_future(anext(engine.watch("s")))
    await asyncio.sleep(0)
    monkeypatch.setattr(engine._commits, "_commit_rows", lambda: apsw.IOError("fsync"))
    batches = [put(b"2", request_id="mine"), Batch("a", (Delete("records/absent"),)), put(b"3")]
    outcomes = await asyncio.gather(*(engine.commit("s", each) for each in batches), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [OutcomeUnknown] * 3
    assert isinstance(outcomes[0], OutcomeUnknown)
    assert outcomes[0].request_id == "mine"
    assert engine.failure is not None
    assert reasons == [engine.failure]
    calls = [
        engine.get("s", ["records/k"]),
        engine.scan("s", ""),
        engine.commit("s", put(b"4")),
        engine.spaces(),
        engine.create("t"),
        engine.compact("s", 1),
        watching,
    ]
    for call in calls:
        with pytest.raises(Unavailable):
            await call
    await engine.close()
    again = await ResidentEngine.open(tmp_path / "team.db")
    assert (await again.commit("s", put(b"2", request_id="mine"))).version in (2, 3)
    await again.close()


async def test_a_full_disk_refuses_the_group_and_nothing_of_it_is_shown(tmp_path: Path) -> None:
    engine = await ResidentEngine.open(tmp_path / "team.db")
    await engine.commit("s", put(b"1"))
    before = await everything(engine)
    [(pages,)] = engine._link.execute("PRAGMA page_count").fetchall()
    engine._link.execute(f"PRAGMA max_page_count = {pages}")
    batches = [put(LARGE * 20, f"records/{number}") for number in range(5)]
    outcomes = await asyncio.gather(*(engine.commit("s", each) for each in batches), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {StorageFull}
    with pytest.raises(StorageFull):
        await engine.commit("other", put(LARGE * 20))
    assert await everything(engine) == before
    engine._link.execute("PRAGMA max_page_count = 1000000")
    receipts = await asyncio.gather(*(engine.commit("s", each) for each in batches))
    assert [receipt.version for receipt in receipts] == [2, 3, 4, 5, 6]
    await engine.close()


async def test_a_file_that_another_program_wrote_to_is_not_served_from_memory_any_more(tmp_path: Path) -> None:
    engine = await ResidentEngine.open(tmp_path / "team.db")
    await engine.commit("s", put(b"1"))
    await engine.close()  # which folds: the entry has its row
    engine = await ResidentEngine.open(tmp_path / "team.db")
    await engine.commit("other", put(b"1"))
    shell = sqlite3.connect(tmp_path / "team.db")
    shell.execute("UPDATE entries SET value = x'39'")
    shell.commit()
    shell.close()
    with pytest.raises(Unavailable, match="another program"):
        await engine.commit("s", put(b"2"))
    with pytest.raises(Unavailable, match="another program"):
        await engine.get("s", ["records/k"])
    await engine.close()
    again = await ResidentEngine.open(tmp_path / "team.db")
    assert (await again.get("s", ["records/k"]))[0].value == b"9"  # type: ignore[union-attr]
    await again.close()


async def _damaged(path: Path, table: str, *, left_open: bool) -> None:
    """A store with one page of a table overwritten."""
    engine = await ResidentEngine.open(path)
    await asyncio.gather(*(engine.commit("s", put(b"1", f"records/{n}", request_id=f"r{n}")) for n in range(300)))
    await engine.close()
    with sqlite3.connect(path) as shell:
        (page,) = shell.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (table,)).fetchone()
    shell.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * 2048)
        file.write(b"\x55" * 2048)
    if left_open:
        Path(f"{path}-wal").write_bytes(b"\0" * 32)


@pytest.mark.parametrize(("table", "left_open"), [("entries", False), ("entries", True), ("requests", True)])
async def test_damage_is_found_at_the_start_and_the_file_is_let_go(tmp_path: Path, table: str, left_open: bool) -> None:
    path = tmp_path / "team.db"
    await _damaged(path, table, left_open=left_open)
    for _ in range(2):
        if left_open:
            Path(f"{path}-wal").write_bytes(b"\0" * 32)
        with pytest.raises(Damaged):
            await ResidentEngine.open(path)


async def test_a_large_value_that_is_missing_is_damage(tmp_path: Path) -> None:
    engine = await ResidentEngine.open(tmp_path / "team.db")
    await engine.commit("s", put(LARGE))
    await engine.close()
    with sqlite3.connect(tmp_path / "team.db") as shell:
        shell.execute("DELETE FROM large")
    shell.close()
    with pytest.raises(Damaged, match="records/k"):
        await ResidentEngine.open(tmp_path / "team.db")


# --- the log and the feed ---


async def test_the_log_is_folded_while_commits_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_log, "LOG_PAGES_MAX", 50)
    path = tmp_path / "team.db"
    engine = await ResidentEngine.open(path)
    for round in range(60):
        commits = (engine.commit("s", put(LARGE, f"records/{n}", request_id=f"{round}/{n}")) for n in range(20))
        await asyncio.gather(*commits)
    assert Path(f"{path}-wal").stat().st_size < path.stat().st_size / 2
    held = await everything(engine)
    await engine.close()
    again = await ResidentEngine.open(path)
    assert await everything(again) == held
    await again.close()


async def test_a_log_that_cannot_be_folded_stops_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_log, "LOG_PAGES_MAX", 1)
    monkeypatch.setattr(resident_log, "_fold", lambda connection: apsw.IOError("fsync"))
    stopped = asyncio.Event()
    engine = await ResidentEngine.open(tmp_path / "team.db", on_failure=lambda reason: stopped.set())
    for _ in range(2):  # the second group finds the log too long
        await asyncio.gather(*(engine.commit("s", put(b"1")) for _ in range(3)))
    await asyncio.wait_for(stopped.wait(), 10)
    with pytest.raises(Unavailable, match="fsync"):
        await engine.get("s", ["records/k"])
    await engine.close()


async def test_the_tail_of_the_feed_is_bounded_and_the_file_has_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident_feed, "TAIL_BYTES_MAX", 20_000)
    engine = await ResidentEngine.open(tmp_path / "team.db")
    watches = [engine.watch(space) for space in ("s0", "s1", "s2")]
    first = [asyncio.ensure_future(anext(watch)) for watch in watches]
    await asyncio.sleep(0)
    for number in range(300):
        await engine.commit(f"s{number % 3}", put(b"%d" % number))
    assert engine._tail.bytes <= 20_000
    held = sum(len(home.recent.commits) for home in engine._spaces.values())
    assert 5 < held < 50
    for space in ("s0", "s1", "s2"):
        assert [c.version async for c in engine.watch(space, cursor="r0", live=False)] == list(range(1, 101))
    assert [(await commit).version for commit in first] == [1, 1, 1]
    del watches
    await engine.close()


async def test_commits_that_nobody_watches_are_not_kept_and_nobody_who_comes_later_misses_any(tmp_path: Path) -> None:
    engine = await ResidentEngine.open(tmp_path / "team.db")
    for number in range(10):
        await engine.commit("s", put(b"%d" % number))
    assert engine._tail.bytes == 0
    watch = engine.watch("s", cursor="r3")
    assert (await anext(watch)).version == 4
    for number in range(5):
        await engine.commit("s", put(b"%d" % number))
    assert len(engine._spaces["s"].recent.commits) == 5
    assert [(await anext(watch)).version for _ in range(11)] == list(range(5, 16))
    await watch.aclose()  # type: ignore[attr-defined]
    await engine.commit("s", put(b"1"))
    assert len(engine._spaces["s"].recent.commits) == 5, "it is not kept any more"
    await engine.close()


@pytest.mark.parametrize("seed", range(12))
async def test_watches_that_come_and_go_see_every_commit_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(resident_feed, "TAIL_BYTES_MAX", chance.choice((1_500, 4_000, 1_000_000)))
    engine = await ResidentEngine.open(tmp_path / "team.db")
    watches: list[tuple[AsyncIterator[ChangeSet], int]] = []
    made = 0
    for _ in range(150):
        action = chance.choice(("commit", "commit", "begin", "end", "read"))
        if action == "commit":
            made = max([(await engine.commit("s", put(b"%d" % made))).version for _ in range(chance.randint(1, 4))])
        elif action == "begin" and made:
            after = chance.randint(0, made)
            watches.append((engine.watch("s", cursor=f"r{after}"), after))
        elif watches:
            watch, after = watches.pop(chance.randrange(len(watches)))
            if action == "end":
                await watch.aclose()  # type: ignore[attr-defined]
                continue
            for _ in range(min(chance.randint(1, 6), made - after)):
                assert (await anext(watch)).version == after + 1
                after += 1
            watches.append((watch, after))
    for watch, after in watches:
        assert [(await anext(watch)).version for _ in range(made - after)] == list(range(after + 1, made + 1))
    await engine.close()


async def test_only_those_are_woken_whose_prefix_is_touched_and_they_miss_nothing(tmp_path: Path) -> None:
    engine = await ResidentEngine.open(tmp_path / "team.db")
    await engine.commit("s", put(b"0"))
    rung: list[str] = []

    async def watch(prefix: str) -> ChangeSet:
        async for commit in engine.watch("s", prefix):
            rung.append(prefix)
            return commit
        raise AssertionError

    idle = [asyncio.ensure_future(watch(f"locks/{number}/")) for number in range(50)]
    await asyncio.sleep(0)
    for number in range(20):
        await engine.commit("s", put(b"%d" % number))
    await engine.compact("s", 15)  # what they did not have to read may go
    await engine.commit("s", put(b"1", "locks/7/a"))
    assert (await idle[7]).version == 22
    assert rung == ["locks/7/"]
    for task in idle:
        task.cancel()
    await asyncio.gather(*idle, return_exceptions=True)
    assert [bells._listening for bells in engine._bells.values() if bells._listening] == []
    await engine.close()


async def test_nobody_is_told_of_a_commit_before_reads_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has a commit a moment before memory has it; a watcher that reads the file must not see it then."""
    monkeypatch.setattr(resident_feed, "TAIL_BYTES_MAX", 0)
    engine = await ResidentEngine.open(tmp_path / "team.db")
    for number in range(3):
        await engine.commit("s", put(b"%d" % number))
    told: list[int] = []
    shown: list[int] = []
    apply = engine.apply

    def late(done: list[object]) -> None:
        feed = resident_feed.ResidentFeed(engine, "s")
        told.extend(commit.version for commit in feed._read_file(1, 1, engine._spaces["s"].revision, 10))
        shown.append(engine._spaces["s"].revision)
        apply(done)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "apply", late)
    await engine.commit("s", put(b"9"))
    assert (told, shown) == ([2, 3], [3])
    await engine.close()


async def test_memory_does_not_grow_with_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_feed, "TAIL_BYTES_MAX", 10_000)
    engine = await ResidentEngine.open(tmp_path / "team.db")

    async def rounds(count: int) -> int:
        for number in range(count):
            batch = Batch(
                f"agent-{number}", (Put("records/k", b"1"), Delete("records/k")), request_id=new_id(), fresh=True
            )
            assert isinstance(await engine.commit("s", batch), Receipt)
        home = engine._spaces["s"]
        return (
            len(home.entries) + len(home.keys) + len(home.usage) + len(home.recent.commits) + len(engine._tail._groups)
        )

    first = await rounds(200)
    assert await rounds(600) <= first + 2
    await engine.close()


async def test_a_writer_beside_the_owner_is_told_who_has_the_file(tmp_path: Path) -> None:
    path = tmp_path / "owned.db"
    owner = await ResidentEngine.open(path)
    await owner.commit("space", Batch("alice", (Put("records/k", b"1"),)))
    beside = await SqliteEngine.open(path)
    with pytest.raises(Unavailable, match=str(os.getpid())):
        await asyncio.wait_for(beside.commit("space", Batch("bob", (Put("records/k", b"2"),))), 20)
    [entry] = await beside.get("space", ["records/k"])
    assert entry is not None
    assert entry.value == b"1"
    await owner.close()
    await beside.commit("space", Batch("bob", (Put("records/k", b"2"),)))
    await beside.close()


async def test_a_volatile_space_of_a_file_stays_volatile_when_the_file_is_opened_again(tmp_path: Path) -> None:
    for _ in range(2):
        engine = await SqliteEngine.open(tmp_path / "v.db")
        await engine.create("space", "volatile")
        await engine.commit("space", Batch("alice", (Put("records/k", b"1"),)))
        assert [info.durability for info in await engine.spaces()] == ["volatile"]
        await engine.close()


async def test_a_fork_after_closing_leaves_the_childs_files_alone(tmp_path: Path) -> None:
    """The numbers of the lock's files are given out again; a closed engine that is still referred to has none."""
    engine = await ResidentEngine.open(tmp_path / "store.db")
    await engine.close()
    files = [os.open(tmp_path / "store.db", os.O_RDONLY) for _ in range(8)]
    child = os.fork()
    if child == 0:
        try:
            for file in files:
                os.fstat(file)
        except OSError:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: ASYNC222
    for file in files:
        os.close(file)


async def test_who_watches_something_else_costs_no_memory_and_misses_nothing(tmp_path: Path) -> None:
    engine = await ResidentEngine.open(tmp_path / "k.db")
    await engine.commit("s", Batch("a", (Put("records/a", b"0"),)))
    watching = engine.watch("s", "quiet/")
    for number in range(3):
        following = asyncio.ensure_future(anext(watching))
        for _ in range(5):
            await asyncio.sleep(0)  # it waits
        home = engine._spaces["s"]
        kept = len(home.recent.commits)
        for _ in range(20):
            await engine.commit("s", Batch("a", (Put("records/a", b"%d" % number),)))
        assert len(home.recent.commits) == kept
        told = await engine.commit("s", Batch("a", (Put("records/a", b"1"), Put("quiet/b", b"%d" % number))))
        # It is awake now, whether it has run or not, and reads on.
        later = await engine.commit("s", Batch("a", (Put("quiet/c", b"%d" % number),)))
        assert (await following).version == told.version
        assert (await anext(watching)).version == later.version
    await engine.close()


async def test_a_disk_that_fails_while_the_store_is_opened_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is read last: it was read outside of where errors of the driver become ours."""
    await (await ResidentEngine.open(tmp_path / "team.db")).close()

    def failing(execute: object) -> int:
        error = apsw.IOError("disk I/O error")
        error.extendedresult = apsw.SQLITE_IOERR_READ
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(resident_file, "first_revision", failing)
        with pytest.raises(Unavailable, match=r"team\.db"):
            await ResidentEngine.open(tmp_path / "team.db")
    await (await ResidentEngine.open(tmp_path / "team.db")).close()


@pytest.mark.parametrize("error", [apsw.FullError, apsw.CorruptError, apsw.BusyError, apsw.SQLError])
def test_an_error_of_the_file_names_it_without_the_folder_it_is_in(error: type[apsw.Error]) -> None:
    path = Path("/srv/secret/team.db")
    for told in (translate(path, error("x")), in_doubt(path, error("x"))):
        assert "team.db" in str(told)
        assert "secret" not in str(told)
