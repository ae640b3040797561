"""A store: where spaces live. `holdfast.open(url)` gives one.

    async with holdfast.open("team.db") as store:
        space = store.space("contoso", agent="market")

Opening starts the caretaker, closing stops it and finishes what was accepted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Generator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakSet

from holdfast.checking import check_durability
from holdfast.clock import Clock, SystemClock
from holdfast.engine import SYSTEM_ACTOR, Durability, Engine, Finding, SpaceInfo
from holdfast.engines.private import sync_folder
from holdfast.engines.registry import check_path, file_of, open_engine, open_shelf, path_url, split_url
from holdfast.errors import InvalidInput, NotFound, Unavailable
from holdfast.identity import AGENT_NAMES, AgentNames, Identity, Secret
from holdfast.layers.catalogue import Catalogue
from holdfast.layers.redaction import Redaction
from holdfast.layers.retention import Retention
from holdfast.layers.scope import Scope
from holdfast.layers.session import Session
from holdfast.layers.settings import SYSTEM_SPACE, make_system_space, share
from holdfast.middleware.creation import CreatedOnFirstUse
from holdfast.space import Origin, Space, check_agent, check_space

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

    from holdfast.layers.audit import Audit
    from holdfast.layers.blobs import Blobs
    from holdfast.layers.caretaker import Caretaker
    from holdfast.layers.coordination import Coordination
    from holdfast.layers.resolutions import Judgement
    from holdfast.layers.standings import Locks
    from holdfast.middleware.cache import CachedEngine
    from holdfast.middleware.cache_options import Cache


T = TypeVar("T")

log = logging.getLogger("holdfast.store")


@runtime_checkable
class _BacksUp(Protocol):
    """An engine that can make a consistent copy of itself in one step."""

    async def backup(self, target: Path) -> None: ...


@runtime_checkable
class _MayRefuse(Protocol):
    """An engine whose durability depends on a server's settings."""

    async def require(self, durability: Durability) -> None: ...


@runtime_checkable
class _Kept(Protocol):
    """An engine behind a keeper, which looks after its spaces itself and knows who is asking."""

    @property
    def identity(self) -> Identity: ...


def open(
    url: str | os.PathLike[str],
    *,
    clock: Clock | None = None,
    retention: Retention | None = None,
    redact: Redaction | None = None,
    blobs: str | os.PathLike[str] | None = None,
    durability: Durability | None = "sync",
    background: bool = True,
    token: str | None = None,
    cache: str | Cache | None = None,
    agent_names: AgentNames | None = None,
) -> Store:
    """A store, to be used as `async with holdfast.open(url) as store:` or `store = await holdfast.open(url)`.

    `url` is a path ("team.db"), "memory:", "redis://…", "postgresql://…" or a keeper's "holdfast://…". `retention` and `redact` change the defaults.
    `blobs` is the folder for large data, by default beside the file. `durability` is what spaces are made with that name no
    other; a server that cannot give it is refused with DurabilityUnavailable (None: only when a space needs it).
    `background=False` leaves sweeping, sealing and pruning to other processes. `token` is what a keeper knows you by; other
    stores take none. `cache` is a hot tier for session and eventual reads: "memory", or the "redis://…" of a server that
    processes share. `agent_names` is "strict" (small letters and underscores) or "plain"; it belongs to the store: whoever
    opens it afterwards without a word about it keeps to it.
    """
    _check_switch(background, "background")
    if durability is not None:
        check_durability(durability)
    if agent_names is not None and agent_names not in AGENT_NAMES:
        raise InvalidInput(f"agent_names= is one of {', '.join(AGENT_NAMES)}, not {agent_names!r:.60}")
    url = path_url(url) if isinstance(url, os.PathLike) else url
    file = file_of(url)
    folder = None if file is None else Path(f"{file}-blobs")
    return Store(
        url,
        _given(clock, isinstance(clock, Clock), "clock", "a Clock, such as holdfast.ManualClock()") or SystemClock(),
        _given(retention, isinstance(retention, Retention), "retention", "a holdfast.Retention") or Retention(),
        _given(redact, isinstance(redact, Redaction), "redact", "a holdfast.Redaction") or Redaction(),
        folder if blobs is None else _path(blobs, "blobs", "a folder for blobs"),
        durability,
        background,
        None if token is None else Secret(token),
        None if cache is None else _options(cache),
        agent_names,
    )


def _given(value: T | None, is_right: bool, name: str, expected: str) -> T | None:
    """Refuse another kind of thing, which would be taken for none, or fail where nobody knows why."""
    if value is not None and not is_right:
        raise InvalidInput(f"{name} must be {expected}, not {value!r:.60}")
    return value


def _check_switch(value: bool, name: str) -> None:
    """Refuse what would be taken for True or False by what it happens to be, such as the text "no"."""
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} must be True or False, not {value!r:.60}")


def _path(value: str | os.PathLike[str], name: str, what: str) -> Path:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise InvalidInput(f"{name} must be the path of {what}, not {value!r:.60}")
    check_path(path, what)
    return Path(path)


def _options(cache: str | Cache) -> Cache:
    from holdfast.middleware.cache_options import Cache

    if isinstance(cache, Cache):
        return cache
    if not isinstance(cache, str):
        raise InvalidInput(
            f"cache= is 'memory', the 'redis://…' of a server that processes share, or a holdfast.Cache(…), not {cache!r:.60}"
        )
    return Cache(cache)


class Store:
    """An open store. Made by `holdfast.open`."""

    def __init__(
        self,
        url: str,
        clock: Clock,
        retention: Retention,
        redaction: Redaction,
        blobs: Path | None,
        durability: Durability | None,
        background: bool,
        token: Secret | None = None,
        cache: Cache | None = None,
        agent_names: AgentNames | None = None,
    ) -> None:
        self.url = url
        self._clock = clock
        self._retention = retention
        self._redaction = redaction
        self._blobs = blobs
        self._durability: Durability | None = durability
        self._temporary: TemporaryDirectory[str] | None = None
        self._background = background
        self._token = token
        self._options = cache
        self._told_names = agent_names
        self.agent_names: AgentNames = agent_names or "plain"
        """What agents may be called, as this store was told, or by this process."""
        self._engine: Engine | None = None
        self._awaited = False
        self._closing = asyncio.Lock()
        self._cache: CachedEngine | None = None
        self._audited: set[str] = set()
        self._created: WeakSet[CreatedOnFirstUse] = WeakSet()
        self._identity: Identity | None = None
        self._judgements: dict[str, Judgement] = {}
        """By space: what its user registered there is known to every view of it."""

    async def __aenter__(self) -> Store:
        if self._engine is not None and self._awaited:  # async with await holdfast.open(…)
            self._awaited = False
            return self
        return await self._opened()

    async def _opened(self) -> Store:
        if self._engine is not None:
            raise InvalidInput("this store is open already")
        self._engine = await open_engine(self.url, self._clock, self._token)
        try:
            if isinstance(self._engine, _Kept):
                self._identity = self._engine.identity
            if self._options is not None:
                self._cache = await self._cached(self._engine, self._options)
            if self._identity is not None:
                return self
            if self._durability is not None and isinstance(self._engine, _MayRefuse):
                await self._engine.require(self._durability)
            told = self._redaction, self._retention, self._durability, self._told_names
            self.agent_names = await share(self._engine, *told)
            self._audited = {info.name for info in await self._engine.spaces() if info.audit_reads}
        except BaseException:
            await self._engine.close()
            self._engine = None
            raise
        if self._background:
            self._caretaker.start()
        return self

    async def _cached(self, engine: Engine, options: Cache) -> CachedEngine:
        from holdfast.middleware.cache import CachedEngine
        from holdfast.middleware.cache_following import READABLE
        from holdfast.middleware.cache_options import MEMORY

        identity = self._identity
        if identity is not None and options.url != MEMORY:
            raise InvalidInput(
                "what a keeper's rules let one read does not belong into a cache that others share; use cache='memory'"
            )
        shelf = None if options.url == MEMORY else await open_shelf(options.url)
        watched = READABLE if identity is not None and identity.role == "agent" else ()
        name = str(file_of(self.url) or re.sub(r"//[^/@]*@", "//", self.url))
        return CachedEngine(engine, self._clock, options, shelf, store=name, watched=watched)

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __await__(self) -> Generator[Any, None, Store]:
        self._awaited = True
        return self._opened().__await__()

    async def close(self) -> None:
        """Finish what was accepted, stop the background work, let go of the store. Closing again does nothing."""
        async with self._closing:
            if self._engine is not None:
                await self._close(self._engine)

    async def _close(self, engine: Engine) -> None:
        made = self.__dict__
        try:
            if "_coordination" in made:
                await self._coordination.close()
            if "_caretaker" in made:
                await self._caretaker.stop()
        finally:
            await (self._cache or engine).close()
            self._engine = self._cache = None
            for name in ("_caretaker", "_coordination", "_catalogue"):
                made.pop(name, None)
            if self._temporary is not None:
                self._temporary.cleanup()
                self._temporary = self._blobs = None

    @property
    def engine(self) -> Engine:
        """The engine underneath."""
        if self._engine is None:
            raise Unavailable("the store is not open; use: async with holdfast.open(...) as store")
        return self._engine

    @property
    def cache(self) -> CachedEngine | None:
        """The hot tier, if the store was opened with one; `store.cache.stats` tells what it does."""
        return self._cache

    @property
    def identity(self) -> Identity | None:
        """Whom a keeper's token speaks for; None when there is no keeper."""
        return self._identity

    @cached_property
    def _caretaker(self) -> Caretaker:
        from holdfast.layers.caretaker import Caretaker

        return Caretaker(
            self.engine,
            self._clock,
            self._retention,
            self._redaction,
            self._audit_of,
            self._sweep_blobs,
        )

    @cached_property
    def _coordination(self) -> Coordination:
        from holdfast.layers.coordination import Coordination
        from holdfast.layers.leases import Leases

        return Coordination(Leases(self._clock))

    @cached_property
    def _catalogue(self) -> Catalogue:
        return Catalogue(self.engine, self._clock)

    async def _sweep_blobs(self, space: str) -> None:
        if self._blobs is not None and self._blobs.exists():
            await self._blobs_of(space).sweep()

    def space(
        self,
        name: str,
        *,
        agent: str | None = None,
        instance: str = "1",
        durability: Durability | None = None,
        audit_reads: bool = False,
        session: str | None = None,
    ) -> Space:
        """A space as seen by an agent, "local" unless named; a keeper's token names it. It comes into being at its first use.

        `instance` tells processes of one agent apart, where each contributes something of its own. `durability` is "sync" (on disk before the reply; the default), "async" or "volatile"; it is fixed when the space
        is made. `audit_reads` makes every read leave an audit record. `session` is the token of a session, of this or
        another process: session reads of this view show at least what that one has seen.
        """
        check_space(name)
        agent = self._agent(agent)
        check_agent(instance, what="an instance")
        _check_switch(audit_reads, "audit_reads")
        if durability is not None:
            check_durability(durability)
        seen = Session.of(name, session)
        engine: Engine = self._cache or self.engine
        otherwise = self._durability or "sync"
        if durability is not None or audit_reads or otherwise != "sync":
            engine = created = CreatedOnFirstUse(engine, name, durability, otherwise, audit_reads)
            self._created.add(created)
        if audit_reads or name in self._audited:
            self._audited.add(name)
            from holdfast.middleware.audited_reads import AuditedReads

            engine = AuditedReads(engine, agent)
        if self._identity is None and self._background:
            self._caretaker.look_after(name)
        origin = Origin(self.url, self._token, None if self._temporary is not None else self._blobs)
        scope = self._scope(name, agent, instance, engine, seen)
        return Space(scope, self._blob_folder, self._coordination, self._judgements, origin)

    def seen_through(self, engine: Engine, name: str, agent: str, coordination: Coordination) -> Space:
        """A space as a keeper shows it to one of its clients: through the engine that holds the client's rules."""
        check_space(name)
        check_agent(agent)
        return Space(self._scope(name, agent, engine=engine), self._blob_folder, coordination)

    def locks_of(self, name: str) -> Locks:
        """Who holds what in a space, as the store itself sees it."""
        from holdfast.layers.standings import Locks

        return Locks(self._scope(name, SYSTEM_ACTOR))

    def look_after(self, name: str) -> None:
        """Include a space in the background work, whoever uses it."""
        self._caretaker.look_after(name)

    def _agent(self, given: str | None) -> str:
        """On whose behalf a space is used."""
        identity = self._identity
        if identity is not None and (given is None or (given != identity.agent and identity.role != "admin")):
            if given is not None:
                raise InvalidInput(f"the token speaks for {identity.agent!r} and cannot write as {given!r}")
            return identity.agent
        agent = "local" if given is None else given
        check_agent(agent, self.agent_names)
        return agent

    async def spaces(self) -> list[SpaceInfo]:
        """Every space, with its durability, revision and usage."""
        return [info for info in await self.engine.spaces() if not info.name.startswith("_")]

    async def drop_space(self, name: str, *, agent: str = "local") -> None:
        """Delete a space with all it holds. That it was deleted, and by whom, stays in the store's own audit."""
        check_space(name)
        if not await self.engine.spaces(name):
            raise NotFound(f"there is no space {name!r}")
        if self._identity is None:  # a keeper notes it by itself
            await self.note_drop(name, agent)
        await (self._cache or self.engine).drop(name)
        for created in self._created:
            created.forget(name)

    async def note_drop(self, name: str, agent: str) -> None:
        """Write down, before it happens, who drops a space."""
        await self.note("drop_space", f"spaces/{name}", agent)

    async def note(self, operation: str, key: str, agent: str) -> None:
        """Write into the store's own audit what is done to the store as a whole, and by whom."""
        from holdfast.layers.audit import Audit

        await make_system_space(self.engine, self._durability)
        await Audit(self._scope(SYSTEM_SPACE, SYSTEM_ACTOR)).note("committed", operation, key, actor=agent)

    async def tidy(self) -> None:
        """Do the background work of every space now: sweep, collect, seal, prune."""
        from holdfast.layers.caretaker import Steps

        steps = Steps()
        for info in await self.engine.spaces():
            with steps.step():
                await self._caretaker.round(info.name)
            with steps.step():
                if info.durability == "volatile":
                    await self._caretaker.collect(info.name)
                else:
                    await self._caretaker.tidy(info.name)
        steps.done()

    async def backup(self, target: str | os.PathLike[str]) -> None:
        """A consistent copy into a new SQLite file, while others go on writing."""
        path = _path(target, "target", "a backup's file").absolute()
        if isinstance(self.engine, _BacksUp):
            await self.engine.backup(path)
        else:
            await self._copy_into(path)

    async def _copy_into(self, path: Path) -> None:
        """A backup that appears under its name when it is complete."""
        from tempfile import TemporaryDirectory

        from holdfast.layers.backing_up import copy_living_store

        if path.exists():
            raise InvalidInput(f"{path} exists already; name a file that does not")
        if not path.parent.is_dir():
            raise InvalidInput(f"the folder of {path} does not exist; create it, or name another path")
        with TemporaryDirectory(prefix=".backup-", dir=path.parent) as folder:
            made = Path(folder) / path.name
            copy = await open_engine(str(made.absolute()), self._clock)
            try:
                await copy_living_store(self.engine, copy)
            finally:
                await copy.close()
            made.rename(path)
            sync_folder(path.parent)

    async def doctor(self, *, full: bool = False) -> list[Finding]:
        """What this store guarantees as it is configured and with the spaces it has, and what is wrong with it.

        Of the audit the newest segments are looked at, and of the blobs so many; with `full` all, which takes its time.
        """
        from holdfast.layers.checkup import Checkup

        blobs_of = None if self._blobs is None else self._blobs_of
        return await Checkup(self.engine, self._audit_of, blobs_of, full=full).findings()

    def _audit_of(self, space: str) -> Audit:
        from holdfast.layers.audit import Audit

        return Audit(self._scope(space, SYSTEM_ACTOR))

    def _blobs_of(self, space: str) -> Blobs:
        from holdfast.layers.blobs import Blobs

        return Blobs(self.engine, space, SYSTEM_ACTOR, self._blob_folder(), self._clock)

    def _scope(
        self,
        space: str,
        agent: str,
        instance: str = "1",
        engine: Engine | None = None,
        session: Session | None = None,
    ) -> Scope:
        return Scope(
            engine or self.engine,
            space,
            agent,
            instance,
            self._clock,
            self._retention,
            self._redaction,
            catalogue=self._catalogue,
            session=session or Session(space),
        )

    def _blob_folder(self) -> Path:
        if self._blobs is None:
            from tempfile import TemporaryDirectory

            if split_url(self.url)[0] != "memory":
                log.warning(
                    "this store was told no folder for blobs: what is put now is gone when it is closed, and no other process sees "
                    "it; open the store with blobs=, a folder that all its processes share"
                )
            self._temporary = TemporaryDirectory(prefix="holdfast-blobs-")
            self._blobs = Path(self._temporary.name)
        return self._blobs
