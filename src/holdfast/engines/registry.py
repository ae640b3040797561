"""Which URL is kept by which engine.

team.db, ./data/team.db, sqlite:team.db     a SQLite file
memory:                                     this process's memory
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.engines.memory import MemoryEngine
from holdfast.engines.sqlite import SqliteEngine
from holdfast.errors import InvalidInput

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*):(.*)", re.DOTALL)


async def _memory(rest: str, clock: Clock) -> Engine:
    if rest:
        raise InvalidInput(f"a memory store has no path: write 'memory:', not 'memory:{rest}'")
    return MemoryEngine(clock=clock)


async def _sqlite(rest: str, clock: Clock) -> Engine:
    return await SqliteEngine.open(_path(rest), clock=clock)


def _path(rest: str) -> Path:
    path = rest.removeprefix("//")
    if not path or "\0" in path:
        raise InvalidInput(f"{rest!r} is not a path of a store's file")
    return Path(path).expanduser().absolute()


def file_of(url: str) -> Path | None:
    """The file that keeps this store, if it is kept in one."""
    scheme, rest = split_url(url)
    return _path(rest) if scheme == "sqlite" else None


ENGINES: Final[dict[str, Callable[[str, Clock], Awaitable[Engine]]]] = {
    "memory": _memory,
    "sqlite": _sqlite,
}


def split_url(url: str) -> tuple[str, str]:
    """The scheme and the rest; a plain path is a SQLite file."""
    if not isinstance(url, str) or not url.strip():
        raise InvalidInput(f"a store is named by a path or a URL, not {url!r}")
    match = _SCHEME.fullmatch(url)
    if match is None or (match[1] not in ENGINES and "://" not in url):
        return "sqlite", url
    if match[1] not in ENGINES:
        known = ", ".join(f"{scheme}:" for scheme in sorted(ENGINES))
        raise InvalidInput(f"no engine for {match[1]}:// in this version; use a file's path, or one of {known}")
    return match[1], match[2]


async def open_engine(url: str, clock: Clock) -> Engine:
    """The engine that keeps this store, opened."""
    scheme, rest = split_url(url)
    return await ENGINES[scheme](rest, clock)
