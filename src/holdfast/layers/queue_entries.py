"""What a queue keeps, and under which keys.

    queues/ready/<q>/<rest>            a message that may be taken; its value is the body and nothing else
    queues/delayed/<q>/<rest>          one whose time has not come
    reserved/<q>/<lease>/<rest>        one that a consumer has; under the lease "-", which never lives, a dead letter
    reserved/<q>/<lease>~/<rest>       the same of a consumer that takes some ahead: it may have begun, or not
    consumers/<q>/<lease>              a consumer's lease, kept alive as long as it lives
    depths/<q>/<what>                  how many are ready, delayed, reserved, dead; the registry of queues, too
    dedup/<q>/<key>                    the id of the message that was put under this key, for a window
    reasons/<q>/<id>                   why a message failed, the last REASONS_MAX times

`<rest>` is `<pp>/<position>/<id>`: 999 minus the priority's rank, so that higher sorts first; the position in line, 19 digits; and
the message's id, 19 digits. The position is left out where it is the id itself, as with everything that is put to be taken at
once. A message with a delay has the position of the instant it is due: when that has come it is moved to `ready` as it is, by
one Take, and stands where it would stand had it been put then. An id that the sender chose is followed by the sender's name,
`…/<id>/@<agent>`, so that nobody can make a message that takes the place of another's.

A message keeps its id wherever it goes. How often it failed is the entry's tag; a message that never did has none, so nothing is
read or written about it. One that was taken ahead by a consumer that died has the tag "0".
"""

from __future__ import annotations

import os
import re
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, Protocol

import msgspec

from holdfast.clock import Duration, as_datetime, duration_ms
from holdfast.codec import decode
from holdfast.engine import ID_DIGITS, ID_SHIFT, TAG_BYTES_MAX, Entry, Take
from holdfast.errors import InvalidInput
from holdfast.keys import Subspace, check_name, escape, unescape

QUEUES: Final = Subspace("queues")
RESERVED: Final = Subspace("reserved")
CONSUMERS: Final = Subspace("consumers")
DEPTHS: Final = Subspace("depths")
DEDUP: Final = Subspace("dedup")
REASONS: Final = Subspace("reasons")

NO_LEASE: Final = "-"
"""Where dead letters are."""
AHEAD: Final = "~"
"""Behind a lease: what was taken ahead under it."""
SUSPECT: Final = "0"
"""The tag of a message that never failed, as far as anybody knows, and may have begun when its consumer died."""
STATES: Final = ("ready", "delayed", "reserved", "dead")
PRIORITY_MIN: Final = -500
PRIORITY_MAX: Final = 499
QUEUE_NAME_BYTES_MAX: Final = 256
DEDUP_BYTES_MAX: Final = 256
REASONS_MAX: Final = 16
"""As many reasons are kept of one message, the newest ones."""
REASON_CHARS_MAX: Final = 1000
ATTEMPTS_MAX: Final = 10_000
LEASE_MS: Final = 30_000
DEDUP_WINDOW_MS: Final = 300_000
KEYS_MAX: Final = 1024
"""Keys that are remembered, since a queue needs the same ones with every message."""

_HALF: Final = 1 << (ID_SHIFT - 1)
_TASK: Final = re.compile(r"T\d+")


class Requeue(msgspec.Struct, frozen=True):
    """A policy: a message that failed comes again after a while, up to so many attempts, and is then a dead letter.

    `Requeue(attempts=5, backoff="1s", factor=2, max="5m", jitter=0.1)`: the first time after a second, then after two, four …;
    `jitter` spreads each by up to that share.
    """

    attempts: int = 5
    backoff: Duration = "1s"
    factor: float = 2.0
    max: Duration = "5m"
    jitter: float = 0.1

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or not 0 < self.attempts <= ATTEMPTS_MAX:
            raise InvalidInput(f"attempts must be between 1 and {ATTEMPTS_MAX:,}, not {self.attempts!r}")
        if not 1 <= self.factor <= 100 or not 0 <= self.jitter <= 1:
            raise InvalidInput("the factor of a backoff is between 1 and 100, its jitter between 0 and 1")
        duration_ms(self.backoff, name="backoff")
        duration_ms(self.max, name="max")

    def delay_ms(self, failures: int) -> int:
        """How long a message waits after it failed so many times."""
        longest = duration_ms(self.max)
        steps = min(failures - 1, 64)
        delay = min(duration_ms(self.backoff) * self.factor**steps, longest)
        import random  # only who waits to try again needs it

        return max(1, round(delay * (1 + random.uniform(-self.jitter, self.jitter))))  # noqa: S311 - spreads, guards nothing


Policy = str | Requeue
"""What becomes of a message: "keep" (a dead letter), "clear" (it is gone), "release" (ready again at once), or Requeue(…)."""
WORDS: Final = ("keep", "clear", "release")


def check_policy(policy: Policy, name: str) -> Policy:
    if isinstance(policy, Requeue) or policy in WORDS:
        return policy
    raise InvalidInput(f"{name} is {', '.join(map(repr, WORDS))} or Requeue(…), not {policy!r:.60}")


class Place(msgspec.Struct, frozen=True):
    """Where a message stands, as the last part of its key tells."""

    pp: str
    position: str
    id: str
    by: str = ""
    """Who chose the id, if it was chosen."""

    @property
    def tail(self) -> str:
        return f"{self.id}/@{escape(self.by)}" if self.by else self.id

    @property
    def rest(self) -> str:
        return f"{self.pp}/{self.tail}" if self.position == self.id else f"{self.pp}/{self.position}/{self.tail}"

    @property
    def priority(self) -> int:
        return PRIORITY_MAX - int(self.pp) if self.pp.isdigit() else 0

    def at(self, position: str) -> Place:
        """The same message at another place in the line."""
        return Place(self.pp, position, self.id, self.by)


def place_of(rest: str) -> Place:
    """Read the last part of a message's key. What no library wrote is read as far as it goes."""
    parts = rest.split("/")
    by = unescape(parts.pop()[1:]) if len(parts) > 2 and parts[-1].startswith("@") else ""
    return Place(parts[0], parts[1] if len(parts) > 1 else parts[0], parts[-1], by)


def rest_of(key: str) -> str:
    """The last part of a message's key, wherever the message is."""
    return key.split("/", 3)[-1]


def check_queue(name: str) -> str:
    check_name(name, "queue's name")
    if len(name.encode()) > QUEUE_NAME_BYTES_MAX:
        raise InvalidInput(f"a queue's name has at most {QUEUE_NAME_BYTES_MAX} bytes; {name[:40]!r}… has more")
    return name


def priority_element(priority: int) -> str:
    if type(priority) is not int or not PRIORITY_MIN <= priority <= PRIORITY_MAX:
        raise InvalidInput(f"a priority is a whole number from {PRIORITY_MIN} to {PRIORITY_MAX}, not {priority!r:.40}")
    return f"{PRIORITY_MAX - priority:03d}"


def position_at(at_ms: int) -> str:
    """The place in line of whoever comes at this instant."""
    return f"{at_ms << ID_SHIFT:0{ID_DIGITS}d}"


def instant_of(position: str) -> int:
    """When that was, in milliseconds; 0 if it is no position."""
    return int(position) >> ID_SHIFT if position.isascii() and position.isdigit() else 0


def check_id(id: str) -> str:
    if not isinstance(id, str) or len(id) != ID_DIGITS or not id.isascii() or not id.isdigit():
        raise InvalidInput(f"a message's id has {ID_DIGITS} digits; {id!r:.40} has not")
    return id


class _Ids:
    """Ids made here, in the form of those that a commit assigns: ordered by time, and in the order one process makes them.

    Those that are assigned count from the beginning of a millisecond, these from a random point of its second half.
    """

    def __init__(self) -> None:
        self.last = 0

    def next(self, now_ms: int) -> str:
        if self.last >> ID_SHIFT < now_ms:
            self.last = (now_ms << ID_SHIFT) + _HALF + int.from_bytes(os.urandom(4)) % (_HALF // 2)
        else:
            self.last += 1
        return f"{self.last:0{ID_DIGITS}d}"


_ids = _Ids()


def new_message_id(now_ms: int) -> str:
    """An id for a message that does not exist yet."""
    return _ids.next(now_ms)


def reserved_name(name: str) -> str:
    """Under which name a queue shows what its consumers have: `T<tid>.inbox` as `T<tid>.reserved`."""
    stem = name.removesuffix(".inbox")
    return f"{stem}.reserved" if _TASK.fullmatch(stem) else f"{name}.reserved"


def queue_behind(name: str) -> str | None:
    """The queue whose reserved messages are shown under this name; None when it is a queue of its own."""
    if not name.endswith(".reserved"):
        return None
    stem = name.removesuffix(".reserved")
    return f"{stem}.inbox" if _TASK.fullmatch(stem) else stem


def failures_of(entry: Entry) -> int:
    """How often a message failed."""
    return int(entry.tag) if entry.tag.isascii() and entry.tag.isdigit() and len(entry.tag) <= 6 else 0


def failures_tag(failures: int) -> str:
    return str(failures)[:TAG_BYTES_MAX] if failures else ""


class Failure(msgspec.Struct, frozen=True):
    """One reason: which attempt failed, when, in whose hands, and why."""

    attempt: int
    at: int
    agent: str
    reason: str


class Begun(Protocol):
    """A message that somebody works on."""

    async def stop(self) -> None:
        """Its consumer stops: do what the policy says."""
        ...


class Peeked(msgspec.Struct, frozen=True):
    """A message as it is seen from outside."""

    id: str
    body: Any
    priority: int
    attempts: int
    """How often it failed."""
    state: str
    """ready, delayed, reserved or dead."""
    owner: str
    """Who put it, or has it."""
    enqueued_at: datetime
    due_at: datetime
    """When it may be taken, or might have been."""
    key: str
    reasons: tuple[Failure, ...] = ()


def peeked(entry: Entry, state: str, reasons: tuple[Failure, ...] = ()) -> Peeked:
    place = place_of(rest_of(entry.key))
    return Peeked(
        id=place.id,
        body=decode(entry.value),
        priority=place.priority,
        attempts=failures_of(entry),
        state=state,
        owner=entry.owner,
        enqueued_at=as_datetime(instant_of(place.id)),
        due_at=as_datetime(instant_of(place.position)),
        key=entry.key,
        reasons=reasons,
    )


@lru_cache(KEYS_MAX)
def depth_key(name: str, what: str) -> str:
    return DEPTHS.key(name, what)


@lru_cache(KEYS_MAX)
def ready_prefix(name: str) -> str:
    return QUEUES.prefix("ready", name)


@lru_cache(KEYS_MAX)
def delayed_prefix(name: str) -> str:
    return QUEUES.prefix("delayed", name)


@lru_cache(KEYS_MAX)
def reserved_prefix(name: str, lease: str, *, ahead: bool = False) -> str:
    """Where messages are that were taken under a lease; `lease` is its key."""
    return RESERVED.prefix(name, lease[lease.rindex("/") + 1 :] + (AHEAD if ahead else ""))


def promoting(name: str, pp: str, now_ms: int, n: int) -> Take:
    """Those that are due stand in line from now on, where they would stand had they come when they were due."""
    source, ready = f"{delayed_prefix(name)}{pp}/", f"{ready_prefix(name)}{pp}/"
    due = source + position_at(now_ms + 1)
    return Take(source, ready, n, due, depth_key(name, "delayed"), depth_key(name, "ready"))
