"""Time: the only module that reads a clock, and the only one that reads a person's durations.

Engines keep instants as whole milliseconds since 1970 (UTC); people see aware datetimes. A store takes its clock at
`open(clock=…)`; tests pass a ManualClock and move it, so nothing in the test suite sleeps to see a ttl pass.
"""

from __future__ import annotations

import asyncio
import re
import time
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final, Protocol, runtime_checkable

from holdfast.errors import InvalidInput

TTL_MS_MAX: Final = 100 * 365 * 86_400_000
"""The longest ttl: a hundred years."""

TIME_MS_MAX: Final = 253_402_300_799_999
"""The end of the year 9999: no date is later."""

Duration = str | int | float | timedelta
"""Seconds, a timedelta, or text such as "90s", "5m", "1h", "7d", "250ms"."""

_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_TEXT: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)?\s*", re.ASCII)


@runtime_checkable
class Clock(Protocol):
    """Where a store gets its time from."""

    def now_ms(self) -> int:
        """Milliseconds since 1970, UTC."""
        ...

    async def sleep_until(self, at_ms: int) -> None:
        """Return when `now_ms()` has about reached `at_ms`."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep_until(self, at_ms: int) -> None:
        left_ms = at_ms - self.now_ms()
        if left_ms > 0:
            await asyncio.sleep(left_ms / 1000)


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, now_ms: int = 1_750_000_000_000) -> None:
        if type(now_ms) is not int or not 0 <= now_ms <= TIME_MS_MAX:
            raise InvalidInput(
                f"a clock stands at whole milliseconds since 1970, such as 1_750_000_000_000, not {now_ms!r:.60}"
            )
        self._now_ms = now_ms
        self._sleepers: set[asyncio.Event] = set()

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, by: Duration) -> None:
        """Move forward; whoever sleeps on this clock looks at it again."""
        self._now_ms += duration_ms(by)
        for sleeper in self._sleepers:
            sleeper.set()

    def set_back(self, by: Duration) -> None:
        """Move backwards, as a corrected machine clock does."""
        self._now_ms -= duration_ms(by)

    async def sleep_until(self, at_ms: int) -> None:
        moved = asyncio.Event()
        self._sleepers.add(moved)
        try:
            while self._now_ms < at_ms:
                await moved.wait()
                moved.clear()
        finally:
            self._sleepers.discard(moved)


async def sleep_or(clock: Clock, at_ms: int | None, event: asyncio.Event) -> bool:
    """Return when the clock has about reached `at_ms` (None: never), or the event is set; tells whether it is set."""
    if at_ms is None:
        await event.wait()
        return True
    if event.is_set():
        await asyncio.sleep(0)  # others run too, whoever asks in a loop
        return True
    loop, limit, over = asyncio.get_running_loop(), asyncio.timeout(None), False

    def it_is_time(_: object) -> None:
        if not over:  # in the same step of the loop the event may have been set
            limit.reschedule(loop.time())

    sleeping = loop.create_task(clock.sleep_until(at_ms))
    sleeping.add_done_callback(it_is_time)
    try:
        async with limit:  # the event wakes whoever waits, and nobody in between
            await event.wait()
    except TimeoutError:
        if not limit.expired():
            raise
    finally:
        over = True
        sleeping.cancel()
    return event.is_set()


def elapsed_ms() -> int:
    """Milliseconds since some moment in the past, which never fall: to measure how long something took, never when it was."""
    return time.monotonic_ns() // 1_000_000


elapsed_s: Final = time.perf_counter
"""Seconds since some moment in the past, as exact as the machine can: how long something took that may take microseconds."""


def duration_ms(value: Duration, *, name: str = "duration") -> int:
    """Read a duration given by a person; it must be positive and at most a hundred years."""
    if isinstance(value, bool):
        raise InvalidInput(f"{name} must be a duration such as 30, 1.5 or '90s', not {value!r}")
    if isinstance(value, str):
        match = _TEXT.fullmatch(value)
        if match is None and value.lstrip()[:1] == "-" and _TEXT.fullmatch(value.lstrip()[1:]):
            raise InvalidInput(f"{name} {value!r} must be more than zero and at most 100 years")
        if match is None:
            raise InvalidInput(
                f"{name} {value!r:.60} is not a duration; write seconds or '250ms', '90s', '5m', '1h', '7d'"
            )
        ms = float(match[1]) * _UNITS_MS[match[2] or "s"]
    elif isinstance(value, timedelta):
        ms = value.total_seconds() * 1000
    elif isinstance(value, int | float):
        ms = float(value) * 1000
    else:
        raise InvalidInput(f"{name} must be a duration such as 30, 1.5 or '90s', not {type(value).__name__}")
    if not 0 < ms <= TTL_MS_MAX:  # also refuses NaN
        raise InvalidInput(f"{name} {value!r} must be more than zero and at most 100 years")
    return max(1, round(ms))


Instant = int | str | datetime | timedelta
"""Milliseconds since 1970, a datetime, ISO 8601 text (UTC unless it says otherwise), or how long ago: "1h", a timedelta."""


def instant_ms(value: Instant, now_ms: int, *, name: str) -> int:
    """Read an instant given by a person."""
    if isinstance(value, str):
        try:
            at = datetime.fromisoformat(value)
        except ValueError:
            return now_ms - _ago_ms(value, name)
        value = at if at.tzinfo else at.replace(tzinfo=UTC)
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise InvalidInput(f"{name} {value.isoformat()} has no time zone; write datetime(…, tzinfo=UTC)")
        return round(value.timestamp() * 1000)
    if isinstance(value, timedelta):
        return now_ms - duration_ms(value, name=name)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise InvalidInput(
        f"{name} must be a datetime, a time or a duration ago as text ('1h'), or milliseconds since 1970, not {value!r:.60}"
    )


def _ago_ms(text: str, name: str) -> int:
    try:
        return duration_ms(text, name=name)
    except InvalidInput:
        raise InvalidInput(
            f"{name} {text!r:.60} is neither a time such as 2026-01-31T08:00:00Z nor a duration ago such as 90s, 5m, 1h, 7d"
        ) from None


def optional_ms(value: Duration | None, *, name: str = "ttl") -> int | None:
    """Like `duration_ms`; None stays None, and 0 is an error rather than "no ttl"."""
    return None if value is None else duration_ms(value, name=name)


def wait_ms(wait: Duration | None) -> int | None:
    """How long to wait for something: 0 not at all, None as long as it takes."""
    if wait is None:
        return None
    match = _TEXT.fullmatch(wait) if isinstance(wait, str) else None
    nothing = wait in (0, timedelta()) if match is None else not float(match[1])
    return 0 if nothing else duration_ms(wait, name="wait")


@lru_cache(maxsize=64)  # most ask for the present moment, several at once
def as_datetime(at_ms: int) -> datetime:
    """An engine's instant as people read it: always aware, always UTC."""
    return datetime.fromtimestamp(at_ms / 1000, tz=UTC)


@lru_cache(maxsize=64)
def as_text(at_ms: int) -> str:
    """The same as it is written where times are text."""
    return as_datetime(at_ms).isoformat()
