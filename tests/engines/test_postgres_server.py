"""What only a PostgreSQL store has: a schema others may look at, a server that is set up in many ways, crashes and is away."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from itertools import cycle
from typing import Any

import psycopg
import pytest
from tests.servers import started

import holdfast
from holdfast.clock import SystemClock
from holdfast.engine import Batch, Entry, Finding, Increment, Put, Usage, cursor_at
from holdfast.engines import postgres_commit, postgres_doctor, postgres_link
from holdfast.engines.postgres import PostgresEngine
from holdfast.engines.postgres_feed import QUIET_S, RING_S
from holdfast.engines.postgres_functions import MOVED, SUMMED_EVERY
from holdfast.engines.postgres_link import SESSION, Broken, Call, Link, number, statement
from holdfast.engines.postgres_schema import ASYNC_JUMP, SCHEMA_VERSION
from holdfast.engines.postgres_statements import USAGE
from holdfast.engines.registry import open_engine
from holdfast.errors import (
    AuthenticationFailed,
    Compacted,
    DurabilityUnavailable,
    Error,
    IncompatibleStore,
    InvalidInput,
    OutcomeUnknown,
    Unavailable,
)
from holdfast.testing.servers.postgres import PostgresServer

SPACE = "s"
SECRET = "open-sesame"
OPENER = """
import asyncio, sys
from holdfast.engine import Batch, Put
from holdfast.engines.postgres import PostgresEngine

async def main(url, number):
    engine = await PostgresEngine.open(url)
    await engine.commit("s", Batch("a", (Put(f"p/{number}", b"1"),)))
    await engine.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def schema() -> str:
    return f"v_{uuid.uuid4().hex[:12]}"


@pytest.fixture
def url(postgres_server: PostgresServer, schema: str) -> str:
    return f"{postgres_server.url}?schema={schema}"


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server that a test may stop and kill."""
    with started(PostgresServer.temporary()) as server:
        yield server


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[PostgresEngine]:
    engine = await PostgresEngine.open(url)
    try:
        yield engine
    finally:
        await engine.close()


async def shell(url: str, *queries: str) -> list[Any]:
    """What psql would say to the last of these."""
    async with await psycopg.AsyncConnection.connect(url.partition("?")[0], autocommit=True) as connection:
        for query in queries[:-1]:
            await connection.execute(query.encode())
        cursor = await connection.execute(queries[-1].encode())
        return await cursor.fetchall() if cursor.description else []


async def put(engine: PostgresEngine, value: bytes, space: str = SPACE) -> int:
    return (await engine.commit(space, Batch("a", (Put("records/k", value),)))).version


# --- the schema ---


async def test_a_schema_is_made_once_by_processes_that_open_it_at_the_same_time(url: str, schema: str) -> None:
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", OPENER, url, str(n), stderr=subprocess.PIPE)
        for n in range(8)
    ]
    for process in processes:
        _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
    async with opened(url) as engine:
        assert [info.revision for info in await engine.spaces()] == [8]
    [(value,)] = await shell(url, f"SELECT value FROM {schema}.meta WHERE key = 'version'")
    assert value == str(SCHEMA_VERSION)


async def test_a_schema_of_a_newer_version_is_refused_and_not_changed(url: str, schema: str) -> None:
    async with opened(url) as engine:
        await put(engine, b"1")
    await shell(url, f"UPDATE {schema}.meta SET value = '{SCHEMA_VERSION + 1}' WHERE key = 'version'")
    with pytest.raises(IncompatibleStore, match="newer holdfast"):
        await PostgresEngine.open(url)
    [(count,)] = await shell(url, f"SELECT count(*) FROM {schema}.entries")
    assert count == 1


async def test_a_schema_of_version_1_is_brought_up_to_date_and_keeps_what_it_holds(url: str, schema: str) -> None:
    """It had nearly the same tables, and functions of the same names that took other parameters."""
    async with opened(url) as engine:
        first = await put(engine, b"1")
    await shell(
        url,
        f"SET search_path = {schema}",
        "DROP FUNCTION commit_one, commit_group, sum_up",
        "ALTER TABLE usage DROP is_sum",
        f"UPDATE usage SET change = {first + 1}",  # more changes were counted than there are revisions: it was loaded
        "CREATE FUNCTION commit_one(_space int4) RETURNS int4 LANGUAGE sql AS 'SELECT 1'",
        "CREATE FUNCTION commit_group(_space int4) RETURNS int4 LANGUAGE sql AS 'SELECT 1'",
        "UPDATE meta SET value = '1' WHERE key = 'version'",
    )
    async with opened(url) as engine, opened(url) as other:
        assert [await put(engine, b"22"), await put(other, b"3")] == [first + 1, first + 2]
        assert await errors(engine) == []
    [(version,)] = await shell(url, f"SELECT value FROM {schema}.meta WHERE key = 'version'")
    named = f"SELECT proname FROM pg_proc WHERE pronamespace = '{schema}'::regnamespace AND proname LIKE 'commit%'"
    assert (version, sorted(await shell(url, named))) == (str(SCHEMA_VERSION), [("commit_group",), ("commit_one",)])


async def test_a_server_that_does_not_answer_counts_as_gone_however_many_calls_it_has_answered(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep = statement("asleep", "SELECT pg_sleep($1::float8)")
    monkeypatch.setattr(postgres_link, "REPLY_S", 0.3)
    async with opened(url) as engine:
        for _ in range(8):  # longer together than it may be silent
            await engine._pool.run((asleep, (struct.pack("!d", 0.05),)))
        with pytest.raises(Broken, match="has not answered"):
            await engine._pool.run((asleep, (struct.pack("!d", 30.0),)))
        assert await put(engine, b"1"), "another connection is made"


async def test_usage_is_summed_up_every_now_and_then_and_is_exact_all_the_time(url: str, schema: str) -> None:
    commits = 12 * SUMMED_EVERY
    rows = f"SELECT count(*), count(*) FILTER (WHERE is_sum) FROM {schema}.usage WHERE subspace = 'a'"
    async with opened(url) as engine:
        for number in range(commits):  # what one writes alone, and with others
            key, size = f"a/{number % 7}", number % 50
            more = (Put("b/x", b"x" * size),) if number % 2 else ()
            await engine.commit("s", Batch("agent", (Put(key, b"x" * size), *more)))
        [info] = await engine.spaces("s")
        last = [next(n for n in range(commits - 1, -1, -1) if n % 7 == k) % 50 for k in range(7)]
        assert info.usage[0] == Usage("agent", "a", 7, sum(len(f"a/{k}") + last[k] for k in range(7)))
        assert await errors(engine) == []
        for number in range(3):  # what is loaded has one revision
            loaded = [Entry(f"a/{number}{n}", b"x", 1, "agent", 1, 1) for n in range(10)]
            await engine.load("s", loaded, info.revision)
        [after] = await engine.spaces("s")
        assert after.usage[0].keys == info.usage[0].keys + 30
        assert await errors(engine) == []
    [(found, sums)] = await shell(url, rows)
    assert sums == 1, "what came before the last sum is gone"
    assert found < commits / 2


async def test_a_lone_writer_sums_up_its_usage_as_often_as_it_draws_to_do_so(
    url: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not summed up is read by every count: a draw that is taken twice lets it grow with the history."""
    draws = cycle((0.0, *(1.0,) * (SUMMED_EVERY - 1)))
    async with opened(url) as engine:
        monkeypatch.setattr(engine._writer, "_chance", lambda: next(draws))
        for size in range(4 * SUMMED_EVERY):  # each charges, since each has another size
            await put(engine, b"x" * size)
    counted = f"SELECT count(*), count(*) FILTER (WHERE is_sum) FROM {schema}.usage"
    assert await shell(url, counted) == [(SUMMED_EVERY, 1)]


async def test_to_count_a_space_the_usage_of_others_is_not_read(url: str, schema: str) -> None:
    """However few spaces the statistics know of."""
    async with opened(url) as engine:
        for space in ("large", "small"):
            await engine.commit(space, Batch("a", tuple(Put(f"s{n}/k", b"1") for n in range(100))))
    settings = [f"SET {name} = '{value}'" for name, value in SESSION.items()]
    prepared = f"PREPARE counts AS {USAGE.sql.decode()}"
    plan = await shell(
        url,
        f"SET search_path = {schema}",
        *settings,
        "ANALYZE spaces, usage",
        prepared,
        "EXPLAIN EXECUTE counts ('small')",
    )
    lines = [line.strip() for (line,) in plan]
    [reads] = [number for number, line in enumerate(lines) if "usage_pkey" in line]
    assert lines[reads + 1].startswith("Index Cond: (space ="), "\n".join(lines)


async def test_a_process_whose_store_was_migrated_meanwhile_is_told_so(url: str, schema: str) -> None:
    async with opened(url) as engine:
        await put(engine, b"1")
        await put(engine, b"2")
        newer = (
            f"CREATE OR REPLACE FUNCTION {schema}.schema_version() RETURNS int4 LANGUAGE sql IMMUTABLE AS 'SELECT 99'"
        )
        await shell(url, newer, f"DROP FUNCTION {schema}.commit_one")
        with pytest.raises(IncompatibleStore, match="migrated by a newer holdfast"):
            await put(engine, b"3")
        [entry] = await engine.get(SPACE, ["records/k"])
        assert entry is not None
        assert entry.value == b"2"


@pytest.mark.parametrize(
    "table", ["CREATE TABLE orders (id int)", "CREATE TABLE meta (id int)", "CREATE TABLE meta (key text, value text)"]
)
async def test_a_schema_of_another_program_is_refused_and_not_changed(url: str, schema: str, table: str) -> None:
    await shell(url, f"CREATE SCHEMA {schema}", f"SET search_path = {schema}", table)
    with pytest.raises(IncompatibleStore, match="another program"):
        await PostgresEngine.open(url)
    rows = await shell(url, f"SELECT relname FROM pg_class WHERE relnamespace = '{schema}'::regnamespace")
    assert len(rows) == 1


async def test_an_empty_schema_that_was_made_for_it_is_used(url: str, schema: str) -> None:
    await shell(url, f"CREATE SCHEMA {schema}")
    async with opened(url) as engine:
        assert await put(engine, b"1") == 1


async def test_two_schemas_of_a_database_are_two_stores(postgres_server: PostgresServer, url: str) -> None:
    async with opened(url) as one, opened(f"{postgres_server.url}?schema=other_{uuid.uuid4().hex[:8]}") as other:
        await put(one, b"1")
        assert await other.spaces() == []


@pytest.mark.parametrize("name", ["", "a b", 'a"; DROP', "pg_mine", "1a", "x" * 64])
async def test_a_name_that_is_no_schemas_is_invalid(postgres_server: PostgresServer, name: str) -> None:
    with pytest.raises(InvalidInput, match="schema"):
        await PostgresEngine.open(f"{postgres_server.url}?schema={name}")


async def test_people_can_read_the_tables(url: str, schema: str) -> None:
    async with opened(url) as engine:
        await engine.commit(
            SPACE, Batch("a", (Put("records/k", b'{"a":"\xc3\xa9"}', tag="t"), Put("x/raw", b"\xff\0")))
        )
    rows = await shell(url, f"SELECT space, key, value, version, owner, tag FROM {schema}.readable ORDER BY key")
    assert rows == [("s", "records/k", '{"a":"é"}', 1, "a", "t"), ("s", "x/raw", "\\377\\000", 1, "a", "")]


# --- the server ---


async def test_a_server_without_fsync_is_refused_for_sync_and_says_what_to_do() -> None:
    with started(PostgresServer.temporary(fsync="off")) as server:
        async with opened(server.url) as engine:
            for attempt in (put(engine, b"1"), engine.create(SPACE)):
                with pytest.raises(DurabilityUnavailable, match=r"fsync = on.*'async'"):
                    await attempt
            assert await engine.spaces() == []
            await engine.create("relaxed", "async")
            assert await put(engine, b"1", "relaxed") == 1
            assert [finding.subject for finding in await errors(engine)] == ["fsync"]
        with pytest.raises(DurabilityUnavailable, match="fsync = on"):
            await holdfast.open(server.url)
        async with holdfast.open(server.url, durability="async") as store:
            await store.space("team").records.set("k", 1)
            await store.drop_space("team")


async def errors(engine: PostgresEngine) -> list[Finding]:
    return [finding for finding in await engine.inspect() if finding.level == "error"]


async def test_sync_is_sync_although_the_role_commits_asynchronously(url: str) -> None:
    async with opened(f"{url}&options=-c%20synchronous_commit%3Doff") as engine:
        flushed = 0
        for n in range(9):
            await put(engine, b"%d" % n)
            [(all_of_it,)] = await shell(url, "SELECT pg_current_wal_flush_lsn() >= pg_current_wal_insert_lsn()")
            flushed += all_of_it
        # The server writes for others too, now and then between the commit and the question.
        assert flushed >= 5
        findings = {finding.subject: finding for finding in await engine.inspect()}
    assert findings["synchronous_commit"].level == "note"


async def test_a_batch_reads_what_it_replaces_and_not_the_space_around_it(url: str, schema: str) -> None:
    """Also before the table has statistics, and with plans that were made when it was empty."""
    async with opened(url) as engine:

        async def replace_two(times: int) -> None:
            for n in range(times):
                await engine.commit(SPACE, Batch("a", tuple(Put(f"records/{key}", b"%d" % n) for key in "ab")))

        await replace_two(3)
        for start in range(0, 2000, 100):
            keys = range(start, start + 100)
            await engine.commit(SPACE, Batch("a", tuple(Put(f"records/n{key:04}", b"1") for key in keys)))
        await replace_two(30)
    rows = await shell(url, f"SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE schemaname = '{schema}'")
    assert rows[0][0] < 10_000


async def test_the_doctor_finds_nothing_wrong_and_names_what_it_looked_at(url: str) -> None:
    async with opened(url) as engine:
        await put(engine, b"1")
        subjects = {finding.subject for finding in await engine.inspect()}
        assert not await errors(engine)
    assert {"server", "durability sync", "replication", "long transactions", "autovacuum", "usage"} <= subjects


async def test_the_doctor_tells_of_long_transactions(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_doctor, "LONG_TRANSACTION_S", 0)
    async with opened(url) as engine, await psycopg.AsyncConnection.connect(url.partition("?")[0]) as foreign:
        await foreign.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        await foreign.execute("SELECT 1")
        findings = {finding.subject: finding for finding in await engine.inspect()}
        await foreign.rollback()
    assert findings["long transactions"].level == "warning"
    assert "pg_stat_activity" in findings["long transactions"].advice


async def test_counts_that_are_wrong_are_found(url: str, schema: str) -> None:
    async with opened(url) as engine:
        await put(engine, b"1")
        await shell(url, f"UPDATE {schema}.usage SET bytes = bytes + 1")
        assert [finding.subject for finding in await errors(engine)] == ["usage"]


async def test_a_database_that_cannot_hold_every_text_is_refused(postgres_server: PostgresServer) -> None:
    name = f"latin_{uuid.uuid4().hex[:8]}"
    await shell(postgres_server.url, f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(IncompatibleStore, match="UTF8"):
        await PostgresEngine.open(f"{postgres_server.url.rpartition('/')[0]}/{name}")


# --- who comes in, and what is said about it ---


@pytest.fixture
async def guarded(postgres_server: PostgresServer) -> str:
    """The URL of a role that needs a password."""
    with contextlib.suppress(psycopg.errors.DuplicateObject):
        await shell(postgres_server.url, f"CREATE ROLE guarded SUPERUSER LOGIN PASSWORD '{SECRET}'")
    return postgres_server.url.replace("postgres@", f"guarded:{SECRET}@")


def said(exc: BaseException | None) -> str:
    """Everything an error shows, with what caused it."""
    words = []
    while exc is not None:
        words.append(repr(exc) + str(exc))
        exc = exc.__cause__ or exc.__context__
    return " ".join(words)


async def test_the_password_opens_the_store_and_is_shown_nowhere(guarded: str, schema: str) -> None:
    async with opened(f"{guarded}?schema={schema}") as engine:
        await put(engine, b"1")
        shown = [repr(engine), repr(engine._address), repr(vars(engine)), *map(repr, await engine.inspect())]
    assert SECRET not in " ".join(shown)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ((f":{SECRET}@", f":{SECRET}x@"), AuthenticationFailed),
        ((f":{SECRET}@", "@"), AuthenticationFailed),
        (("127.0.0.1:", "127.0.0.1:1"), Unavailable),
        (("/postgres", "/no_such_database"), InvalidInput),
        (("postgresql://", "postgresql://%zz"), InvalidInput),
        (("/postgres", "/postgres?no_such_option=1"), InvalidInput),
        ((f":{SECRET}@127.0.0.1", f":{SECRET}@[127.0.0.1"), InvalidInput),
    ],
)
async def test_who_cannot_come_in_is_told_why_without_the_password(
    guarded: str, change: tuple[str, str], error: type[Error]
) -> None:
    head, _, database = guarded.rpartition("/")
    url = (head.replace(*change) + "/" + database) if change[0] != "/postgres" else head + change[1]
    with pytest.raises(error) as caught:
        await open_engine(url, SystemClock())
    assert SECRET not in said(caught.value)


async def test_a_missing_driver_names_the_cure(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for name in [name for name in sys.modules if name.startswith("holdfast.engines.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(InvalidInput, match=r"pip install 'holdfast\[postgres\]'"):
        await open_engine(url, SystemClock())


# --- broken connections ---


async def terminate_all(url: str) -> None:
    await shell(
        url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'holdfast'",
    )


async def test_a_store_goes_on_after_its_connections_were_ended(own_server: PostgresServer) -> None:
    async with opened(own_server.url) as engine:
        for n in range(1, 6):
            assert await put(engine, b"%d" % n) == n
            await terminate_all(own_server.url)
        [entry] = await engine.get(SPACE, ["records/k"])
        assert entry is not None
        assert entry.value == b"5"


async def test_where_the_server_has_no_connection_left_those_that_there_are_have_to_do() -> None:
    few = {"max_connections": "3", "superuser_reserved_connections": "0", "max_wal_senders": "0", "autovacuum": "off"}
    with started(PostgresServer.temporary(**few)) as server:
        engine = await PostgresEngine.open(server.url)
        try:
            spaces = [f"s{number}" for number in range(24)]
            await asyncio.gather(*(engine.commit(space, Batch("a", (Put("records/k", b"1"),))) for space in spaces))
            found = await asyncio.gather(*(engine.get(space, ["records/k"]) for space in spaces))
            assert [entry.value for [entry] in found if entry is not None] == [b"1"] * len(spaces)
            with pytest.raises(Unavailable, match="max_connections"):
                await asyncio.gather(*(PostgresEngine.open(server.url) for _ in range(3)))
        finally:
            await engine.close()


async def test_a_commit_whose_connection_breaks_while_it_waits_happens_once(own_server: PostgresServer) -> None:
    async with opened(own_server.url) as engine, await psycopg.AsyncConnection.connect(own_server.url) as foreign:
        await engine.commit(SPACE, Batch("a", (Increment("n/1", 1),)))
        await foreign.execute("SELECT pg_advisory_xact_lock(%s, 1)", (engine._locks,))
        commits = [asyncio.create_task(engine.commit(SPACE, Batch("a", (Increment("n/1", 1),)))) for _ in range(3)]
        await until_waiting(own_server.url, 1)
        await terminate_all(own_server.url)
        await until_waiting(own_server.url, 1)
        await foreign.rollback()
        receipts = await asyncio.gather(*commits)
        assert sorted(receipt.results for receipt in receipts) == [[2], [3], [4]]


async def until_waiting(url: str, count: int) -> None:
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    for _ in range(1000):
        if await shell(url, waiting) == [(count,)]:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{count} never waited")


async def test_a_commit_whose_server_is_gone_is_in_doubt_and_the_next_is_refused(
    own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_commit, "RESOLVE_S", 0.5)
    async with opened(own_server.url) as engine:
        foreign = await psycopg.AsyncConnection.connect(own_server.url)
        await engine.commit(SPACE, Batch("a", (Increment("n/1", 1),)))
        await foreign.execute("SELECT pg_advisory_xact_lock(%s, 1)", (engine._locks,))
        commit = asyncio.create_task(engine.commit(SPACE, Batch("a", (Increment("n/1", 1),), (), "r")))
        await until_waiting(own_server.url, 1)
        own_server.kill()
        with pytest.raises(OutcomeUnknown) as caught:
            await commit
        assert caught.value.request_id == "r"
        await foreign.close()
        with pytest.raises(Unavailable):
            await engine.commit(SPACE, Batch("a", (Increment("n/1", 1),)))
        own_server.start()
        again = await engine.commit(SPACE, Batch("a", (Increment("n/1", 1),), (), "r"))
        assert again.results == [2]


@pytest.mark.parametrize("shared", [False, True])
async def test_a_message_that_comes_after_its_group_was_written_anew_has_no_effect(
    url: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks, the message is still under way, the group is sent again, and then the first one arrives."""
    late: list[Call] = []
    send = Link.send

    def delayed(link: Link, *calls: Call, **options: Any) -> Any:
        if calls[-1][0].name.startswith((b"write_one", b"plain_")) and not late:
            late.extend(calls)
            reply = send(link, **options)
            link._break(psycopg.OperationalError("cut"))
            return reply
        return send(link, *calls, **options)

    async with opened(url) as engine, opened(url) as other:
        for n in range(4):  # both know that they are not alone
            await put(engine, b"%d" % n)
            if shared:
                await other.commit(SPACE, Batch("b", (Put("records/other", b"%d" % n),)))
        before = (await engine.spaces(SPACE))[0].revision
        monkeypatch.setattr(engine._writer, "_chance", lambda: 1.0)  # what sums up usage is a function, alone or not
        monkeypatch.setattr(Link, "send", delayed)
        assert await put(engine, b"7") == before + 1
        await engine.commit(SPACE, Batch("a", (Put("records/k", b"8"),)))
        *_, rows = await engine._ask(*late)
        assert [number(row[0]) for row in rows] == ([MOVED] if shared else [])
        [info] = await engine.spaces(SPACE)
        [entry] = await engine.get(SPACE, ["records/k"])
        assert entry is not None
        assert (info.revision, entry.value) == (before + 2, b"8")


async def test_a_message_that_is_too_old_has_no_effect(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_commit, "MESSAGE_MS", -1000)
    async with opened(url) as engine:
        with pytest.raises(Unavailable):
            await asyncio.wait_for(put(engine, b"1"), 20)
        assert await engine.spaces() == []


async def test_a_lock_that_is_not_let_go_is_told_and_nothing_is_written(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(postgres_link.SESSION, "lock_timeout", "100ms")
    async with opened(url) as engine, await psycopg.AsyncConnection.connect(url.partition("?")[0]) as foreign:
        first = await put(engine, b"1")
        await foreign.execute("SELECT pg_advisory_xact_lock(%s, 1)", (engine._locks,))
        with pytest.raises(Unavailable, match="nothing was changed"):
            await put(engine, b"2")
        [entry] = await engine.get(SPACE, ["records/k"])
        assert entry is not None
        assert entry.value == b"1"
        await foreign.rollback()
        assert await put(engine, b"3") == first + 1


async def test_a_crash_of_the_server_loses_no_sync_commit_and_never_repeats_an_async_version(
    own_server: PostgresServer,
) -> None:
    async with opened(own_server.url) as engine:
        await engine.create("relaxed", "async")
        strict = [await put(engine, b"%d" % n) for n in range(5)]
        relaxed = [await put(engine, b"%d" % n, "relaxed") for n in range(5)]
        seen = []
        watching = engine.watch(SPACE, cursor=cursor_at(strict[0]))
        seen.append((await anext(watching)).version)
        own_server.kill()
        own_server.start()
        assert await put(engine, b"5") == strict[-1] + 1
        version = await put(engine, b"5", "relaxed")
        assert version > relaxed[-1]
        assert version > ASYNC_JUMP
        with pytest.raises(Compacted):
            await anext(engine.watch("relaxed", cursor=cursor_at(relaxed[-1])))
        while seen[-1] <= strict[-1]:
            seen.append((await anext(watching)).version)
        assert seen == [*strict[1:], strict[-1] + 1]
        own_server.stop()
        own_server.start()
        assert await put(engine, b"6", "relaxed") == version + 1, "a clean restart loses nothing"


# --- the bell ---


async def test_waking_costs_no_notification_per_commit(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rings = 0
    send = Link.send

    def counted(link: Link, *calls: Call, **options: Any) -> Any:
        nonlocal rings
        rings += calls[0][0].name == b"ring"
        return send(link, *calls, **options)

    monkeypatch.setattr(Link, "send", counted)
    async with opened(url) as writer, opened(url) as watcher:
        began = time.monotonic()
        await put(writer, b"0")
        for _ in range(200):
            await put(writer, b"1")
        assert rings <= 2 + (time.monotonic() - began) / QUIET_S, "nobody listens"
        watching = watcher.watch(SPACE, cursor=cursor_at(201))
        waiting = asyncio.ensure_future(anext(watching))
        await asyncio.sleep(0.3)
        await put(writer, b"2")
        assert (await asyncio.wait_for(waiting, 5)).version == 202
        rings, began = 0, time.monotonic()
        for _ in range(300):
            await put(writer, b"3")
        assert rings <= 2 + (time.monotonic() - began) / RING_S, "several commits share one"
        for version in range(203, 503):
            assert (await asyncio.wait_for(anext(watching), 5)).version == version
        await watching.aclose()  # type: ignore[attr-defined]


async def test_who_alone_watches_what_it_writes_notifies_nobody(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rings = 0
    send = Link.send

    def counted(link: Link, *calls: Call, **options: Any) -> Any:
        nonlocal rings
        rings += calls[0][0].name == b"ring"
        return send(link, *calls, **options)

    async with opened(url) as engine:
        first = await put(engine, b"0")
        watching = engine.watch(SPACE, cursor=cursor_at(first - 1))
        assert (await asyncio.wait_for(anext(watching), 5)).version == first
        async with asyncio.timeout(10):
            while engine._bell._ear is None:
                await asyncio.sleep(0.01)
        monkeypatch.setattr(Link, "send", counted)
        began = time.monotonic()
        for n in range(100):
            await put(engine, b"1")
            assert (await asyncio.wait_for(anext(watching), 5)).version == first + n + 1
        assert rings <= 2 + (time.monotonic() - began) / QUIET_S
        await watching.aclose()  # type: ignore[attr-defined]


async def test_a_watcher_whose_connection_was_ended_misses_nothing(own_server: PostgresServer) -> None:
    async with opened(own_server.url) as writer, opened(own_server.url) as watcher:
        first = await put(writer, b"0")
        watching = watcher.watch(SPACE, cursor=cursor_at(first))
        for n in range(1, 6):
            waiting = asyncio.ensure_future(anext(watching))
            await asyncio.sleep(0.05)
            await terminate_all(own_server.url)
            await put(writer, b"%d" % n)
            assert (await asyncio.wait_for(waiting, 10)).version == first + n
        await watching.aclose()  # type: ignore[attr-defined]
