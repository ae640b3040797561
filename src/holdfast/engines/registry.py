"""Which URL is kept by which engine.

team.db, ./data/team.db, sqlite:team.db     a SQLite file
resident:team.db                            the same file with one owner, which has it in memory
memory:                                     this process's memory
redis://host, rediss://, redis+sentinel://, redis+cluster://     Redis; `redis_url.py` has the options
postgresql://user@host/database?schema=holdfast                  PostgreSQL; other options are libpq's
holdfast://host:7420, holdfasts://, holdfast+unix:///path        a keeper, which asks for a token

What looks like a URL and is none of these is refused: a store that was mistyped must not become an empty file of that name. A
file whose name looks like a URL is named with its folder: ./foo:bar.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.engines.private import real_path
from holdfast.errors import InvalidInput

if TYPE_CHECKING:
    from holdfast.engines.redis_shelf import RedisShelf

REDIS: Final = ("redis", "rediss", "redis+sentinel", "redis+cluster")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_OPTIONS: Final = re.compile(r".*?(\?\w+)=\w*(?:&\w+=\w*)*", re.DOTALL)
_BESIDE: Final = "-managers"
"""The longest ending of what is kept beside a store's file."""


async def _memory(rest: str, clock: Clock) -> Engine:
    if rest:
        raise InvalidInput(f"a memory store has no path: write 'memory:', not 'memory:{rest}'")
    from holdfast.engines.memory import MemoryEngine

    return MemoryEngine(clock=clock)


async def _sqlite(rest: str, clock: Clock) -> Engine:
    from holdfast.engines.sqlite import SqliteEngine

    return await SqliteEngine.open(_path(rest), clock=clock)


async def _resident(rest: str, clock: Clock) -> Engine:
    from holdfast.engines.resident import ResidentEngine

    return await ResidentEngine.open(_path(rest), clock=clock)


def _redis(scheme: str) -> Callable[[str, Clock], Awaitable[Engine]]:
    async def open_redis(rest: str, clock: Clock) -> Engine:
        try:
            from holdfast.engines.redis_engine import RedisEngine
        except ModuleNotFoundError as exc:
            raise InvalidInput(f"{scheme}:// needs the Redis driver: pip install 'holdfast[redis]'") from exc
        return await RedisEngine.open(f"{scheme}:{rest}", clock=clock)

    return open_redis


async def _postgres(rest: str, clock: Clock) -> Engine:
    try:
        from holdfast.engines.postgres import PostgresEngine
    except ModuleNotFoundError as exc:
        raise InvalidInput("postgresql:// needs the PostgreSQL driver: pip install 'holdfast[postgres]'") from exc
    return await PostgresEngine.open(f"postgresql:{rest}", clock=clock)


async def _remote(scheme: str, rest: str, token: str | None) -> Engine:
    from holdfast.engines.remote import RemoteEngine, address_of

    if token is None:
        address_of(f"{scheme}:{rest}")
        raise InvalidInput(
            f"{scheme}:{rest} is a keeper, which asks for a token: set HOLDFAST_TOKEN, or give token= or --token"
        )
    return await RemoteEngine.open(f"{scheme}:{rest}", token=token)


def _path(rest: str) -> Path:
    path = rest.removeprefix("//")
    check_path(path, "a store's file")
    try:
        return real_path(Path(path).expanduser())
    except RuntimeError as exc:
        raise InvalidInput(
            f"{path!r} begins with the home of a user that is not known; write './{path}' if it is a name"
        ) from exc


def check_path(path: str, what: str) -> None:
    """Refuse what no file system takes as the path of something."""
    if not path or "\0" in path:
        raise InvalidInput(f"{path!r:.60} is not a path of {what}")
    try:
        os.lstat(os.path.expanduser(path) + _BESIDE)
    except UnicodeEncodeError:
        raise InvalidInput(f"{path!r:.60} is not a path of {what}: it is not valid Unicode text") from None
    except OSError as exc:
        if exc.errno == errno.ENAMETOOLONG:
            size = len(os.fsencode(path))
            raise InvalidInput(
                f"the path of {what} {path[:40]!a}… is {size:,} bytes long, which is more than the file system takes"
            ) from exc


def path_url(path: os.PathLike[str]) -> str:
    """The URL of a file, also where its name looks like another's."""
    text = os.fspath(path)
    looks = isinstance(text, str) and (_SCHEME.fullmatch(text) or text.lower() in _MEMORY)
    return f"./{text}" if looks else text


def file_of(url: str) -> Path | None:
    """The file that keeps this store, if it is kept in one."""
    scheme, rest = split_url(url)
    return _path(rest) if scheme in ("sqlite", "resident") else None


ENGINES: Final[dict[str, Callable[[str, Clock], Awaitable[Engine]]]] = {
    "memory": _memory,
    "sqlite": _sqlite,
    "resident": _resident,
    **{scheme: _redis(scheme) for scheme in REDIS},
    "postgresql": _postgres,
    "postgres": _postgres,
}


KEEPERS: Final = ("holdfast", "holdfasts", "holdfast+unix")
"""Schemes of stores that are reached through a keeper, which asks for a token."""


_MEMORY: Final = ("memory", ":memory:")
"""What other programs, or people in a hurry, call a store in memory."""


def split_url(url: str) -> tuple[str, str]:
    """The scheme and the rest; a plain path is a SQLite file.

    Refusals name the scheme alone: a URL may have a password in it.
    """
    if not isinstance(url, str) or not url.strip():
        raise InvalidInput(f"a store is named by a path or a URL, not {url!r}")
    match = _SCHEME.fullmatch(url)
    scheme, rest = ("sqlite", url) if match is None else (match[1], match[2])
    if scheme not in (*ENGINES, *KEEPERS):
        raise InvalidInput(_unknown(scheme, rest))
    if match is None and url.lower() in _MEMORY:
        raise InvalidInput(f"a store in memory is named 'memory:', not {url!r}; a file of that name is './{url}'")
    if match is not None and scheme in ("sqlite", "resident"):
        if rest.lstrip("/") == ":memory:":
            raise InvalidInput(f"a store in memory is named 'memory:', not '{scheme}:{rest}'")
        options = _OPTIONS.fullmatch(rest)
        if options is not None:
            raise InvalidInput(
                f"a store in a file takes no options: leave '{options[1]}=…' out of its URL. If that belongs to the file's name, "
                "name it by its path alone: ./name"
            )
    return scheme, rest


def _unknown(scheme: str, rest: str) -> str:
    """What to say of a scheme that no engine has."""
    lower = scheme.lower()
    if lower in (*ENGINES, *KEEPERS):
        return f"no engine for {scheme}:, which is written in small letters: {lower}:"
    if lower in ("http", "https"):
        return (
            f"no engine for {scheme}://; a keeper is reached by holdfast://HOST:7420, or holdfasts:// with TLS, and its HTTP port "
            "is for other programs"
        )
    if lower == "file":
        return "no engine for file:; a store in a file is named by the file's path alone, such as team.db or ./team.db"
    if rest.isdecimal():
        return f"{scheme}:{rest} is no store; a keeper is reached by holdfast://HOST:PORT, and a file of that name by ./{scheme}:{rest}"
    known = ", ".join(f"{each}:" for each in sorted((*ENGINES, *KEEPERS)))
    slashes = "//" if rest.startswith("//") else ""
    return (
        f"no engine for {scheme}:{slashes} in this version; use a file's path, which is written ./{scheme}:… if its name has a "
        f"colon, or one of {known}"
    )


def shown_url(url: str) -> str:
    """A store's URL as it may be told: without a password, and without options, of which some are secret."""
    scheme, rest = split_url(url)
    if scheme in ("sqlite", "resident", "memory"):
        return url
    return f"{scheme}:" + re.sub(r"^//[^/]*@", "//", rest.partition("?")[0])


async def open_engine(url: str, clock: Clock, token: str | None = None) -> Engine:
    """The engine that keeps this store, opened. Only a keeper asks for a token."""
    scheme, rest = split_url(url)
    if scheme in KEEPERS:
        return await _remote(scheme, rest, token)
    if token is not None:
        raise InvalidInput(f"a store of {scheme}: takes no token: only a keeper asks for one. Leave it out")
    return await ENGINES[scheme](rest, clock)


async def open_shelf(url: str) -> RedisShelf:
    """Where processes share the copies of a hot tier."""
    scheme, _ = split_url(url)
    if scheme not in REDIS:
        known = ", ".join(f"{each}://" for each in REDIS)
        raise InvalidInput(f"a cache is 'memory' or a Redis server ({known}), not one of {scheme}:")
    try:
        from holdfast.engines.redis_shelf import RedisShelf
    except ModuleNotFoundError as exc:
        raise InvalidInput(f"{scheme}:// needs the Redis driver: pip install 'holdfast[redis]'") from exc
    return await RedisShelf.open(url)
