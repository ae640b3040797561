"""A keeper as a process: its settings followed, its logs written, its signals obeyed.

SIGTERM and SIGINT stop it, a second one at once. SIGHUP reads the configuration and the certificate anew; a change of the
file does so too. A new file that is wrong changes nothing, and the log says why.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

from holdfast.clock import elapsed_s
from holdfast.errors import InvalidInput, Unavailable
from holdfast.middleware.verbs import check_verb
from holdfast.server.config import Config, ConfigFile, make_folders
from holdfast.server.keeper import Keeper
from holdfast.server.logs import Logs

GC_OBJECTS: Final = 50_000
"""New objects after which Python looks for cycles."""

log = logging.getLogger("holdfast.keeper")


class Service:
    """Runs a keeper until it is told to stop."""

    def __init__(self, settings: Config | Path) -> None:
        self._file: ConfigFile | None = None
        if isinstance(settings, Path):
            self._file = ConfigFile(settings, self._changed, check_verb=check_verb)
            settings = self._file.config
            make_folders(self._file.path, settings)
        self.config = settings
        self.keeper = Keeper(self.config, about=None if self._file is None else self._file.about)
        self._logs = Logs(self.config.log.level, self.config.log.format)

    async def run(self, started: Callable[[Keeper, float], None]) -> None:
        """Serve. `started` is told when requests are taken, and how many seconds that took."""
        _open_all_files()
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        with self._logs:
            logging.getLogger("uvicorn.error").addFilter(lambda record: record.levelno >= logging.WARNING)
            began = elapsed_s()
            await self.keeper.start()
            try:
                if self._file is not None:
                    self._file.start()
                started(self.keeper, elapsed_s() - began)
                _collect_rarely()
                await _first_of(self.keeper.failed, stop)
            finally:
                for each in (signal.SIGINT, signal.SIGTERM):
                    loop.remove_signal_handler(each)
                if self._file is not None:
                    await self._file.close()
                await self.keeper.stop()
        if self.keeper.failure is not None:
            raise Unavailable(
                f"the keeper had to stop: {self.keeper.failure}. Start it again: it looks what is on the disk"
            )

    def _changed(self, settings: Config) -> None:
        self._logs.change(settings.log.level, settings.log.format)
        self.keeper.reload(settings)

    def _reload(self) -> None:
        if self._file is not None:
            self._file.reload()
        else:
            log.info("there is no configuration file to read anew: this keeper was started without one")
        try:
            if self.keeper.renew_certificate():
                log.info("the certificate was read anew")
        except (InvalidInput, OSError) as exc:
            log.error("the certificate cannot be read anew, and the old one stays: %s", exc)


def _open_all_files() -> None:
    """As many files as the system lets this process have: a connection is one, and shells start with fewer than `limits` allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _collect_rarely() -> None:
    """What was loaded stays, and requests leave hardly any cycles: looking for some at every turn costs a sixth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS, 20, 50)


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
