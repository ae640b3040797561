"""The statements a PostgreSQL store is asked with: one for one question.

They are made of constants; everything that varies is a parameter. A name is what the statement is prepared under. `$1` is
the space almost everywhere, and `$2` of those that depend on the time is the clock's time, or NULL for the server's own.
"""
# ruff: noqa: S608 - nothing of what is put together here comes from outside

from __future__ import annotations

from typing import Final

from holdfast.engines.evaluation import SWEEP_MAX
from holdfast.engines.postgres_functions import CALL_GROUP, CALL_ONE, CLOCK, COLUMNS
from holdfast.engines.postgres_link import Statement, statement

_HEAD_OF: Final = (
    "SELECT revision, step, time, last_id FROM feed WHERE space = {} ORDER BY revision DESC, step DESC LIMIT 1"
)
_STARTED: Final = "floor(extract(epoch FROM statement_timestamp()) * 1000)::int8"

BEGIN: Final = statement("begin", "BEGIN")
BEGIN_SNAPSHOT: Final = statement("begin_snapshot", "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
COMMIT: Final = statement("commit", "COMMIT")
ROLLBACK: Final = statement("rollback", "ROLLBACK")
LOCK: Final = statement("lock", "SELECT pg_advisory_xact_lock($1::int4, $2::int4)")
"""Space 0 is none: its lock is for making spaces."""
LOCK_NAMED: Final = statement(
    "lock_named", "SELECT pg_advisory_xact_lock($1::int4, id) FROM spaces WHERE name = $2::text"
)

SPACE: Final = statement("space", "SELECT id, durability, created_at, dropped FROM spaces WHERE name = $1::text")
MAKE: Final = statement(
    "make",
    """
    INSERT INTO spaces (name, durability, audit_reads, floor, created_at, dropped)
    VALUES ($1::text, $2::text, $3::bool, 0, $4::int8, false) RETURNING id
    """,
)
REVIVE: Final = statement(
    "revive",
    """
    UPDATE spaces SET dropped = false, durability = $2::text, audit_reads = $3::bool, created_at = $4::int8
    WHERE id = $1::int4
    """,
)
HEAD: Final = statement(
    "head",
    f"""
    SELECT s.id, s.durability, s.dropped, coalesce(f.revision, 0), coalesce(f.step, 0), coalesce(f.time, 0),
           coalesce(f.last_id, 0), c.now, (
               SELECT expires_at FROM entries WHERE space = s.id AND expires_at > greatest(c.now, f.time)
               ORDER BY expires_at LIMIT 1)
    FROM spaces AS s
    LEFT JOIN LATERAL ({_HEAD_OF.format("s.id")}) AS f ON true
    CROSS JOIN LATERAL (SELECT coalesce($2::int8, {CLOCK}) AS now OFFSET 0) AS c
    WHERE s.name = $1::text
    """,
)
FETCH: Final = statement(
    "fetch",
    f"""
    SELECT found.* FROM unnest($2::text[]) AS wanted (key) CROSS JOIN LATERAL (
        SELECT {COLUMNS} FROM entries WHERE space = $1::int4 AND key = wanted.key ORDER BY version DESC LIMIT 1) AS found
    """,
)
RANGE: Final = statement(
    "range",
    f"SELECT {COLUMNS} FROM entries WHERE space = $1::int4 AND key >= $2::text AND key < $3::text ORDER BY key LIMIT $4::int8",
)
DUE: Final = statement(
    "due",
    f"""
    SELECT {COLUMNS} FROM entries WHERE space = $1::int4 AND expires_at <= greatest(
        coalesce($2::int8, {CLOCK}), (SELECT time FROM feed WHERE space = $1 ORDER BY revision DESC, step DESC LIMIT 1))
    ORDER BY expires_at, key LIMIT {SWEEP_MAX}
    """,
)
REQUESTS: Final = statement(
    "requests",
    """
    SELECT asked.actor, asked.id, f.* FROM unnest($2::text[], $3::text[]) AS asked (actor, id)
    CROSS JOIN LATERAL (
        SELECT version FROM requests WHERE space = $1::int4 AND actor = asked.actor AND id = asked.id LIMIT 1) AS r
    CROSS JOIN LATERAL (
        SELECT revision, time, commits FROM feed WHERE space = $1 AND revision >= r.version
        ORDER BY revision, step LIMIT 1) AS f
    """,
)
SEARCH: Final = statement(
    "search",
    """
    SELECT revision, time, commits FROM feed WHERE space = $1::int4 AND revision > $2::int8 AND time > $3::int8
        AND position($4::bytea IN commits) > 0 ORDER BY revision DESC, step DESC LIMIT 16
    """,
)
FORGET: Final = statement(
    "forget",
    """
    DELETE FROM requests WHERE ctid = ANY (ARRAY(
        SELECT r.ctid FROM unnest($2::text[], $3::text[], $4::int8[]) AS old (actor, id, version) CROSS JOIN LATERAL (
            SELECT ctid FROM requests WHERE space = $1::int4 AND actor = old.actor AND id = old.id
                AND version = old.version LIMIT 1) AS r))
    """,
)
WRITER: Final = statement(
    "writer",
    """
    SELECT s.floor > $2::int8, f.revision, f.time FROM spaces AS s LEFT JOIN LATERAL (
        SELECT revision, time FROM feed WHERE space = s.id AND revision >= $2::int8 AND writer = $3::int8 LIMIT 1
    ) AS f ON true WHERE s.name = $1::text
    """,
)
WRITE_ONE: Final = statement("write_one", CALL_ONE)
WRITE_GROUP: Final = statement("write_group", CALL_GROUP)

_LIVE: Final = f"""(expires_at IS NULL OR expires_at > greatest(coalesce($2::int8, {_STARTED}), (
    SELECT time FROM feed WHERE space = $1::int4 ORDER BY revision DESC, step DESC LIMIT 1)))"""
"""Reads show entries as they are when the statement begins, before its snapshot: an entry that is extended in between must
not be judged by a time at which it would have expired."""
GET: Final = statement(
    "get",
    f"SELECT {COLUMNS} FROM entries WHERE space = $1 AND key = $3::text AND {_LIVE} ORDER BY version DESC LIMIT 1",
)
GET_MANY: Final = statement(
    "get_many",
    f"""
    SELECT found.* FROM unnest($3::text[]) AS wanted (key) CROSS JOIN LATERAL (
        SELECT {COLUMNS} FROM entries WHERE space = $1 AND key = wanted.key AND {_LIVE}
        ORDER BY version DESC LIMIT 1) AS found
    """,
)


def _scan(order: str) -> str:
    return f"""
    SELECT coalesce(head.revision, 0), found.* FROM (SELECT) AS always
    LEFT JOIN LATERAL ({_HEAD_OF.format("$1::int4")}) AS head ON true
    LEFT JOIN LATERAL (
        SELECT {COLUMNS} FROM entries WHERE space = $1 AND key >= $3::text AND key < $4::text AND {_LIVE}
        ORDER BY key {order} LIMIT $5::int8) AS found ON true
    """


SCAN: Final = statement("scan", _scan("ASC"))
SCAN_BACKWARDS: Final = statement("scan_backwards", _scan("DESC"))

# --- the feed ---

POSITION: Final = statement(
    "position",
    f"""
    SELECT s.floor, coalesce(f.revision, 0) FROM spaces AS s
    LEFT JOIN LATERAL ({_HEAD_OF.format("s.id")}) AS f ON true WHERE s.name = $1::text
    """,
)
FEED: Final = statement(
    "feed",
    """
    SELECT s.floor, part.revision, part.time, part.commits FROM spaces AS s LEFT JOIN LATERAL (
        SELECT revision, step, time, commits FROM (
            SELECT *, sum(octet_length(commits)) OVER (ORDER BY revision, step) - octet_length(commits) AS before
            FROM (
                SELECT revision, step, time, commits FROM feed
                WHERE space = s.id AND revision > $2::int8 AND octet_length(commits) > 1
                ORDER BY revision, step LIMIT $3::int8) AS first
        ) AS counted WHERE before < $4::int8
    ) AS part ON true WHERE s.name = $1::text ORDER BY part.revision, part.step
    """,
)
"""Rows without commits are heads only."""
HEADS: Final = statement(
    "heads",
    f"""
    SELECT s.id, s.name, coalesce(f.revision, 0) FROM spaces AS s
    LEFT JOIN LATERAL ({_HEAD_OF.format("s.id")}) AS f ON true WHERE s.name = ANY ($1::text[])
    """,
)
LISTENING: Final = statement("listening", "SELECT pg_advisory_lock_shared($1::int4, -1)")
RING: Final = statement(
    "ring",
    """
    SELECT CASE WHEN pg_try_advisory_xact_lock($1::int4, -1) THEN false
                ELSE set_config('synchronous_commit', 'off', true) IS NOT NULL AND pg_notify($2::text, $3::text) IS NOT NULL
           END
    """,
)


def listen_to(channel: str) -> Statement:
    return statement("listen", f'LISTEN "{channel}"')


# --- the life of spaces ---

SPACES: Final = statement(
    "spaces",
    f"""
    SELECT s.id, s.name, s.durability, s.created_at, s.audit_reads, s.floor, coalesce(f.revision, 0), (
        SELECT expires_at FROM entries WHERE space = s.id AND expires_at IS NOT NULL ORDER BY expires_at LIMIT 1)
    FROM spaces AS s LEFT JOIN LATERAL ({_HEAD_OF.format("s.id")}) AS f ON true
    WHERE NOT s.dropped AND ($1::text IS NULL OR s.name = $1::text) ORDER BY s.name
    """,
)
USAGE: Final = statement(
    "usage",
    """
    SELECT s.id, u.* FROM spaces AS s CROSS JOIN LATERAL (
        SELECT owner, subspace, sum(keys)::int8, sum(bytes)::int8 FROM usage WHERE space = s.id
        GROUP BY owner, subspace HAVING sum(keys) > 0) AS u
    WHERE NOT s.dropped AND ($1::text IS NULL OR s.name = $1::text) ORDER BY s.id, u.owner, u.subspace
    """,
)
"""Not a join: where there are few spaces, that may be planned as a walk through the usage of all of them."""
AUDIT_READS: Final = statement("audit_reads", "UPDATE spaces SET audit_reads = true WHERE id = $1::int4")
EMPTY: Final = tuple(
    statement(f"empty_{table}", f"DELETE FROM {table} WHERE space = $1::int4")
    for table in ("entries", "requests", "usage", "feed")
)
DROPPED: Final = statement("dropped", "UPDATE spaces SET dropped = true, floor = $2::int8 WHERE id = $1::int4")
FLOOR: Final = statement("floor", "UPDATE spaces SET floor = greatest(floor, $2::int8) WHERE id = $1::int4")
SET_HEAD: Final = statement(
    "set_head",
    "INSERT INTO feed VALUES ($1::int4, $2::int8, $3::int8, $4::int8, $5::int8, 0, '\\x90'::bytea)",
)
SIZES: Final = statement(
    "sizes",
    """
    SELECT found.* FROM unnest($2::text[]) AS wanted (key) CROSS JOIN LATERAL (
        SELECT key, version, owner, octet_length(key) + octet_length(value) FROM entries
        WHERE space = $1::int4 AND key = wanted.key ORDER BY version DESC LIMIT 1) AS found
    """,
)
CLEAR_FEED: Final = statement(
    "clear_feed",
    "DELETE FROM feed WHERE space = $1::int4 AND revision >= $2::int8 AND (revision, step) < ($3::int8, $4::int8)",
)
"""It begins at the floor, so that it does not walk over what was removed before."""
CLEAR_REQUESTS: Final = statement(
    "clear_requests", "DELETE FROM requests WHERE space = $1::int4 AND version <= $2::int8"
)
OLDEST: Final = statement(
    "oldest",
    """
    SELECT s.floor, f.revision, f.step FROM spaces AS s LEFT JOIN LATERAL (
        SELECT revision, step FROM feed WHERE space = s.id AND revision >= s.floor AND revision <= $2::int8
        ORDER BY revision, step LIMIT $3::int8) AS f ON true
    WHERE s.id = $1::int4 ORDER BY f.revision, f.step
    """,
)
EMPTY_HEAD: Final = statement(
    "empty_head",
    "UPDATE feed SET commits = '\\x90'::bytea WHERE space = $1::int4 AND revision = $2::int8 AND step = $3::int8",
)
