"""A full disk, in the log: a line when it begins and a line when it is over, however many commits are refused.

It begins with the first commit that is refused for want of room, and is over with the first that succeeds when none has been
refused for QUIET_MS: on a disk that is nearly full small commits may succeed while large ones do not. It is told by what clients
ask for; while nobody commits, nothing is known.
"""

from __future__ import annotations

import logging
from typing import Final

from holdfast.clock import Clock
from holdfast.errors import StorageFull

FULL: Final = StorageFull.code
QUIET_MS: Final = 5_000
"""Without a refusal, before a commit that succeeds means that there is room again; so there are at most two lines in this time."""

log = logging.getLogger("holdfast.keeper")


class Fullness:
    """Hears how requests ended, while that may matter: those that were refused for want of room, and all while `is_full`."""

    def __init__(self, clock: Clock) -> None:
        self.is_full = False
        self._clock = clock
        self._since = self._last = self._refused = 0

    def heard(self, op: str, outcome: str, count: int) -> None:
        if op != "commit":
            return  # such as a backup, which has a disk of its own
        if outcome == FULL:
            self._last = self._clock.now_ms()
            if not self.is_full:
                self.is_full, self._since, self._refused = True, self._last, 0
                log.error(
                    "the disk of the store is full: commits are refused and change nothing, reads are served. "
                    "Make room on it; the keeper goes on by itself"
                )
            self._refused += count
        elif outcome == "ok" and (now := self._clock.now_ms()) - self._last >= QUIET_MS:
            self.is_full = False
            lasted = {"refused": self._refused, "for_s": round((now - self._since) / 1000, 3)}
            log.warning("the disk of the store has room again: commits are taken", extra=lasted)
