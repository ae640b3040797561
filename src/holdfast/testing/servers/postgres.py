"""A private PostgreSQL server: a new cluster in a folder, on a free port of the loopback.

PostgreSQL refuses to run as root. Started by root, it runs as the system's user `postgres`, and that user must be able to
reach the folder: one inside another user's private folder is refused by name. `temporary()` makes a folder that works.

fsync is on, because the tests are about durability. Nothing else listens: no Unix socket, no other address. The superuser
comes in without a password; whoever tests passwords makes the role `guarded`, which needs one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Final

from holdfast.testing.servers.process import PATIENCE_S, ServerProcess, find_program, free_port, wait_until

USER: Final = "postgres"
"""Who runs the server when we are root, and its superuser."""

SETTINGS: Final = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "fsync": "on",
    "logging_collector": "off",
    "dynamic_shared_memory_type": "mmap",  # a server that is killed leaves nothing outside its folder
}

ACCESS: Final = """\
host all guarded 127.0.0.1/32 scram-sha-256
host all all 127.0.0.1/32 trust
host replication all 127.0.0.1/32 trust
"""


class PostgresServer:
    """A cluster in `folder`, made when it is started for the first time; `settings` are added to its configuration."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self._folder = folder
        self._data = folder / "data"
        self._settings = SETTINGS | settings
        self._user = USER if os.getuid() == 0 else None
        self.port = free_port()
        self._process = ServerProcess(
            [_program("postgres"), "-D", str(self._data), "-p", str(self.port)],
            folder / "postgres.log",
            user=self._user,
        )

    @classmethod
    @contextlib.contextmanager
    def temporary(cls, **settings: str) -> Iterator[PostgresServer]:
        """A running server in a folder of its own; both are gone afterwards."""
        folder = Path(tempfile.mkdtemp(prefix="holdfast-postgres-"))
        try:
            server = cls(folder, **settings)
            try:
                server.start()
                yield server
            finally:
                # At once, without a last checkpoint: nobody needs the data any more.
                server._process.stop(signal.SIGQUIT)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def url(self) -> str:
        """The database everybody may use."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.running

    def start(self) -> None:
        """Run it, on the data and the port it had before, and return when it lets clients in."""
        if not self._data.exists():
            self._make_cluster()
        self._process.start(self._answers)

    def stop(self) -> None:
        """The fast shutdown: clients are disconnected, everything is written."""
        self._process.stop(signal.SIGINT)

    def kill(self) -> None:
        """kill -9 of the server and all its processes, as a crash of the machine ends them, but for what the disk has."""
        os.kill(self.pid, signal.SIGSTOP)  # from now on it starts no other, and does not tidy up
        doomed = _children(self.pid)
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        wait_until(lambda: not any(map(_is_alive, doomed)), "the server's processes to end")

    def pause(self) -> None:
        """Stop every process of the server where it stands."""
        for pid in (self.pid, *_children(self.pid)):
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in (*_children(self.pid), self.pid):
            os.kill(pid, signal.SIGCONT)

    def _make_cluster(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._user is not None:
            shutil.chown(self._folder, self._user)
            self._check_reachable()
        _run(self._user, "cp", "-a", str(_template(self._user)), str(self._data))
        with (self._data / "postgresql.conf").open("a") as configuration:
            configuration.writelines(f"{name} = '{value}'\n" for name, value in self._settings.items())
        (self._data / "pg_hba.conf").write_text(ACCESS)

    def _check_reachable(self) -> None:
        for parent in self._folder.absolute().parents:
            if not parent.stat().st_mode & 0o001:
                raise RuntimeError(f"user {self._user} cannot reach {self._folder}: {parent} is private to its owner")

    def _answers(self) -> bool:
        """Whether it lets clients in: the answer to a start-up packet is then a request to log in, and an error before."""
        packet = b"\0\x03\0\0user\0" + USER.encode() + b"\0database\0postgres\0\0"
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                probe.sendall((len(packet) + 4).to_bytes(4, "big") + packet)
                return probe.recv(1) == b"R"
        except OSError:
            return False


@functools.cache
def _template(user: str | None) -> Path:
    """A new cluster, made once in a process and copied for each server: initdb takes a second of a core, a copy a twentieth."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-postgres-"))
    atexit.register(_remove, folder, os.getpid())
    if user is not None:
        shutil.chown(folder, user)
    options = ("-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync", "--locale=C")
    _run(user, _program("initdb"), "-D", str(folder / "data"), *options)
    return folder / "data"


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a child that was forked from it
        shutil.rmtree(folder, ignore_errors=True)


def _run(user: str | None, *command: str) -> None:
    made = subprocess.run(command, user=user, cwd="/", capture_output=True, text=True, timeout=PATIENCE_S)
    if made.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{made.stdout}{made.stderr}")


def _program(name: str) -> str:
    newest_first = sorted(glob("/usr/lib/postgresql/*/bin"), key=lambda path: -float(Path(path).parent.name))
    return find_program(name, *newest_first, "/opt/homebrew/bin", "/usr/local/pgsql/bin")


def _is_alive(pid: int) -> bool:
    """Whether a process still runs; one that nobody has collected yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _children(pid: int) -> list[int]:
    """The processes a process has started; Linux only, as PR_SET_PDEATHSIG is."""
    with contextlib.suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
