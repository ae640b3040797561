"""Giving a state its type, and bringing it to the version that the code has: what a run does before its code runs.

The first run of an execution writes the defaults of the declared type, as the event `typed` of the log. When code with a higher
version of the state has an older execution, the whole state is read, migrated and written back: one commit, with the event
`migrated` and the new version, before any of the code runs. What was replaced is in the log, so history and diffs show both, and a retry or a
fork from before takes the migration back (`rewinding.py`). How replayed code sees what was written before: `earlier.py` and `past.py`.

How it fails. A crash before that commit changes nothing, and one after it finds the new version. A migration that is missing, raises, or
gives what the type refuses, pauses the execution with the error; `resume()` goes on with mended code. Code with a lower version puts it off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.codec import encode
from holdfast.engine import Delete, Operation, Push
from holdfast.errors import MigrationFailed
from holdfast.layers.workflows.entries import STATE, LogEvent, data_prefix, log_prefix, state_record
from holdfast.layers.workflows.journal import GATHERED_MAX, Upgrade, as_it_is
from holdfast.layers.workflows.past import places_of
from holdfast.layers.workflows.reading import state_of
from holdfast.layers.workflows.rewinding import MIGRATED, TYPED
from holdfast.layers.workflows.shape import UNTYPED, Shape
from holdfast.layers.workflows.state import DELETE, SET, View, Write

if TYPE_CHECKING:
    from holdfast.layers.state_type import StateType
    from holdfast.layers.workflows.running import Run


def upgrade_of(shape: Shape | None, known: StateType | None) -> Upgrade:
    """How what was written under one version is shown in another."""
    if shape is None or known is None:
        return as_it_is

    def upgrade(data: dict[str, Any], version: str, to: str) -> dict[str, Any]:
        found: dict[str, Any] = known.between(data, version or UNTYPED, to)
        return found

    return upgrade


async def settle_state(run: Run, shape: Shape, known: StateType) -> None:
    """Let the state be of the version that the code has. MigrationFailed when it cannot be."""
    journal = run.journal
    if journal.version == shape.version:
        return
    if not journal.version and not journal.has_state:
        _begin(run, shape)
    else:
        await _migrate(run, shape, known)


def _begin(run: Run, shape: Shape) -> None:
    """The defaults, to go with the first commit."""
    journal, writes = run.journal, shape.writes(shape.defaults)
    told = LogEvent(run.clock.now_ms(), TYPED, writes=writes, version=shape.version)
    journal.hold(
        [
            *journal.writing(writes),
            journal.record(STATE, state_record(shape.version)),
            Push(log_prefix(journal.id), encode(told)),
        ]
    )


async def _migrate(run: Run, shape: Shape, known: StateType) -> None:
    journal, version = run.journal, run.journal.version or UNTYPED
    before = await state_of(run.scope, journal.id)
    after: dict[str, Any] = known.upgrade(before, version)
    filled = shape.missing(after)
    after |= filled
    removed: dict[str, Write] = {key: [DELETE, None] for key in before if key not in after}
    changed = shape.writes(
        {key: value for key, value in after.items() if key not in before or encode(before[key]) != encode(value)}
    )
    fresh = View()
    operations: list[Operation] = [Delete(data_prefix(journal.id) + key) for key in removed]
    operations += fresh.operations(journal.id, changed)
    removed |= {key: [DELETE, None] for key, (kind, _) in changed.items() if kind != SET and key in before}
    told = LogEvent(
        run.clock.now_ms(),
        MIGRATED,
        writes=changed,
        body_writes=removed,
        version=shape.version,
        filled=filled,
        places=places_of(journal.records),
    )
    if len(operations) > GATHERED_MAX - 2:
        raise MigrationFailed(
            f"the state of execution {journal.id!r} cannot be migrated from {version} to {shape.version}: it changes "
            f"{len(changed) + len(removed)} keys, more than one commit can. Do it in two versions",
            reason="invalid_result",
            type=shape.type,
            from_version=version,
            to_version=shape.version,
        )
    await journal.commit(
        [*operations, journal.record(STATE, state_record(shape.version)), Push(log_prefix(journal.id), encode(told))]
    )
    kept = {key: each for key, each in journal.view.generations.items() if key not in removed and key not in changed}
    journal.view.generations = kept | fresh.generations
    journal.view.next()
    journal.migrated(told, version, upgrade_of(shape, known))
    journal.view.settled = journal.view.number
