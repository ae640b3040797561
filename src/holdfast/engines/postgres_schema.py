"""The schema of a PostgreSQL store: its tables, and how they come into being.

Everything lives in one schema of the database (`?schema=`, by default `holdfast`). `meta` says that it is ours and which
version it has. The first process to open a new store makes it, under an advisory lock, so several may open at once; a
schema of a newer version, or of another program, is refused before anything is written. A version is one step of STEPS:
an old store is brought up by the steps it lacks, in one transaction. The functions are made anew by the last step; a
process of an older version that is still running finds them gone and says so.

Rows are replaced, not updated. A commit removes the old version of an entry and inserts the new one under its own version. In
`usage` there is a row per change, and every now and then one that sums up those before, which are removed. PostgreSQL keeps the dead versions of a row as long as any transaction of
anybody is older, and a look-up by key walks over all of them: with the version in the primary key a look-up goes to the
newest at once, so a report that runs for an hour slows nobody down. For the same reason there is no row for a space's
revision: the newest row of the append-only `feed` is its head.

`step` tells apart the states of one revision: a touch is no commit and has no version, and it changes an entry all the
same. (revision, step) is different after every change, which is what a process compares to know that what it remembers
is still so.

`running` is unlogged: PostgreSQL empties it when it recovers from a crash, and on a standby that is promoted. Whoever finds
it empty knows that the last commits of async spaces may be lost, and lets their versions jump (`RECOVER`).
"""

from __future__ import annotations

import re
import secrets
from typing import Final

from psycopg import AsyncConnection, sql

from holdfast.engine import LOSS_JUMP
from holdfast.engines.postgres_functions import FUNCTIONS, SCHEMA_VERSION
from holdfast.errors import IncompatibleStore, InvalidInput

SERVER_VERSION_MIN: Final = 130_000
DEFAULT_SCHEMA: Final = "holdfast"
OPENING_LOCK: Final = 0x486F6C64  # "Hold"
"""The class of the advisory locks around making and migrating a schema; the other half is the schema's hash."""
ASYNC_JUMP: Final = 2**20
"""By how much the revision of an async space jumps when the server crashed."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


_TABLES: Final = """
CREATE TABLE spaces (
    id int4 GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE,
    durability text NOT NULL,
    audit_reads bool NOT NULL,
    floor int8 NOT NULL,
    created_at int8 NOT NULL,
    dropped bool NOT NULL
);
CREATE TABLE entries (
    space int4 NOT NULL,
    key text COLLATE "C" NOT NULL,
    version int8 NOT NULL,
    value bytea NOT NULL,
    owner text COLLATE "C" NOT NULL,
    created_at int8 NOT NULL,
    updated_at int8 NOT NULL,
    expires_at int8,
    tag text COLLATE "C" NOT NULL,
    PRIMARY KEY (space, key, version)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000);
CREATE INDEX expiries ON entries (space, expires_at, key) WHERE expires_at IS NOT NULL;
-- One row per group of commits that became durable together; `commits` is a msgpack list. The newest row of a space is its
-- head. `writer` is a number its writer drew, by which it finds out after a lost connection whether the group was
-- written, and by which a message of it that comes late is known.
CREATE TABLE feed (
    space int4 NOT NULL,
    revision int8 NOT NULL,
    step int8 NOT NULL,
    time int8 NOT NULL,
    last_id int8 NOT NULL,
    writer int8 NOT NULL,
    commits bytea NOT NULL,
    PRIMARY KEY (space, revision, step)
) WITH (toast_tuple_target = 8160);
-- Which commit answered a request; its receipt is in the feed.
CREATE TABLE requests (
    space int4 NOT NULL,
    actor text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    version int8 NOT NULL,
    PRIMARY KEY (space, actor, id)
);
CREATE INDEX answers ON requests (space, version);
CREATE TABLE usage (
    space int4 NOT NULL,
    owner text COLLATE "C" NOT NULL,
    subspace text COLLATE "C" NOT NULL,
    change int8 NOT NULL,
    keys int8 NOT NULL,
    bytes int8 NOT NULL,
    PRIMARY KEY (space, owner, subspace, change)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000);
CREATE UNLOGGED TABLE running (timeline text NOT NULL);
-- For people with psql.
CREATE FUNCTION as_text(value bytea) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN convert_from(value, 'UTF8');
EXCEPTION WHEN OTHERS THEN
    RETURN encode(value, 'escape');
END $$;
CREATE VIEW readable AS
    SELECT spaces.name AS space, key, as_text(value) AS value, version, owner, tag,
           to_timestamp(entries.created_at / 1000.0) AS created_at,
           to_timestamp(updated_at / 1000.0) AS updated_at,
           to_timestamp(expires_at / 1000.0) AS expires_at
    FROM entries JOIN spaces ON spaces.id = entries.space;
"""

_NOTHING: Final = "SELECT"
_SUMS: Final = "ALTER TABLE usage ADD is_sum bool NOT NULL DEFAULT true; UPDATE usage SET change = 0;"
"""The changes were counted before, and are numbered by revisions now."""
STEPS: Final = (_TABLES, _NOTHING, _NOTHING, _NOTHING, _NOTHING, _SUMS, _NOTHING, _NOTHING, FUNCTIONS)
"""What brings a schema from one version to the next; the first makes the tables, the last the functions. 2: unknown keys are
replaced unseen. 3: ranges are taken for empty. 4: unknown keys are looked up one by one. 5: what expires can be
written after what others wrote. 6: usage is charged by rows that are summed up later. 7: empty arrays are NULL. 8: several
columns come in one array. 9: all texts of a group come in one, and all its numbers."""

TIMELINE: Final = "left(pg_walfile_name(pg_current_wal_lsn()), 8)"
"""What changes when a standby takes over."""

RECOVER: Final = f"""
WITH jump AS (
    SELECT id, CASE WHEN $1::bool THEN {LOSS_JUMP} ELSE {ASYNC_JUMP} END AS gap FROM spaces
    WHERE $1::bool OR durability = 'async'
), jumped AS (
    INSERT INTO feed SELECT id, coalesce(revision, 0) + gap, 0, coalesce(time, 0), coalesce(last_id, 0) + gap, 0, '\\x90'
    FROM jump LEFT JOIN LATERAL (
        SELECT revision, time, last_id FROM feed WHERE space = id ORDER BY revision DESC, step DESC LIMIT 1) AS head ON true
    RETURNING space, revision
)
UPDATE spaces SET floor = revision FROM jumped WHERE id = space
"""  # noqa: S608 - made of constants


def check_schema_name(name: str) -> str:
    if _NAME.fullmatch(name) is None or name.startswith("pg_"):
        raise InvalidInput(
            f"schema {name!r:.80} must be letters, digits and underscores, at most 63, and not begin with pg_"
        )
    return name


async def prepare(connection: AsyncConnection, schema: str) -> int:
    """Make the schema, or make sure that it is ours and of this version. Gives the class of its advisory locks.

    A store that is ready is recognised without the lock, so opening it waits for nobody and needs no right to create.
    """
    version, locks = await _look(connection, schema)
    if version < SCHEMA_VERSION:
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", (OPENING_LOCK, schema))
            version, locks = await _look(connection, schema)
            if version < SCHEMA_VERSION:
                locks = await _upgrade(connection, schema, version, locks)
    return locks


async def _look(connection: AsyncConnection, schema: str) -> tuple[int, int]:
    """The version of the schema (0: there is nothing yet) and the class of its locks; a foreign or newer one raises."""
    found = await (
        await connection.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace(%s)", (f'"{schema}"',)
        )
    ).fetchall()
    names = {str(row[0]) for row in found}
    if not names:
        return 0, 0
    meta: dict[str, str] = {}
    if "meta" in names:
        table = sql.Identifier(schema, "meta")
        columns = {
            str(row[0])
            for row in await (
                await connection.execute(
                    "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0",
                    (f'"{schema}".meta',),
                )
            ).fetchall()
        }
        if {"key", "value"} <= columns:
            rows = await connection.execute(sql.SQL("SELECT key::text, value::text FROM {}").format(table))
            meta = dict(await rows.fetchall())
    if meta.get("program") != "holdfast":
        raise IncompatibleStore(
            f"schema {schema!r} of this database belongs to another program; nothing was changed. "
            "Name another with ?schema="
        )
    version = int(meta["version"])
    if version > SCHEMA_VERSION:
        raise IncompatibleStore(
            f"schema {schema!r} was written by a newer holdfast (version {version}, this one knows {SCHEMA_VERSION}); "
            "upgrade holdfast"
        )
    return version, int(meta["locks"])


async def _upgrade(connection: AsyncConnection, schema: str, version: int, locks: int) -> int:
    """With the lock held, in a transaction: the steps that are missing."""
    await connection.execute("SET LOCAL synchronous_commit = on")
    if version == 0:
        locks = secrets.randbelow(2**31)
        name = sql.Identifier(schema)
        exists = await (await connection.execute("SELECT to_regnamespace(%s)", (f'"{schema}"',))).fetchone()
        if exists is None or exists[0] is None:
            await connection.execute(sql.SQL("CREATE SCHEMA {}").format(name))
        made = sql.SQL(
            "CREATE TABLE meta (key text PRIMARY KEY, value text NOT NULL);"
            "INSERT INTO meta VALUES ('program', 'holdfast'), ('version', '0'), ('locks', {})"
        )
        await connection.execute(made.format(sql.Literal(str(locks))))
    for step in STEPS[version:]:
        await connection.execute(step.encode())
    await connection.execute("UPDATE meta SET value = %s WHERE key = 'version'", (str(SCHEMA_VERSION),))
    return locks
