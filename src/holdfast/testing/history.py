"""What concurrent clients did to a store and what they were told: recorded while they run, read back afterwards.

A history is a set of files of JSON lines. Each client process writes its own file: a `Started` line before it sends an
operation and an `Ended` line after it has the answer, each with one system call, so that whatever a process did before
kill -9 is there. Times are nanoseconds of a clock that all processes share (`time.monotonic_ns` on one machine).

    {"event": "start", "id": "w3.1.17", "at": 81250, "key": "records/a", "kind": "increment", "delta": 2}
    {"event": "end", "id": "w3.1.17", "at": 81990, "outcome": "ok", "version": 41, "total": 7}

`load` joins the two by id, over all files: the end of an operation whose process was killed may be recorded by another
process, which repeated it with the same request id. An operation without an end is `unknown`: it may have taken effect
at any time since its start, or never. The last line of a killed process may be torn; it counts as not written. Two
different answers to one operation, or an answer to one that never started, are a ValueError: no store may do that.

What the operations mean and what answers are right is `linearizability`'s matter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

Kind: TypeAlias = Literal["read", "write", "swap", "swap_version", "increment", "delete"]
Outcome: TypeAlias = Literal["ok", "refused", "failed", "unknown"]


class Found(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an operation saw under its key: the value, as JSON text (None: absent), and its version if the client saw it."""

    value: str | None = None
    version: int | None = None


NOTHING: Final = Found()
"""The key was absent."""


class Started(msgspec.Struct, frozen=True, tag_field="event", tag="start", omit_defaults=True, gc=False):
    """An operation is about to be sent.

    write and the swaps put `value`; swap asks for the value `expect` (None: absent), swap_version for the version
    `expect_version`; increment adds `delta`.
    """

    id: str
    at: int
    key: str
    kind: Kind
    value: str | None = None
    expect: str | None = None
    expect_version: int = 0
    delta: int = 0


class Ended(msgspec.Struct, frozen=True, tag_field="event", tag="end", omit_defaults=True, gc=False):
    """The answer has arrived.

    ok: it took effect, as commit `version`. refused: its condition did not hold and nothing changed. failed: the store
    promises that nothing changed, and nobody tried again. unknown: nobody can tell; a repetition that fails leaves it so.
    `found` is what a read or a refusal showed, `total` the sum of an increment, `existed` whether a delete removed
    something.
    """

    id: str
    at: int
    outcome: Outcome
    version: int | None = None
    found: Found | UnsetType = UNSET
    total: int | None = None
    existed: bool | None = None


class Operation(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A `Started` and its `Ended`, in one; `end` is None as long as the outcome is unknown."""

    id: str
    key: str
    kind: Kind
    start: int
    end: int | None = None
    outcome: Outcome = "unknown"
    value: str | None = None
    expect: str | None = None
    expect_version: int = 0
    delta: int = 0
    version: int | None = None
    found: Found | UnsetType = UNSET
    total: int | None = None
    existed: bool | None = None

    def __str__(self) -> str:
        """One line for a report: `w1.4 [100, 250] increment +2 records/a -> ok 7 @41`."""
        sent = {
            "write": f" {self.value}",
            "swap": f" {'absent' if self.expect is None else self.expect} -> {self.value}",
            "swap_version": f" @{self.expect_version} -> {self.value}",
            "increment": f" {self.delta:+d}",
        }.get(self.kind, "")
        told = f" {self.outcome}"
        if isinstance(self.found, Found):
            told += " absent" if self.found.value is None else f" {self.found.value} @{self.found.version}"
        told += "" if self.total is None else f" = {self.total}"
        told += "" if self.existed is None else " existed" if self.existed else " was absent"
        told += "" if self.version is None else f" @{self.version}"
        return f"{self.id} [{self.start}, {'…' if self.end is None else self.end}] {self.kind} {self.key}{sent}:{told}"


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Started | Ended).decode


class Recorder:
    """Writes one process's part of a history. `now` is the shared clock: pass `time.monotonic_ns`."""

    def __init__(self, path: Path, now: Callable[[], int]) -> None:
        self._now = now
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def start(
        self,
        id: str,
        key: str,
        kind: Kind,
        *,
        value: str | None = None,
        expect: str | None = None,
        expect_version: int = 0,
        delta: int = 0,
    ) -> Started:
        """Write down that the operation is about to be sent. Its time is taken after everything else is prepared."""
        event = Started(id, self._now(), key, kind, value, expect, expect_version, delta)
        os.write(self._fd, _encode(event) + b"\n")
        return event

    def end(
        self,
        id: str,
        outcome: Outcome,
        *,
        version: int | None = None,
        found: Found | UnsetType = UNSET,
        total: int | None = None,
        existed: bool | None = None,
    ) -> None:
        """Write down the answer; its time is taken first."""
        at = self._now()
        os.write(self._fd, _encode(Ended(id, at, outcome, version, found, total, existed)) + b"\n")

    def close(self) -> None:
        os.close(self._fd)


def events(path: Path) -> list[Started | Ended]:
    """The lines of one file, without a torn last one."""
    *lines, torn = path.read_bytes().split(b"\n")
    found: list[Started | Ended] = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(_decode(line))
        except msgspec.DecodeError as exc:
            raise ValueError(f"{path}:{number}: {exc}") from exc
    del torn  # without its newline it was never finished, whatever it says
    return found


def load(paths: Iterable[Path]) -> list[Operation]:
    """All operations of a history, in the order of their start."""
    return join(event for path in paths for event in events(path))


def join(recorded: Iterable[Started | Ended]) -> list[Operation]:
    """Operations from events, which may come in any order."""
    started: dict[str, Started] = {}
    ended: dict[str, Ended] = {}
    for event in recorded:
        if isinstance(event, Started):
            if event.id in started:
                raise ValueError(f"operation {event.id} started twice")
            started[event.id] = event
        elif event.outcome != "unknown":
            ended[event.id] = _one_answer(ended.get(event.id), event)
    if strangers := ended.keys() - started.keys():
        raise ValueError(f"operation {min(strangers)} was answered and never started")
    return sorted((_joined(event, ended.get(event.id)) for event in started.values()), key=lambda op: op.start)


def _one_answer(first: Ended | None, second: Ended) -> Ended:
    """The earlier of two equal answers."""
    if first is None:
        return second
    if msgspec.structs.replace(first, at=second.at) != second:
        raise ValueError(f"operation {first.id} got two different answers: {first} and {second}")
    return min(first, second, key=lambda event: event.at)


def _joined(start: Started, end: Ended | None) -> Operation:
    sent = (start.value, start.expect, start.expect_version, start.delta)
    if end is None:
        return Operation(start.id, start.key, start.kind, start.at, None, "unknown", *sent)
    told = (end.version, end.found, end.total, end.existed)
    return Operation(start.id, start.key, start.kind, start.at, end.at, end.outcome, *sent, *told)
