"""The feed of one space in Redis, as `feed.follow` reads it, and the bell that tells of new commits.

Each commit publishes its revision on the space's channel. An engine listens on one connection to all channels somebody
follows. A message only wakes: what happened is read from the feed, after the follower's own position, so a message that
is lost costs time and nothing else. A follower looks by itself every POLL_S, more often while there is no connection, and
whenever it was made anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Final

from redis.asyncio.connection import Connection
from redis.exceptions import RedisError

from holdfast.engine import ChangeSet
from holdfast.engines.redis_link import Unreachable, open_connection
from holdfast.engines.redis_packing import commit_of
from holdfast.engines.redis_scripts import FEED
from holdfast.engines.redis_servers import Servers
from holdfast.errors import Compacted, Error

if TYPE_CHECKING:
    from holdfast.engines.redis_engine import RedisEngine

POLL_S: Final = 5.0
POLL_DEAF_S: Final = 0.5
RECONNECT_S: Final = 0.25
SILENCE_S: Final = 10.0
"""After this much silence the server is asked whether it is there; after as much again it is not."""
READ_BYTES: Final = 4 * 1024 * 1024
"""About how much of the feed is read at once."""


class RedisFeed:
    """`Feed` of one space."""

    def __init__(self, engine: RedisEngine, space: str) -> None:
        self._engine = engine
        self._space = space

    async def bounds(self) -> tuple[int, int]:
        floor, revision, _ = await self._read(0, 0)
        return floor, revision

    async def read(self, after: int, limit: int) -> list[ChangeSet]:
        floor, revision, commits = await self._read(after, limit)
        if after < floor:
            raise Compacted(f"the feed begins after revision {floor} and this watch stands at {after}")
        if commits is None:
            raise Compacted(
                f"this watch stands at revision {after}, which this server does not have: another one took over, and the "
                f"latest commits were lost; read the state afresh and watch from now (revision {revision})"
            )
        return commits

    async def changed(self, after: int) -> None:
        await self._engine.bell.wait(self, self._space, after)

    async def _read(self, after: int, limit: int) -> tuple[int, int, list[ChangeSet] | None]:
        """Floor, revision, and the commits after a position; None when there is no such position."""
        keys = self._engine.keys(self._space)
        floor, revision, ahead, *commits = await self._engine.script(
            self._space, FEED, [keys.feed, keys.meta], [after, limit, READ_BYTES]
        )
        return int(floor), int(revision), None if ahead else [commit_of(commit) for commit in commits]


class Bell:
    """Who waits for which space, and the connection that hears of commits. It connects when somebody first waits."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._followers: dict[str, weakref.WeakSet[RedisFeed]] = {}
        self._latest: dict[str, int] = {}
        """The last revision heard of, of the channels that are listened to."""
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._connection: Connection | None = None
        self._listener: asyncio.Task[None] | None = None
        self._closed = False

    async def wait(self, feed: RedisFeed, space: str, after: int) -> None:
        """Return when a commit after this revision may have happened."""
        channel = feed._engine.keys(space).bell
        self._followers.setdefault(channel, weakref.WeakSet()).add(feed)
        if self._closed or self._latest.get(channel, -1) > after:
            return
        if self._listener is None:
            self._listener = asyncio.get_running_loop().create_task(self._listen())
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(channel, set()).add(waiter)
        try:
            if channel not in self._latest:
                await self._subscribe(channel)  # its confirmation wakes, so that what came before is read
            async with asyncio.timeout(POLL_S if channel in self._latest else POLL_DEAF_S):
                await waiter
        except TimeoutError:
            pass
        finally:
            waiting = self._waiting[channel]
            waiting.discard(waiter)
            if not waiting:
                del self._waiting[channel]

    def ring(self) -> None:
        """Wake everybody."""
        for channel in list(self._waiting):
            self._wake(channel)

    async def close(self) -> None:
        self._closed = True
        self.ring()
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])
            self._listener = None

    def _wake(self, channel: str) -> None:
        for waiter in self._waiting.get(channel, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def _listen(self) -> None:
        """Connect, listen, and connect again, as long as the store is open."""
        while True:
            with contextlib.suppress(Unreachable, Error, RedisError, OSError):  # followers look by themselves meanwhile
                await self._listen_once()
            self._latest.clear()
            self.ring()
            await asyncio.sleep(RECONNECT_S)

    async def _listen_once(self) -> None:
        url = self._servers.url
        [address, *_] = await self._servers.finder.primaries()
        connection = await open_connection(address, url, url.username, url.password)
        try:
            self._connection = connection
            if self._followers:
                await connection.send_command("SUBSCRIBE", *self._followers, check_health=False)
            asked = False
            while True:
                message = await connection.read_response(disable_decoding=True, timeout=SILENCE_S)
                if message is not None:
                    asked = False
                    await self._heard(connection, *message)
                elif asked:
                    return
                else:
                    asked = True
                    await connection.send_command("PING", check_health=False)
        finally:
            self._connection = None
            with contextlib.suppress(RedisError, OSError):
                await connection.disconnect(nowait=True)

    async def _heard(self, connection: Connection, kind: bytes, name: bytes, *payload: Any) -> None:
        channel = name.decode()
        if kind == b"subscribe":
            self._latest.setdefault(channel, -1)
        elif kind != b"message":
            return
        elif self._followers.get(channel):
            self._latest[channel] = int(payload[0])
        else:
            await self._unsubscribe(connection, channel)
        self._wake(channel)

    async def _subscribe(self, channel: str) -> None:
        if self._connection is not None:  # otherwise it is done once there is one
            with contextlib.suppress(RedisError, OSError):
                await self._connection.send_command("SUBSCRIBE", channel, check_health=False)

    async def _unsubscribe(self, connection: Connection, channel: str) -> None:
        """Nobody follows this channel any more."""
        self._followers.pop(channel, None)
        self._latest.pop(channel, None)
        await connection.send_command("UNSUBSCRIBE", channel, check_health=False)
