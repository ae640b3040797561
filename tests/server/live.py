"""Clients of a keeper that runs as a process: tokens, the real command line, HTTP, and frames written by hand."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import holdfast
from holdfast import Space, Store
from holdfast.clock import SystemClock
from holdfast.engine import Batch, Condition, Operation
from holdfast.identity import Role
from holdfast.layers.tokens import Tokens
from holdfast.testing.servers.keeper import KeeperServer
from holdfast.wire import (
    PROTOCOL,
    REPLY_BYTES_MAX,
    Changes,
    Commit,
    Failed,
    Frames,
    Goodbye,
    Hello,
    Message,
    Watching,
    Welcome,
    decode_reply,
    frame,
    raised,
)

SPACE = "contoso"
DEADLINE_S = 30.0

if importlib.util.find_spec("sniffio") is None:
    # httpx's transport looks for this six times a request. What is known to be missing is not looked for on the disk.
    sys.modules["sniffio"] = None  # type: ignore[assignment]

NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Whom a client of plain HTTP trusts. By default each would load the certificates of the world, which takes 40 ms."""


async def make_token(
    keeper: KeeperServer, name: str, space: str = SPACE, role: Role = "agent", ttl: str | None = None
) -> str:
    """A new token, made through the keeper."""
    async with holdfast.open(keeper.url, token=keeper.admin) as store:
        where = None if role == "admin" else space
        text, _ = await Tokens(store.engine, SystemClock(), "admin").create(name, where, role, ttl)
        return str(text)


async def revoke(keeper: KeeperServer, which: str) -> None:
    async with holdfast.open(keeper.url, token=keeper.admin) as store:
        await Tokens(store.engine, SystemClock(), "admin").revoke(which)


@asynccontextmanager
async def client(
    keeper: KeeperServer, name: str, space: str = SPACE, role: Role = "agent"
) -> AsyncIterator[tuple[Store, Space]]:
    """A store and a space as an agent with a new token has them."""
    token = await make_token(keeper, name, space, role)
    async with holdfast.open(keeper.url, token=token) as store:
        yield store, store.space(space)


def http(keeper: KeeperServer, token: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.AsyncClient(base_url=keeper.http, headers=headers, timeout=DEADLINE_S, verify=NOBODY)


def rss_of(pid: int) -> int:
    """The bytes of memory that a process has."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


# --- the command line ---


@dataclass(frozen=True)
class Outcome:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def clean_environment(**settings: str) -> dict[str, str]:
    """The environment without settings of ours, but these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return kept | settings


def run(*args: str, folder: Path | None = None, **settings: str) -> Outcome:
    """The real command, with these settings in its environment."""
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *args],
        cwd=folder,
        env=clean_environment(**settings),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def command(keeper: KeeperServer, *args: str, token: str | None = None, code: int = 0) -> Outcome:
    """The real command against a keeper, as its administrator unless another token is given."""
    done = run(
        *args, folder=keeper.folder, HOLDFAST_STORE=keeper.url, HOLDFAST_TOKEN=keeper.admin if token is None else token
    )
    assert done.code == code, done
    return done


# --- frames by hand ---


@dataclass
class Hand:
    """A client that knows the frames and nothing else: it sends what it is told."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    agent: str = ""
    frames: Frames = field(default_factory=lambda: Frames(REPLY_BYTES_MAX))
    told: list[Message] = field(default_factory=list)
    """Changes and goodbyes that came in between."""
    _ids: int = 0

    async def next(self) -> Any:
        """The next message; EOFError when there is none any more."""
        while not (found := self.frames.take(1)):
            data = await asyncio.wait_for(self.reader.read(65536), DEADLINE_S)
            if not data:
                raise EOFError
            self.frames.feed(data)
        return decode_reply(found[0])

    def id(self) -> int:
        self._ids += 1
        return self._ids

    async def ask(self, message: Any) -> Any:
        """Send it, and give its answer; a refusal is raised."""
        self.writer.write(frame(message))
        return await self.answer(message.id)

    async def answer(self, id: int) -> Any:
        while True:
            reply = await self.next()
            if isinstance(reply, Changes | Goodbye | Watching):
                self.told.append(reply)
            elif isinstance(reply, Failed) and reply.id in (id, 0):
                raise raised(reply)
            elif reply.id == id:
                return reply

    async def commit(
        self,
        *operations: Operation,
        space: str = SPACE,
        actor: str | None = None,
        when: tuple[Condition, ...] = (),
        request_id: str | None = None,
        fresh: bool = False,
    ) -> Any:
        batch = Batch(actor or self.agent, operations, when, request_id, fresh)
        return (await self.ask(Commit(self.id(), space, batch))).receipt

    async def close(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def by_hand(
    keeper: KeeperServer, token: str, name: str = "by-hand", *, together: bool = False
) -> AsyncIterator[Hand]:
    reader, writer = await asyncio.open_connection("127.0.0.1", keeper.port)
    hand = Hand(reader, writer)
    try:
        writer.write(frame(Hello(PROTOCOL, token, name, together)))
        welcome = await hand.next()
        if isinstance(welcome, Failed):
            raise raised(welcome)
        assert isinstance(welcome, Welcome)
        hand.agent = welcome.identity.agent
        yield hand
    finally:
        await hand.close()
