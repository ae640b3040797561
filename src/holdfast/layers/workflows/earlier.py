"""What a state was under an earlier version, brought to the next one as it is read.

Code that is resumed under a newer version of its state runs again from its beginning, and what is replayed was written in the shape of
then. It must see the state of each moment, and in its own shape. So what each version wrote is a view of its own, over this: the
state that the version before had, as far as the code has come, migrated. Numbers, lists and sets that the later version added to are added to what that gives.

Migrating is done when something is read, and again when more was replayed; so a migration is a function of its argument alone, and takes
a state to which not everything has been written yet. One that fails here is NonDeterminism: the execution is paused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from holdfast.codec import encode
from holdfast.errors import MigrationFailed, NonDeterminism
from holdfast.layers.workflows.state import APPEND, JOIN, SET, Cell, View, Write

Migrate = Callable[[dict[str, Any]], dict[str, Any]]


class Earlier:
    """The state of the version before, migrated: what a later one begins with."""

    def __init__(self, below: View, migrate: Migrate, written: dict[str, Write]) -> None:
        self.below = below
        self._migrate = migrate
        self._written = written
        """What the migration wrote to the store; it tells what is kept as a list or set there."""
        self._seen: tuple[int, str | None] = -1, None
        self._cells: dict[str, Cell] = {}

    @property
    def stamp(self) -> int:
        """Another one whenever something below has changed."""
        return self.below.stamp

    def keys(self, beside: str | None) -> Iterable[str]:
        return self._state(beside).keys()

    def cell(self, key: str, beside: str | None) -> Cell | None:
        """A key as the later version finds it; `beside` a step, with what the code has not come to."""
        return self._state(beside).get(key)

    def _state(self, beside: str | None) -> dict[str, Cell]:
        if self._seen != (self.stamp, beside):
            self._seen, data = (self.stamp, beside), self.below.state(beside)
            try:
                self._cells = {key: self._made(key, value, beside) for key, value in self._migrate(data).items()}
            except MigrationFailed as exc:
                raise NonDeterminism(
                    f"the state of before, which the code comes to again, cannot be shown in its present version: {exc}",
                    recorded=exc.from_version or "",
                    called=exc.to_version or "",
                ) from exc
        return self._cells

    def _made(self, key: str, value: Any, beside: str | None) -> Cell:
        if (write := self._written.get(key)) is not None:
            kind = write[0]
        else:
            before = self.below.cell(key, beside)
            kind = SET if before is None else before.kind
        cell = Cell()
        cell.kind = kind if isinstance(value, list) and kind in (APPEND, JOIN) else SET
        if cell.kind == SET:
            cell.value = encode(value)
        else:
            cell.chunks = [(0, value)]
        return cell
