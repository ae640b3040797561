"""The functions of a PostgreSQL store that write groups: the part of a commit that happens on the server.

`commit_one` and `commit_group` do the same; the first is for the group that writes one entry, which is what a lone writer
sends, and takes plain parameters where the second takes arrays: unpacking those costs as much as the write. A call names
the head it was evaluated at (`_revision`, `_step`), what it relied on, and the post-images.

  1. take the space's lock, read the head and the clock
  2. refuse what is too old (LATE), and what relied on an entry that has expired since (EXPIRED)
  3. the head is another: only a group that depends on nothing but the entries it looked at (`_movable`) can still be
     written, after what the others wrote, with versions shifted by as much as the head has moved, and with times to live that
     begin at its time
  4. look whether the ranges that were taken for empty are so (OCCUPIED); what is there, expired or not, is then read
  5. the head is another, or the writer is not sure of what it remembers: compare all it relied on (CHANGED); of an entry
     that is just replaced (not `_exact`) that is when it was made, whose it is, its tag and its size, because nothing else
     of it is in what is written
  6. find what is replaced unseen: an entry that is `_blind` (of a group: the first so many) is put without having looked
     at its key, so whatever is there goes. What the new one has from it is filled in here: it keeps `created_at`, which
     is told to the writer, and its owner is credited. The feed tells the tag of a replaced entry, and an expiry before
     what replaces it, and the feed's row is made by the writer, who took the key for absent: so an entry that has a tag,
     or has expired, is shown first (CHANGED)
  7. write: the feed's row, the entries, the request ids, and by how much the usage has changed; every now and then those
     changes are summed up

Arrays are walked by their subscripts: `unnest` of eight makes eight lists first. One that would be empty is NULL, because all
that are given are unpacked. Nothing is written before everything was compared, so a refusal leaves no trace. The functions are made together with the
tables and belong to the same version of the schema.
"""
# ruff: noqa: S608 - nothing of what is put together here comes from outside

from __future__ import annotations

from typing import Final

DONE, REBASED, MOVED, LATE, EXPIRED, CHANGED, REPEATED, OCCUPIED = range(8)
"""What the functions answer: written; written after what others wrote; others have written, evaluate anew; the message is
too old; an entry that was relied on has expired, or the time is ahead of the server's; entries are not as they were taken
to be, here they are; a request id is known; a range that was taken for empty is not."""

BEHIND_MAX: Final = 1000
"""How many revisions a group may be behind and still be written after them."""
SUMMED_EVERY: Final = 64
"""Of so many commits, on average, one sums up the usage of those it charges."""
CLOCK_SLACK_MS: Final = 2
"""How far a client's estimate of the server's time may be ahead of it."""

CLOCK: Final = "floor(extract(epoch FROM clock_timestamp()) * 1000)::int8"
COLUMNS: Final = "key, value, version, owner, created_at, updated_at, expires_at, tag"

_EXPECTED: Final = """
    _class int4, _space int4, _revision int8, _step int8, _now int8, _clock int8, _until int8, _deadline int8,
    _relaxed bool, _sure bool, _movable bool, _first_id int8, _timed bool, _to_revision int8, _to_last_id int8,
    _writer int8, _commits bytea, _empty text[], _empty_ends text[]"""
_ONE: Final = """
    _key text, _absent bool, _blind bool, _exact bool, _old int8, _old_expires int8, _old_created int8, _old_owner text,
    _old_tag text, _old_size int8, _version int8, _value bytea, _owner text, _created int8, _updated int8, _expires int8,
    _tag text, _charged text, _subspace text, _more_keys int8, _more_bytes int8"""
_MANY: Final = """
    _absent text[], _blind int4, _fact_keys text[], _exact bool[], _old int8[], _old_expires int8[],
    _old_created int8[], _old_owners text[], _old_tags text[], _old_sizes int8[], _gone_keys text[], _gone int8[],
    _values bytea[], _keys_owners_tags text[], _versions_times int8[], _actors text[], _ids text[], _answers int8[],
    _charged text[], _subspaces text[], _more_keys int8[], _more_bytes int8[]"""
"""What is written comes column by column, several in one array: every array takes a while to be taken apart. `_keys_owners_tags`
has the keys, then the owners, then the tags; `_versions_times` the versions, then created_at, updated_at and expires_at."""

_NEWEST: Final = "ORDER BY version DESC LIMIT 1"

_GUESSED_ONE: Final = "_absent OR _blind"
_WRONG_ONE: Final = "EXISTS (SELECT FROM entries WHERE space = _space AND key = _key AND (_absent OR tag <> ''))"
_GUESSED_MANY: Final = "_absent IS NOT NULL OR _blind > 0"
_OF_THESE: Final = "unnest({}) AS these (one) CROSS JOIN LATERAL (SELECT tag FROM entries WHERE space = _space AND key = one LIMIT 1) AS e"
"""What there is under some keys, looked up one by one: for `key = ANY (…)` the planner may read the whole space instead."""
_WRONG_MANY: Final = f"""
            EXISTS (SELECT FROM {_OF_THESE.format("_absent")})
            OR EXISTS (SELECT FROM {_OF_THESE.format("_keys_owners_tags[:_blind]")} WHERE e.tag <> '')"""
_LIVE_UNTAGGED: Final = "{0}.tag = '' AND ({0}.expires_at > greatest(time, _now_here)) IS NOT FALSE"
"""What can be replaced unseen. Live by the server's clock too, like every entry that is taken for live (`_until`)."""


def _beginning(guessed: str, wrong: str, facts: str, variables: str = "") -> str:
    """The first five steps, as far as they are the same for both."""
    return f"""
RETURNS TABLE (outcome int4, clock int8, revision int8, step int8, "time" int8, last_id int8, key text, value bytea,
               version int8, owner text, created_at int8, updated_at int8, expires_at int8, tag text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _held record;
    _head_time int8;
    _head_step int8;
    _now_here int8;
    _shift int8;
    _lag int8;
    _moved bool;
    _unsure bool;
    _kept int8[];  -- since when those are there that are replaced unseen, in their order; NULL: it is new
    {variables}
BEGIN
    IF _movable AND ({guessed}) THEN
        -- A guess that is wrong need not wait for the lock to be told.
        IF {wrong} THEN
            RETURN QUERY SELECT {CHANGED}, {CLOCK}, head.*, e.* FROM (
                    SELECT revision, step, time, last_id FROM feed WHERE space = _space
                    ORDER BY revision DESC, step DESC LIMIT 1) AS head
                CROSS JOIN present(_space, {facts}) AS e;
            RETURN;
        END IF;
    END IF;
    -- Held to the end of the transaction, which comes after the flush of its log. Each statement below has a snapshot of
    -- its own, taken after the lock was; the snapshot of the call itself is older than the wait.
    PERFORM pg_advisory_xact_lock(_class, _space);
    SELECT revision, step, time, last_id INTO revision, _head_step, _head_time, last_id
        FROM feed WHERE space = _space ORDER BY revision DESC, step DESC LIMIT 1;
    IF NOT found THEN
        revision := 0; _head_step := 0; last_id := 0;
    END IF;
    clock := {CLOCK};
    _now_here := coalesce(_clock, clock);
    _shift := revision - _revision;
    _moved := _shift <> 0 OR _head_step <> _step;
    _unsure := _moved OR NOT _sure;
    outcome := {MOVED};
    step := _head_step;
    time := greatest(_now, _head_time);
    _lag := time - _now;
    IF clock > _deadline THEN
        outcome := {LATE}; RETURN NEXT; RETURN;
    END IF;
    IF _now_here >= _until OR _now > greatest(_now_here + {CLOCK_SLACK_MS}, _head_time) THEN
        outcome := {EXPIRED}; RETURN NEXT; RETURN;
    END IF;
    IF _moved THEN
        -- Others have written since. What depends on more than the entries it looked at must be evaluated anew.
        IF NOT _movable OR _shift NOT BETWEEN 0 AND {BEHIND_MAX} OR (_timed AND time > _now) OR last_id >= _first_id THEN
            RETURN NEXT; RETURN;
        END IF;
        PERFORM FROM spaces
            WHERE id = _space AND NOT dropped AND durability = CASE WHEN _relaxed THEN 'async' ELSE 'sync' END;
        IF NOT found THEN
            RETURN NEXT; RETURN;
        END IF;
        -- A message that was delayed, while its sender gave it up and wrote the same group anew, comes too late.
        PERFORM FROM feed WHERE space = _space AND revision >= _revision AND writer = _writer;
        IF found THEN
            RETURN NEXT; RETURN;
        END IF;
    END IF;
    IF _unsure THEN
        PERFORM FROM entries WHERE space = _space AND expires_at <= time;
        IF found THEN
            RETURN NEXT; RETURN;
        END IF;
    END IF;
    IF _empty IS NOT NULL THEN
        PERFORM FROM unnest(_empty, _empty_ends) AS range (low, high) CROSS JOIN LATERAL (
            SELECT FROM entries WHERE space = _space AND key >= low COLLATE "C" AND key < high COLLATE "C" LIMIT 1) AS e;
        IF found THEN
            outcome := {OCCUPIED}; RETURN NEXT; RETURN;
        END IF;
    END IF;
"""


_WRITTEN: Final = f"""
    outcome := CASE WHEN _moved THEN {REBASED} ELSE {DONE} END;
    IF _commits IS NULL THEN
        time := coalesce(_head_time, 0); RETURN NEXT; RETURN;
    END IF;
    IF _relaxed THEN PERFORM set_config('synchronous_commit', 'off', true); END IF;
    revision := _to_revision + _shift;
    IF _to_revision = _revision THEN  -- no commit, so neither a version nor a time of its own
        step := _head_step + 1;
        time := coalesce(_head_time, 0);
    ELSE
        step := 0;
    END IF;
    last_id := greatest(_to_last_id, last_id);
    RETURN NEXT;
    INSERT INTO feed VALUES (_space, revision, step, time, last_id, _writer, _commits);
"""

_ADDED: Final = """
            ON CONFLICT (space, owner, subspace, change)  -- what is loaded comes in several groups of one revision
                DO UPDATE SET keys = usage.keys + excluded.keys, bytes = usage.bytes + excluded.bytes"""

_COMMIT_ONE: Final = f"""
CREATE FUNCTION commit_one({_EXPECTED},{_ONE}) {_beginning(_GUESSED_ONE, _WRONG_ONE, "ARRAY[_key]")}
    IF _unsure OR _absent OR _blind THEN
        SELECT version, owner, tag, octet_length(value) AS size, created_at, expires_at INTO _held
            FROM entries WHERE space = _space AND key = _key {_NEWEST};
        IF _blind AND found AND {_LIVE_UNTAGGED.format("_held")} THEN
            key := _key;
            created_at := _held.created_at;
        ELSIF found <> (_old IS NOT NULL) OR _held.owner <> _old_owner OR _held.tag <> _old_tag
           OR _held.size <> _old_size OR _held.created_at <> _old_created
           OR (_exact AND (_held.version <> _old OR _held.expires_at IS DISTINCT FROM _old_expires)) THEN
            RETURN QUERY SELECT {CHANGED}, clock, revision, step, coalesce(_head_time, 0), last_id, e.*
                FROM present(_space, ARRAY[_key]) AS e;
            RETURN;
        END IF;
        _old := _held.version;
    END IF;
    IF _moved THEN
        IF _version > _revision THEN _version := _version + _shift; END IF;
        IF _created = _now THEN _created := time; END IF;
        IF _updated = _now THEN _updated := time; END IF;
        _expires := _expires + _lag;
    END IF;
    _created := coalesce(created_at, _created);
    {_WRITTEN}
    IF _old IS NOT NULL THEN
        DELETE FROM entries WHERE space = _space AND key = _key AND version = _old;
    END IF;
    IF _version IS NOT NULL THEN
        INSERT INTO entries VALUES (_space, _key, _version, _value, _owner, _created, _updated, _expires, _tag);
    END IF;
    IF created_at IS NOT NULL THEN
        -- The writer charged for a new key; what was replaced unseen is credited.
        IF _held.owner = _charged THEN
            _more_keys := _more_keys - 1;
            _more_bytes := _more_bytes - octet_length(_key) - _held.size;
        ELSE
            INSERT INTO usage VALUES (_space, _held.owner, _subspace, revision, -1, -octet_length(_key) - _held.size, false){_ADDED};
        END IF;
    END IF;
    IF _more_keys <> 0 OR _more_bytes <> 0 THEN
        INSERT INTO usage VALUES (_space, _charged, _subspace, revision, _more_keys, _more_bytes, false){_ADDED};
        IF random() * {SUMMED_EVERY} < 1 THEN
            PERFORM sum_up(_space, _charged, _subspace, revision);
        END IF;
    END IF;
END $$;
"""

_COUNTED: Final = "_count int4 := coalesce(cardinality(_values), 0);"
_LOOKED_AT: Final = "_fact_keys || _keys_owners_tags[:_blind]"
_COMMIT_GROUP: Final = f"""
CREATE FUNCTION commit_group({_EXPECTED},{_MANY}) {_beginning(_GUESSED_MANY, _WRONG_MANY, _LOOKED_AT, _COUNTED)}
    IF _unsure THEN
        PERFORM FROM unnest(_fact_keys, _exact, _old, _old_expires, _old_created, _old_owners, _old_tags, _old_sizes)
                AS fact (key, exact, version, expires_at, created_at, owner, tag, size)
            LEFT JOIN LATERAL (
                SELECT version, owner, tag, octet_length(value) AS size, created_at, expires_at FROM entries
                WHERE space = _space AND key = fact.key {_NEWEST}) AS e ON true
            WHERE (fact.version IS NULL) <> (e.version IS NULL) OR fact.owner <> e.owner OR fact.tag <> e.tag
                OR fact.size <> e.size OR fact.created_at <> e.created_at OR (fact.exact AND (
                    fact.version <> e.version OR fact.expires_at IS DISTINCT FROM e.expires_at));
    ELSIF _absent IS NOT NULL THEN
        PERFORM FROM {_OF_THESE.format("_absent")};
    END IF;
    IF (_unsure OR _absent IS NOT NULL) AND found THEN
        RETURN QUERY SELECT {CHANGED}, clock, revision, step, coalesce(_head_time, 0), last_id, e.*
            FROM present(_space, {_LOOKED_AT}) AS e;
        RETURN;
    END IF;
    IF _blind > 0 THEN
        PERFORM FROM {_OF_THESE.format("_keys_owners_tags[:_blind]")};
        IF found THEN
            SELECT bool_and(good) AS good, array_agg(version) AS versions, array_agg(created_at) AS created,
                   array_agg(owner) AS owners, array_agg(split_part(key, '/', 1)) AS subspaces,
                   array_agg(-1::int8) AS less_keys, array_agg(less_bytes) AS less_bytes
                INTO _held FROM (
                    SELECT new.key, e.* FROM unnest(_keys_owners_tags[:_blind]) WITH ORDINALITY AS new (key, at) LEFT JOIN LATERAL (
                        SELECT version, owner, created_at, {_LIVE_UNTAGGED.format("entries")} AS good,
                               (-octet_length(key) - octet_length(value))::int8 AS less_bytes
                        FROM entries WHERE space = _space AND key = new.key {_NEWEST}) AS e ON true
                    ORDER BY new.at) AS replaced;  -- where nothing is, all but the key is NULL
            IF NOT _held.good THEN
                RETURN QUERY SELECT {CHANGED}, clock, revision, step, coalesce(_head_time, 0), last_id, e.*
                    FROM present(_space, {_LOOKED_AT}) AS e;
                RETURN;
            END IF;
            _kept := _held.created;
            _gone_keys := _gone_keys || _keys_owners_tags[:_blind];
            _gone := _gone || _held.versions;
            _charged := _charged || _held.owners;
            _subspaces := _subspaces || _held.subspaces;
            _more_keys := _more_keys || _held.less_keys;
            _more_bytes := _more_bytes || _held.less_bytes;
        END IF;
    END IF;
    IF _ids IS NOT NULL THEN
        PERFORM FROM unnest(_actors, _ids) AS asked (actor, id) CROSS JOIN LATERAL (
            SELECT FROM requests WHERE space = _space AND actor = asked.actor AND id = asked.id LIMIT 1) AS known;
        IF found THEN
            outcome := {REPEATED}; RETURN NEXT; RETURN;
        END IF;
    END IF;
    {_WRITTEN}
    IF _kept IS NOT NULL THEN
        RETURN QUERY SELECT outcome, clock, revision, step, time, last_id, new.key, NULL::bytea, NULL::int8, NULL::text,
            new.kept, NULL::int8, NULL::int8, NULL::text
            FROM unnest(_keys_owners_tags[:_blind], _kept) AS new (key, kept) WHERE new.kept IS NOT NULL;
    END IF;
    IF _ids IS NOT NULL THEN
        INSERT INTO requests SELECT _space, asked.actor, asked.id, asked.version + _shift
            FROM unnest(_actors, _ids, _answers) AS asked (actor, id, version);
    END IF;
    IF _gone_keys IS NULL THEN
        NULL;
    ELSIF _unsure THEN
        DELETE FROM entries WHERE ctid = ANY (ARRAY(
            SELECT e.ctid FROM unnest(_gone_keys) AS gone (key) CROSS JOIN LATERAL (
                SELECT ctid FROM entries WHERE space = _space AND key = gone.key {_NEWEST}) AS e));
    ELSE
        -- Not a join: before the table has statistics, that may be planned as a walk through the whole space.
        DELETE FROM entries WHERE ctid = ANY (ARRAY(
            SELECT e.ctid FROM generate_series(1, cardinality(_gone_keys)) AS at CROSS JOIN LATERAL (
                SELECT ctid FROM entries WHERE space = _space AND key = _gone_keys[at] AND version = _gone[at] LIMIT 1) AS e));
    END IF;
    IF _count > 0 AND _moved THEN
        INSERT INTO entries
            SELECT _space, _keys_owners_tags[at], version + CASE WHEN version > _revision THEN _shift ELSE 0 END,
                   _values[at], _keys_owners_tags[_count + at],
                   coalesce(_kept[at], CASE WHEN created = _now THEN time ELSE created END),
                   CASE WHEN updated = _now THEN time ELSE updated END,
                   _versions_times[3 * _count + at] + _lag, _keys_owners_tags[2 * _count + at]
            FROM generate_series(1, _count) AS at CROSS JOIN LATERAL (
                SELECT _versions_times[at], _versions_times[_count + at], _versions_times[2 * _count + at])
                AS new (version, created, updated);
    ELSIF _count > 0 THEN
        INSERT INTO entries
            SELECT _space, _keys_owners_tags[at], _versions_times[at], _values[at], _keys_owners_tags[_count + at],
                   coalesce(_kept[at], _versions_times[_count + at]), _versions_times[2 * _count + at],
                   _versions_times[3 * _count + at], _keys_owners_tags[2 * _count + at]
            FROM generate_series(1, _count) AS at;
    END IF;
    IF _charged IS NOT NULL THEN
        IF _kept IS NULL THEN
            INSERT INTO usage SELECT _space, _charged[at], _subspaces[at], revision, _more_keys[at], _more_bytes[at], false
                FROM generate_series(1, cardinality(_charged)) AS at{_ADDED};
        ELSE
            INSERT INTO usage SELECT _space, owner, subspace, revision, sum(keys), sum(bytes), false
                FROM unnest(_charged, _subspaces, _more_keys, _more_bytes) AS amount (owner, subspace, keys, bytes)
                WHERE owner IS NOT NULL GROUP BY owner, subspace HAVING sum(keys) <> 0 OR sum(bytes) <> 0{_ADDED};
        END IF;
        IF random() * {SUMMED_EVERY} < 1 THEN
            PERFORM sum_up(_space, owner, subspace, revision) FROM (
                SELECT DISTINCT owner, subspace FROM unnest(_charged, _subspaces) AS amount (owner, subspace)) AS charged
                WHERE owner IS NOT NULL;
        END IF;
    END IF;
END $$;
"""

_PRESENT: Final = f"""
CREATE OR REPLACE FUNCTION present(_space int4, _keys text[])
RETURNS TABLE (key text, value bytea, version int8, owner text, created_at int8, updated_at int8, expires_at int8, tag text)
LANGUAGE sql STABLE AS $$
    SELECT asked.key, e.value, e.version, e.owner, e.created_at, e.updated_at, e.expires_at, e.tag
    FROM unnest(_keys) AS asked (key)
    LEFT JOIN LATERAL (SELECT * FROM entries WHERE space = _space AND key = asked.key {_NEWEST}) AS e ON true
$$;
"""

_SUM_UP: Final = """
CREATE FUNCTION sum_up(_space int4, _owner text, _subspace text, _change int8) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    _sum int8;
    _keys int8;
    _bytes int8;
BEGIN
    -- From the newest on backwards: what comes before the last sum is gone, and dead rows are not walked over.
    SELECT change INTO _sum FROM usage
        WHERE space = _space AND owner = _owner AND subspace = _subspace AND is_sum ORDER BY change DESC LIMIT 1;
    WITH summed AS (
        DELETE FROM usage WHERE space = _space AND owner = _owner AND subspace = _subspace AND change >= coalesce(_sum, 0)
        RETURNING keys, bytes)
    SELECT sum(keys), sum(bytes) INTO _keys, _bytes FROM summed;
    IF _keys IS NOT NULL THEN
        INSERT INTO usage VALUES (_space, _owner, _subspace, _change, _keys, _bytes, true);
    END IF;
END $$;
"""

_OTHERS: Final = "DROP FUNCTION IF EXISTS commit_one, commit_group, sum_up, charge(int4, text, text, int8, int8);"
"""Those of an older version take other parameters, so they would stay beside the new."""
FUNCTIONS: Final = _OTHERS + _PRESENT + _SUM_UP + _COMMIT_ONE + _COMMIT_GROUP


def signature(*parameters: str) -> str:
    """Numbered parameters with their types, as a call of one of the functions has them."""
    types = [each.split()[1] for part in parameters for each in part.split(",")]
    return ", ".join(f"${number}::{type_}" for number, type_ in enumerate(types, 1))


CALL_ONE: Final = f"SELECT * FROM commit_one({signature(_EXPECTED, _ONE)})"
CALL_GROUP: Final = f"SELECT * FROM commit_group({signature(_EXPECTED, _MANY)})"
