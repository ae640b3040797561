"""What a PostgreSQL server guarantees as it is configured, and what is wrong with it: the findings behind `holdfast doctor`."""

from __future__ import annotations

from typing import Any, Final

from psycopg import AsyncConnection

from holdfast.engine import Finding
from holdfast.engines.postgres_functions import SCHEMA_VERSION

LONG_TRANSACTION_S: Final = 60


async def examine(connection: AsyncConnection, schema: str) -> list[Finding]:
    """Look at the server's settings and at what others do there; changes nothing."""
    shown, database = await _one(connection, "SELECT current_setting('server_version'), current_database()")
    return [
        Finding("ok", "server", f"PostgreSQL {shown}, database {database!r}"),
        Finding("ok", "schema", f"{schema}: Holdfast schema {SCHEMA_VERSION}"),
        *await _durability(connection),
        *await _replication(connection),
        *await _transactions(connection),
        *await _vacuum(connection),
        *await _usage(connection),
    ]


async def _durability(connection: AsyncConnection) -> list[Finding]:
    fsync, pages, method, default = await _one(
        connection,
        "SELECT current_setting('fsync'), current_setting('full_page_writes'), current_setting('wal_sync_method'), "
        "(SELECT reset_val FROM pg_settings WHERE name = 'synchronous_commit')",
    )
    found: list[Finding] = []
    if fsync != "on":
        found.append(
            Finding(
                "error",
                "fsync",
                "fsync is off: a crash of the machine can lose or damage everything; sync spaces are refused",
                "set fsync = on in postgresql.conf and reload it",
            )
        )
    else:
        found.append(
            Finding("ok", "durability sync", f"every commit is on the server's disk before its reply ({method})")
        )
    if pages != "on":
        found.append(
            Finding(
                "warning",
                "full_page_writes",
                "full_page_writes is off: a crash can leave half-written pages, unless the file system writes them whole",
                "set full_page_writes = on",
            )
        )
    if default == "off":
        found.append(
            Finding(
                "note",
                "synchronous_commit",
                "the default is off; holdfast turns it on for its own connections, so that sync spaces are sync",
            )
        )
    else:
        found.append(Finding("ok", "synchronous_commit", str(default)))
    found.append(
        Finding(
            "ok", "durability async", "a crash of the server may lose the last commits; versions are not given twice"
        )
    )
    found.append(Finding("ok", "durability volatile", "kept in each process's memory; lost when it ends"))
    return found


async def _replication(connection: AsyncConnection) -> list[Finding]:
    names, commit = await _one(
        connection, "SELECT current_setting('synchronous_standby_names'), current_setting('synchronous_commit')"
    )
    (standbys,) = await _one(connection, "SELECT count(*) FROM pg_stat_replication")
    if names and commit != "local":
        return [Finding("ok", "replication", f"a commit waits for standbys ({names}); {standbys} connected")]
    if standbys:
        return [
            Finding(
                "note",
                "replication",
                f"{standbys} standbys follow asynchronously: if one takes over, the last commits may be lost",
                "set synchronous_standby_names to lose none",
            )
        ]
    return [Finding("note", "replication", "no standby: the store lives and dies with this server's disk")]


async def _transactions(connection: AsyncConnection) -> list[Finding]:
    count, age = await _one(
        connection,
        "SELECT count(*), coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::int8 "
        "FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND xact_start < clock_timestamp() - %s * interval '1 s' "
        "AND backend_type = 'client backend'",
        (LONG_TRANSACTION_S,),
    )
    if count:
        return [
            Finding(
                "warning",
                "long transactions",
                f"{count} are open, the oldest for {age} s: nothing that is replaced meanwhile can be cleaned up, so "
                "tables grow, and scans and takes get slower",
                "end them; SELECT pid, query FROM pg_stat_activity WHERE backend_xmin IS NOT NULL ORDER BY xact_start",
            )
        ]
    return [Finding("ok", "long transactions", f"none is open for more than {LONG_TRANSACTION_S} s")]


async def _vacuum(connection: AsyncConnection) -> list[Finding]:
    (on,) = await _one(connection, "SELECT current_setting('autovacuum')")
    if on != "on":
        return [
            Finding(
                "warning",
                "autovacuum",
                "autovacuum is off: every write leaves a dead row, and nobody removes them",
                "set autovacuum = on",
            )
        ]
    live, dead = await _one(
        connection,
        "SELECT coalesce(sum(n_live_tup), 0)::int8, coalesce(sum(n_dead_tup), 0)::int8 FROM pg_stat_user_tables "
        "WHERE schemaname = current_schema()",
    )
    return [Finding("ok", "autovacuum", f"on; {live:,} rows, {dead:,} dead ones wait to be removed")]


async def _usage(connection: AsyncConnection) -> list[Finding]:
    """The kept counts against what is really there."""
    (wrong,) = await _one(
        connection,
        "SELECT count(*) FROM (SELECT space, owner, split_part(key, '/', 1) AS subspace, count(*) AS keys, "
        "sum(octet_length(key) + octet_length(value)) AS bytes FROM entries GROUP BY 1, 2, 3) AS counted "
        "FULL JOIN (SELECT space, owner, subspace, sum(keys) AS keys, sum(bytes) AS bytes FROM usage "
        "GROUP BY 1, 2, 3 HAVING sum(keys) > 0) AS kept USING (space, owner, subspace) "
        "WHERE kept.keys IS DISTINCT FROM counted.keys OR kept.bytes IS DISTINCT FROM counted.bytes",
    )
    if wrong:
        advice = "export the store and import it anew"
        return [Finding("error", "usage", f"{wrong} counts of keys or bytes are wrong", advice)]
    return [Finding("ok", "usage", "the counts of keys and bytes are exact")]


async def _one(connection: AsyncConnection, query: str, values: tuple[object, ...] = ()) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = await (await connection.execute(query.encode(), values or None)).fetchone()
    return row or ()
