"""Whether a recorded history could have come from a store that does one thing at a time.

`check(load(paths))` gives the violations it finds, none for a good history. An operation must seem to take effect at one
instant between its start and its end, and every answer must be what the contract says of the state at that instant.
An operation of unknown outcome may take effect at any instant after its start, or never; one that `failed` may not.

How. Linearizability is local: a history is linearizable if each key's part is, so keys are searched one by one. The
search is Wing and Gong's with Lowe's memory of configurations, depth first: of the operations that no unplaced one
precedes in real time, place one whose answer fits the state; on a dead end go back. Four facts keep it near linear:

 - what changes nothing and fits is placed at once: moving it forward can hurt nobody
 - versions rise, so of the acknowledged writes of a key only the one with the lowest unplaced version can be next. That
   is no trust in the store: if its versions lie, no order fits, and that is the violation
 - unknown operations are tried last, only one of several equal ones, and never right before a blind write: left out,
   they would not be missed. Those whose effect somebody sees come first, chains of unseen ones at the very end
 - a configuration that failed also fails with fewer unknown operations left

The version of an unknown write is unknown until somebody reads it; until then the state has a lower bound for it.

What versions promise holds between keys, and is checked over the whole history: every version belongs to one write and
shows one value; a write's version is above every version that anybody had seen or been given before it started; and
whoever starts after version n was seen sees, on every key, all writes up to n. This assumes that the keys of a history
are in one space and that every commit is one operation of it, without ttl.

How it fails. A history it cannot decide within STEPS_MAX steps is reported as `undecided`, never as good: a bad one with
dozens of unknown increments on a key may be. Between keys it knows only the versions that clients saw: a read of an
absent key shows none, so which delete it saw is judged on its own key alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Final, Literal, NamedTuple

import msgspec

from holdfast.codec import INT64_MAX, INT64_MIN, integer
from holdfast.testing.history import Found, Operation

STEPS_MAX: Final = 2_000_000
"""Operations placed, per key and beyond its own number, before the search gives up."""
CHAINS: Final = (1, 2, 3, 1_000_000)
"""How many unknown operations may follow each other with nobody to see what is between: few first, any number at last."""
SHOWN_MAX: Final = 12
"""Operations listed in a report."""


class Violation(msgspec.Struct, frozen=True):
    """Why a history is wrong, in words, with the operations that show it."""

    kind: Literal["order", "version", "undecided"]
    key: str
    message: str
    operations: list[Operation] = []

    def __str__(self) -> str:
        shown = [f"    {op}" for op in self.operations[:SHOWN_MAX]]
        more = len(self.operations) - len(shown)
        return "\n".join(
            [f"{self.kind} {self.key}: {self.message}", *shown, *([f"    and {more} more"] if more else [])]
        )


def check(operations: Iterable[Operation], *, steps_max: int = STEPS_MAX) -> list[Violation]:
    """Everything wrong with a history; at most one violation of order per key."""
    history = list(operations)
    floors = _floors(history)
    violations = list(_check_versions(history, floors))
    keys: dict[str, list[Operation]] = {}
    for op in history:
        if op.outcome != "failed" and not (op.outcome == "unknown" and op.kind == "read"):
            keys.setdefault(op.key, []).append(op)
    for key, group in keys.items():
        violation = _Search(key, group, floors, steps_max).run()
        if violation is not None:
            violations.append(violation)
    return violations


def is_write(op: Operation) -> bool:
    """Whether it changed the key, as far as the client was told."""
    if op.outcome != "ok" or op.kind == "read":
        return False
    return op.kind != "delete" or op.existed is True


# --- what versions promise, over all keys ---


def _seen(op: Operation) -> int:
    """The highest version the client knew to exist when the operation ended."""
    found = op.found.version if isinstance(op.found, Found) else None
    return max(op.version or 0, found or 0)


def _floors(history: list[Operation]) -> dict[str, int]:
    """For each operation by id: the highest version that anybody had seen before it started."""
    floors: dict[str, int] = {}
    ends = sorted((op.end, _seen(op)) for op in history if op.end is not None)
    position = highest = 0
    for op in sorted(history, key=attrgetter("start")):
        while position < len(ends) and ends[position][0] < op.start:
            highest = max(highest, ends[position][1])
            position += 1
        floors[op.id] = highest
    return floors


def _check_versions(history: list[Operation], floors: dict[str, int]) -> Iterator[Violation]:
    shown: dict[int, tuple[str, str | None, Operation]] = {}
    writers: dict[int, Operation] = {}
    for op in history:
        version = op.version
        if version is not None and op.outcome == "ok":
            floor = floors[op.id]
            if is_write(op):
                if version <= floor:
                    text = f"a write got version {version}, but version {floor} had been seen before it started"
                    yield Violation("version", op.key, text, [op])
                if (other := writers.setdefault(version, op)) is not op:
                    yield Violation("version", op.key, f"two writes got version {version}", [other, op])
                yield from _check_shown(shown, version, _written(op), op)
            elif version < floor:
                text = f"the space was at revision {version}, but version {floor} had been seen before"
                yield Violation("version", op.key, text, [op])
        if isinstance(op.found, Found) and op.found.version is not None and op.found.value is not None:
            yield from _check_shown(shown, op.found.version, op.found.value, op)


def _check_shown(
    shown: dict[int, tuple[str, str | None, Operation]], version: int, value: str | None, op: Operation
) -> Iterator[Violation]:
    key, before, other = shown.setdefault(version, (op.key, value, op))
    if key != op.key:
        yield Violation("version", op.key, f"version {version} is on two keys, here and on {key}", [other, op])
    elif before != value:
        yield Violation("version", key, f"version {version} showed two values, {before} and {value}", [other, op])


def _written(op: Operation) -> str | None:
    if op.kind == "increment":
        return None if op.total is None else str(op.total)
    return None if op.kind == "delete" else op.value


# --- the state of one key, and what an operation does to it ---


class _State(NamedTuple):
    """`version` is exact, or the lowest one possible while nobody has seen what an unknown write got."""

    value: str | None
    version: int
    exact: bool


def _matches(state: _State, found: Found) -> _State | None:
    """The state, if it is what was found; its version may become known by that."""
    if state.value != found.value:
        return None
    if found.version is None or found.value is None or (state.exact and state.version == found.version):
        return state
    if not state.exact and found.version >= state.version:
        return _State(state.value, found.version, True)
    return None


def _put(state: _State, value: str | None, op: Operation, floor: int) -> _State | None:
    if op.version is None:
        return _State(value, max(state.version, floor) + 1, False)
    return _State(value, op.version, True) if op.version > state.version else None


def _raise(state: _State, revision: int | None) -> _State | None:
    """An absent key, seen at a revision of the space: whatever is written later gets a higher version."""
    if revision is None or revision == state.version:
        return state
    return None if revision < state.version else _State(None, revision, state.exact)


def _sum(state: _State, delta: int) -> int | None:
    """What an increment makes of the value; None when that is no number."""
    number = 0 if state.value is None else integer(state.value.encode())
    if number is None or not INT64_MIN <= number + delta <= INT64_MAX:
        return None
    return number + delta


def _expected(state: _State, op: Operation) -> _State | None:
    """The state, if it is what a swap asks for."""
    if op.kind == "swap":
        return state if state.value == op.expect else None
    if state.value is None:
        return None
    return _matches(state, Found(state.value, op.expect_version))


def _apply(state: _State, op: Operation, floor: int) -> _State | None:
    """The state after the operation, the same object if it changed nothing; None if its answer does not fit."""
    kind = op.kind
    if kind == "read":
        return _matches(state, op.found) if isinstance(op.found, Found) else state
    if op.outcome == "refused":
        return _refuse(state, op)
    if kind == "write":
        return _put(state, op.value, op, floor)
    if kind == "increment":
        total = _sum(state, op.delta)
        if total is None or op.total not in (None, total):
            return None
        return _put(state, str(total), op, floor)
    if kind == "delete":
        if state.value is None:
            return None if op.existed else _raise(state, op.version)
        return _put(state, None, op, floor) if op.existed is not False else None
    expected = _expected(state, op)
    return None if expected is None else _put(expected, op.value, op, floor)


def _refuse(state: _State, op: Operation) -> _State | None:
    """A refusal fits if its reason holds. Of an unknown version it may be said that it is not the expected one."""
    if op.kind in ("write", "delete"):
        return None  # they ask for nothing that could be refused
    if isinstance(op.found, Found):
        seen = _matches(state, op.found)
        if seen is None:
            return None
        state = seen
    if op.kind == "increment":
        return state if _sum(state, op.delta) is None else None
    return state if _expected(state, op) is not state else None


# --- the search ---


class _Frame(NamedTuple):
    """A point where the search chose: how it stood, what is left to try, and what to take back when all has failed."""

    place: _Place
    choices: Iterator[_Place]
    placed: list[int]


class _Place(NamedTuple):
    """Where a search stands. `done` and the bits of `ahead` say which answered operations are placed: all before index
    `done`, and `done + i` for each bit i. `used` has a bit per unknown operation; `fresh` counts those nobody has seen the
    effect of. `rank` is the number of writes with a version that are placed, `last` the operation to place now."""

    state: _State
    done: int
    ahead: int
    used: int
    rank: int
    fresh: int
    last: int


class _Search:
    """One key."""

    def __init__(self, key: str, group: list[Operation], floors: dict[str, int], steps_max: int) -> None:
        self.key = key
        self.steps = steps_max + 2 * len(group)
        self.ops = sorted((op for op in group if op.end is not None), key=attrgetter("start"))
        self.unknown = _classes(op for op in group if op.end is None)
        self.starts = [op.start for op in self.ops]
        self.ends: list[int] = [op.end for op in self.ops if op.end is not None]
        self.writes = [is_write(op) for op in self.ops]
        self.floors = floors
        # What must have happened before an operation is placed: writes with versions up to its floor.
        order = [i for i, op in enumerate(self.ops) if self.writes[i] and op.version is not None]
        order.sort(key=lambda i: self.ops[i].version or 0)
        self.order = [*order, -1]
        self.next_versions = [*(self.ops[i].version or 0 for i in order), INT64_MAX]
        versions = sorted({_seen(op) for op in self.ops if is_write(op) or op.outcome != "ok" or op.kind == "read"})
        self.floor = [max(floors[op.id], 0 if self.writes[i] else op.version or 0) for i, op in enumerate(self.ops)]
        self.least = [versions[at - 1] if (at := bisect_right(versions, floor)) else 0 for floor in self.floor]
        # Answered operations that are not placed, in order of their start, as a linked list; -1 is its head.
        count = len(self.ops)
        self.after = [*range(1, count + 1), 0]
        self.before = [*range(-1, count), count - 1]
        self.tried: dict[tuple[_State, int, int, int], list[int]] = {}
        self.chain_max = CHAINS[0]
        self.cut_short = False

    def run(self) -> Violation | None:
        """Place everything, or say why not."""
        for self.chain_max in CHAINS:
            self.tried.clear()
            self.cut_short = False
            violation = self._search()
            if violation is None or violation.kind == "undecided" or not self.cut_short:
                return violation
        return violation

    def _search(self) -> Violation | None:
        place = _Place(_State(None, 0, True), 0, 0, 0, 0, 0, -1)
        frames: list[_Frame] = []
        furthest, stuck = -1, place
        placed_count = 0
        while True:
            placed: list[int] = []
            if place.last >= 0:
                self._lift(place.last)
                placed.append(place.last)
            place = self._settle(place, placed)
            placed_count += len(placed)
            if placed_count == len(self.ops):
                return None
            if placed_count > furthest:
                furthest, stuck = placed_count, place
            frames.append(_Frame(place, iter(()) if self._failed_before(place) else self._choices(place), placed))
            self.steps -= 1 + len(placed)
            if self.steps < 0:
                return self._explain("undecided", furthest, stuck)
            while (choice := next(frames[-1].choices, None)) is None:
                frame = frames.pop()
                for index in reversed(frame.placed):
                    self._put_back(index)
                placed_count -= len(frame.placed)
                if not frames:
                    return self._explain("order", furthest, stuck)
            place = choice

    def _window(self) -> Iterator[int]:
        """The operations that may come next: no unplaced one ended before they started."""
        first_end = INT64_MAX
        index, count = self.after[-1], len(self.ops)
        while index != count and self.starts[index] <= first_end:
            yield index
            first_end = min(first_end, self.ends[index])
            index = self.after[index]

    def _settle(self, place: _Place, placed: list[int]) -> _Place:
        """Place whatever fits and changes nothing, as long as there is any."""
        state, done, ahead, used, rank, fresh, _ = place
        more = True
        while more:
            more = False
            for index in self._window():
                op = self.ops[index]
                if not self.writes[index] and self._timely(index, place) and _apply(state, op, 0) is state:
                    self._lift(index)
                    placed.append(index)
                    done, ahead = _mark(done, ahead, index)
                    more, fresh = True, 0
        return _Place(state, done, ahead, used, rank, fresh, -1)

    def _timely(self, index: int, place: _Place) -> bool:
        """Whether everything that was known to have happened before the operation started is placed."""
        next_version = self.next_versions[place.rank]
        if next_version <= self.floor[index] and self.order[place.rank] != index:
            return False
        return not place.state.exact or place.state.version >= self.least[index] or self.writes[index]

    def _choices(self, place: _Place) -> Iterator[_Place]:
        """What may be placed next and changes the state: answered operations first, unknown ones last."""
        state, done, ahead, used, rank, fresh, _ = place
        window = list(self._window())
        for index in window:
            op = self.ops[index]
            if (fresh and op.kind == "write") or not self._timely(index, place):
                continue
            versioned = self.writes[index] and op.version is not None
            if versioned and self.order[rank] != index:
                continue
            after = _apply(state, op, self.floor[index])
            if after is not None:
                yield _Place(after, *_mark(done, ahead, index), used, rank + versioned, 0, index)
        if fresh >= self.chain_max:
            self.cut_short = True
            return
        unseen: list[_Place] = []
        for next_place in self._unknown_choices(place, min(self.ends[index] for index in window)):
            if any(self._sees(index, next_place) for index in window):
                yield next_place
            else:
                unseen.append(next_place)
        yield from unseen

    def _unknown_choices(self, place: _Place, last_start: int) -> Iterator[_Place]:
        for equal in self.unknown:
            bit = next((bit for bit, _ in equal if not place.used >> bit & 1), None)
            if bit is None:
                continue
            op = equal[bit - equal[0][0]][1]
            if op.start > last_start or (place.fresh and op.kind == "write"):
                continue
            after = _apply(place.state, op, self.floors[op.id])
            if after is not None and after is not place.state:
                used = place.used | 1 << bit
                yield _Place(after, place.done, place.ahead, used, place.rank, place.fresh + 1, -1)

    def _sees(self, index: int, place: _Place) -> bool:
        """Whether an operation that may come next fits this state, and would not fit just any."""
        op = self.ops[index]
        return op.kind != "write" and _apply(place.state, op, self.floor[index]) is not None

    def _failed_before(self, place: _Place) -> bool:
        """Whether this has been tried, with at least as many unknown operations left; remembers it if not."""
        tried = self.tried.setdefault((place.state, place.done, place.ahead, place.fresh), [])
        if any(used & place.used == used for used in tried):
            return True
        tried.append(place.used)
        return False

    def _lift(self, index: int) -> None:
        before, after = self.before[index], self.after[index]
        self.after[before], self.before[after] = after, before

    def _put_back(self, index: int) -> None:
        self.after[self.before[index]] = self.before[self.after[index]] = index

    def _explain(self, kind: Literal["order", "undecided"], placed: int, stuck: _Place) -> Violation:
        state = stuck.state
        holds = "is absent" if state.value is None else f"holds {state.value}"
        version = f"at version {state.version}" if state.exact else f"at an unknown version from {state.version} on"
        text = (
            f"after {placed} of {len(self.ops)} operations it {holds}, {version}, and nothing that may come next fits"
        )
        if kind == "undecided":
            text += "; the search gave up among too many unknown outcomes"
        done = {stuck.done + bit for bit in range(stuck.ahead.bit_length()) if stuck.ahead >> bit & 1}
        first_end = INT64_MAX
        waiting: list[Operation] = []
        for index in range(stuck.done, len(self.ops)):
            if self.starts[index] > first_end:
                break
            if index not in done:
                waiting.append(self.ops[index])
                first_end = min(first_end, self.ends[index])
        return Violation(kind, self.key, text, waiting)


def _mark(done: int, ahead: int, index: int) -> tuple[int, int]:
    """The pair `done`, `ahead` with one more operation placed."""
    ahead |= 1 << (index - done)
    while ahead & 1:
        ahead >>= 1
        done += 1
    return done, ahead


def _classes(unknown: Iterable[Operation]) -> list[list[tuple[int, Operation]]]:
    """Unknown operations, equal ones together, the earliest of them first, each with the bit that stands for it."""
    classes: dict[tuple[object, ...], list[Operation]] = {}
    for op in sorted(unknown, key=attrgetter("start")):
        classes.setdefault((op.kind, op.value, op.expect, op.expect_version, op.delta), []).append(op)
    bits = iter(range(sum(map(len, classes.values()))))
    return [[(next(bits), op) for op in equal] for equal in classes.values()]
