"""One connection to one Redis server, shared by everybody who speaks to it.

Commands go out in the order of their callers and answers come back in that order, so any number of tasks use the
connection at the same time without waiting for each other. The driver connects, authenticates and parses; there is no
pool, because one connection that is always busy does more than many that wait.

How it fails. `Unreachable`: nothing was sent. `Lost`: the connection ended, or stayed silent for REPLY_S, while an answer
was awaited, so what was sent may have been done. A link that failed is not used again. Whoever connects next first ends
the old connection on the server (CLIENT KILL), so that nothing sent through it can still take effect after that.

What the server guarantees (`Facts`) is asked when a link connects and again every FACTS_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from hiredis import pack_command
from redis.asyncio.connection import Connection, SSLConnection
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoScriptError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as DriverTimeout

from holdfast.engines.redis_packing import Argument
from holdfast.engines.redis_scripts import Script
from holdfast.engines.redis_url import Address, RedisUrl
from holdfast.errors import AuthenticationFailed, IncompatibleStore

CONNECT_S: Final = 5.0
REPLY_S: Final = 60.0
"""How long a server may be silent while an answer is awaited."""
FACTS_S: Final = 60.0
VERSION_MIN: Final = (6, 2)


class Unreachable(Exception):
    """No server answers there; nothing was sent."""


class Lost(Exception):
    """The connection ended while an answer was awaited: what was sent may have been done."""


class Facts(msgspec.Struct, frozen=True):
    """What a server says of itself."""

    version: str
    run_id: str
    role: str
    aof: bool
    fsync: str | None
    """`appendfsync`; None when CONFIG is forbidden and nothing is asserted."""
    skips_fsync: bool
    """`no-appendfsync-on-rewrite`: a rewrite of the file suspends the fsync."""
    policy: str
    memory_max: int
    replicas: int
    promoted: bool
    """It took over from another server, in this life."""
    info: dict[str, str] = {}

    @property
    def syncs(self) -> bool:
        """Every write is on disk before its reply."""
        return self.aof and self.fsync == "always" and not self.skips_fsync

    @property
    def evicts(self) -> bool:
        """A full memory makes room at our cost. Policies `volatile-*` remove only keys with a ttl, and we have none."""
        return self.policy.startswith("allkeys-")

    @property
    def durabilities(self) -> tuple[str, ...]:
        """What spaces may ask for here."""
        if self.evicts:
            return ("volatile",)
        return ("sync", "async", "volatile") if self.syncs else ("async", "volatile")


class Link:
    """A connection that is open, until it fails or is closed. Made by `connect`."""

    def __init__(self, address: Address, connection: Connection, url: RedisUrl) -> None:
        self.address = address
        self.facts: Facts
        self.client_id = 0
        self._url = url
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._facts_at = self._loop.time()
        self._pending: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._failure: str | None = None
        self._retired = False
        self._reader = self._loop.create_task(self._read())
        self._watch = self._loop.call_later(REPLY_S, self._look_for_silence)

    @classmethod
    async def connect(cls, address: Address, url: RedisUrl, before: tuple[str, int] | None = None) -> Link:
        """Connect. `before` is the run id and client id of the link that this one replaces."""
        connection = await open_connection(address, url, url.username, url.password, url.db)
        link = cls(address, connection, url)
        try:
            link.facts = await link.ask_facts()
            with contextlib.suppress(ResponseError):  # where it is not allowed there is no fence
                link.client_id = await link.call("CLIENT", "ID")
                if before is not None and before[0] == link.facts.run_id:
                    await link.call("CLIENT", "KILL", "ID", before[1])
        except Lost as exc:
            await link.close()
            raise Unreachable(str(exc)) from exc
        except BaseException:
            await link.close()
            raise
        return link

    @property
    def usable(self) -> bool:
        return self._failure is None and not self._retired

    def retire(self) -> None:
        """Take no more commands; those under way are answered."""
        self._retired = True

    async def call(self, *command: Argument) -> Any:
        """Send a command and give its answer; an error the server answers with is raised."""
        [answer] = await self.call_all(command)
        if isinstance(answer, RedisError):
            raise answer
        return answer

    async def call_all(self, *commands: tuple[Argument, ...]) -> list[Any]:
        """Send commands together, in one round trip. Errors the server answers with are among the answers."""
        connection = self._connection
        if self._failure is not None or not connection.is_connected:
            raise Unreachable(self._failure or f"the connection to {self._where} is closed")
        sent_at = self._loop.time()
        awaited: list[asyncio.Future[Any]] = []
        for _ in commands:
            future = self._loop.create_future()
            awaited.append(future)
            self._pending.append((future, sent_at))
        data = b"".join(pack_command(command) for command in commands)  # type: ignore[arg-type]
        try:
            # It writes before it first gives way, so that commands and those who wait are in the same order.
            await connection.send_packed_command(data, check_health=False)
        except (RedisError, OSError) as exc:
            self._fail(f"the connection to {self._where} broke: {exc}")
        return [await future for future in awaited]

    async def run(
        self,
        script: Script,
        keys: list[str],
        arguments: list[Argument],
        *also: tuple[Argument, ...],
        asking: bool = False,
    ) -> list[Any]:
        """Run a script, and send `also` behind it in the same round trip. A server that does not know the script learns it."""
        first: list[tuple[Argument, ...]] = [("ASKING",)] if asking else []
        command = ("EVALSHA", script.sha, len(keys), *keys, *arguments)
        answers = await self.call_all(*first, command, *also)
        if isinstance(answers[len(first)], NoScriptError):
            await self.call("SCRIPT", "LOAD", script.text)
            answers = await self.call_all(*first, command, *also)
        answers = answers[len(first) :]
        if isinstance(answers[0], RedisError):
            raise answers[0]
        return answers

    async def fresh_facts(self) -> Facts:
        """What the server guarantees, not older than FACTS_S."""
        if self._loop.time() - self._facts_at > FACTS_S:
            self.facts = await self.ask_facts()
            self._facts_at = self._loop.time()
        return self.facts

    async def close(self) -> None:
        """Wait for the answers under way, then disconnect."""
        self._retired = True
        while self._pending:
            await asyncio.wait([future for future, _ in self._pending])
        self._fail(f"the connection to {self._where} is closed")
        self._watch.cancel()
        self._reader.cancel()
        await asyncio.wait([self._reader])
        with contextlib.suppress(RedisError, OSError):
            await self._connection.disconnect()

    @property
    def _where(self) -> str:
        return shown_address(self.address)

    async def _read(self) -> None:
        """Give each answer to whoever waits for it."""
        connection, pending = self._connection, self._pending
        while True:
            answer: Any
            try:
                answer = await connection.read_response(disable_decoding=True, disconnect_on_error=False)
            except (ResponseError, BusyLoadingError, AuthenticationError) as exc:
                answer = exc
            except (RedisError, OSError) as exc:
                self._fail(f"the connection to {self._where} broke: {exc}")
                return
            if not pending:
                self._fail(f"{self._where} answers what was not asked")
                return
            future, _ = pending.popleft()
            if not future.done():
                future.set_result(answer)

    def _look_for_silence(self) -> None:
        if self._pending and self._loop.time() - self._pending[0][1] >= REPLY_S:
            self._fail(f"{self._where} has not answered for {REPLY_S:g} s")
            self._reader.cancel()
        elif self._failure is None:
            self._watch = self._loop.call_later(REPLY_S / 4, self._look_for_silence)

    def _fail(self, reason: str) -> None:
        """Nothing is sent any more, and whoever waits is told."""
        if self._failure is None:
            self._failure = reason
        while self._pending:
            future, _ = self._pending.popleft()
            if not future.done():
                future.set_exception(Lost(reason))
                future.exception()  # whoever waited may be gone

    async def ask_facts(self) -> Facts:
        info, config = await self.call_all(("INFO",), ("CONFIG", "GET", "*append*"))
        if isinstance(info, RedisError):
            raise info
        told = parse_info(info)
        if told.get("loading", "0") != "0":  # until then it says of itself what is not so, such as that it keeps no log
            raise Lost("the server is still loading its data")
        return facts_of(
            told,
            None if isinstance(config, RedisError) else config,
            asserted=self._url.asserted,
        )


def parse_info(info: bytes) -> dict[str, str]:
    """The lines of INFO."""
    lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def facts_of(info: Mapping[str, str], config: list[bytes] | None, *, asserted: bool) -> Facts:
    """What INFO and CONFIG GET tell; a server that is too old is refused."""
    version = info.get("redis_version", "0")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < VERSION_MIN:
        raise IncompatibleStore(
            f"this server is Redis {version}; Holdfast needs {'.'.join(map(str, VERSION_MIN))} or newer"
        )
    settings = (
        {name.decode(): value.decode() for name, value in zip(config[::2], config[1::2], strict=True)} if config else {}
    )
    second = info.get("master_replid2", "")
    return Facts(
        version=version,
        run_id=info.get("run_id", ""),
        role=info.get("role", "master"),
        aof=asserted or info.get("aof_enabled") == "1",
        fsync="always" if asserted else settings.get("appendfsync"),
        skips_fsync=not asserted and settings.get("no-appendfsync-on-rewrite") == "yes",
        policy=info.get("maxmemory_policy", ""),
        memory_max=int(info.get("maxmemory", "0")),
        replicas=int(info.get("connected_slaves", "0")),
        promoted=second.strip("0") != "",
        info=dict(info),
    )


async def open_connection(
    address: Address, url: RedisUrl, username: str | None, password: str | None, db: int = 0
) -> Connection:
    """A connection of the driver, connected and authenticated."""
    options: dict[str, Any] = {
        "host": address[0],
        "port": address[1],
        "db": db,
        "username": username,
        "password": password,
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": None,
        "socket_keepalive": True,
        "client_name": "holdfast",
        "protocol": 2,
        **_driver(),
    }
    if url.tls and url.ca is not None:
        options["ssl_ca_certs"] = url.ca
    connection = (SSLConnection if url.tls else Connection)(**options)
    try:
        async with asyncio.timeout(CONNECT_S):
            await connection.connect()  # type: ignore[no-untyped-call]
    except BusyLoadingError as exc:
        await _abandon(connection)
        raise Unreachable(f"{shown_address(address)} is loading its data") from exc
    except AuthenticationError as exc:
        await _abandon(connection)
        raise AuthenticationFailed(f"{shown_address(address)} does not accept these credentials: {exc}") from exc
    except (RedisError, OSError, TimeoutError, DriverTimeout) as exc:
        await _abandon(connection)
        raise Unreachable(f"cannot connect to {shown_address(address)}: {exc or type(exc).__name__}") from exc
    except BaseException:
        await _abandon(connection)
        raise
    return connection


@functools.cache
def _driver() -> dict[str, Any]:
    """What the driver tells a server of itself. By default it reads its package's metadata for every connection."""
    try:
        from redis.driver_info import DriverInfo
    except ImportError:  # an older driver reads them once
        return {}
    return {"driver_info": DriverInfo()}


async def ask(address: Address, url: RedisUrl, username: str | None, password: str | None, *command: Argument) -> Any:
    """One question to a server that is not kept: a sentinel, or a node that tells the others."""
    connection = await open_connection(address, url, username, password)
    try:
        async with asyncio.timeout(CONNECT_S):
            await connection.send_command(*command)
            return await connection.read_response(disable_decoding=True)
    except (RedisError, OSError, TimeoutError) as exc:
        raise Unreachable(f"{shown_address(address)} does not answer: {exc or type(exc).__name__}") from exc
    finally:
        await _abandon(connection)


async def _abandon(connection: Connection) -> None:
    with contextlib.suppress(RedisError, OSError):
        await connection.disconnect(nowait=True)


def shown_address(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
