"""What a manager is told when it starts. Each option is also one of the command line, under the same name."""

from __future__ import annotations

import os
import re
import socket
from typing import Final

import msgspec

from holdfast.clock import Duration, duration_ms
from holdfast.errors import InvalidInput

HOST_VARIABLE: Final = "HOLDFAST_HOST"
"""Names the host, where the machine's own name is not what is meant."""
IDLE_S: Final = 600
LEASE_S: Final = 10
GRACE_S: Final = 10
CONCURRENCY_MAX: Final = 10_000
_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


def this_host() -> str:
    """The name of this host."""
    given = os.environ.get(HOST_VARIABLE) or socket.gethostname()
    return re.sub(r"[^A-Za-z0-9_.-]", "-", given).lstrip("_.-")[:64] or "localhost"


def default_concurrency() -> int:
    """Twice as many tasks as there are cores that this process may use."""
    return 2 * len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2 * (os.cpu_count() or 1)


class ManagerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a manager serves. Durations are in seconds, or text such as "5m"."""

    host: str = msgspec.field(default_factory=this_host)
    concurrency: int = msgspec.field(default_factory=default_concurrency)
    """Tasks that run at once."""
    idle: Duration = IDLE_S
    """How long it stays without work."""
    lease: Duration = LEASE_S
    """How long after its death others take over what it had; also how long it tries to reach its store before it ends that."""
    grace: Duration = GRACE_S
    """What tasks get to come to their end when the manager is told to stop."""
    blobs: str | None = None
    """The folder for outputs that are too large; by default beside the store, or, where that is no file, beside its log."""
    allow_modules: tuple[str, ...] = ()
    allow_commands: tuple[str, ...] = ()
    allow_env: tuple[str, ...] = ()
    restrict: bool = False
    """Run nothing but what is allowed; so it is as soon as anything is."""
    preload: tuple[str, ...] = ()
    """Modules that are imported once; functions that need them start faster."""

    def __post_init__(self) -> None:
        if _HOST.fullmatch(self.host) is None:
            raise InvalidInput(f"a host's name is letters, digits, '_', '-' and '.', at most 64, not {self.host!r:.80}")
        if type(self.concurrency) is not int or not 0 < self.concurrency <= CONCURRENCY_MAX:
            raise InvalidInput(f"concurrency is between 1 and {CONCURRENCY_MAX:,}, not {self.concurrency!r}")
        for name in ("idle", "lease", "grace"):
            duration_ms(getattr(self, name), name=name)

    @property
    def is_restricted(self) -> bool:
        """Whether there is a list of what may be run."""
        return self.restrict or bool(self.allow_modules or self.allow_commands or self.allow_env)
