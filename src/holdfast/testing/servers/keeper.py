"""A private keeper: `holdfast serve` in a process of its own, on a folder and ports that survive restarts.

`kill` and `start` are a crash and a recovery. Its store is a file in its folder unless a URL names another. `admin` is the
administrator's token that its first start printed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.testing.servers.process import ServerProcess, free_port

LOOPBACK = "127.0.0.1"


class KeeperServer:
    """A keeper in `folder`; `settings` are those of its configuration file, besides `listen` and `store`."""

    def __init__(self, folder: Path, store: str | None = None, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = free_port()
        self.http_port = free_port()
        self.admin = ""
        self.ready_s = 0.0
        """How long its last start took, by its own account."""
        self.settings = {
            "store": store or f"resident:{folder}/store.db",
            "listen": {"binary": f"{LOOPBACK}:{self.port}", "http": f"{LOOPBACK}:{self.http_port}"},
            **settings,
        }
        self.config = folder / "keeper.yaml"
        self.log = folder / "keeper.log"
        self._process: ServerProcess | None = None
        self.write_settings()

    @classmethod
    @contextlib.contextmanager
    def temporary(cls, store: str | None = None, **settings: Any) -> Iterator[KeeperServer]:
        """A running keeper in a folder of its own; both are gone afterwards."""
        folder = Path(tempfile.mkdtemp(prefix="holdfast-keeper-"))
        server = cls(folder, store, **settings)
        try:
            server.start()
            yield server
        finally:
            server.stop()
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"holdfast://{LOOPBACK}:{self.port}"

    @property
    def http(self) -> str:
        return f"http://{LOOPBACK}:{self.http_port}"

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    def write_settings(self, **changes: Any) -> None:
        """What its configuration file says from now on. JSON is YAML."""
        self.settings |= changes
        new = self.config.with_suffix(".new")
        new.write_text(json.dumps(self.settings, indent=1))
        new.replace(self.config)

    def start(self) -> None:
        """Run it, and return when it takes requests."""
        seen = self.log.stat().st_size if self.log.exists() else 0
        command = [sys.executable, "-m", "holdfast", "serve", "--config", str(self.config), "--json"]
        self._process = ServerProcess(command, self.log)
        ready: list[dict[str, Any]] = []

        def is_ready() -> bool:
            for line in self.log.read_bytes()[seen:].splitlines():
                if line.startswith(b'{"store"'):
                    ready.append(json.loads(line))
            return bool(ready)

        self._process.start(is_ready)
        self.admin = ready[0].get("admin_token", self.admin)
        self.ready_s = float(ready[0]["seconds"])

    def stop(self) -> None:
        """SIGTERM: it finishes what it took."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """kill -9."""
        self._running.kill()

    def signal(self, which: signal.Signals) -> None:
        self._running.signal(which)

    def pause(self) -> None:
        """Alive, and silent."""
        self._running.pause()

    def resume(self) -> None:
        self._running.resume()

    @property
    def _running(self) -> ServerProcess:
        assert self._process is not None, "the keeper is not running"
        return self._process
