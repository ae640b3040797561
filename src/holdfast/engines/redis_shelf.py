"""The shelf of a hot tier in Redis: copies that processes share.

Keys. `<prefix>:cache:{<space>.<store>}:entry:<key>` and `…:page:<prefix>`: 19 digits of the revision at which it was read,
then the copy, with a ttl. All copies of a space have one hash tag, so they are on one node of a cluster. `<store>` is a
hash of the store's URL and of the space's beginning: stores that share a Redis server do not see each other's.

How it works. A copy is put by a script that compares revisions: one of an earlier revision never replaces a later one,
however late it arrives. Nobody removes copies. Whether one is new enough is for the reader to judge; Redis may evict
any, lose all, or come back with old ones.

How it fails. It does not: a server that is away, silent for REPLY_S, full or forbidden is a shelf without copies. After a
failure nobody waits for it again until a connection was made in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from redis.exceptions import RedisError

from holdfast.engines.redis_link import Link, Lost, Unreachable
from holdfast.engines.redis_scripts import Script
from holdfast.engines.redis_servers import Servers
from holdfast.engines.redis_url import parse
from holdfast.errors import Error, Unavailable

REPLY_S: Final = 0.25
"""How long a reader waits for Redis before it asks the durable engine."""
OPEN_S: Final = 1.0
"""How long one who opens a store waits for a server that is silent; for one that is not there nobody waits."""
PAUSE_S: Final = 0.1
PAUSE_S_MAX: Final = 5.0
"""Between two attempts to connect."""
ANSWER_S: Final = 5.0
"""How long a server may take to connect and answer, when nobody waits for it."""
AT_DIGITS: Final = 19

_PUT: Final = """\
local there = redis.call('GETRANGE', KEYS[1], 0, 18)
if there > ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1] .. ARGV[2], 'PX', ARGV[3])
return 1
"""
PUT: Final = Script("cache_put", _PUT, hashlib.sha1(_PUT.encode(), usedforsecurity=False).hexdigest())
_FAILURES: Final = (Error, Lost, Unreachable, RedisError, OSError, TimeoutError)

log = logging.getLogger("holdfast.cache")


class RedisShelf:
    """Copies in Redis. Use `await RedisShelf.open(url)`; a server that cannot be reached is tried again and again."""

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition(":")
        self._url = parse(scheme, rest)
        self._servers = Servers(self._url)
        self._ready = False
        self._closed = False
        self._errors = 0
        self._connecting: asyncio.Task[None] | None = None
        self._patience = _Patience(REPLY_S)

    @classmethod
    async def open(cls, url: str) -> RedisShelf:
        shelf = cls(url)
        try:
            async with asyncio.timeout(OPEN_S):
                await shelf._servers.run(shelf._url.prefix, "reads", _ping, patience_s=0)
            shelf._ready = True
        except _FAILURES as exc:
            shelf._failed(exc)
        except BaseException:
            await shelf.close()
            raise
        return shelf

    @property
    def errors(self) -> int:
        return self._errors

    async def get(self, space: str, name: str) -> bytes | None:
        copy = await self._run(space, _asking(("GET", self._key(space, name))))
        return copy[AT_DIGITS:] if isinstance(copy, bytes) else None

    async def get_all(self, space: str, names: list[str]) -> list[bytes | None]:
        copies = await self._run(space, _asking(("MGET", *(self._key(space, name) for name in names))))
        if not isinstance(copies, list) or len(copies) != len(names):
            return [None] * len(names)
        return [copy[AT_DIGITS:] if isinstance(copy, bytes) else None for copy in copies]

    async def put(self, space: str, name: str, at: int, copy: bytes, ttl_ms: int) -> bool:
        key, digits = self._key(space, name), f"{at:0{AT_DIGITS}d}"

        async def work(link: Link, asking: bool) -> Any:
            return (await link.run(PUT, [key], [digits, copy, ttl_ms], asking=asking))[0]

        return bool(await self._run(space, work) == 1)

    async def close(self) -> None:
        self._closed = True
        self._ready = False
        self._patience.close()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        with contextlib.suppress(*_FAILURES):
            await self._servers.close()

    def _key(self, space: str, name: str) -> str:
        return f"{self._url.prefix}:cache:{{{_tag(space)}}}:{name}"

    async def _run(self, space: str, work: Any) -> Any:
        """What the server answers; None when it does not."""
        if not self._ready:
            return None
        try:
            with self._patience:
                return await self._servers.run(_tag(space), "reads", work, patience_s=0)
        except _FAILURES as exc:
            self._errors += 1
            if isinstance(exc, Error) and type(exc) is not Unavailable:
                log.debug("the cache in Redis refused: %s", exc)  # it is full, perhaps, and still gives what it has
            else:
                self._failed(exc)
            return None

    def _failed(self, exc: BaseException) -> None:
        if self._ready or self._connecting is None:
            log.warning("the cache in Redis is not used, the durable engine is asked: %s", exc or type(exc).__name__)
        self._ready = False
        if not self._closed and (self._connecting is None or self._connecting.done()):
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        pause = PAUSE_S
        while True:
            await asyncio.sleep(pause)
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._servers.run(self._url.prefix, "reads", _ping, patience_s=0)
            except _FAILURES as exc:
                log.debug("the cache in Redis cannot be reached: %s", exc)
                pause = min(2 * pause, PAUSE_S_MAX)
            else:
                self._ready = True
                return


class _Patience:
    """What `asyncio.timeout` does, with one timer for all: one per question costs a sixth of what the answer does.

    Whoever has waited for `seconds` is cancelled, and gets a TimeoutError; some wait up to twice as long.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: dict[asyncio.Task[Any] | None, float] = {}
        self._given_up: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        self._waiting[asyncio.current_task()] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._look)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        task = asyncio.current_task()
        del self._waiting[task]
        if task is not None and task in self._given_up:
            self._given_up.discard(task)
            if task.uncancel() == 0 and kind is asyncio.CancelledError:
                raise TimeoutError(f"no answer within {self._seconds:g} s") from exc

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        for task, since in self._waiting.items():
            if task is not None and task not in self._given_up and loop.time() - since >= self._seconds:
                self._given_up.add(task)
                task.cancel()
        if self._waiting:
            self._timer = loop.call_later(self._seconds, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _asking(command: tuple[str, ...]) -> Callable[[Link, bool], Awaitable[Any]]:
    """One command, as `Servers.run` takes it."""

    async def work(link: Link, asking: bool) -> Any:
        first: list[tuple[str, ...]] = [("ASKING",)] if asking else []
        answer = (await link.call_all(*first, command))[-1]
        if isinstance(answer, RedisError):
            raise answer
        return answer

    return work


async def _ping(link: Link, asking: bool) -> None:
    await link.call("PING")


def _tag(space: str) -> str:
    """A hash tag ends at the first brace."""
    return space.replace("{", "%7B").replace("}", "%7D")
