"""Denials in the audit: who was refused what, by which request, and why.

The policy tells a callback of every refusal. `DenialNotes` is one that appends notes under `audit/notes/`, from where the
sealer takes them, in the space of the identity that was refused: another space never hears of it. It writes in the
background and never fails or delays a request. An agent that is refused again and again cannot fill the audit: of the
refusals of one agent at most NOTES_PER_SECOND are told each second, and then one note says how many more there were.

How it fails. Notes that cannot be written are logged and gone. A space that does not exist is not made for its denials.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Final

import msgspec

from holdfast.clock import Clock, sleep_or
from holdfast.codec import encode
from holdfast.engine import OPERATIONS_MAX, SYSTEM_ACTOR, Batch, Engine, Push
from holdfast.errors import Conflict, Error
from holdfast.identity import EVERY_SPACE, Identity
from holdfast.keys import shown
from holdfast.middleware.audited_reads import NOTE_TTL_MS, NOTES

NOTES_PER_SECOND: Final = 5
SECOND_MS: Final = 1000
WAITING_MAX: Final = 10_000
"""Notes that wait to be written; more are only counted."""
SHOWN_MAX: Final = 512
"""Characters of a key, a reason or a request id that a note tells."""

log = logging.getLogger("holdfast.denials")


class Denial(msgspec.Struct, frozen=True):
    """One refusal: who, where, what, which error, in which words, and of which request."""

    identity: Identity
    space: str
    verb: str
    key: str
    code: str
    reason: str
    request_id: str | None = None
    """Of the batch that was refused, if it had one."""


class _Second:
    """The refusals of one agent within a second."""

    __slots__ = ("began_at", "noted", "suppressed")

    def __init__(self, began_at: int) -> None:
        self.began_at = began_at
        self.noted = 0
        self.suppressed = 0


class DenialNotes:
    """A callback for `Policy(denied=…)` that writes notes; `close` writes what is left."""

    def __init__(self, engine: Engine, clock: Clock, *, per_second: int = NOTES_PER_SECOND) -> None:
        self._engine = engine
        self._clock = clock
        self._per_second = per_second
        self._seconds: dict[tuple[str, str], _Second] = {}
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __call__(self, denial: Denial) -> None:
        space = denial.space if denial.identity.space == EVERY_SPACE else denial.identity.space
        agent, now = denial.identity.agent, self._clock.now_ms()
        second = self._seconds.get((space, agent))
        if second is None or not 0 <= now - second.began_at < SECOND_MS:
            if second is not None:
                self._sum_up(space, agent, second)
            second = self._seconds[space, agent] = _Second(now)
        if second.noted < self._per_second and len(self._waiting) < WAITING_MAX:
            second.noted += 1
            reason = f"{denial.code}: {denial.reason}"
            self._append(space, agent, denial.verb, denial.key, reason, denial.request_id)
        else:
            second.suppressed += 1
        self._news.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Write what is left, and stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        self._end_seconds(None)
        await self._write()

    def _append(self, space: str, agent: str, verb: str, key: str, reason: str, request_id: str | None = None) -> None:
        note = {"actor": agent, "operation": verb, "key": _shown(key), "outcome": "denied", "reason": _shown(reason)}
        if request_id is not None:
            note["request_id"] = _shown(request_id)
        self._waiting.append((space, encode(note)))

    def _sum_up(self, space: str, agent: str, second: _Second) -> None:
        if second.suppressed:
            self._append(space, agent, "several", "", f"{second.suppressed} more refusals within a second are not told")

    def _end_seconds(self, now: int | None) -> None:
        """Sum up the seconds that are over; all of them, if no time is given."""
        for (space, agent), second in list(self._seconds.items()):
            if now is None or not 0 <= now - second.began_at < SECOND_MS:
                self._sum_up(space, agent, second)
                del self._seconds[space, agent]

    async def _run(self) -> None:
        while True:
            self._news.clear()
            self._end_seconds(self._clock.now_ms())
            await self._write()
            first = min((second.began_at for second in self._seconds.values()), default=None)
            await sleep_or(self._clock, None if first is None else first + SECOND_MS, self._news)

    async def _write(self) -> None:
        while self._waiting:
            space = self._waiting[0][0]
            notes: list[bytes] = []
            while self._waiting and self._waiting[0][0] == space and len(notes) < OPERATIONS_MAX:
                notes.append(self._waiting.popleft()[1])
            try:
                if await self._engine.spaces(space):
                    batch = Batch(SYSTEM_ACTOR, tuple(Push(NOTES, note, NOTE_TTL_MS) for note in notes))
                    await self._engine.commit(space, batch)
            except Error as exc:
                log.warning("%d denials in %s did not get into the audit: %s", len(notes), space, exc)


def _shown(text: str) -> str:
    return text[:SHOWN_MAX].encode(errors="replace").decode()


def why_not_ours(conflict: Conflict, key: str) -> str:
    """What a refusal by a condition that ownership added means, to who is refused."""
    if conflict.condition == "mine":
        owner = "somebody else" if conflict.actual is None else repr(conflict.actual.owner)
        return (
            f"{shown(key)} belongs to {owner}: outside of records one changes only what one owns. Nothing was written"
        )
    if key.startswith(("queues/", "reserved/", "consumers/")):
        return f"{shown(key)} is {'there' if conflict.condition == 'absent' else 'gone'}: the message is another's. Nothing was written"
    if conflict.condition == "absent":
        return f"{shown(key)} is there already, and is written once. Nothing was written"
    if conflict.condition == "value":
        return (
            f"{shown(key)} does not stand for this list or set: items are written in the batch that makes their record, or "
            "after it. Nothing was written"
        )
    return f"{shown(key)} is not there, and what was sent is about it. Nothing was written"
