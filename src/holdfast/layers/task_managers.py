"""The registry of managers: who runs tasks, where, and whether it lives. Shown under the name `holdfast.workers.registry`.

    tasks/managers/<tid>   {host, pid, capacity, since, draining}, with a ttl that the manager's heartbeats extend

A manager is itself a task, without timeout and without a process to be launched: its tid is made like any other, it has a spec and a
state, its log tells that it was created, spawned and is running, and it is controlled as tasks are. It is its own manager, so
when it dies it is among what it left, and is settled by whoever finds that its lease is gone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from holdfast.clock import Duration, as_datetime, duration_ms
from holdfast.codec import encode
from holdfast.engine import Absent, Delete, Put
from holdfast.errors import Error, InvalidInput
from holdfast.layers.blobs import Blobs
from holdfast.layers.leases import Leases
from holdfast.layers.scope import Scope
from holdfast.layers.task_launch import MANAGER, ManagerInfo
from holdfast.layers.task_ledger import TaskLedger
from holdfast.layers.task_spec import TaskSpec, shown
from holdfast.layers.task_states import (
    MANAGERS,
    Parts,
    TaskState,
    TaskStatus,
    advance,
    beginning,
    ending,
    spec_key,
    state_key,
    state_of,
)
from holdfast.layers.tid import new_tid

LEASE_MS: Final = 10_000
CAPACITY_MAX: Final = 10_000

log = logging.getLogger("holdfast.tasks")


@asynccontextmanager
async def registered(
    scope: Scope,
    leases: Leases,
    blobs: Blobs,
    *,
    host: str,
    capacity: int,
    lease: Duration = LEASE_MS / 1000,
    pid: int | None = None,
) -> AsyncIterator[TaskLedger]:
    """A manager as long as this lasts: registered, with heartbeats, and a task of its own."""
    if type(capacity) is not int or not 0 < capacity <= CAPACITY_MAX:
        raise InvalidInput(f"a manager's capacity is between 1 and {CAPACITY_MAX:,}, not {capacity!r}")
    now, lease_ms = scope.clock.now_ms(), duration_ms(lease, name="lease")
    info = ManagerInfo(new_tid(now), host, os.getpid() if pid is None else pid, capacity, as_datetime(now))
    spec = TaskSpec(function="holdfast.manager:main", name=MANAGER, tags=("manager",))
    key, parts = MANAGERS + info.tid, _born(info, spec, scope, now)
    await scope.commit((Put(key, encode(info), lease_ms), *parts.operations), parts.conditions)
    kept = leases.keep(scope, key, lease_ms, now)
    ledger = TaskLedger(scope, info, kept, blobs)
    failed = True
    try:
        yield ledger
        failed = False
    finally:
        leases.release(kept)
        try:
            await _gone(kept.guarding(), ledger, spec, failed=failed)
        except Error as exc:
            log.warning("manager %s leaves the registry when its lease ends: %s", info.tid, exc)


def _born(info: ManagerInfo, spec: TaskSpec, scope: Scope, now: int) -> Parts:
    """Its three first states in one commit: it is running when it can say so."""
    at = as_datetime(now)
    told = shown(spec, scope.redaction)
    created = TaskState(
        tid=info.tid, status="created", owner=scope.actor, title=spec.title, created_at=at, tags=spec.tags
    )
    spawning = msgspec.structs.replace(created, status="spawning", manager=info.tid, host=info.host, attempt=1)
    running = msgspec.structs.replace(spawning, status="running", pid=info.pid, started_at=at)
    parts = Parts((Absent(state_key(info.tid)), Absent(MANAGERS + info.tid)), (Put(spec_key(info.tid), encode(spec)),))
    parts |= beginning(created, told, now)
    for before, after in ((created, spawning), (spawning, running)):
        parts |= Parts((), advance(before, 0, after, told, now).operations)
    return parts


async def _gone(scope: Scope, ledger: TaskLedger, spec: TaskSpec, *, failed: bool) -> None:
    """It leaves: its own state, and its entry in the registry, in one commit. What it has not ended others find by that.

    One that has lost its lease writes nothing: others settle it.
    """
    [entry] = await scope.engine.get(scope.space, [state_key(ledger.tid)])
    parts = Parts((), (Delete(MANAGERS + ledger.tid),))
    if entry is not None and not (state := state_of(entry)).ended:
        now = scope.clock.now_ms()
        status: TaskStatus = "failed" if failed else ledger.ends_as
        kept_ms = scope.retention.ttl_ms("task", status)
        reason = "it raised" if failed else None if status == "completed" else "it was told to end"
        after = ending(state, status, now, return_code=1 if failed else 0, reason=reason)
        parts |= advance(state, entry.version, after, shown(spec, scope.redaction), now, kept_ms=kept_ms)
    await scope.commit(parts.operations, parts.conditions)
