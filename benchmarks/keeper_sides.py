"""The keeper and its peers, each a private server with a process of clients, ready to take turns.

Whoever is not in turn is stopped (SIGSTOP), so that nobody's background work, ours least of all, falls into another's turn.
A peer that is not installed is left out, and a line on stderr says so. The keeper runs as `holdfast serve` does: resident
store, sync, feed, audit, metrics, and policies with limits that are never reached.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import holdfast
from benchmarks import server_peers
from benchmarks.children import Child, children
from benchmarks.etcd_server import EtcdServer
from benchmarks.keeper_clients import CONNECTIONS
from benchmarks.rounds import Turn
from holdfast.clock import SystemClock
from holdfast.layers.tokens import Tokens
from holdfast.testing.servers.keeper import KeeperServer
from holdfast.testing.servers.postgres import PostgresServer
from holdfast.testing.servers.process import MissingServer
from holdfast.testing.servers.redis import RedisServer

SPACE: Final = "bench"
GENEROUS: Final = {
    "rate_limits": [{"agent_pattern": "*", "max_ops_per_second": 1e9, "burst": 1_000_000_000}],
    "quotas": [{"agent_pattern": "*", "max_keys_per_agent": 10**8, "max_total_size": "100 GB"}],
}
PEERS: Final = ("etcd", "redis", "postgres")
LABELS: Final = {
    "etcd": f"etcd, its gRPC on {CONNECTIONS['etcd']} connections",
    "redis": f"{server_peers.REDIS}, appendfsync always, {CONNECTIONS['redis']} connections",
    "postgres": f"{server_peers.POSTGRES}, {CONNECTIONS['postgres']} connections",
}


class Pausable(Protocol):
    """A server that can stand still."""

    @property
    def pid(self) -> int: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


@dataclass
class Spent:
    """What was done in all turns of one kind."""

    took_us: list[int] = field(default_factory=list)
    server_s: float = 0.0
    client_s: float = 0.0

    def quantile_ms(self, part: float) -> float:
        return sorted(self.took_us)[int(len(self.took_us) * part)] / 1000

    @property
    def server_us(self) -> float:
        """CPU of the server per operation."""
        return 1e6 * self.server_s / len(self.took_us)

    @property
    def client_us(self) -> float:
        return 1e6 * self.client_s / len(self.took_us)

    def told(self, prefix: str = "") -> dict[str, Any]:
        figures = {"p50_ms": self.quantile_ms(0.5), "p99_ms": self.quantile_ms(0.99)}
        figures |= {"server_cpu_us": self.server_us, "client_cpu_us": self.client_us}
        return {prefix + name: figure for name, figure in figures.items()}


class Side:
    """A server and its clients."""

    def __init__(self, server: Pausable, clients: Child) -> None:
        self.server = server
        self._clients = clients
        self.spent: dict[tuple[int, bool], Spent] = {}

    @property
    def clients_pid(self) -> int:
        return self._clients.pid

    def turn(self, in_flight: int, *, one_name: bool = False) -> Turn:
        """So many tasks at once; gives the rate."""
        spent = self.spent.setdefault((in_flight, one_name), Spent())

        async def turn(seconds: float) -> float:
            self.server.resume()
            before = cpu_s(self.server.pid)
            self._clients.tell(in_flight=in_flight, one_name=one_name, seconds=seconds)
            answer = self._clients.answer()
            spent.server_s += cpu_s(self.server.pid) - before
            self.server.pause()
            spent.client_s += answer["cpu_s"]
            spent.took_us += answer["took_us"]
            return float(len(answer["took_us"]) / answer["took_s"])

        return turn


def cpu_s(pid: int) -> float:
    """CPU time of a process and its children, to the nanosecond, whoever runs it."""
    below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(time.clock_gettime((~int(each) << 3) | 2) for each in (pid, *below))


def rss_bytes(pid: int) -> int:
    """Memory of a process as it is."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def new_keeper(folder: Path) -> KeeperServer:
    """One that is not started yet."""
    return KeeperServer(folder, policies=GENEROUS, log={"level": "warning"})


async def agent_token(keeper: KeeperServer, space: str = SPACE) -> str:
    async with holdfast.open(keeper.url, token=keeper.admin) as store:
        secret, _ = await Tokens(store.engine, SystemClock()).create("bench", space, "agent")
    return str(secret)


@contextmanager
def serving(keeper: KeeperServer) -> Iterator[KeeperServer]:
    keeper.start()
    try:
        yield keeper
    finally:
        if keeper.running:
            keeper.resume()
        keeper.stop()


class Sides:
    """All that take part, as long as they are needed. `async with Sides(folder, job) as sides:`."""

    def __init__(self, folder: Path, job: str, peers: tuple[str, ...] = PEERS) -> None:
        self._folder = folder
        self._job = job
        self._peers = peers
        self._stack = ExitStack()
        self.sides: dict[str, Side] = {}

    async def __aenter__(self) -> Sides:
        try:
            keeper = self._stack.enter_context(serving(new_keeper(self._folder / "keeper")))
            token = await agent_token(keeper)
            self._join("ours", keeper, {"url": keeper.url, "token": token})
            for name in self._peers:
                try:
                    START[name](self)
                except MissingServer as exc:
                    print(f"# {name} is left out of keeper_{self._job}: {exc}", file=sys.stderr)
        except BaseException:
            self._stack.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        for side in self.sides.values():
            side.server.resume()
        self._stack.close()

    @property
    def present(self) -> list[str]:
        """The peers that take part."""
        return [name for name in self.sides if name != "ours"]

    def told(self, peer: str, in_flight: int, *, one_name: bool = False) -> dict[str, Any]:
        """How long an operation took, and what CPU, ours and a peer's."""
        ours, theirs = (self.sides[name].spent[in_flight, one_name] for name in ("ours", peer))
        return ours.told() | theirs.told("peer_")

    def _join(self, kind: str, server: Pausable, target: dict[str, Any]) -> None:
        [clients] = self._stack.enter_context(children(1, "benchmarks.keeper_clients"))
        clients.tell(kind=kind, job=self._job, **target)
        clients.answer()
        server.pause()
        self.sides[kind] = Side(server, clients)

    def _etcd(self) -> None:
        server = EtcdServer(self._folder / "etcd")
        server.start()
        self._stack.callback(server.stop)
        self._join("etcd", server, {"port": server.port})

    def _redis(self) -> None:
        server = RedisServer(self._folder / "redis")
        server.start()
        self._stack.callback(server.stop)
        self._join("redis", server, {"url": server.url})

    def _postgres(self) -> None:
        server = self._stack.enter_context(PostgresServer.temporary())
        server_peers.make_table(server.url)
        self._join("postgres", server, {"url": server.url})


START: Final[dict[str, Callable[[Sides], None]]] = {
    "etcd": Sides._etcd,
    "redis": Sides._redis,
    "postgres": Sides._postgres,
}
