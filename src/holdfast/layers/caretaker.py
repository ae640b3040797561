"""What a store does by itself: sweep what expired, collect what lists and tasks left, seal the audit, forget the old feed.

One task per open store looks after the spaces that were used through it. Expired entries are swept as soon as they are
due, by whoever notices: that is idempotent. The rest is done by one process at a time: it holds the entry
`system/caretaker`, which expires LEASE_MS after its last round, so another process takes over when it dies. Two at once
would be wasteful, not wrong: every step is conditional (`consumer.py`).

The feed is forgotten after its retention, and never before it is sealed. A step of a round that fails is tried again by the
next round, and keeps none of the other steps from being done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from holdfast.clock import Clock
from holdfast.codec import encode
from holdfast.engine import SYSTEM_ACTOR, Absent, Batch, Delete, Engine, Put, SpaceInfo, Touch, ValueIs, cursor_at
from holdfast.errors import Compacted, Conflict, Error
from holdfast.ids import new_id
from holdfast.layers.audit import Audit
from holdfast.layers.collector import collect
from holdfast.layers.redaction import Redaction
from holdfast.layers.retention import Retention
from holdfast.layers.settings import learn
from holdfast.layers.task_collector import collect_tasks

LEASE: Final = "system/caretaker"
LEASE_MS: Final = 15_000
ROUND_MS: Final = 1_000
SEAL_MS: Final = 2_000
SEALING_SHARE: Final = 0.02
"""Of the time, while there is much to seal: what is committed faster than that is sealed when it gets quieter. If it does not,
the share grows, because the feed is not forgotten before it is sealed."""
LAST_ROUND_S: Final = 3.0
"""How long closing a store may take because of what is not sealed yet; it stays in the feed until it is."""
PRUNE_MS: Final = 600_000
FORGET_MAX: Final = 100_000
"""Commits forgotten per round; the next round goes on."""

log = logging.getLogger("holdfast.caretaker")


class Steps:
    """Steps that fail independently of each other: all are tried, then the first failure is raised, and the others are logged."""

    def __init__(self) -> None:
        self._failures: list[Exception] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            self._failures.append(exc)

    def done(self) -> None:
        """After the last step."""
        if self._failures:
            first, *others = self._failures
            for exc in others:
                log.warning("another step failed too: %s", exc, exc_info=None if isinstance(exc, Error) else exc)
            raise first


class Caretaker:
    """Looks after spaces in the background; `round` does one round at once."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        retention: Retention,
        redaction: Redaction,
        audit_of: Callable[[str], Audit],
        sweep_blobs: Callable[[str], Awaitable[object]],
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._retention = retention
        self._redaction = redaction
        self._audit_of = audit_of
        self._sweep_blobs = sweep_blobs
        self._me = encode(new_id())
        self._spaces: dict[str, _Progress] = {}
        self._task: asyncio.Task[None] | None = None

    def look_after(self, space: str) -> None:
        """Include a space from now on."""
        self._spaces.setdefault(space, _Progress())

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End the task, seal what is left, and let go of the lease so that another process need not wait."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            try:
                async with asyncio.timeout(LAST_ROUND_S):
                    for space in list(self._spaces):
                        await self._close(space)
            except TimeoutError:
                log.info("the store is closed before its audit is sealed to the end; that goes on when it is opened")
        for space, progress in self._spaces.items():
            if progress.holds_lease:
                try:
                    await self._engine.commit(space, Batch(SYSTEM_ACTOR, (Delete(LEASE),), (ValueIs(LEASE, self._me),)))
                except Error as exc:
                    log.debug("the caretaker's lease of %s ends by itself: %s", space, exc)

    async def _run(self) -> None:
        while True:
            await self._clock.sleep_until(self._clock.now_ms() + ROUND_MS)
            for space in list(self._spaces):
                try:
                    await self.round(space)
                except Error as exc:
                    log.warning("looking after space %s failed and is tried again: %s", space, exc)
                except Exception:  # a fault in one space must not leave the others alone
                    log.exception("looking after space %s failed unexpectedly and is tried again", space)

    async def round(self, space: str) -> None:
        """Do what is due in one space: every step of it, whichever of them fail; then the first failure is raised."""
        found = await self._engine.spaces(space)
        if not found:
            return
        info, progress, now = found[0], self._spaces.setdefault(space, _Progress()), self._clock.now_ms()
        steps = Steps()
        if info.next_expiry is not None and info.next_expiry <= now:
            with steps.step():
                await self._engine.commit(space, Batch(SYSTEM_ACTOR))
        pruning = now - progress.pruned_at >= PRUNE_MS
        if info.durability == "volatile":
            if pruning:
                progress.pruned_at = now
                with steps.step():
                    await self.collect(space)
            if pruning or progress.forgets:
                with steps.step():
                    progress.forgets = await self._forget(info, info.revision, now)
            steps.done()
            return
        if (
            info.revision != progress.revision
            and now - progress.sealed_at >= SEAL_MS
            and await self._hold(space, progress)
        ):
            progress.sealed_at = now
            with steps.step():
                await self.tidy(space, share=SEALING_SHARE)
                progress.revision = await self._revision(space)
        if (pruning or progress.forgets) and await self._hold(space, progress):
            await self._remove_old(info, progress, steps, pruning, now)
        steps.done()

    async def _remove_old(self, info: SpaceInfo, progress: _Progress, steps: Steps, pruning: bool, now: int) -> None:
        """Forget the feed, and if it is time, prune the audit and sweep blobs."""
        audit = self._audit_of(info.name)
        with steps.step():
            progress.forgets = True  # until that is known better
            progress.forgets = await self._forget(info, await audit.sealed_upto(), now)
        if not pruning:
            return
        progress.pruned_at = now
        kept_ms = self._retention.ttl_ms("audit_logs")
        if kept_ms is not None:
            with steps.step():
                await audit.prune(now - kept_ms)
        with steps.step():
            await self._sweep_blobs(info.name)

    async def _close(self, space: str) -> None:
        try:
            await self._last_round(space)
        except Error as exc:
            log.warning("space %s was closed with its audit not sealed to the end: %s", space, exc)

    async def _last_round(self, space: str) -> None:
        """A process that lives shortly seals as it closes."""
        found, progress = await self._engine.spaces(space), self._spaces[space]
        unsealed = found and found[0].durability != "volatile" and found[0].revision != progress.revision
        if unsealed and await self._hold(space, progress):
            await self.tidy(space)

    async def tidy(self, space: str, *, share: float = 1.0) -> None:
        """Collect and seal, now; both, if one of them fails. Nothing is sealed by who does not know what is secret."""
        steps = Steps()
        with steps.step():
            await self.collect(space)
        with steps.step():
            await learn(self._engine, self._redaction, self._retention)
            await self._audit_of(space).seal(share=share)
        steps.done()

    async def collect(self, space: str) -> None:
        """Remove what lists, sets, executions and tasks left, now."""
        steps = Steps()
        with steps.step():
            await collect(self._engine, space)
        with steps.step():
            await collect_tasks(self._engine, space, self._clock.now_ms())
        steps.done()

    async def _forget(self, info: SpaceInfo, sealed: int, now: int) -> bool:
        """Forget the feed that is older than its retention, and not beyond what is sealed; tells whether more is left to forget.

        Reads only what it is about to forget, and one commit more.
        """
        kept_ms = self._retention.ttl_ms("feed")
        if kept_ms is None:
            return False
        upto, count = info.feed_floor, 0
        try:
            async for commit in self._engine.watch(info.name, cursor=cursor_at(upto), live=False):
                if commit.at >= now - kept_ms or commit.version > sealed or count >= FORGET_MAX:
                    break
                upto, count = commit.version, count + 1
        except Compacted:
            return True  # somebody forgot it meanwhile, or the engine, which keeps only so much
        if upto > info.feed_floor:
            await self._engine.compact(info.name, upto)
        return count >= FORGET_MAX

    async def _hold(self, space: str, progress: _Progress) -> bool:
        """Keep the lease, or take it if it is free; False when another process has it."""
        keep = Batch(SYSTEM_ACTOR, (Touch(LEASE, LEASE_MS),), (ValueIs(LEASE, self._me),))
        take = Batch(SYSTEM_ACTOR, (Put(LEASE, self._me, LEASE_MS),), (Absent(LEASE),))
        for batch in (keep, take) if progress.holds_lease else (take,):
            try:
                await self._engine.commit(space, batch)
            except Conflict:
                progress.holds_lease = False
            else:
                progress.holds_lease = True
                return True
        return False

    async def _revision(self, space: str) -> int:
        found = await self._engine.spaces(space)
        return found[0].revision if found else 0


class _Progress:
    """How far the care of one space has come, in this process."""

    def __init__(self) -> None:
        self.revision = -1
        self.sealed_at = 0
        self.pruned_at = 0
        self.forgets = False
        """The last round left something to forget."""
        self.holds_lease = False
