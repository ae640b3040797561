"""Following the feeds of the spaces that a hot tier knows, from the first read of each on.

A space is known from a revision on, and its feed is followed from there by cursor, so it does not matter when the watch
begins or how often it breaks. A feed that is cut is taken up where it was. One that cannot be (Compacted: it was shortened,
or the space was dropped, loaded or restored) is a gap: everything of the space is forgotten, and it is known from the
present revision on. Whoever may not watch everything follows what agents may read; who may not even do that has
no hot tier, and neither have spaces that are volatile or whose reads are audited: their reads pass.

A feed that tells nothing may be one that is dead. So somebody looks, once a second and only where readers were answered, how far
the space is: if everything there is has been told, what is kept is proved to be up to date at that moment; if the next look still
finds what the feed has not told, or nobody answers, the feed counts as cut. One who does not follow everything asks the feed
itself for what is new, and knows the space up to there if there is nothing. Readers do not wait for any of this.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Final

from holdfast.clock import Clock
from holdfast.engine import Engine, SpaceInfo, cursor_at
from holdfast.errors import AccessDenied, AuthenticationFailed, Compacted, Error, RateLimitExceeded
from holdfast.middleware.cache_followed import Followed

SPACES_MAX: Final = 256
"""Spaces followed at once; the one that was begun first makes room."""
PAUSE_S: Final = 0.05
PAUSE_S_MAX: Final = 2.0
"""Between two attempts to follow a feed that failed."""
LOOK_S: Final = 1.0
"""Between two looks at how far a space is."""
LOOK_ANSWER_S: Final = 2.0
"""How long one may take."""
CLOCK_SKEW_MS: Final = 1_000
"""By how much the clocks of those who share copies may differ."""
READABLE: Final = ("records/", "lists/", "sets/", "documents/", "sections/", "correlations/", "blobs/")
"""What is followed by one who may not watch everything: what layers read through a hot tier, all of it with the verb Get."""

log = logging.getLogger("holdfast.cache")


class Following:
    """The spaces that are known, each with the task that follows it. `forget` is told of those that had a gap or ended."""

    def __init__(
        self, engine: Engine, clock: Clock, store: str, watched: tuple[str, ...], forget: Callable[[str], None]
    ) -> None:
        self.spaces: dict[str, Followed] = {}
        self.flushes = 0
        self._engine = engine
        self._clock = clock
        self._store = store
        self._watched = watched
        self._forget = forget
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    async def begin(self, space: str) -> Followed | None:
        """Know the space from now on; None when there is none yet, or it cannot be told."""
        if self._closed:
            return None
        began = self._clock.now_ms()
        try:
            found = await self._engine.spaces(space)
        except Error as exc:
            log.debug("space %s cannot be looked at: %s", space, exc)
            return None  # whether it can be read, the read will tell
        home = self.spaces.get(space)
        if home is not None or not found or self._closed:
            return home
        while len(self.spaces) >= SPACES_MAX:
            await self.end(next(iter(self.spaces)))
            if (home := self.spaces.get(space)) is not None or self._closed:  # another has begun it meanwhile
                return home
        home = self.spaces[space] = Followed(space, found[0].revision, self._identity(found[0]))
        home.prefixes, home.proved_ms = self._watched, began
        home.passing = _passes(found[0])
        if not home.passing:
            loop = asyncio.get_running_loop()
            self._tasks[space] = loop.create_task(self._follow(home))
            if self._looking is None:
                self._looking = loop.create_task(self._look_again())
        return home

    async def end(self, space: str) -> None:
        """Forget the space; it may begin anew."""
        home = self.spaces.pop(space, None)
        if home is None:
            return
        home.passing = True
        self._forget(space)
        task = self._tasks.pop(space, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        self._closed = True
        for space in list(self.spaces):
            await self.end(space)
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    def _identity(self, info: SpaceInfo) -> str:
        whose = hashlib.sha256(f"{self._store}\n{info.created_at}".encode()).hexdigest()[:16]
        return f"{info.name}.{whose}"

    async def _follow(self, home: Followed) -> None:
        """Hear of every change, for as long as the space is known."""
        pause = PAUSE_S
        while True:
            try:
                cursor = cursor_at(home.applied)
                async for commit in self._engine.watch(home.space, *home.prefixes, cursor=cursor):
                    pause = PAUSE_S
                    now = self._clock.now_ms()
                    home.lag_ms = max(now - commit.at, 0)
                    home.proved_ms, home.cut = max(home.proved_ms, min(now, commit.at)), False
                    if commit.version > home.applied:
                        home.note(commit.version, [change.key for change in commit.changes])
            except Compacted:
                if not await self._begin_again(home):
                    return
            except (AccessDenied, AuthenticationFailed) as exc:
                if home.prefixes or isinstance(exc, AuthenticationFailed):
                    log.info("space %s is not cached: %s", home.space, exc)
                    self._flush(home)
                    return
                home.prefixes = READABLE
                self._forget(home.space)  # what was kept of the rest would count as unchanged for ever
                continue
            except Error as exc:
                home.cut = True
                log.debug("the feed of space %s is cut: %s", home.space, exc)
            except Exception:
                home.cut = True
                log.exception("the feed of space %s cannot be followed", home.space)
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_S_MAX)

    def _flush(self, home: Followed) -> None:
        """Forget everything, and pass every read on until something is known again."""
        home.passing = True
        self.flushes += 1
        self._forget(home.space)
        home.shared_since_ms = self._clock.now_ms() + CLOCK_SKEW_MS

    async def _begin_again(self, home: Followed) -> bool:
        """After a gap. False when there is nothing to follow any more."""
        self._flush(home)
        while True:
            began = self._clock.now_ms()
            try:
                found = await self._engine.spaces(home.space)
                break
            except Error as exc:
                log.debug("space %s cannot be looked at: %s", home.space, exc)
                await asyncio.sleep(PAUSE_S_MAX)
        if not found or _passes(found[0]):
            await self.end(home.space)
            return False
        home.begin(found[0].revision, self._identity(found[0]))
        home.proved_ms, home.cut = began, False
        home.passing = False
        return True

    # --- whether the feed has told everything ---

    async def _look_again(self) -> None:
        """Look now and then, for as long as there is a tier."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Find out, wherever readers were answered since the last time, whether the feed has told everything there is."""
        asked = [home for home in self.spaces.values() if home.asked and not home.passing]
        if asked:
            await asyncio.gather(*map(self._look_at, asked))

    async def _look_at(self, home: Followed) -> None:
        began, identity, prefixes = self._clock.now_ms(), home.identity, home.prefixes
        home.asked = False  # whoever is answered from here on is answered after this look began
        try:
            async with asyncio.timeout(LOOK_ANSWER_S):
                found = await self._engine.spaces(home.space)
                reached = found[0].revision if found else 0
                quiet = reached > home.applied and bool(prefixes) and await self._is_quiet(home, prefixes)
                if quiet and identity is home.identity and prefixes is home.prefixes:
                    home.applied = max(home.applied, reached)
        except (Compacted, RateLimitExceeded) as exc:  # who follows finds out by itself; there is no hurry
            home.asked = True
            log.debug("whether the feed of space %s has told everything is not known: %s", home.space, exc)
            return
        except (Error, TimeoutError) as exc:
            home.asked = home.cut = True
            log.debug("how far space %s is cannot be told: %s", home.space, exc or "no answer")
            return
        if identity is not home.identity:
            return
        if reached <= home.applied:
            home.proved_ms, home.cut = max(home.proved_ms, began), False
        else:
            home.asked = True
            home.cut = home.cut or home.applied < home.awaited
        home.awaited = reached
        home.known = max(home.known, reached)

    async def _is_quiet(self, home: Followed, prefixes: tuple[str, ...]) -> bool:
        """Whether the feed has nothing that was not told, of what is followed."""
        last, cursor = 0, cursor_at(home.applied)
        async for commit in self._engine.watch(home.space, *prefixes, cursor=cursor, live=False):
            last = commit.version
        return last <= home.applied


def _passes(info: SpaceInfo) -> bool:
    """A volatile space is in memory already; where reads are audited, each of them must be."""
    return info.durability == "volatile" or info.audit_reads
