"""The feed of one space in Redis, as its tail reads it, and the bell that tells of new commits.

Each commit publishes its revision on the space's channel. An engine listens on one connection to all channels somebody
follows. A message only says that there is something: what happened is read from the feed (`feed_tail.py`), so a message that is lost
costs time and nothing else. Every POLL_S the feed is looked at without one, more often while there is no connection, and whenever
that was made anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from redis.asyncio.connection import Connection
from redis.exceptions import RedisError

from holdfast.engine import ChangeSet
from holdfast.engines.feed_tail import Tails
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
    """The feed of one space, as the server has it."""

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

    async def _read(self, after: int, limit: int) -> tuple[int, int, list[ChangeSet] | None]:
        """Floor, revision, and the commits after a position; None when there is no such position."""
        keys = self._engine.keys(self._space)
        floor, revision, ahead, *commits = await self._engine.script(
            self._space, FEED, [keys.feed, keys.meta], [after, limit, READ_BYTES]
        )
        return int(floor), int(revision), None if ahead else [commit_of(commit) for commit in commits]


class Bell:
    """The tails of what is watched, and the connection that hears of commits. It connects when somebody first watches."""

    def __init__(self, servers: Servers, source: Callable[[str], RedisFeed], channel: Callable[[str], str]) -> None:
        self.tails = Tails(source)
        self._servers = servers
        self._channel = channel
        self._spaces: dict[str, str] = {}
        """By channel: those that are, or will be, listened to."""
        self._confirmed: set[str] = set()
        self._connection: Connection | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def listen_to(self, space: str) -> None:
        """From here on its tail is told of commits."""
        channel = self._channel(space)
        known = self._spaces.setdefault(channel, space) and channel in self._confirmed
        if self._closed or known:
            return
        if not self._tasks:
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._listen()), loop.create_task(self._poll())]
        elif self._connection is not None:  # otherwise it is done once there is one
            with contextlib.suppress(RedisError, OSError):
                await self._connection.send_command("SUBSCRIBE", channel, check_health=False)

    async def close(self) -> None:
        self._closed = True
        self.tails.begin_anew()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
            self._tasks.clear()

    async def _poll(self) -> None:
        """The safety net, for a message that was lost."""
        while True:
            await asyncio.sleep(POLL_DEAF_S if self._connection is None else POLL_S)
            self.tails.look_all()

    async def _listen(self) -> None:
        """Connect, listen, and connect again, as long as the store is open."""
        while True:
            with contextlib.suppress(Unreachable, Error, RedisError, OSError):  # the tails look by themselves meanwhile
                await self._listen_once()
            self._confirmed.clear()
            self.tails.begin_anew()  # perhaps another server has taken over
            await asyncio.sleep(RECONNECT_S)

    async def _listen_once(self) -> None:
        url = self._servers.url
        [address, *_] = await self._servers.finder.primaries()
        connection = await open_connection(address, url, url.username, url.password)
        try:
            self._connection = connection
            if self._spaces:
                await connection.send_command("SUBSCRIBE", *self._spaces, check_health=False)
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
        space = self._spaces.get(channel)
        if space is None or kind not in (b"subscribe", b"message"):
            return
        if kind == b"subscribe":
            self._confirmed.add(channel)  # what was committed before is looked for below
        elif space not in self.tails:  # nobody watches it any more
            del self._spaces[channel]
            self._confirmed.discard(channel)
            await connection.send_command("UNSUBSCRIBE", channel, check_health=False)
        else:
            revision = int(payload[0])
            if revision > self.tails.reached(space):
                self.tails.look(space, revision)
                return
        self.tails.look(
            space
        )  # a revision that we have already: perhaps another server gives them, and the tail is not of it
