"""Folding: the entries of the resident engine follow their feed, a slice per transaction.

A group is durable with its row of the feed; its entries are rows later, after FOLD_COMMITS commits or FOLD_S seconds,
whichever comes first. By then a key that was written often is one row, and keys that lie side by side share their pages:
that is what makes a durable write cheap. A *pass* goes through what had changed when it began, in the order of the keys.
Each group takes a slice of it along in its transaction, larger than what it writes itself, so a pass always comes to its
end; when no group comes, slices are committed on their own. So no commit waits for a fold, and there is none to wait for.

The rows are written as they are in memory, which is what the last COMMIT made durable; what a key became since then is in
the feed. After a crash the next owner lays the feed over the rows (`sqlite_folds.newer`), and its passes fold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.engine import Entry
from holdfast.engines.evaluation import Group
from holdfast.engines.sqlite_rows import Writer

if TYPE_CHECKING:
    from holdfast.engines.resident_space import ResidentSpace

FOLD_COMMITS: Final = 50_000
"""A pass begins when so many commits of a space are not folded. Laying them over the rows takes a quarter of a second."""
FOLD_BYTES: Final = 32 * 1024 * 1024
"""Or when their rows of the feed are so many bytes, which an owner after a crash has to read."""
FOLD_S: Final = 300.0
"""Or when the first of them is so old."""
FOLD_PAUSE_S: Final = 0.02
"""How long to wait for a group that takes a slice along before it is committed alone."""
SLICE_ROWS: Final = 256
"""Rows of a slice, besides as many as the group writes that takes it along."""
SLICE_BYTES: Final = 1024 * 1024
"""A slice ends with the row that reaches this."""


class Unfolded:
    """What of one space is in the feed only."""

    __slots__ = ("bytes", "changed", "commits", "folded", "passing", "upto")

    def __init__(self) -> None:
        self.folded: int | None = None
        """What `folds` says of the space."""
        self.changed: set[str] = set()
        """Keys that changed since the last pass began."""
        self.commits = 0
        self.bytes = 0
        self.passing: list[str] = []
        """What is left of the pass, in falling order."""
        self.upto = 0
        """The revision at which the pass began."""

    def add(self, group: Group, revision: int, size: int) -> None:
        """A group is in the feed now, as a row of so many bytes; before, the space was at this revision."""
        if self.folded is None:
            self.folded = revision
        self.changed.update(group.writes)
        self.commits += len(group.commits)
        self.bytes += size

    @property
    def is_long(self) -> bool:
        return self.commits >= FOLD_COMMITS or self.bytes >= FOLD_BYTES

    def inherit(self, keys: Iterable[str], folded: int, revision: int) -> None:
        """An owner before this one left these keys behind."""
        self.folded = folded
        self.changed.update(keys)
        self.commits = revision - folded

    def begin_pass(self, revision: int) -> None:
        self.passing = sorted(self.changed, reverse=True)
        self.changed = set()
        self.commits = self.bytes = 0
        self.upto = revision


class Slice(NamedTuple):
    """Rows that were written in a transaction that is not committed yet."""

    home: ResidentSpace
    rows: dict[str, Entry | None]
    done: int
    """Keys of the pass that are done with it."""
    folded: int | None
    """What `folds` says now."""


class Folding:
    """The passes of an engine, one space after the other."""

    def __init__(self, rows: Writer) -> None:
        self._rows = rows
        self._homes: list[ResidentSpace] = []

    @property
    def is_under_way(self) -> bool:
        return bool(self._homes)

    def begin_if_due(self, home: ResidentSpace, *, now: bool = False) -> None:
        """Begin a pass if there is enough to fold; with `now`, whatever there is."""
        unfolded = home.unfolded
        if home not in self._homes and (unfolded.is_long or (now and unfolded.folded is not None)):
            unfolded.begin_pass(home.revision)
            self._homes.append(home)

    def write_slice(self, groups: Mapping[ResidentSpace, Group]) -> Slice | None:
        """Within a transaction: the next rows. `groups` are written in it too; if there are none, it is on its own."""
        while self._homes and not self._homes[0].exists:
            self._homes.pop(0)  # dropped meanwhile
        if not self._homes:
            return None
        home = self._homes[0]
        unfolded, entries, space = home.unfolded, home.entries, home.id or 0
        count = SLICE_ROWS + (sum(len(group.writes) for group in groups.values()) or SLICE_ROWS)
        keys = _within_bytes(unfolded.passing[-count:], entries)
        # What the group itself has written must not be written over with what is in memory until it is committed.
        written = groups[home].untold if home in groups else ()
        rows = {key: entries.get(key) for key in reversed(keys) if key not in written}
        self._rows.fold(space, rows, home.large)
        folded = unfolded.folded
        if len(keys) == len(unfolded.passing):
            folded = None if not groups and not unfolded.changed else unfolded.upto
            self._rows.folded(space, folded)
        return Slice(home, rows, len(keys), folded)

    def committed(self, slice: Slice) -> None:
        """The slice is in the file."""
        home, unfolded = slice.home, slice.home.unfolded
        home.note_rows(slice.rows)
        del unfolded.passing[len(unfolded.passing) - slice.done :]
        unfolded.folded = slice.folded
        if not unfolded.passing:
            self._homes.remove(home)

    def write_all(self, home: ResidentSpace) -> None:
        """Within a transaction, in whichever thread: everything a space has left; `forget` comes next."""
        unfolded = home.unfolded
        if unfolded.folded is not None:
            keys = sorted(unfolded.changed.union(unfolded.passing))
            self._rows.fold(home.id or 0, {key: home.entries.get(key) for key in keys}, home.large)
            self._rows.folded(home.id or 0, None)

    def forget(self, home: ResidentSpace) -> None:
        """All that was left is in the file now; or the space is gone."""
        if home in self._homes:
            self._homes.remove(home)
        home.note_rows({key: home.entries.get(key) for key in home.unfolded.changed.union(home.unfolded.passing)})
        home.unfolded = Unfolded()


def _within_bytes(keys: list[str], entries: Mapping[str, Entry]) -> list[str]:
    """The last of the keys, as many as a slice may have bytes; one at least."""
    size = 0
    for count, key in enumerate(reversed(keys), 1):
        entry = entries.get(key)
        size += 0 if entry is None else len(entry.value)
        if size > SLICE_BYTES:
            return keys[-count:]
    return keys
