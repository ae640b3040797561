"""A private etcd: one member, in a folder of its own, on free ports of the loopback. Each put is fsynced, as it does by default."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

from holdfast.testing.servers.process import ServerProcess, find_program, free_port

LOOPBACK: Final = "127.0.0.1"


class EtcdServer:
    """A running member; MissingServer when it is not installed (Debian: package etcd-server)."""

    def __init__(self, folder: Path) -> None:
        program = find_program("etcd")
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        client, peer = f"http://{LOOPBACK}:{self.port}", f"http://{LOOPBACK}:{free_port()}"
        command = [program, "--data-dir", str(folder / "data"), "--logger", "zap", "--log-level", "error"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", f"default={peer}", "--quota-backend-bytes", str(8 * 2**30)]
        self._process = ServerProcess(command, folder / "etcd.log")

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        self._process.start(self._answers)

    def stop(self) -> None:
        self._process.stop()

    def pause(self) -> None:
        self._process.pause()

    def resume(self) -> None:
        self._process.resume()

    def _answers(self) -> bool:
        """Whether it says that it is healthy: it has a leader then."""
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=1) as connection:
                connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                return b'"true"' in connection.makefile("rb").read()
        except OSError:
            return False
