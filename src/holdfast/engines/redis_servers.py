"""Which server keeps a space, the connections to it, and what to do when it moves or goes away.

One server is where its URL says; a primary under Sentinel is where the sentinels say; in a cluster each space is on the
node that has its hash slot. `run` finds the server, connects, and lets the caller work on the link. When the server says
that it is not the one (MOVED, ASK, READONLY), is loading, or cannot be reached, the answer is looked for anew and the
work repeated, for at most PATIENCE_S. Errors of the driver and the server leave here as Holdfast's, by one table
(`translate`).

Reads and commits have a connection each: a commit may wait for replicas, and a large one takes its time on the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, Protocol, TypeVar

from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)

from holdfast.engines.redis_link import Link, Lost, Unreachable, ask, shown_address
from holdfast.engines.redis_url import Address, RedisUrl
from holdfast.errors import (
    AccessDenied,
    AuthenticationFailed,
    Damaged,
    Error,
    IncompatibleStore,
    InvalidInput,
    StorageFull,
    Unavailable,
)

PATIENCE_S: Final = 15.0
"""How long a server may be gone, or a failover may take, before callers are told."""
OPEN_PATIENCE_S: Final = 3.0
PAUSE_S: Final = 0.02
PAUSE_MAX_S: Final = 0.5
REDIRECTS_MAX: Final = 3

Purpose = Literal["commits", "reads"]
T = TypeVar("T")

ELSEWHERE: Final = (ReadOnlyError, MasterDownError, ClusterDownError, TryAgainError, BusyLoadingError)
"""What a server answers that has not done what it was asked, and may do it later, or another one will."""


class Finder(Protocol):
    """Knows the server of a space."""

    async def find(self, tag: str) -> Address:
        """Where the space with this hash tag is kept."""
        ...

    async def primaries(self) -> list[Address]:
        """Every server that keeps spaces."""
        ...

    async def confirms(self, address: Address) -> bool:
        """Whether a server that was just reached, and calls itself a primary, is still the one to use."""
        ...

    def has_replicas(self, address: Address) -> bool:
        """Whether a replica is known that may take over from this server."""
        ...

    def moved(self, slot: int, address: Address) -> None:
        """A server said where a slot is."""
        ...

    def forget(self) -> None:
        """What was known may be wrong: ask again."""
        ...


class Servers:
    """The servers of one store. `run` is the only way to them."""

    def __init__(self, url: RedisUrl) -> None:
        self.url = url
        self.finder = _FINDERS[url.kind](url)
        self._links: dict[tuple[Address, Purpose], Link] = {}
        self._before: dict[tuple[Address, Purpose], tuple[str, int]] = {}
        self._connecting: dict[tuple[Address, Purpose], asyncio.Lock] = {}
        self._closed = False
        self.connections = 0
        """How many connections were made: what was learned from a server holds no longer than this stands still."""

    async def open(self, tag: str) -> None:
        """Find out whether there is a server at all; who opens a store is not kept waiting for long."""

        async def work(link: Link, asking: bool) -> None:
            """It answers."""

        await self.run(tag, "reads", work, patience_s=OPEN_PATIENCE_S)

    async def run(
        self,
        tag: str,
        purpose: Purpose,
        work: Callable[[Link, bool], Awaitable[T]],
        *,
        patience_s: float | None = None,
        at: Address | None = None,
    ) -> T:
        """Do the work on the server that keeps this hash tag; it is repeated until a server has answered it.

        The work takes a link, and whether the server must be told that it is asked for a slot it is only receiving.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (PATIENCE_S if patience_s is None else patience_s)
        pause, redirects = PAUSE_S, 0
        asked: Address | None = None
        reason: Exception
        while True:
            link: Link | None = None
            try:
                link = await self._link(at or asked or await self.finder.find(tag), purpose)
                return await work(link, asked is not None)
            except AskError as exc:  # a MovedError is one too
                reason, redirects = exc, redirects + 1
                asked = self._redirected(exc, link)
                if redirects <= REDIRECTS_MAX:
                    continue
            except ELSEWHERE as exc:
                reason = exc
                if link is not None and isinstance(exc, ReadOnlyError):
                    link.retire()
            except (Unreachable, Lost) as exc:
                reason = exc
            except RedisError as exc:
                raise translate(exc) from exc
            asked, redirects = None, 0
            self.finder.forget()
            if loop.time() + pause > deadline:
                raise Unavailable(f"Redis cannot serve this now: {reason}") from reason
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_MAX_S)

    def _redirected(self, exc: AskError, link: Link | None) -> Address | None:
        """Where the next attempt goes if that is not where the finder says."""
        target = (exc.host or (link.address[0] if link else ""), exc.port)
        if not isinstance(exc, MovedError):
            return target
        if link is not None:
            link.retire()  # it may be a replica from now on
        self.finder.moved(exc.slot_id, target)
        return None

    async def _link(self, address: Address, purpose: Purpose) -> Link:
        """The link to a server, made anew if it has failed."""
        if self._closed:
            raise Unavailable("the store is closed")
        link = self._links.get((address, purpose))
        if link is not None and link.usable:
            return link
        async with self._connecting.setdefault((address, purpose), asyncio.Lock()):
            link = self._links.get((address, purpose))
            if link is not None:
                if link.usable:
                    return link
                del self._links[address, purpose]
                await link.close()
            link = await Link.connect(address, self.url, self._before.get((address, purpose)))
            self.connections += 1
            if self._closed or link.facts.role != "master":
                await link.close()
                if self._closed:
                    raise Unavailable("the store is closed")
                raise Unreachable(f"{shown_address(address)} is a replica; only its primary takes writes")
            if not await self.finder.confirms(address):
                await link.close()
                raise Unreachable(f"{shown_address(address)} calls itself the primary, and another one took over")
            self._links[address, purpose] = link
            self._before[address, purpose] = (link.facts.run_id, link.client_id)
            return link

    async def close(self) -> None:
        self._closed = True
        while self._links:
            _, link = self._links.popitem()
            await link.close()


def translate(exc: RedisError) -> Error:
    """What the server answered, as the error it means. None of these changed anything, unless it is in doubt anyway."""
    words = str(exc)
    if isinstance(exc, OutOfMemoryError) or "OOM command not allowed" in words:
        return StorageFull(f"the Redis server has reached its maxmemory; nothing was changed: {words}")
    if "No space left on device" in words:
        return StorageFull(f"the disk of the Redis server is full; nothing was changed: {words}")
    if isinstance(exc, NoPermissionError):
        return AccessDenied(f"the Redis user may not do this: {words}")
    if isinstance(exc, AuthenticationError):
        return AuthenticationFailed(f"the Redis server does not accept these credentials: {words}")
    code = words.partition(" ")[0]
    if code == "HFLAYOUT":
        return IncompatibleStore(f"the space has layout {words.partition(' ')[2]}; this version of Holdfast knows 1")
    if code == "HFREVISION":
        return InvalidInput("the space's revision is beyond what a Redis store can count to (2^53)")
    if code == "WRONGTYPE" or "HFDAMAGED" in words:
        return Damaged(f"what lies under the store's keys is not Holdfast's: {words}")
    return Unavailable(f"the Redis server refuses: {words}")


def left_no_trace(exc: RedisError) -> bool:
    """Whether a script that ended with this error has certainly written nothing.

    Redis refuses a command before it runs, or a script at its first write. Any other error may come after a write.
    """
    if isinstance(exc, (OutOfMemoryError, NoScriptError, AuthenticationError, AskError, *ELSEWHERE)):
        return True
    return str(exc).startswith(("HF", "MISCONF", "NOREPLICAS", "BUSY", "CROSSSLOT", "OOM"))


# --- one server ---


class _Single:
    """`Finder` of a URL that names its server."""

    def __init__(self, url: RedisUrl) -> None:
        self._url = url

    async def find(self, tag: str) -> Address:
        return self._url.addresses[0]

    async def primaries(self) -> list[Address]:
        return [self._url.addresses[0]]

    async def confirms(self, address: Address) -> bool:
        return True

    def has_replicas(self, address: Address) -> bool:
        return False

    def moved(self, slot: int, address: Address) -> None:
        host = shown_address(self._url.addresses[0])
        raise InvalidInput(f"{host} is a node of a cluster; open it as redis+cluster://{host}")

    def forget(self) -> None:
        pass


# --- sentinel ---


class _Sentinel(_Single):
    """`Finder` of a primary that sentinels watch. The first sentinel that answers counts.

    A primary that was killed and comes back takes itself for one until a sentinel tells it otherwise, which takes seconds. Who
    was told its address before the failover, and reaches it after, would commit what is thrown away, under versions that the
    new primary gives again. So the sentinels are asked once more when it was reached.
    """

    def __init__(self, url: RedisUrl) -> None:
        super().__init__(url)
        self._primary: Address | None = None

    async def find(self, tag: str) -> Address:
        if self._primary is None:
            self._primary = await self._ask()
        return self._primary

    async def _ask(self) -> Address:
        url = self._url
        reason: Exception = Unreachable("there is no sentinel")
        for sentinel in url.addresses:
            try:
                answer = await ask(
                    sentinel, url, url.sentinel_username, url.sentinel_password,
                    "SENTINEL", "GET-MASTER-ADDR-BY-NAME", url.master,
                )  # fmt: skip
            except (Unreachable, AuthenticationFailed) as exc:
                reason = exc
                continue
            if answer is not None:
                return answer[0].decode(), int(answer[1])
            reason = Unreachable(f"the sentinel {shown_address(sentinel)} knows no primary {url.master!r}")
        raise Unreachable(f"no sentinel names the primary: {reason}") from reason

    async def primaries(self) -> list[Address]:
        return [await self.find("")]

    async def confirms(self, address: Address) -> bool:
        try:
            return await self._ask() == address
        except Unreachable:
            return True  # nobody says otherwise

    def has_replicas(self, address: Address) -> bool:
        return True

    def forget(self) -> None:
        self._primary = None


# --- cluster ---


class _Cluster:
    """`Finder` in a cluster: the map of its hash slots, asked from any node that answers."""

    def __init__(self, url: RedisUrl) -> None:
        self._url = url
        self._slots: list[tuple[int, int, Address]] = []
        self._replicated: set[Address] = set()
        self._nodes: list[Address] = list(url.addresses)
        self._asking = asyncio.Lock()

    async def find(self, tag: str) -> Address:
        slot = key_slot(f"{{{tag}}}".encode())
        for first, last, address in await self._map():
            if first <= slot <= last:
                return address
        self.forget()
        raise Unreachable(f"no node of the cluster has slot {slot}")

    async def primaries(self) -> list[Address]:
        return list(dict.fromkeys(address for _, _, address in await self._map()))

    async def _map(self) -> list[tuple[int, int, Address]]:
        async with self._asking:
            if not self._slots:
                self._slots = await self._ask()
            return self._slots

    async def _ask(self) -> list[tuple[int, int, Address]]:
        url = self._url
        reason: Exception = Unreachable("there is no node")
        for node in dict.fromkeys([*self._nodes, *url.addresses]):
            try:
                answer = await ask(node, url, url.username, url.password, "CLUSTER", "SLOTS")
            except (Unreachable, AuthenticationFailed) as exc:
                reason = exc
                continue
            return self._learned(node, answer)
        raise Unreachable(f"no node of the cluster answers: {reason}") from reason

    def _learned(self, node: Address, answer: list[Any]) -> list[tuple[int, int, Address]]:
        slots: list[tuple[int, int, Address]] = []
        self._replicated = set()
        for first, last, primary, *replicas in answer:
            address = (primary[0].decode() if primary[0] else node[0], int(primary[1]))
            slots.append((first, last, address))
            if replicas:
                self._replicated.add(address)
        self._nodes = list(dict.fromkeys(address for _, _, address in slots)) or self._nodes
        return slots

    async def confirms(self, address: Address) -> bool:
        return True  # its nodes know of each other, and answer MOVED

    def has_replicas(self, address: Address) -> bool:
        return address in self._replicated

    def moved(self, slot: int, address: Address) -> None:
        """The whole map is asked anew, first of all from the node that has the slot now."""
        self.forget()
        self._nodes = [address, *self._nodes]

    def forget(self) -> None:
        self._slots = []


_FINDERS: Final[dict[str, Callable[[RedisUrl], Finder]]] = {
    "single": _Single,
    "sentinel": _Sentinel,
    "cluster": _Cluster,
}
