"""What a user holds: a space, seen by one agent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from holdfast.clock import Duration
from holdfast.engine import Condition, Operation, Present, Receipt, SpaceInfo, cursor_at
from holdfast.errors import NotFound
from holdfast.identity import check_agent as check_agent
from holdfast.identity import check_space as check_space
from holdfast.layers.audit import Audit
from holdfast.layers.blobs import Blobs
from holdfast.layers.lines import LOCKS, Kind
from holdfast.layers.locks import Coordination, Pool, Wanted, check_units, ttl_of, wait_ms
from holdfast.layers.records import Records, RecordTransaction
from holdfast.layers.scope import Scope
from holdfast.layers.standings import Locks
from holdfast.layers.transact import ATTEMPTS_MAX
from holdfast.layers.watching import RecordChanges, watch_records

T = TypeVar("T")


class Space:
    """The unit of isolation, of atomic commits and of scale-out. Nothing in one space can see or touch another.

    `records` are its values, `audit` who did what, `blobs` its large data. Get one from `store.space(name, agent=…)`.
    """

    def __init__(self, scope: Scope, blob_folder: Callable[[], Path], coordination: Coordination) -> None:
        self._scope = scope
        self._blob_folder = blob_folder
        self._coordination = coordination
        self.records = Records(scope)

    @property
    def name(self) -> str:
        """The space's name."""
        return self._scope.space

    @property
    def agent(self) -> str:
        """On whose behalf this view writes; the owner of what it writes."""
        return self._scope.actor

    @property
    def instance(self) -> str:
        """Which instance of the agent this is."""
        return self._scope.instance

    @cached_property
    def audit(self) -> Audit:
        """Every mutation, chained by hash."""
        return Audit(self._scope)

    @cached_property
    def blobs(self) -> Blobs:
        """Large data as content-addressed files."""
        scope = self._scope
        return Blobs(scope.engine, scope.space, scope.actor, self._blob_folder(), scope.clock)

    @cached_property
    def locks(self) -> Locks:
        """Who holds what, and who waits for it."""
        return Locks(self._scope)

    def lock(
        self, name: str, *, ttl: Duration | None = None, wait: Duration | None = 0, profile: str = "default"
    ) -> Wanted:
        """One holder at a time: `async with space.lock("portfolio/MSFT", ttl="5s", wait="2s") as guard:`.

        `guard.space` writes only as long as the lock is held. `wait` is how long to stand in line: 0 not at all, None as
        long as it takes. The lease lasts `ttl` (30 s; by profile "locks" 60 s, "long_running" 300 s) and is renewed as
        long as the process lives.
        """
        return self._wanted("lock", name, ttl, wait, profile)

    def read_lock(self, name: str, *, ttl: Duration | None = None, wait: Duration | None = 0) -> Wanted:
        """Held together with other readers, and with no writer."""
        return self._wanted("rw", name, ttl, wait, shared=True)

    def write_lock(self, name: str, *, ttl: Duration | None = None, wait: Duration | None = 0) -> Wanted:
        """Held alone: with no other writer and no reader."""
        return self._wanted("rw", name, ttl, wait)

    def semaphore(self, name: str, *, permits: int, ttl: Duration | None = None, wait: Duration | None = 0) -> Wanted:
        """So many holders at a time. The number is stored at first use; another one later is InvalidInput."""
        return self._wanted("semaphore", name, ttl, wait, size=check_units(permits, "permits"))

    def election(self, name: str, *, ttl: Duration | None = None, wait: Duration | None = None) -> Wanted:
        """One leader at a time: `async with space.election("leader") as term:`; `term.epoch` grows from leader to leader."""
        return self._wanted("election", name, ttl, wait)

    def pool(self, name: str, *, size: int) -> Pool:
        """So many units of something: `async with pool.allocate():`. The size is stored at first use."""
        size = check_units(size, "size")
        return Pool(lambda units, ttl, wait: self._wanted("pool", name, ttl, wait, size=size, units=units), size)

    def guarded_by(self, kind: Kind, name: str, id: str) -> Space:
        """What `guard.space` is, for a guard that was acquired in another process: writes only as long as it is held."""
        return self._view(self._scope.guarded(Present(LOCKS.key(kind, name, id))))

    def _wanted(
        self,
        kind: Kind,
        name: str,
        ttl: Duration | None,
        wait: Duration | None,
        profile: str = "default",
        *,
        size: int = 1,
        units: int = 1,
        shared: bool = False,
    ) -> Wanted:
        times = ttl_of(ttl, profile), wait_ms(wait)
        return Wanted(self._coordination, self._scope, self._view, kind, name, *times, size, units, shared)

    def _view(self, scope: Scope) -> Space:
        return Space(scope, self._blob_folder, self._coordination)

    async def commit(self, *parts: Condition | Operation, request_id: str | None = None) -> Receipt:
        """Conditions and operations on records in one batch, all or nothing.

        `await space.commit(at_least("available", 1), increment("available", -1), set_("owner", "market"))`
        """
        return await self.records.commit(*parts, request_id=request_id)

    async def transact(self, work: Callable[[RecordTransaction], Awaitable[T]], *, attempts: int = ATTEMPTS_MAX) -> T:
        """Run a function that reads and writes through `tx`, all or nothing. It may run several times."""
        return await self.records.transact(work, attempts=attempts)

    def watch(self, prefix: str = "", *, cursor: str | None = None, live: bool = True) -> AsyncIterator[RecordChanges]:
        """Commits that change records whose name begins with the prefix, from now or from a saved cursor on.

        Without end; with `live=False` it ends when everything committed so far has been told.
        """
        return watch_records(self._scope, prefix, cursor, live)

    async def cursor(self) -> str:
        """Where the feed stands now; a watch from here sees everything committed after this call."""
        found = await self._scope.engine.spaces(self.name)
        return cursor_at(found[0].revision if found else 0)

    async def info(self) -> SpaceInfo:
        """How durable the space is, its revision, and who keeps how much in it."""
        found = await self._scope.engine.spaces(self.name)
        if not found:
            raise NotFound(f"there is no space {self.name!r} yet; the first write makes it")
        return found[0]

    def __repr__(self) -> str:
        return f"<Space {self.name!r} as {self.agent!r}>"
