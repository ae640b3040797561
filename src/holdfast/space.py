"""What a user holds: a space, seen by one agent.

Each capability's module is imported when it is first used: a command that reads one record should not wait for the others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from holdfast.clock import Duration, duration_ms, wait_ms
from holdfast.engine import Condition, Mine, Operation, Present, Receipt, SpaceInfo, cursor_at
from holdfast.errors import InvalidInput, NotFound
from holdfast.identity import Secret
from holdfast.identity import check_agent as check_agent
from holdfast.identity import check_space as check_space
from holdfast.layers.records import Records, RecordTransaction
from holdfast.layers.scope import Scope
from holdfast.layers.session import Session
from holdfast.layers.transact import ATTEMPTS_MAX

if TYPE_CHECKING:
    from holdfast.layers.audit import Audit
    from holdfast.layers.blobs import Blobs
    from holdfast.layers.coordination import Coordination
    from holdfast.layers.correlation_entries import Decision
    from holdfast.layers.correlations import Correlation, Correlations
    from holdfast.layers.document_heads import Documents
    from holdfast.layers.documents import Document
    from holdfast.layers.lines import Kind
    from holdfast.layers.locks import Wanted
    from holdfast.layers.merging import Strategy
    from holdfast.layers.modes import Mode
    from holdfast.layers.orchestrator import Orchestrator
    from holdfast.layers.pools import Pool
    from holdfast.layers.queue_entries import Policy
    from holdfast.layers.queues import Queue, Queues
    from holdfast.layers.resolutions import Judgement
    from holdfast.layers.schemas import Schemas
    from holdfast.layers.standings import Locks
    from holdfast.layers.tasks import Tasks
    from holdfast.layers.watching import RecordChanges
    from holdfast.layers.workflows.handles import Workflows

T = TypeVar("T")


class Origin(msgspec.Struct, frozen=True):
    """The store that a space is of, as another process would open it."""

    url: str
    token: Secret | None = None
    blobs: Path | None = None


class Space:
    """The unit of isolation, of atomic commits and of scale-out. Nothing in one space can see or touch another.

    `records` are its values, `audit` who did what, `blobs` its large data. Get one from `store.space(name, agent=…)`.
    """

    def __init__(
        self,
        scope: Scope,
        blob_folder: Callable[[], Path],
        coordination: Coordination,
        judgements: dict[str, Judgement] | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.origin = origin
        self._judgements = {} if judgements is None else judgements
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

    @property
    def session(self) -> Session:
        """How far this view has come: what it wrote, and what its session reads showed. `session.token` goes elsewhere."""
        return self._scope.session

    @cached_property
    def judgement(self) -> Judgement:
        """Detectors and strategies for documents, by name; the same for all views of the space that the store gives."""
        from holdfast.layers.resolutions import Judgement

        return self._judgements.setdefault(self.name, Judgement())

    @cached_property
    def audit(self) -> Audit:
        """Every mutation, chained by hash."""
        from holdfast.layers.audit import Audit

        return Audit(self._scope)

    @cached_property
    def blobs(self) -> Blobs:
        """Large data as content-addressed files."""
        from holdfast.layers.blobs import Blobs

        scope = self._scope
        return Blobs(scope.engine, scope.space, scope.actor, self._blob_folder(), scope.clock)

    @cached_property
    def schemas(self) -> Schemas:
        """What the data of each type looks like, and how older data becomes newer."""
        from holdfast.layers.schemas import Schemas

        return Schemas(self._scope)

    @cached_property
    def locks(self) -> Locks:
        """Who holds what, and who waits for it."""
        from holdfast.layers.standings import Locks

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
        from holdfast.layers.locks import check_units

        return self._wanted("semaphore", name, ttl, wait, size=check_units(permits, "permits"))

    def election(self, name: str, *, ttl: Duration | None = None, wait: Duration | None = None) -> Wanted:
        """One leader at a time: `async with space.election("leader") as term:`; `term.epoch` grows from leader to leader."""
        return self._wanted("election", name, ttl, wait)

    def pool(self, name: str, *, size: int) -> Pool:
        """So many units of something: `async with pool.allocate():`. The size is stored at first use."""
        from holdfast.layers.locks import check_units
        from holdfast.layers.pools import Pool

        size = check_units(size, "size")
        return Pool(lambda units, ttl, wait: self._wanted("pool", name, ttl, wait, size=size, units=units), size)

    @cached_property
    def documents(self) -> Documents:
        """The documents of the space: which there are, and what waits for a person."""
        from holdfast.layers.document_heads import Documents

        return Documents(self._scope)

    def document(self, name: str, *, mode: Mode = "merge") -> Document:
        """A shared document: one body, one section per agent. It comes into being when somebody writes to it.

        Where several instances of an agent contribute, mode "merge" keeps a section for each; with "reject" they share one,
        and whoever has not seen the present one gets Conflict. The first contribution settles the mode; another is InvalidInput.
        """
        from holdfast.layers.documents import Document

        return Document(
            self._scope,
            name,
            mode,
            lambda ttl, wait: self.lock(f"documents/{name}", ttl=ttl, wait=wait),
            self.judgement,
        )

    def guarded_by(self, kind: Kind, name: str, id: str) -> Space:
        """What `guard.space` is, for a guard this agent acquired in another process: writes only as long as it is held.

        Another agent's is AccessDenied. Whether its turn had come `locks.waits` tells; once it has, it does not go.
        """
        from holdfast.layers.lines import LOCKS

        key = LOCKS.key(kind, name, id)
        return self._view(self._scope.guarded(Mine(key), Present(key)))

    @cached_property
    def correlations(self) -> Correlations:
        """The correlations there are."""
        from holdfast.layers.correlations import Correlations

        return Correlations(self._scope, self._coordination)

    async def correlation(
        self,
        id: str,
        *,
        expect: Sequence[str] | int | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109 - of the correlation, not of this call
        min_agents: int | None = None,
        profile: str | None = None,
        pattern: str = "fan_in",
        wait: Duration | None = 0,
    ) -> Correlation:
        """Make a correlation that expects these agents, or so many; without `expect` find the one of this id.

        `timeout` is 5 minutes unless given. `min_agents` signals are then enough for a decision. `profile` gives number and
        timeout: simple (2, 60 s), workflow (3, 300 s), high_frequency (1, 10 s). `wait` is how long to wait for one that is to
        be found. Orchestrators make correlations; agents find them.
        """
        if expect is None and profile is None:
            if timeout is not None or min_agents is not None:
                raise InvalidInput("timeout and min_agents are of a correlation that is made; name whom it expects")
            return await self.correlations.find(id, wait)
        return await self.correlations.make(id, expect, timeout, min_agents, profile, pattern)

    def orchestrator(
        self,
        *,
        merge: str | Strategy = "all",
        on_decision: Callable[[Decision], Any] | None = None,
        strategies: Mapping[str, Strategy] | None = None,
        publish: bool | None = None,
        lease: Duration | None = None,
        version: str = "1",
    ) -> Orchestrator:
        """One that decides correlations; any number may run: `await space.orchestrator(merge="majority").run()`.

        `merge` is a strategy's name or a callable; `strategies` adds names. `on_decision` is called with each Decision, at least
        once, and mostly by the orchestrator that made it. Without it decisions are left to others that have one, as soon as one
        has ever run in this space; `publish=True` leaves them there in any case, `publish=False` in none.
        """
        from holdfast.layers.orchestrator import LEASE_MS, Orchestrator

        return Orchestrator(
            self._scope,
            self._coordination,
            merge=merge,
            strategies=strategies,
            on_decision=on_decision,
            publish=publish,
            lease_ms=LEASE_MS if lease is None else duration_ms(lease, name="lease"),
            version=version,
        )

    @cached_property
    def tasks(self) -> Tasks:
        """Functions and commands that managers run as processes: submit, find, list, observe."""
        from holdfast.layers.tasks import Tasks

        return Tasks(self._scope, self._coordination, lambda: self.blobs)

    @cached_property
    def queues(self) -> Queues:
        """The queues there are, and how many messages they have."""
        from holdfast.layers.queues import Queues

        return Queues(self._scope, self._coordination)

    def queue(
        self,
        name: str,
        *,
        lease: Duration = "30s",
        on_error: Policy = "keep",
        on_stop: Policy = "keep",
        on_death: Policy | None = None,
        prefetch: int = 0,
        dedup_window: Duration = "5m",
    ) -> Queue:
        """A queue: `await q.put(body)`, `async with q.reserve(wait="30s") as message:`. It comes into being with its first message.

        `lease` is after what time a dead consumer's messages come back; `on_error`, `on_stop` and `on_death` what becomes of a
        message that failed, whose consumer was stopped, whose consumer died: "keep" (a dead letter), "clear", "release" or
        `Requeue(…)`, which for a death is the default. `prefetch` messages are taken ahead.
        """
        from holdfast.layers.queue_entries import Requeue
        from holdfast.layers.queues import Options, Queue

        options = Options(
            duration_ms(lease, name="lease"),
            on_error,
            on_stop,
            Requeue() if on_death is None else on_death,
            prefetch,
            duration_ms(dedup_window, name="dedup_window"),
        )
        return Queue(self._scope, self._coordination, name, options)

    @cached_property
    def workflows(self) -> Workflows:
        """Code that survives: `await space.workflows.start(research, {…})`, and workers that run it."""
        from holdfast.layers.workflows.handles import Workflows

        return Workflows(self._scope, self._coordination, lambda: self.blobs)

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
        from holdfast.layers.locks import Wanted, ttl_of

        times = ttl_of(ttl, profile), wait_ms(wait)
        return Wanted(self._coordination, self._scope, self._view, kind, name, *times, size, units, shared)

    def _view(self, scope: Scope) -> Space:
        return Space(scope, self._blob_folder, self._coordination, self._judgements, self.origin)

    async def commit(self, *parts: Condition | Operation, request_id: str | None = None) -> Receipt:
        """Conditions and operations on records in one batch, all or nothing.

        `await space.commit(at_least("available", 1), increment("available", -1), set_("owner", "market"))`
        """
        return await self.records.commit(*parts, request_id=request_id)

    async def transact(
        self,
        work: Callable[[RecordTransaction], Awaitable[T]],
        *,
        attempts: int = ATTEMPTS_MAX,
        request_id: str | None = None,
    ) -> T:
        """Run a function that reads and writes through `tx`, all or nothing. It may run several times.

        Repeated under its request id within an hour it is not run again, and gives what it gave, which must be JSON.
        """
        return await self.records.transact(work, attempts=attempts, request_id=request_id)

    def watch(self, prefix: str = "", *, cursor: str | None = None, live: bool = True) -> AsyncIterator[RecordChanges]:
        """Commits that change records whose name begins with the prefix, from now or from a saved cursor on.

        Without end; with `live=False` it ends when everything committed so far has been told.
        """
        from holdfast.layers.watching import watch_records

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
