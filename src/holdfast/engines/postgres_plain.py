"""A group in plain SQL: what a process that is alone in a space sends.

While nobody else writes, everything is as it was taken to be, and one statement writes the group if that is so: the head is
where it was, nothing that was relied on has expired, what was taken for absent or empty is. If not, nothing is written and
no row comes back; then a function of the store (`postgres_functions.py`) finds out what is otherwise, and does what can be
done. A function takes two to three times as long for the same, because of all that it runs one after the other.

The lock of the space is taken by a statement before it, in the same message and the same transaction, so that this one sees
whatever was written until then. Its parts all see the same, and are done in no certain order: so what keeps its version (a
touch) is not for here, because one row would take another's place.

There are several forms, with and without the parts that are not always needed, since each part costs time even where it has
nothing to do.
"""
# ruff: noqa: S608 - nothing of what is put together here comes from outside

from __future__ import annotations

import functools
from typing import Final

from holdfast.engines.evaluation import Group
from holdfast.engines.postgres_functions import CLOCK, CLOCK_SLACK_MS, SCHEMA_VERSION
from holdfast.engines.postgres_link import (
    Call,
    Rows,
    Statement,
    Value,
    bytea_array,
    int4,
    int8,
    int8s,
    joined,
    number,
    statement,
)
from holdfast.engines.postgres_rows import Reply, Terms, columns_of, encode_commits
from holdfast.engines.postgres_state import SpaceState
from holdfast.engines.postgres_statements import LOCK
from holdfast.keys import prefix_end

NEVER: Final = 2**63 - 1

_SPACE, _REVISION, _STEP, _NOW, _CLOCK, _UNTIL = "$1::int4", "$2::int8", "$3::int8", "$4::int8", "$5::int8", "$6::int8"
_DEADLINE, _TO_REVISION, _TO_LAST_ID, _WRITER, _COMMITS = "$7::int8", "$8::int8", "$9::int8", "$10::int8", "$11::bytea"
_PLAIN: Final = f"""
WITH written AS MATERIALIZED (
    SELECT clock FROM (
        SELECT revision, step, time FROM feed WHERE space = {_SPACE} ORDER BY revision DESC, step DESC LIMIT 1) AS head
    CROSS JOIN (SELECT {CLOCK} AS clock OFFSET 0) AS now
    WHERE revision = {_REVISION} AND step = {_STEP} AND clock <= {_DEADLINE} AND coalesce({_CLOCK}, clock) < {_UNTIL}
        AND {_NOW} <= greatest(coalesce({_CLOCK}, clock) + {CLOCK_SLACK_MS}, time)
        AND schema_version() = {SCHEMA_VERSION}{{conditions}}
), told AS (
    INSERT INTO feed SELECT {_SPACE}, {_TO_REVISION}, 0, {_NOW}, {_TO_LAST_ID}, {_WRITER}, {_COMMITS} FROM written
){{effects}}
SELECT clock FROM written
"""
_ABSENT: Final = f"""
        AND NOT EXISTS (SELECT FROM (SELECT {{}} AS key) AS these CROSS JOIN LATERAL (
            SELECT FROM entries WHERE space = {_SPACE} AND key = these.key LIMIT 1) AS e)"""
_EMPTY: Final = f"""
        AND NOT EXISTS (SELECT FROM (SELECT {{}} AS low, {{}} AS high) AS range CROSS JOIN LATERAL (
            SELECT FROM entries WHERE space = {_SPACE} AND key >= low COLLATE "C" AND key < high COLLATE "C" LIMIT 1) AS e)"""
_MADE_ONE: Final = f""", made AS (
    INSERT INTO entries SELECT {_SPACE}, {{}}, {{}}, {{}}, {{}}, {{}}, {{}}, {{}}, {{}} FROM written
)"""
_MADE: Final = f""", made AS (
    INSERT INTO entries SELECT {_SPACE}, key, version, value, owner, created, updated, nullif(expires, -1), tag
    FROM written CROSS JOIN (SELECT {{}} AS key, {{}} AS version, {{}} AS value, {{}} AS owner, {{}} AS created,
        {{}} AS updated, {{}} AS expires, {{}} AS tag) AS new
)"""
_REMOVED: Final = f""", removed AS (
    DELETE FROM entries WHERE EXISTS (SELECT FROM written) AND ctid = ANY (ARRAY(
        SELECT e.ctid FROM (SELECT {{}} AS key, {{}} AS version) AS old CROSS JOIN LATERAL (
            SELECT ctid FROM entries WHERE space = {_SPACE} AND key = old.key AND version = old.version LIMIT 1) AS e))
)"""
_CHARGED: Final = f""", charged AS (
    INSERT INTO usage SELECT {_SPACE}, owner, subspace, {_TO_REVISION}, keys, bytes, false
    FROM written CROSS JOIN (SELECT {{}} AS owner, {{}} AS subspace, {{}} AS keys, {{}} AS bytes) AS amount
)"""
_COUNT: Final = 11


class _Form:
    """The text of one form, while it is put together."""

    def __init__(self) -> None:
        self._count = _COUNT
        self.conditions = self.effects = ""

    def part(self, template: str, types: str) -> str:
        """A part with parameters of these types; `texts` and what ends in [] are those that `joined` and arrays carry."""
        return template.format(*map(self._parameter, types.split()))

    def _parameter(self, type_: str) -> str:
        self._count += 1
        if type_ == "texts":
            given = f"${self._count}::text"
            return f"unnest(string_to_array(substr({given}, 2), left({given}, 1)))"
        given = f"${self._count}::{type_}"
        return f"unnest({given})" if type_.endswith("[]") else given


@functools.cache
def _form(one: bool, removes: bool, charges: bool, absent: bool, empty: bool) -> Statement:
    form = _Form()
    if one:
        form.effects += form.part(_MADE_ONE, "text int8 bytea text int8 int8 int8 text")
    else:
        form.effects += form.part(_MADE, "texts int8[] bytea[] texts int8[] int8[] int8[] texts")
    if removes:
        form.effects += form.part(_REMOVED, "texts int8[]")
    if charges:
        form.effects += form.part(_CHARGED, "texts texts int8[] int8[]")
    if absent:
        form.conditions += form.part(_ABSENT, "texts")
    if empty:
        form.conditions += form.part(_EMPTY, "texts texts")
    name = "plain_" + "".join("ny"[each] for each in (one, removes, charges, absent, empty))
    return statement(name, _PLAIN.format(conditions=form.conditions, effects=form.effects))


def plain_calls(state: SpaceState, group: Group, terms: Terms) -> list[Call] | None:
    """What writes a group if nothing is otherwise than it was taken to be; None where that takes a function."""
    writes, base = group.writes, state.revision
    if group.asked or terms.sums or not state.sure or not base or group.revision == base or state.durability != "sync":
        return None
    made = [entry for entry in writes.values() if entry is not None]
    for entry in made:
        if entry.version <= base:
            return None
    removed = [(key, old.version) for key in writes if (old := state.known(key)) is not None]
    charged = [(where, amount) for where, amount in group.usage.items() if amount[0] or amount[1]]
    values: list[Value] = [
        int4(state.id or 0),
        int8(base),
        int8(state.step),
        int8(group.now),
        int8(terms.clock),
        int8(NEVER if state.until is None else state.until),
        int8(terms.deadline),
        int8(group.revision),
        int8(group.last_id),
        int8(terms.writer),
        encode_commits(group.commits),
    ]
    if one := len(made) == 1:
        values += (made[0].key.encode(), *columns_of(made[0]))
    else:
        values += (
            joined([e.key for e in made]),
            int8s([e.version for e in made]),
            bytea_array([e.value for e in made]),
            joined([e.owner for e in made]),
            int8s([e.created_at for e in made]),
            int8s([e.updated_at for e in made]),
            int8s([-1 if e.expires_at is None else e.expires_at for e in made]),
            joined([e.tag for e in made]),
        )
    if removed:
        values += joined([key for key, _ in removed]), int8s([version for _, version in removed])
    if charged:
        values += joined([owner for (owner, _), _ in charged]), joined([subspace for (_, subspace), _ in charged])
        values += int8s([keys for _, (keys, _) in charged]), int8s([size for _, (_, size) in charged])
    if state.assumed:
        values.append(joined(list(state.assumed)))
    if state.emptied:
        values += joined(list(state.emptied)), joined([prefix_end(prefix) or "" for prefix in state.emptied])
    form = _form(one, bool(removed), bool(charged), bool(state.assumed), bool(state.emptied))
    return [(LOCK, (int4(terms.locks), int4(state.id or 0))), (form, values)]


def plain_reply(rows: Rows, group: Group) -> Reply | None:
    """What a group in plain SQL was answered; None: nothing was written."""
    return Reply.as_sent(number(rows[0][0]), group) if rows else None
