"""The engine under test, as the tests hold it.

An engine's test file gives an `EngineFactory`. A test gets a `Subject` made of it: one fresh storage, one ManualClock, and
the engines the test opened on that storage, all closed when it ends. The subject's short forms (`commit`, `get`, `feed`
…) speak to `subject.engine` and to the space SPACE unless told otherwise.

`refused` is the suite's most used tool: it takes a snapshot of everything, expects the error, and compares.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import pytest

from holdfast.clock import Clock, Duration, ManualClock
from holdfast.engine import (
    SCAN_MAX,
    Batch,
    Change,
    ChangeSet,
    Condition,
    Engine,
    Entry,
    Operation,
    Receipt,
    SpaceInfo,
    cursor_at,
)
from holdfast.errors import Error

SPACE: Final = "conformance"
ELSEWHERE: Final = "conformance-elsewhere"
ALICE: Final = "alice"
BOB: Final = "bob"

DEADLINE_S: Final = 20.0
"""How long a test waits for what must happen at once; only a failure waits that long."""

LOOP_TURNS: Final = 50
"""Turns of the event loop after which whoever was about to wait is waiting."""


@dataclass(frozen=True)
class Capabilities:
    """In what engines differ. Declared by the engine's test file; the tests ask for these and never for a name."""

    shared: bool = False
    """Several engines may be open on one storage at the same time, as several processes are."""
    survives_reopen: bool = False
    """What was acknowledged is still there when the last engine is closed and the storage is opened again."""
    manual_time: bool = True
    """The engine takes its time from the clock it is opened with."""


OpenEngine = Callable[[Clock], Awaitable[Engine]]
"""Opens one more engine on a storage."""


@dataclass(frozen=True)
class EngineFactory:
    """How the engine under test is opened: `new_storage` makes an empty storage and gives what opens engines on it."""

    new_storage: Callable[[], OpenEngine]
    capabilities: Capabilities
    new_clock: Callable[[], ManualClock] = ManualClock
    """For an engine whose time is another process's: a clock that it shares."""
    histories: int = 20
    """How many random histories are compared with the memory engine's; fewer where each costs much, and where the same
    engine is compared elsewhere. HOLDFAST_SOAK=1 takes many times that."""


@dataclass(frozen=True)
class Snapshot:
    """Everything a space shows."""

    info: SpaceInfo
    entries: list[Entry]
    feed: list[ChangeSet]


class Watching:
    """A watcher in a test: `next` waits with a deadline."""

    def __init__(self, changes: AsyncIterator[ChangeSet], deadline_s: float) -> None:
        self._changes = changes
        self._deadline_s = deadline_s
        self._waiting: asyncio.Task[ChangeSet] | None = None

    async def next(self) -> ChangeSet:
        """The next commit; it must come before the deadline."""
        waiting = self._waiting or self.begin()
        self._waiting = None
        return await asyncio.wait_for(waiting, self._deadline_s)

    async def several(self, count: int) -> list[ChangeSet]:
        return [await self.next() for _ in range(count)]

    def begin(self) -> asyncio.Task[ChangeSet]:
        """Start waiting for the next commit without waiting for it here; the following `next` gives it."""
        self._waiting = asyncio.ensure_future(anext(self._changes))
        return self._waiting

    async def close(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)
        if isinstance(self._changes, AsyncGenerator):
            await self._changes.aclose()


class Subject:
    """One storage of the engine under test, its clock, and the engines a test has opened on it."""

    engine: Engine

    def __init__(self, factory: EngineFactory, *, deadline_s: float = DEADLINE_S) -> None:
        self.capabilities = factory.capabilities
        self.clock = factory.new_clock()
        self.deadline_s = deadline_s
        self._open = factory.new_storage()
        self._engines: list[Engine] = []
        self._watching: list[Watching] = []

    # --- the life of engines ---

    async def __aenter__(self) -> Subject:
        self.engine = await self._opened()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._close_all()

    async def another(self) -> Engine:
        """A second engine on the same storage: what another process has."""
        if not self.capabilities.shared:
            pytest.skip("the engine does not share its storage")
        return await self._opened()

    async def reopen(self) -> None:
        """Close every engine and open the storage afresh."""
        if not self.capabilities.survives_reopen:
            pytest.skip("the engine keeps nothing when it is closed")
        await self._close_all()
        self.engine = await self._opened()

    async def _opened(self) -> Engine:
        engine = await self._open(self.clock)
        self._engines.append(engine)
        return engine

    async def _close_all(self) -> None:
        for watching in self._watching:
            await watching.close()
        for engine in self._engines:
            await asyncio.wait_for(engine.close(), self.deadline_s)
        self._watching.clear()
        self._engines.clear()

    # --- time ---

    def advance(self, by: Duration) -> None:
        self._need_manual_time()
        self.clock.advance(by)

    def advance_ms(self, by: int) -> None:
        self.advance(by / 1000)

    def set_back(self, by: Duration) -> None:
        self._need_manual_time()
        self.clock.set_back(by)

    def _need_manual_time(self) -> None:
        if not self.capabilities.manual_time:
            pytest.skip("the engine's time cannot be moved")

    # --- writing and reading ---

    async def commit(
        self,
        *operations: Operation,
        when: Iterable[Condition] = (),
        actor: str = ALICE,
        request_id: str | None = None,
        space: str = SPACE,
        engine: Engine | None = None,
    ) -> Receipt:
        return await (engine or self.engine).commit(space, Batch(actor, operations, tuple(when), request_id))

    async def get(self, key: str, *, space: str = SPACE, engine: Engine | None = None) -> Entry | None:
        return (await (engine or self.engine).get(space, [key]))[0]

    async def entry(self, key: str, *, space: str = SPACE) -> Entry:
        """The entry of a key that must be there."""
        entry = await self.get(key, space=space)
        assert entry is not None, f"{key!r} is not there"
        return entry

    async def value(self, key: str, *, space: str = SPACE, engine: Engine | None = None) -> bytes | None:
        entry = await self.get(key, space=space, engine=engine)
        return None if entry is None else entry.value

    async def entries(self, prefix: str = "", *, space: str = SPACE) -> list[Entry]:
        """All entries under a prefix, read page by page."""
        found: list[Entry] = []
        more = True
        while more:
            page = await self.engine.scan(space, prefix, after=found[-1].key if found else None, limit=SCAN_MAX)
            found += page.entries
            more = page.more
        return found

    async def keys(self, prefix: str = "", *, space: str = SPACE) -> list[str]:
        return [entry.key for entry in await self.entries(prefix, space=space)]

    async def info(self, space: str = SPACE) -> SpaceInfo:
        """The space, which must exist."""
        [info] = await self.engine.spaces(space)
        return info

    async def revision(self, space: str = SPACE) -> int:
        return (await self.info(space)).revision

    async def usage(self, space: str = SPACE) -> dict[tuple[str, str], tuple[int, int]]:
        """(owner, subspace) → (keys, bytes)."""
        return {(each.owner, each.subspace): (each.keys, each.bytes) for each in (await self.info(space)).usage}

    # --- the feed ---

    def watch(
        self, *prefixes: str, cursor: str | None = None, space: str = SPACE, engine: Engine | None = None
    ) -> Watching:
        watching = Watching((engine or self.engine).watch(space, *prefixes, cursor=cursor), self.deadline_s)
        self._watching.append(watching)
        return watching

    async def watch_from_now(
        self, *prefixes: str, space: str = SPACE, engine: Engine | None = None, begun: bool = True
    ) -> Watching:
        """A watcher that stands exactly at the present revision and, if `begun`, waits there already."""
        watching = self.watch(*prefixes, cursor=cursor_at(await self.revision(space)), space=space, engine=engine)
        if begun:
            watching.begin()
            await self.settle()
        return watching

    async def settle(self) -> None:
        """Let every task run until it waits."""
        for _ in range(LOOP_TURNS):
            await asyncio.sleep(0)

    async def feed(self, *, after: int | None = None, space: str = SPACE) -> list[ChangeSet]:
        """The feed after a revision (all that is kept, by default) up to the present one."""
        start = cursor_at((await self.info(space)).feed_floor if after is None else after)
        async with asyncio.timeout(self.deadline_s):
            return [commit async for commit in self.engine.watch(space, cursor=start, live=False)]

    async def changes(self, *, after: int | None = None, space: str = SPACE) -> list[Change]:
        """The changes of that feed, one after the other."""
        return [change for commit in await self.feed(after=after, space=space) for change in commit.changes]

    # --- refusals ---

    async def snapshot(self) -> dict[str, Snapshot]:
        """Everything every space shows."""
        return {
            info.name: Snapshot(info, await self.entries(space=info.name), await self.feed(space=info.name))
            for info in await self.engine.spaces()
        }

    @asynccontextmanager
    async def refused(self, error: type[Error]) -> AsyncIterator[pytest.ExceptionInfo[Error]]:
        """The block raises this error, and nothing changed: not an entry, not the revision, not the usage, not the feed."""
        before = await self.snapshot()
        with pytest.raises(error) as caught:
            yield caught
        assert str(caught.value), "a refusal says why"
        assert await self.snapshot() == before


@pytest.fixture
async def subject(engine_factory: EngineFactory) -> AsyncIterator[Subject]:
    """The engine under test on a fresh storage."""
    async with Subject(engine_factory) as opened:
        yield opened
