"""The command line of a manager: `python -m holdfast.manager --store URL --space NAME`.

Started by `ensure_manager`, or by hand. The store's URL and token may come from HOLDFAST_STORE and HOLDFAST_TOKEN instead: what is
in the environment is not shown to everybody. Where there is a manager of this space on this host already, it ends at once and
says so.

SIGTERM and SIGINT tell it to stop: tasks get the grace to come to their end. `--ready-fd` is a pipe on which it tells, in one line of JSON,
that it serves ({tid, host, pid, …}), that another one does ({"other": true}), or why neither is so ({"error": …}).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import logging.handlers
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.codec import encode
from holdfast.errors import Error, InvalidInput
from holdfast.manager.options import ManagerOptions
from holdfast.manager.place import Place, PlaceLock

LOG_BYTES_MAX: Final = 1_000_000
"""Of a log, before it begins anew; the one before is kept beside it."""
_LISTS: Final = ("allow_modules", "allow_commands", "allow_env", "preload")


def main(argv: Sequence[str] | None = None) -> int:
    """Be a manager; gives the exit code."""
    given = vars(_parser().parse_args(argv))
    store, space, agent = given.pop("store"), given.pop("space"), given.pop("agent")
    ready_fd, to_file, _ = given.pop("ready_fd"), given.pop("log"), given.pop("detach")
    told = _Told(ready_fd)
    try:
        if not store:
            raise InvalidInput("name a store: --store, or HOLDFAST_STORE")
        options = _options(given)
        place = Place.of(store, space, options.host)
        lock = PlaceLock(place)
        if not lock.acquire():
            told.say({"other": True})
            return 0
        _log_to(place.log if to_file else None)
        asyncio.run(_serve(store, space, agent, options, place, lock, told))
    except Error as exc:
        logging.getLogger("holdfast.manager").error("%s", exc)
        told.say({"error": str(exc), "code": exc.code})
        sys.stderr.write(f"{exc}\n")
        return exc.exit_code
    finally:
        told.close()
    return 0


async def _serve(
    url: str, space: str, agent: str | None, options: ManagerOptions, place: Place, lock: PlaceLock, told: _Told
) -> None:
    from holdfast.manager.serving import Manager
    from holdfast.store import open

    token = os.environ.get("HOLDFAST_TOKEN") if "holdfast" in url.partition(":")[0] else None
    blobs = options.blobs or (None if place.folder.name.endswith("-managers") else str(place.blobs))
    async with open(url, blobs=blobs, durability=None, token=token) as store:
        manager = Manager(store, space, options, agent=agent, place=lock, titled=True)
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, manager.stop)
        await manager.run(lambda info: told.say(msgspec.to_builtins(info)))


def _options(given: dict[str, Any]) -> ManagerOptions:
    fields = {name: value for name, value in given.items() if value not in (None, False)}
    for name in _LISTS:
        fields[name] = tuple(fields.get(name, ()))
    return ManagerOptions(**fields)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m holdfast.manager", description="Runs the tasks of a space.")
    add = parser.add_argument
    add("--store", default=os.environ.get("HOLDFAST_STORE"), help="a file or a URL; HOLDFAST_STORE")
    add("--space", default=os.environ.get("HOLDFAST_SPACE") or "default", help="the space; HOLDFAST_SPACE, or default")
    add("--agent", help="as whom it writes; a keeper's token says so by itself")
    add("--host", help="the name of this host; HOLDFAST_HOST, or the machine's own")
    add("--concurrency", type=int, help="tasks at once; twice the cores")
    add("--idle", help="how long it stays without work; 600")
    add("--lease", help="after what time without a sign of life others take over; 10")
    add("--grace", help="what tasks get to end when it is told to stop; 10")
    add("--blobs", help="the folder for outputs that are too large")
    add(
        "--allow-module",
        action="append",
        dest="allow_modules",
        help="run functions of this module; package.* for all below",
    )
    add("--allow-command", action="append", dest="allow_commands", help="run this command, as it is written")
    add("--allow-env", action="append", help="let tasks set this variable")
    add("--restrict", action="store_true", help="run nothing but what is allowed")
    add("--preload", action="append", help="import this module once, for functions that need it")
    add("--log", action="store_true", help="write the log to a file beside the store")
    add("--ready-fd", type=int, help=argparse.SUPPRESS)
    add("--detach", action="store_true", help="run in the background")
    return parser


class _Told:
    """Whoever waits for the manager to be ready."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def say(self, what: dict[str, Any]) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # nobody waits any more
                os.write(self._fd, encode(what) + b"\n")
            self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _log_to(path: Path | None) -> None:
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler()
    else:
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES_MAX, backupCount=1)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", handlers=[handler], force=True
    )
