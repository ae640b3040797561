"""A keeper for the tests of the HTTP port: a real store, a dictionary of tokens, and no rules."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from holdfast import ManualClock, Space, Store
from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.errors import AuthenticationFailed, Error
from holdfast.identity import Identity
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.middleware.denials import Denial
from holdfast.server.http import HttpServer, Limits, make_app, serve_http
from holdfast.server.refusals import PortName
from tests.server.live import NOBODY

MARKET, RISK, LEAD, ADMIN, FOREIGN = "hf_market", "hf_risk", "hf_lead", "hf_admin", "hf_foreign"
TOKENS = {
    MARKET: Identity("market", "agent", "contoso", "t1"),
    RISK: Identity("risk", "agent", "contoso", "t2"),
    LEAD: Identity("lead", "orchestrator", "contoso", "t3"),
    ADMIN: Identity("root", "admin", "*", "t4"),
    FOREIGN: Identity("market", "agent", "fabrikam", "t5"),
}


@dataclass
class Keeper:
    """What the ports need, over a store."""

    store: Store
    clock: Clock = field(default_factory=ManualClock)
    revoked: set[str] = field(default_factory=set)
    reason: str | None = None
    around: Callable[[Engine], Engine] = lambda engine: engine
    """What stands between the port and the store: the place of rules."""
    charged: list[str] = field(default_factory=list)
    """Whose requests came to nothing."""

    def __post_init__(self) -> None:
        self.coordination = Coordination(Leases(self.clock, renew=False))

    def authenticate(self, token: str) -> Identity:
        if token not in TOKENS or token in self.revoked:
            raise AuthenticationFailed("unknown")
        return TOKENS[token]

    def is_valid(self, identity: Identity) -> bool:
        return not any(TOKENS[token].token_id == identity.token_id for token in self.revoked)

    def engine_for(self, identity: Identity) -> Engine:
        return self.around(self.store.engine)

    def space_for(self, identity: Identity, name: str) -> Space:
        scope = self.store._scope(name, identity.agent, engine=self.around(self.store.engine))
        return Space(scope, self.store._blob_folder, self.coordination)

    def denied(self, denial: Denial, seconds: float) -> None:
        pass

    def turned_away(self, port: PortName, error: Error, peer: str) -> None:
        pass

    def require(self, identity: Identity, space: str, verb: str) -> None:
        """There are no rules."""

    def look_at_rate(self, identity: Identity) -> None:
        """There are no rates."""

    def charge(self, identity: Identity) -> None:
        self.charged.append(identity.agent)

    def require_watch(self, identity: Identity, space: str, prefixes: tuple[str, ...]) -> None:
        """There are no rules."""

    def ready(self) -> str | None:
        return self.reason


@dataclass
class Running:
    """A keeper whose HTTP port is open."""

    keeper: Keeper
    server: HttpServer
    url: str

    def client(self, token: str | None = MARKET, **options: object) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30, verify=NOBODY, **options)  # type: ignore[arg-type]


@asynccontextmanager
async def running(
    keeper: Keeper,
    *,
    limits: Limits | None = None,
    metrics: Callable[[], bytes] | None = None,
    metrics_open: bool = False,
    path: Path | None = None,
) -> AsyncIterator[Running]:
    """The port of a keeper, open at a free port of this machine."""
    app = make_app(keeper, limits=limits, metrics=metrics, metrics_open=metrics_open)
    server = await serve_http(app, port=0, path=path)
    try:
        yield Running(keeper, server, f"http://127.0.0.1:{server.port}")
    finally:
        await server.stop()
        await keeper.coordination.close()
