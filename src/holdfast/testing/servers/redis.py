"""Private Redis servers: one, a cluster, or a primary with replicas and sentinels.

Each server has a folder of its own and keeps its port across restarts, so `kill` and `start` are a crash and a recovery.
By default it keeps an append-only file and fsyncs every write, which is what durability `sync` needs.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from holdfast.testing.servers.process import ServerProcess, find_program, free_port, wait_until

DEFAULTS: Final = {
    "appendonly": "yes",
    "appendfsync": "always",
    "save": "",
    "repl-diskless-sync-delay": "0",
    "shutdown-timeout": "0",
}
SLOTS: Final = 16384
LOOPBACK: Final = "127.0.0.1"
BUS_OFFSET: Final = 10_000
"""The bus of a cluster's node has its port plus this: none that an outgoing connection may be given, either."""


class RedisServer:
    """A server in `folder`. `options` are lines of its configuration, with underscores for dashes.

    Replicas are synchronised and servers stopped without the pauses that a busy service needs.
    """

    def __init__(self, folder: Path, **options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._folder = folder
        self._options = DEFAULTS | {name.replace("_", "-"): value for name, value in options.items()}
        self._process: ServerProcess | None = None

    @classmethod
    @contextlib.contextmanager
    def temporary(cls, **options: str) -> Iterator[RedisServer]:
        """A running server in a folder of its own; both are gone afterwards."""
        with _temporary_folder() as folder:
            server = cls(folder, **options)
            try:
                server.start()
                yield server
            finally:
                server.stop()

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.address}"

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    def start(self) -> None:
        """Run it, on the data and the port it had before, and return when it has loaded them."""
        lines = [f"port {self.port}", f"bind {LOOPBACK}", f'dir "{self._folder}"', "daemonize no", "loglevel notice"]
        for name, value in self._options.items():
            lines.append(f"{name} {value or chr(34) * 2}")
        configuration = self._folder / "redis.conf"
        if not configuration.exists():  # Sentinel rewrites it
            configuration.write_text("\n".join(lines) + "\n")
        self._process = ServerProcess(self._command(configuration), self._folder / "redis.log")
        self._process.start(self._answers)

    def stop(self) -> None:
        """End it, even while it writes its first append-only file, when a signal alone is refused."""
        if self._process is not None:
            if self._process.running:
                self._process.resume()
                with contextlib.suppress(OSError):
                    self.command("SHUTDOWN", "NOSAVE", "NOW", "FORCE")
            self._process.stop()

    def kill(self) -> None:
        """kill -9."""
        self._running.kill()

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        """Alive, and silent."""
        self._running.pause()

    def resume(self) -> None:
        self._running.resume()

    def command(self, *words: str) -> str:
        """Send one command and give the first line of the answer, or all of a longer text; for tests that look from outside."""
        with socket.create_connection((LOOPBACK, self.port), timeout=5) as connection:
            parts = "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in words)
            connection.sendall(f"*{len(words)}\r\n{parts}".encode())
            with connection.makefile("rb") as answer:
                line: bytes = answer.readline()
                if line.startswith(b"$") and line != b"$-1\r\n":
                    return answer.read(int(line[1:])).decode(errors="replace")
                return line.decode().strip()

    def info(self, section: str = "everything") -> dict[str, str]:
        """What INFO tells."""
        pairs = (line.partition(":") for line in self.command("INFO", section).splitlines())
        return {name: value for name, colon, value in pairs if colon}

    @property
    def _running(self) -> ServerProcess:
        assert self._process is not None, "the server was not started"
        return self._process

    def _command(self, configuration: Path) -> list[str]:
        return [find_program("redis-server"), str(configuration)]

    def _answers(self) -> bool:
        try:
            return self.command("PING") in ("+PONG", "-NOAUTH Authentication required.")
        except OSError:
            return False


class _ClusterNode(RedisServer):
    def __init__(self, folder: Path, **options: str) -> None:
        super().__init__(folder, **options)
        self.port = free_port(beside=BUS_OFFSET)


class RedisCluster:
    """Primaries that share the slots, each with some replicas."""

    def __init__(self, folder: Path, *, primaries: int = 3, replicas: int = 0, **options: str) -> None:
        options = {"cluster_enabled": "yes", "cluster_node_timeout": "2000", **options}
        count = primaries * (1 + replicas)
        self.servers = [_ClusterNode(folder / str(number), **options) for number in range(count)]
        self.primaries = self.servers[:primaries]
        """Those that were given the slots; a failover changes who has them."""

    @classmethod
    @contextlib.contextmanager
    def temporary(cls, *, primaries: int = 3, replicas: int = 0, **options: str) -> Iterator[RedisCluster]:
        with _temporary_folder() as folder:
            cluster = cls(folder, primaries=primaries, replicas=replicas, **options)
            try:
                cluster.start()
                yield cluster
            finally:
                cluster.stop()

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(server.address for server in self.primaries)

    def start(self) -> None:
        for server in self.servers:
            server.start()
        first, share = self.servers[0], -(-SLOTS // len(self.primaries))
        for number, server in enumerate(self.primaries):
            last = min((number + 1) * share, SLOTS) - 1
            server.command("CLUSTER", "ADDSLOTSRANGE", str(number * share), str(last))
            server.command("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
        for server in self.servers[1:]:
            server.command("CLUSTER", "MEET", LOOPBACK, str(first.port))
        self._wait("the nodes to know each other", lambda server: _state(server, "known_nodes", len(self.servers)))
        for number, server in enumerate(self.servers[len(self.primaries) :]):
            primary = self.primaries[number % len(self.primaries)]
            server.command("CLUSTER", "REPLICATE", primary.command("CLUSTER", "MYID"))
        self._wait("the cluster to be complete", lambda server: _state(server, "state", "ok"))
        if len(self.servers) > len(self.primaries):
            self._wait("the replicas to be in step", _in_step)

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def _wait(self, what: str, ready: Callable[[RedisServer], bool]) -> None:
        for server in self.servers:
            wait_until(lambda server=server: ready(server), what)  # type: ignore[misc]


class RedisSentinels:
    """A primary, its replicas, and three sentinels that fail over within about two seconds."""

    NAME: Final = "main"

    def __init__(self, folder: Path, *, replicas: int = 1, **options: str) -> None:
        self.primary = RedisServer(folder / "primary", **options)
        of_primary = {**options, "replicaof": f"{LOOPBACK} {self.primary.port}"}
        self.replicas = [RedisServer(folder / f"replica-{number}", **of_primary) for number in range(replicas)]
        self.sentinels = [_Sentinel(folder / f"sentinel-{number}", self.primary.port) for number in range(3)]

    @classmethod
    @contextlib.contextmanager
    def temporary(cls, *, replicas: int = 1, **options: str) -> Iterator[RedisSentinels]:
        with _temporary_folder() as folder:
            group = cls(folder, replicas=replicas, **options)
            try:
                group.start()
                yield group
            finally:
                group.stop()

    @property
    def url(self) -> str:
        return "redis+sentinel://" + ",".join(each.address for each in self.sentinels) + f"/{self.NAME}"

    def start(self) -> None:
        self.primary.start()
        for replica in self.replicas:
            replica.start()
            wait_until(lambda replica=replica: _in_step(replica), "the replica to be in step")  # type: ignore[misc]
        for sentinel in self.sentinels:
            sentinel.start()
        for sentinel in self.sentinels:
            wait_until(
                lambda sentinel=sentinel: (
                    f"slaves={len(self.replicas)},sentinels=3" in sentinel.info("sentinel").get("master0", "")
                ),  # type: ignore[misc]
                "the sentinels to know each other",
            )

    def stop(self) -> None:
        for server in (*self.sentinels, *self.replicas, self.primary):
            server.stop()


class _Sentinel(RedisServer):
    def __init__(self, folder: Path, primary_port: int) -> None:
        super().__init__(folder)
        name = RedisSentinels.NAME
        self._options = {
            "sentinel": f"monitor {name} {LOOPBACK} {primary_port} 2\n"
            f"sentinel down-after-milliseconds {name} 1000\n"
            f"sentinel failover-timeout {name} 5000"
        }

    def _command(self, configuration: Path) -> list[str]:
        return [*super()._command(configuration), "--sentinel"]


def _state(server: RedisServer, name: str, value: object) -> bool:
    lines = server.command("CLUSTER", "INFO").splitlines()
    return f"cluster_{name}:{value}" in lines


def _in_step(server: RedisServer) -> bool:
    info = server.info("replication")
    return info.get("role") == "master" or info.get("master_link_status") == "up"


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="holdfast-redis-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
