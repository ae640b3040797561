"""Cron expressions in a time zone: which instants they mean.

Five fields (minute, hour, day, month, weekday), or six with seconds first, as cronsim reads them. Where clocks change it does what
Debian's cron does: a job of a certain time that would be skipped runs at once after the change, and one that would come
twice runs once; jobs of every hour or minute follow the clock on the wall. Instants are whole milliseconds, UTC, as everywhere.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime, tzinfo
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from holdfast.clock import as_datetime
from holdfast.errors import InvalidInput

CRON_CHARS_MAX: Final = 200
SHIFT_MS: Final = 3 * 3_600_000
"""More than any clock is moved at once."""


class Cron:
    """An expression in a zone, checked: InvalidInput when there is no such zone, no such expression, or no such instant."""

    def __init__(self, expression: str, timezone: str = "UTC") -> None:
        self.zone = zone_of(timezone)
        if not isinstance(expression, str) or len(expression) > CRON_CHARS_MAX:
            raise InvalidInput(
                f"a cron expression is text of at most {CRON_CHARS_MAX} characters, not {expression!r:.60}"
            )
        self.expression = " ".join(expression.split())
        try:
            CronSim(self.expression, datetime(2024, 1, 1, tzinfo=UTC))
        except CronSimError as exc:
            raise InvalidInput(
                f"{expression!r:.60} is no cron expression: {str(exc).lower()}. It has five fields: minute, hour, day, month, "
                "weekday; '0 7 * * 1-5' is seven o'clock from Monday to Friday"
            ) from exc

    def after(self, ms: int) -> int:
        """The first instant after this one."""
        try:
            return next(map(_ms, CronSim(self.expression, self._local(ms))))
        except StopIteration:
            raise InvalidInput(
                f"cron expression {self.expression!r} means no day that there is in the next 50 years"
            ) from None

    def last(self, since_ms: int, upto_ms: int, limit: int) -> list[int]:
        """The last instants from one to another, both included, in order; at most so many."""
        first = upto_ms
        for number, ms in enumerate(map(_ms, CronSim(self.expression, self._local(upto_ms + 1), reverse=True)), 1):
            first = ms
            if ms < since_ms or number == limit:
                break
        found = deque[int](maxlen=limit)
        since = max(since_ms, first - SHIFT_MS) - 1  # read backwards, some zones' changes look different
        for ms in map(_ms, CronSim(self.expression, self._local(since))):
            if ms > upto_ms:
                break
            found.append(ms)
        return list(found)

    def _local(self, ms: int) -> datetime:
        return as_datetime(ms).astimezone(self.zone)


def zone_of(name: str) -> tzinfo:
    """A time zone by its name."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, TypeError, KeyError):  # a name may be a folder, leave the database, be no text
        raise InvalidInput(
            f"there is no time zone {name!r:.60} here; zones are named as in Europe/Zurich or America/New_York "
            "(a system without them needs the package tzdata)"
        ) from None


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)
