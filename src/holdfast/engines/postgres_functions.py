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

Arrays are walked by their subscripts: `unnest` of eight makes eight lists first. Nothing is written before everything was compared, so a refusal leaves no trace. The functions are made together with the
tables and belong to the same version of the schema.
"""
# ruff: noqa: S608 - nothing of what is put together here comes from outside

from __future__ import annotations

from typing import Final

DONE, REBASED, MOVED, LATE, EXPIRED, CHANGED, REPEATED, OCCUPIED = range(8)
"""What the functions answer: written; written after what others wrote; others have written, evaluate anew; the message is
too old; an entry that was relied on has expired, or the time is ahead of the server's; entries are not as they were taken
to be, here they are; a request id is known; a range that was taken for empty is not."""

SCHEMA_VERSION: Final = 9
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
    _writer int8, _sums bool, _commits bytea, _empty text[], _empty_ends text[]"""
_ONE: Final = """
    _key text, _absent bool, _blind bool, _exact bool, _old int8, _old_expires int8, _old_created int8, _old_owner text,
    _old_tag text, _old_size int8, _version int8, _value bytea, _owner text, _created int8, _updated int8, _expires int8,
    _tag text, _charged text, _subspace text, _more_keys int8, _more_bytes int8"""
_MANY: Final = """
    _texts text, _numbers int8[], _values bytea[], _blind int4, _gone int4, _charged int4, _facts int4, _absent int4,
    _exact bool[], _old int8[], _old_expires int8[], _old_created int8[], _old_owners text[], _old_tags text[],
    _old_sizes int8[], _actors text[], _ids text[], _answers int8[]"""
"""What is written comes in one text and one array of numbers, because to make, to send and to unpack an array takes a while for
each. The text begins with the character that separates its parts. Both go through what there is, column by column:

    the entries             keys, owners, tags; versions, created_at, updated_at, expires_at (-1: never)
    what is removed         its keys; its versions
    the usage that changed  owners, subspaces; keys more, bytes more
    what was looked at      its keys, those first that were taken for absent
"""

_NEWEST: Final = "ORDER BY version DESC LIMIT 1"

_GUESSED_ONE: Final = "_absent OR _blind"
_WRONG_ONE: Final = "EXISTS (SELECT FROM entries WHERE space = _space AND key = _key AND (_absent OR tag <> ''))"
_GUESSED_MANY: Final = "_absent > 0 OR _blind > 0"
_OF_THESE: Final = "unnest({}) AS these (one) CROSS JOIN LATERAL (SELECT tag FROM entries WHERE space = _space AND key = one LIMIT 1) AS e"
"""What there is under some keys, looked up one by one: for `key = ANY (…)` the planner may read the whole space instead."""
_ABSENT_KEYS: Final = "_words[_looked_at + 1:_looked_at + _absent]"
_FACT_KEYS: Final = "_words[_looked_at + 1:_looked_at + _facts]"
_BLIND_KEYS: Final = "_words[:_blind]"
_WRONG_MANY: Final = f"""
            EXISTS (SELECT FROM {_OF_THESE.format(_ABSENT_KEYS)})
            OR EXISTS (SELECT FROM {_OF_THESE.format(_BLIND_KEYS)} WHERE e.tag <> '')"""
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
        IF _sums THEN
            PERFORM sum_up(_space, _charged, _subspace, revision);
        END IF;
    END IF;
END $$;
"""

_UNPACKED: Final = """
    _words text[] := string_to_array(substr(_texts, 2), left(_texts, 1));
    _count int4 := coalesce(cardinality(_values), 0);
    _removed int4 := 3 * _count;  -- where the keys of what is removed begin, less one; its versions a _count later
    _usage int4 := _removed + _gone;
    _looked_at int4 := _usage + 2 * _charged;"""
_SEEN: Final = f"{_FACT_KEYS} || {_BLIND_KEYS}"
_REMOVED: Final = "_words[_removed + at]"
_AMOUNTS: Final = """SELECT {0} _words[_usage + at], _words[_usage + _charged + at]{1},
                _numbers[_usage + _count + at], _numbers[_usage + _count + _charged + at]{2} FROM generate_series(1, _charged) AS at"""
_NEW: Final = """
            SELECT _space, _words[at], {version}, _values[at], _words[_count + at], coalesce(_kept[at], {created}), {updated},
                   nullif(_numbers[3 * _count + at], -1){later}, _words[2 * _count + at]
            FROM generate_series(1, _count) AS at"""
_VERSION, _CREATED, _UPDATED = "_numbers[at]", "_numbers[_count + at]", "_numbers[2 * _count + at]"
_NEW_MOVED: Final = _NEW.format(
    version=f"{_VERSION} + CASE WHEN {_VERSION} > _revision THEN _shift ELSE 0 END",
    created=f"CASE WHEN {_CREATED} = _now THEN time ELSE {_CREATED} END",
    updated=f"CASE WHEN {_UPDATED} = _now THEN time ELSE {_UPDATED} END",
    later=" + _lag",
)
_NEW_HERE: Final = _NEW.format(version=_VERSION, created=_CREATED, updated=_UPDATED, later="")
_COMMIT_GROUP: Final = f"""
CREATE FUNCTION commit_group({_EXPECTED},{_MANY}) {_beginning(_GUESSED_MANY, _WRONG_MANY, _SEEN, _UNPACKED)}
    IF _unsure AND _facts > 0 THEN
        PERFORM FROM unnest({_FACT_KEYS}, _exact, _old, _old_expires, _old_created, _old_owners, _old_tags, _old_sizes)
                AS fact (key, exact, version, expires_at, created_at, owner, tag, size)
            LEFT JOIN LATERAL (
                SELECT version, owner, tag, octet_length(value) AS size, created_at, expires_at FROM entries
                WHERE space = _space AND key = fact.key {_NEWEST}) AS e ON true
            WHERE (fact.version IS NULL) <> (e.version IS NULL) OR fact.owner <> e.owner OR fact.tag <> e.tag
                OR fact.size <> e.size OR fact.created_at <> e.created_at OR (fact.exact AND (
                    fact.version <> e.version OR fact.expires_at IS DISTINCT FROM e.expires_at));
    ELSIF _absent > 0 THEN
        PERFORM FROM {_OF_THESE.format(_ABSENT_KEYS)};
    END IF;
    IF _facts > 0 AND (_unsure OR _absent > 0) AND found THEN
        RETURN QUERY SELECT {CHANGED}, clock, revision, step, coalesce(_head_time, 0), last_id, e.*
            FROM present(_space, {_SEEN}) AS e;
        RETURN;
    END IF;
    IF _blind > 0 THEN
        PERFORM FROM {_OF_THESE.format(_BLIND_KEYS)};
        IF found THEN
            SELECT bool_and(good) AS good, array_agg(version) AS versions, array_agg(created_at) AS created,
                   array_agg(owner) AS owners, array_agg(split_part(key, '/', 1)) AS subspaces,
                   array_agg(less_bytes) AS less_bytes
                INTO _held FROM (
                    SELECT new.key, e.* FROM unnest({_BLIND_KEYS}) WITH ORDINALITY AS new (key, at) LEFT JOIN LATERAL (
                        SELECT version, owner, created_at, {_LIVE_UNTAGGED.format("entries")} AS good,
                               (-octet_length(key) - octet_length(value))::int8 AS less_bytes
                        FROM entries WHERE space = _space AND key = new.key {_NEWEST}) AS e ON true
                    ORDER BY new.at) AS replaced;  -- where nothing is, all but the key is NULL
            IF NOT _held.good THEN
                RETURN QUERY SELECT {CHANGED}, clock, revision, step, coalesce(_head_time, 0), last_id, e.*
                    FROM present(_space, {_SEEN}) AS e;
                RETURN;
            END IF;
            _kept := _held.created;
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
    IF _ids IS NOT NULL THEN
        INSERT INTO requests SELECT _space, asked.actor, asked.id, asked.version + _shift
            FROM unnest(_actors, _ids, _answers) AS asked (actor, id, version);
    END IF;
    IF _kept IS NOT NULL THEN
        RETURN QUERY SELECT outcome, clock, revision, step, time, last_id, new.key, NULL::bytea, NULL::int8, NULL::text,
            new.kept, NULL::int8, NULL::int8, NULL::text
            FROM unnest({_BLIND_KEYS}, _kept) AS new (key, kept) WHERE new.kept IS NOT NULL;
        DELETE FROM entries WHERE ctid = ANY (ARRAY(
            SELECT e.ctid FROM unnest({_BLIND_KEYS}, _held.versions) AS gone (key, version) CROSS JOIN LATERAL (
                SELECT ctid FROM entries WHERE space = _space AND key = gone.key AND version = gone.version LIMIT 1) AS e));
    END IF;
    -- Not a join: before the table has statistics, that may be planned as a walk through the whole space.
    IF _gone > 0 AND _unsure THEN
        DELETE FROM entries WHERE ctid = ANY (ARRAY(
            SELECT e.ctid FROM generate_series(1, _gone) AS at CROSS JOIN LATERAL (
                SELECT ctid FROM entries WHERE space = _space AND key = {_REMOVED} {_NEWEST}) AS e));
    ELSIF _gone > 0 THEN
        DELETE FROM entries WHERE ctid = ANY (ARRAY(
            SELECT e.ctid FROM generate_series(1, _gone) AS at CROSS JOIN LATERAL (
                SELECT ctid FROM entries
                WHERE space = _space AND key = {_REMOVED} AND version = _numbers[_removed + _count + at] LIMIT 1) AS e));
    END IF;
    IF _count > 0 AND _moved THEN
        INSERT INTO entries{_NEW_MOVED};
    ELSIF _count > 0 THEN
        INSERT INTO entries{_NEW_HERE};
    END IF;
    IF _kept IS NOT NULL THEN
        INSERT INTO usage SELECT _space, owner, subspace, revision, sum(keys), sum(bytes), false FROM (
                {_AMOUNTS.format("", "", "")}
                UNION ALL SELECT owner, subspace, -1, bytes
                    FROM unnest(_held.owners, _held.subspaces, _held.less_bytes) AS less (owner, subspace, bytes)
                ) AS amount (owner, subspace, keys, bytes)
            WHERE owner IS NOT NULL GROUP BY owner, subspace HAVING sum(keys) <> 0 OR sum(bytes) <> 0{_ADDED};
    ELSIF _charged > 0 THEN
        INSERT INTO usage {_AMOUNTS.format("_space,", ", revision", ", false")}{_ADDED};
    END IF;
    IF _charged > 0 AND _sums THEN
        PERFORM sum_up(_space, owner, subspace, revision) FROM (
            SELECT DISTINCT owner, subspace FROM ({_AMOUNTS.format("", "", "")}) AS amount (owner, subspace, keys, bytes)) AS charged;
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
_VERSION_OF_SCHEMA: Final = f"""
CREATE OR REPLACE FUNCTION schema_version() RETURNS int4 LANGUAGE sql IMMUTABLE AS 'SELECT {SCHEMA_VERSION}';
"""
"""Plain SQL asks for it: what an older version has prepared writes nothing any more. It is known when a statement is planned,
and planned anew when it changes, so asking costs nothing."""
FUNCTIONS: Final = _OTHERS + _VERSION_OF_SCHEMA + _PRESENT + _SUM_UP + _COMMIT_ONE + _COMMIT_GROUP


def signature(*parameters: str) -> str:
    """Numbered parameters with their types, as a call of one of the functions has them."""
    types = [each.split()[1] for part in parameters for each in part.split(",")]
    return ", ".join(f"${number}::{type_}" for number, type_ in enumerate(types, 1))


CALL_ONE: Final = f"SELECT * FROM commit_one({signature(_EXPECTED, _ONE)})"
CALL_GROUP: Final = f"SELECT * FROM commit_group({signature(_EXPECTED, _MANY)})"
