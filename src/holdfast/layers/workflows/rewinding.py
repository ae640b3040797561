"""Going back to before a step: what is taken back, and the state that remains.

Taking back a step takes back everything that was called after it in its branch, and everything below those. What code between steps
wrote to the state counts by its place: `Cut.kept` says of each branch how many of its writes were made before the cut. What
comes after is made again, by the same code, and so must be neither in the state nor remembered as committed.

Going back to before a migration of the state takes that back too: the state is of the earlier version again, and whoever goes on migrates
it anew. So everything that was done after the migration is taken back with it, whether it came after the step or not (`over_migrations`).

A map and a gather have no record of their own. Their place is where a number is missing among the calls of their branch: the first one
after the calls that were done before anything below them was. Of a class, the definition tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.codec import encode
from holdfast.engine import Delete, Operation, Put
from holdfast.errors import InvalidInput
from holdfast.layers.workflows.entries import RETRIED, TOLERATED, LogEvent, StepRecord, data_prefix
from holdfast.layers.workflows.state import SET, View

FORKED: Final = "forked"
TYPED: Final = "typed"
"""The first event of a state that has a type: what its fields are from the beginning."""
MIGRATED: Final = "migrated"
SHOWN_MAX: Final = 20
"""Names of steps that an error lists."""

Records = dict[str, StepRecord]


class Cut(NamedTuple):
    """Where an execution is cut off."""

    dropped: frozenset[str]
    """The paths that are done again."""
    kept: dict[str, int]
    """By branch: how many writes of its own code remain. Branches that are not named remain whole."""

    def takes(self, event: LogEvent) -> bool:
        """Whether what a step wrote is taken back."""
        return event.path in self.dropped

    def takes_body(self, event: LogEvent) -> bool:
        """Whether what the code around it wrote is."""
        return bool(event.body_writes) and self.takes_writes(event.branch, event.path, event.body)

    def touches(self, event: LogEvent) -> bool:
        """Whether anything of it is taken back."""
        return (event.event != FORKED and self.takes(event)) or self.takes_body(event)

    def takes_writes(self, branch: str, path: str, upto: int) -> bool:
        """Whether those of a branch that were committed with this path, up to this number, are."""
        return path in self.dropped or upto > self.kept.get(branch, upto)


def root_of(path: str) -> str:
    return path.partition("/")[0]


def path_of(step: str) -> str:
    """A step as people name it: `fetch` is the first call of that name."""
    return step if "#" in step else f"{step}#0"


def with_children(cut: Cut, records: Records) -> Cut:
    """And before what is done elsewhere and still waited for: it was cancelled, or is another's, and tells nobody."""
    waiting = {
        path
        for path, record in records.items()
        if record.status == "waiting" and (record.kind == "child" or record.away is not None)
    }
    return Cut(cut.dropped | waiting, cut.kept)


def failed_cut(records: Records, events: Iterable[LogEvent], steps: list[str], step: str) -> Cut:
    """Before all that failed, unless the code went on after it; and before the step whose failure ended it, whatever came then.

    Whether it went on is told by the calls that it made then (`StepRecord.after`): others may have been under way, and remain. What a
    map has tolerated, or a step that has a result, is handled, whether more was called then or not.
    """
    events = list(events)
    order = _order(records)
    failed = {
        path
        for path, record in records.items()
        if record.status in ("failed", "retrying")
        and not any(at in records for at in _tolerating(path))
        and not any(at in records and records[at].status == "completed" for at in _upwards(_around(path)))
    }
    ended = {_around(at): order[at] for at in _upwards(step)} if step in failed else {}
    dropped = {path for path in records if any(order[at] > ended.get(_around(at), order[at]) for at in _upwards(path))}
    last: dict[str, int] = {}  # of each branch: after how many failures it made its last calls, of those that remain
    for path in records.keys() - dropped:
        for at in _upwards(path):
            last[_around(at)] = max(last.get(_around(at), 0), order[at])
    roots = {path for path in failed - dropped if all(last[_around(at)] <= order[at] for at in _upwards(path))}
    roots |= {step} & failed
    dropped |= {path for path in records if any(each in roots for each in _upwards(path))}
    return _cut(records, dropped, places(records, events, steps), counting(events))


def _order(records: Records) -> dict[str, int]:
    """Of each call: after how many failures it was made. One without a record of its own comes with the first thing below it."""
    calls = {path: record.after for path, record in records.items() if path.rpartition("/")[2][0] != "~"}
    order = defaultdict(int, calls)
    for path, after in calls.items():
        for at in _upwards(_around(path)):
            if at in records:
                break  # what is in a step counts for itself
            order[at] = min(order.get(at, after), after)
    return order


def _around(path: str) -> str:
    """The branch that a call was made in."""
    return path.rpartition("/")[0]


def _upwards(path: str) -> Iterator[str]:
    """A path, and those of what it is in."""
    while path:
        yield path
        path = _around(path)


def _tolerating(path: str) -> Iterator[str]:
    """Where it is told, of each map that this is part of, that what failed in it is tolerated."""
    return (f"{at}/{TOLERATED}" for at in _upwards(_around(path)))


def cut_before(records: Records, events: Iterable[LogEvent], steps: list[str], step: str) -> Cut:
    """Before a step of the trunk, or one below; InvalidInput when nothing is recorded of it."""
    path = path_of(step)
    if not any(each == path or each.startswith(f"{path}/") for each in records):
        known = sorted({root_of(each) for each in records if each[0] != "~"})[:SHOWN_MAX]
        raise InvalidInput(
            f"there is no step {step!r} to go on from; recorded are {', '.join(known) or 'none'}. "
            "A step is named as it was called, the second call of that name as name#1"
        )
    placed = places(records, events, steps)
    dropped = {each for each in records if each == path or each.startswith(f"{path}/")}
    at = path
    while at:  # and what came after it, in its branch and in those around it
        branch, position = at.rpartition("/")[0], placed.get(at, -1)
        if at in records:
            dropped.add(at)  # a step in which it is
        is_item = at in records and records[at].kind == "item"  # the others of its map do not come after it
        for each in records if not is_item else ():
            below = each[len(branch) + 1 :] if branch and each.startswith(f"{branch}/") else each
            if branch and below == each:
                continue  # it is in another branch
            sibling = f"{branch}/{root_of(below)}" if branch else root_of(below)
            if placed.get(sibling, -1) > position >= 0:
                dropped.add(each)
        at = branch
    dropped |= {each for each in records if each == "~result"}
    dropped |= {each for each in records if each.startswith("~when:") and path_of(each[6:]) in dropped}
    return _cut(records, dropped, placed, counting(events))


def places(records: Records, events: Iterable[LogEvent], steps: list[str]) -> dict[str, int]:
    """The place of each call in its branch, by its path."""
    placed = {path: record.position for path, record in records.items() if record.position >= 0}
    placed |= {f"{name}#0": number for number, name in enumerate(steps)}
    calls = {at for path in records for at in _upwards(_around(path)) if "#" in at.rpartition("/")[2]}
    composed = calls - placed.keys()
    if not composed:
        return placed
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, event in enumerate(events):
        for at in _upwards(event.path or event.branch):
            first.setdefault(at, number)
            last[at] = number
    beside: dict[str, dict[str, int]] = {_around(at): {} for at in composed}
    for path, place in placed.items():
        if _around(path) in beside:
            beside[_around(path)][path] = place
    for at in sorted(composed, key=lambda each: first.get(each, 0)):
        others = beside[_around(at)]
        place = max((others[each] for each in others if last.get(each, 0) < first.get(at, 0)), default=-1) + 1
        taken = set(others.values())
        while place in taken:
            place += 1
        placed[at] = others[at] = place
    return placed


def in_order(records: Records, events: Iterable[LogEvent], steps: list[str]) -> Records:
    """The same, in the order in which the code makes the calls. Their times do not tell: several begin in one millisecond."""
    placed = places(records, events, steps)

    def place(at: str) -> int:
        last = at.rpartition("/")[2]
        return placed.get(at, int(last) if last.isdecimal() else -1)  # one of several branches has its number

    def place_in_all(path: str) -> list[int]:
        return [place(at) for at in _upwards(path)][::-1]

    return {path: records[path] for path in sorted(records, key=place_in_all)}


def _cut(records: Records, dropped: set[str], placed: dict[str, int], told: list[LogEvent]) -> Cut:
    """Of each branch of which something is dropped: its own writes up to there remain, and those that something which remains followed.
    A map of which something is dropped has not tolerated anything yet."""
    dropped = dropped | {at for path in dropped for at in _tolerating(path) if at in records}
    firsts: dict[str, int] = {}
    for path in dropped:
        if path[0] == "~":
            continue
        while True:  # a branch that something is dropped of is itself a place of the one around it
            branch = path.rpartition("/")[0]
            position = placed.get(path, -1)
            if position >= 0:
                firsts[branch] = min(position, firsts.get(branch, position))
            if not branch:
                break
            path = branch
    kept = dict.fromkeys(firsts, 0)
    for path, record in records.items():
        branch = _around(path)
        if branch in firsts and 0 <= placed.get(path, -1) < firsts[branch]:
            kept[branch] = max(kept[branch], record.body)
    for path in dropped:
        if path.endswith("/~body"):
            kept.setdefault(path.rpartition("/")[0], 0)  # one that only wrote, and is dropped as a whole
    upto = dict.fromkeys(kept, 0)
    for event in told:
        if event.branch in upto:
            upto[event.branch] = max(upto[event.branch], event.body)
        around = event.path if event.path not in dropped and event.event != FORKED else ""
        while around:
            around = around.rpartition("/")[0]
            if around in kept:
                kept[around] = max(kept[around], upto[around])
    return Cut(frozenset(dropped), kept)


def counting(events: Iterable[LogEvent]) -> list[LogEvent]:
    """Those that no retry has taken back."""
    fold = Fold()
    for event in events:
        fold.add(event)
    return fold.events


def over_migrations(cut: Cut, records: Records, events: Iterable[LogEvent], steps: list[str]) -> Cut:
    """The same, or more, if it goes back to before a migration of the state."""
    fold, events = Fold(), list(events)
    for event in events:
        fold.add(event)
    told = fold.events
    touched = next((place for place, event in enumerate(told) if cut.touches(event)), len(told))
    index = next((place for place in range(touched, len(told)) if told[place].event == MIGRATED), None)
    if index is None:
        return cut
    placed, later = places(records, events, steps), told[index:]
    first = min((place for path in cut.dropped if (place := placed.get(root_of(path), -1)) >= 0), default=0)
    dropped = cut.dropped | {event.path for event in later if event.path in records}
    dropped |= {path for path in records if placed.get(root_of(path), -1) >= first}
    dropped |= {path for path in records if path.startswith("~when:") and path_of(path[6:]) in dropped}
    further = _cut(records, set(dropped), placed, told)
    for event in later:
        if event.body:
            before = max((each.body for each in told[:index] if each.branch == event.branch), default=0)
            further.kept[event.branch] = min(before, further.kept.get(event.branch, before))
    return with_children(further, records)


def taken_back(events: list[LogEvent]) -> set[int]:
    """The places of migrations that a later retry has taken back, and of what was edited after them."""
    if not any(event.event == MIGRATED for event in events):
        return set()
    fold = Fold()
    for event in events:
        fold.add(event)
    return fold.lost


class Fold:
    """The state, as the log says it became; event by event."""

    def __init__(self) -> None:
        self._told: list[tuple[int, LogEvent]] = []
        self._count = 0
        self.lost: set[int] = set()
        """The places of migrations that were taken back."""
        self.view = View()

    def add(self, event: LogEvent) -> list[str]:
        """What happened next; gives the keys of the state that it changed."""
        place, self._count = self._count, self._count + 1
        if event.event == RETRIED:
            cut = Cut(frozenset(event.writes), event.body_writes)
            before = {key: _read(self.view, key) for key in self.view.cells}
            self.cut(cut)
            return [key for key, value in before.items() if _read(self.view, key) != value]
        self._told.append((place, event))
        self._apply(event)
        return [*event.writes, *event.body_writes]

    def cut(self, cut: Cut) -> None:
        """Forget what is taken back, as if it had not been."""
        kept: list[tuple[int, LogEvent]] = []
        touched = undone = False
        for place, event in self._told:
            if (touched and event.event == MIGRATED) or (undone and event.event == FORKED):
                undone = True
                self.lost.add(place)
                continue
            touched = touched or cut.touches(event)
            if event.event != FORKED and cut.takes(event):
                continue
            kept.append((place, _without_body(event) if cut.takes_body(event) else event))
        self._told, self.view = kept, View()
        for _, event in kept:
            self._apply(event)

    def _apply(self, event: LogEvent) -> None:
        for writes in (event.body_writes, event.writes):
            number = self.view.next()
            for key, write in writes.items():
                self.view.apply(key, write, number)

    @property
    def events(self) -> list[LogEvent]:
        """Those that count."""
        return [event for _, event in self._told]

    @property
    def version(self) -> str:
        """Of the state; "" when it has no type."""
        return next((event.version for _, event in reversed(self._told) if event.version), "")

    def state(self) -> dict[str, Any]:
        return {key: _read(self.view, key) for key in sorted(self.view.cells) if self.view.cell(key) is not None}


def _without_body(event: LogEvent) -> LogEvent:
    return msgspec.structs.replace(event, body=0, body_writes={})


def _read(view: View, key: str) -> Any:
    cell = view.cell(key)
    return None if cell is None else cell.read()


def writing(id: str, view: View, keys: Iterable[str]) -> list[Operation]:
    """What makes these keys of a state in the store what they are in the view."""
    operations: list[Operation] = []
    for key in keys:
        cell = view.cell(key)
        if cell is None:
            operations.append(Delete(data_prefix(id) + key))
        elif cell.kind == SET:
            operations.append(Put(data_prefix(id) + key, encode(cell.read())))
        else:
            operations += View().operations(id, {key: [cell.kind, cell.read()]})
    return operations
