"""A binary port over a memory engine, in the test's own loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from holdfast.clock import ManualClock
from holdfast.engine import Engine
from holdfast.engines.memory import MemoryEngine
from holdfast.engines.remote import RemoteEngine
from holdfast.errors import AuthenticationFailed, Error
from holdfast.identity import EVERY_SPACE, Identity
from holdfast.middleware.denials import Denial
from holdfast.server.binary import BinaryPort, Limits
from holdfast.server.refusals import PortName
from holdfast.space import Space

ADMIN = "hf_admin"
AGENT = "hf_agent"


@dataclass
class Doorkeeper:
    """Knows two tokens, and lets both see everything."""

    clock: ManualClock
    engine: Engine
    tokens: dict[str, Identity] = field(
        default_factory=lambda: {
            ADMIN: Identity("admin", "admin", EVERY_SPACE, "1"),
            AGENT: Identity("market", "agent", "contoso", "2"),
        }
    )
    away: list[str] = field(default_factory=list)
    """Why somebody was turned away."""

    def authenticate(self, token: str) -> Identity:
        if token not in self.tokens:
            raise AuthenticationFailed("the token is not valid")
        return self.tokens[token]

    def is_valid(self, identity: Identity) -> bool:
        return identity in self.tokens.values()

    def engine_for(self, identity: Identity) -> Engine:
        return self.engine

    def space_for(self, identity: Identity, name: str) -> Space:
        raise NotImplementedError

    def denied(self, denial: Denial, seconds: float) -> None:
        pass

    def turned_away(self, port: PortName, error: Error, peer: str) -> None:
        self.away.append(str(error))

    def require(self, identity: Identity, space: str, verb: str) -> None:
        raise NotImplementedError

    def look_at_rate(self, identity: Identity) -> None:
        raise NotImplementedError

    def charge(self, identity: Identity) -> None:
        raise NotImplementedError

    def require_watch(self, identity: Identity, space: str, prefixes: tuple[str, ...]) -> None:
        pass

    def ready(self) -> str | None:
        return None


@dataclass
class Running:
    """A port that listens."""

    port: BinaryPort
    number: int
    keeper: Doorkeeper
    observed: list[tuple[str, str]]
    stack: AsyncExitStack

    async def client(self, token: str = ADMIN, port: int | None = None) -> RemoteEngine:
        engine = await RemoteEngine.open(f"holdfast://127.0.0.1:{port or self.number}", token=token)
        self.stack.push_async_callback(engine.close)
        return engine


Serve = Callable[..., Awaitable[Running]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(engine: Engine | None = None, limits: Limits | None = None) -> Running:
            clock, observed = ManualClock(), list[tuple[str, str]]()
            keeper = Doorkeeper(clock, engine or MemoryEngine(clock=clock))
            port = BinaryPort(
                keeper,
                limits or Limits(),
                lambda op, outcome, _, count=1: observed.extend([(op, outcome)] * count),
                sole_owner=True,
            )
            number = await port.listen("127.0.0.1", 0)
            stack.push_async_callback(port.stop, "the test is over", 1.0)
            return Running(port, number, keeper, observed, stack)

        yield start


@pytest.fixture
async def running(serve: Serve) -> Running:
    return await serve()
