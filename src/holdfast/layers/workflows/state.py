"""The state of an execution: what its steps write for each other, and for whoever looks.

While an execution runs, its state is in memory (`View`): one worker at a time has it, so reads need no round trip and `ctx.state["n"]`
works without await. What a step writes is buffered (`Buffer`) and becomes part of the commit that records its result; a step that
fails has written nothing, so whatever it counted is counted once however often it is tried.

A parallel task that read a key and then sets it was right about it only if nobody else has set it meanwhile: its stamp is
compared when the task is done, and the task is run again if it was wrong. Counters, lists and sets just add up.

When an execution is resumed, its code runs again from the beginning and must see what it saw. So the view begins empty, and what the log
says a step wrote is applied when the code comes to that step; the code's own writes are applied as it makes them. Each write
has the number it has in the log, and of two the later one counts, in whatever order branches come to theirs.

A step that was not done before runs now, and must not miss what another branch wrote before the crash and has not come to again. So
steps see that too (`beside`), all but what was written by steps of their own, to which their code comes as any other does.

In the store a key is `journal/data/<id>/<key>`; a list or set has the tag `list` or `set` there, the value is the name of
its present generation, and what was added by one commit is one chunk under `journal/items/`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from holdfast.codec import INT64_MAX, INT64_MIN, decode, encode
from holdfast.engine import Delete, Increment, Operation, Push, Put
from holdfast.errors import InvalidInput
from holdfast.ids import new_id
from holdfast.keys import check_name
from holdfast.layers.workflows.entries import JOURNAL, items_prefix

if TYPE_CHECKING:
    from holdfast.layers.workflows.earlier import Earlier
    from holdfast.layers.workflows.shape import Shape

KEY_BYTES_MAX: Final = 256
KEYS_MAX: Final = 40
"""Keys that one commit writes; each is at most two operations of its batch."""
ADDED_MAX: Final = 64
"""So many additions to a number are remembered one by one, when they may be followed by an earlier write."""
ITEMS_MAX: Final = 100_000
"""Of a list or set in memory."""

SET: Final = "set"
DELETE: Final = "delete"
ADD: Final = "add"
APPEND: Final = "append"
JOIN: Final = "join"
TAGS: Final = {APPEND: "list", JOIN: "set"}
KINDS: Final = {tag: kind for kind, tag in TAGS.items()}

T = TypeVar("T")
Write = list[Any]
"""[kind, payload]: what is done to one key, as the log keeps it."""


class Cell:
    """One key of the view."""

    __slots__ = ("added", "changes", "chunks", "kind", "number", "over", "value")

    def __init__(self) -> None:
        self.kind = ""
        """"" when it is absent; set, append (a list), or join (a set)."""
        self.over = False
        """Whether it adds to what an earlier version of the state has under its key."""
        self.number = 0
        """Of the write that it has its value, or its kind, from."""
        self.changes = 0
        """How often it was changed in this run: what a task that read it compares."""
        self.value: bytes = b""
        self.added: list[tuple[int, int]] = []
        """What was added to the value, by the number of the write."""
        self.chunks: list[tuple[int, list[Any]]] = []

    def read(self) -> Any:
        if self.kind == SET:
            value: Any = decode(self.value)
            return value + sum(delta for _, delta in self.added) if self.added else value
        if self.kind == APPEND:
            return decode(encode([item for _, chunk in self.chunks for item in chunk]))
        members = {encode(member): None for _, chunk in self.chunks for member in chunk}
        return [decode(member) for member in sorted(members)]

    def takes(self, kind: str) -> bool:
        """Whether this kind of addition can be made to it."""
        return self.kind == kind if kind != ADD else self.kind == SET and type(self.read()) is int

    def apply(self, write: Write, number: int, *, over: bool) -> None:
        """Do what a write says. `over`: there may be something of an earlier version that it adds to."""
        kind, payload = write
        if not self.kind and not self.number and kind not in (SET, DELETE):
            self.over = over
        if kind == ADD:
            if self.kind != SET:
                self.kind, self.value, self.added = SET, b"0", []
            self.added.append((number, payload))
        elif kind in (APPEND, JOIN):
            if self.kind != kind:
                if self.kind:
                    self.number = number  # of one that was absent, parts that were added before may still come
                self.kind, self.chunks = kind, []
            insort(self.chunks, (number, payload), key=lambda chunk: chunk[0])
        else:
            self.over, self.number = False, number
            self.added = [each for each in self.added if each[0] > number]
            later = [each for each in self.chunks if each[0] > number]
            if self.kind in (APPEND, JOIN) and later:
                self.chunks = later  # what came after it stays
            elif kind == SET:
                self.kind, self.value = SET, encode(payload)
            else:
                self.kind, self.value = (SET, b"0") if self.kind == SET and self.added else ("", b"")

    def copy(self) -> Cell:
        found = Cell()
        found.kind, found.over, found.number, found.changes = self.kind, self.over, self.number, self.changes
        found.value, found.added, found.chunks = self.value, [*self.added], [*self.chunks]
        return found


class View:
    """The state of one execution, as its code sees it."""

    def __init__(self) -> None:
        self.cells: dict[str, Cell] = {}
        self.number = 0
        """Of the last write; those of the log come first."""
        self.generations: dict[str, tuple[str, str]] = {}
        """Of the lists and sets that the store has, or is told of: the tag, and under which name what they hold is kept.

        Not what the code has come to: a branch that adds to a list may be ahead of one that is still replayed, and began the list."""
        self.settled = 0
        """The number of the last write of the log: what comes after is not replayed, and comes in order."""
        self.earlier: Earlier | None = None
        """What it began with, where the state is of a later version than it was."""
        self._ahead: dict[str, dict[int, tuple[int, str, Write]]] = {}
        """By key: what the log says was written, by whom, and the code has not come to. The writes of one event are known by their
        dictionary."""
        self._applied = 0

    @property
    def stamp(self) -> int:
        """Another one whenever something has changed."""
        return self._applied + (0 if self.earlier is None else self.earlier.stamp)

    def next(self) -> int:
        self.number += 1
        return self.number

    def cell(self, key: str, beside: str | None = None) -> Cell | None:
        """What is under a key, or None; `beside` a step, with what the code has not come to."""
        cell = self.cells.get(key)
        if beside is not None and (ahead := self._ahead_of(key, beside)):
            cell = self._with_ahead(cell, ahead)
        if self.earlier is not None and (cell is None or cell.over):
            below = self.earlier.cell(key, beside)
            return below if cell is None else cell if below is None else _added_to(below, cell)
        return None if cell is None or not cell.kind else cell

    def keys(self, beside: str | None = None) -> set[str]:
        """Of everything that is there, and of what was."""
        ahead = () if beside is None else self._ahead
        return {*self.cells, *ahead, *(() if self.earlier is None else self.earlier.keys(beside))}

    def state(self, beside: str | None = None) -> dict[str, Any]:
        """All of it."""
        return {key: cell.read() for key in sorted(self.keys(beside)) if (cell := self.cell(key, beside)) is not None}

    def changes(self, key: str, beside: str | None = None) -> int:
        """How often it was changed; for a step, what it sees before the code comes to it counts already."""
        cell = self.cells.get(key)
        seen = 0 if beside is None else len(self._ahead_of(key, beside))
        return seen + (0 if cell is None else cell.changes)

    # --- what the log tells, before the code comes to it ---

    def expect(self, path: str, writes: dict[str, Write], number: int) -> None:
        """The log says that these were written there."""
        for key, write in writes.items():
            self._ahead.setdefault(key, {})[id(writes)] = number, path, write

    def came_to(self, writes: dict[str, Write], *keys: str) -> bool:
        """The code has come to these, or to some keys of them, or they were taken back. Whether that was news."""
        found = False
        for key in keys or writes:
            if key in self._ahead:
                found = self._ahead[key].pop(id(writes), None) is not None or found
                if not self._ahead[key]:
                    del self._ahead[key]
        return found

    def replay(self, writes: dict[str, Write], number: int) -> None:
        """The code has come to what these wrote; once."""
        for key, write in writes.items():
            if self.came_to(writes, key):
                self.apply(key, write, number)

    def _ahead_of(self, key: str, beside: str) -> list[tuple[int, Write]]:
        below = beside + "/"
        return [
            (number, write)
            for number, path, write in list(self._ahead.get(key, {}).values())
            if path != beside and not path.startswith(below)
        ]

    def _with_ahead(self, cell: Cell | None, ahead: list[tuple[int, Write]]) -> Cell:
        found = Cell() if cell is None else cell.copy()
        for number, write in ahead:
            if number >= found.number:
                found.apply(write, number, over=self.earlier is not None)
        return found

    # --- writing ---

    def apply(self, key: str, write: Write, number: int, *, new: bool = True) -> None:
        """Do what a write says, if no later one has settled the matter. One that is not `new` is part of one that was counted."""
        cell = self.cells.get(key)
        if cell is None:
            cell = self.cells[key] = Cell()
        cell.changes += new
        if number < cell.number:
            return
        self._applied += 1
        cell.apply(write, number, over=self.earlier is not None)
        if len(cell.added) > ADDED_MAX and key not in self._ahead:
            cell.value, cell.added = b"%d" % cell.read(), []

    def operations(self, id: str, writes: dict[str, Write]) -> list[Operation]:
        """What the store is told, to be asked before the writes are applied here."""
        found: list[Operation] = []
        for key, (kind, payload) in writes.items():
            name = JOURNAL.key("data", id, key)
            if kind in (APPEND, JOIN):
                tag, generation = self.generations.get(key, ("", ""))
                if tag != TAGS[kind]:
                    tag, generation = self.generations[key] = TAGS[kind], new_id()
                    found.append(Put(name, encode(generation), tag=tag))
                found.append(Push(items_prefix(id, key, generation), encode(payload)))
                continue
            was_number = self.generations.pop(key, None) is None
            if kind == DELETE:
                found.append(Delete(name))
            else:
                found.append(Increment(name, payload) if kind == ADD and was_number else Put(name, encode(payload)))
        return found


def _added_to(below: Cell, cell: Cell) -> Cell:
    """What an earlier version had, with what was added since."""
    found = Cell()
    found.kind, found.number, found.changes = cell.kind, cell.number, cell.changes
    if cell.kind == SET:
        before = below.read() if below.kind == SET else 0
        found.value = encode((before if type(before) is int else 0) + cell.read())
    else:
        found.chunks = [*(below.chunks if below.kind == cell.kind else ()), *cell.chunks]
    return found


class Buffer:
    """What one step, or the code between steps, has read and written and not committed."""

    def __init__(self, view: View, beside: str | None = None) -> None:
        self.view = view
        self.beside = beside
        """Whose it is, if it is a step's."""
        self.writes: dict[str, Write] = {}
        self.read: dict[str, int] = {}

    def cell(self, key: str) -> Cell | None:
        """What is under the key without what was written here."""
        return self.view.cell(key, self.beside)

    def names(self) -> set[str]:
        """Of everything that there is, or was."""
        return {*self.view.keys(self.beside), *self.writes}

    def value(self, key: str) -> Any:
        """What this buffer's owner sees under the key; raises KeyError if that is nothing."""
        write = self.writes.get(key)
        if write is not None and write[0] in (SET, DELETE):
            if write[0] == DELETE:
                raise KeyError(key)
            return decode(encode(write[1]))
        self.read.setdefault(
            key, self.view.changes(key, self.beside)
        )  # first: a step in a thread may be interrupted here
        cell = self.cell(key)
        if write is None:
            if cell is None:
                raise KeyError(key)
            return cell.read()
        below = None if cell is None else cell.read()
        if write[0] == ADD:
            return (0 if below is None else below) + write[1]
        found = [*(below if isinstance(below, list) else []), *decode(encode(write[1]))]
        if write[0] == JOIN:
            return [decode(member) for member in sorted({encode(member) for member in found})]
        return found

    def put(self, key: str, write: Write) -> None:
        """Add a write to those of the same key."""
        kind, payload = write
        before = self.writes.get(key)
        if before is None and len(self.writes) >= KEYS_MAX:
            raise InvalidInput(
                f"a step writes at most {KEYS_MAX} keys of its state at a time; call ctx.state.flush() in between"
            )
        if kind in (SET, DELETE) or before is None:
            self.writes[key] = write
        elif before[0] == kind and kind == ADD:
            self.writes[key] = [ADD, before[1] + payload]
        elif before[0] == kind:
            self.writes[key] = [kind, [*before[1], *payload]]
        else:
            self.writes[key] = [SET, _added(before, write)]

    def stale(self) -> str | None:
        """A key that was read and is set, and that another has set meanwhile."""
        for key, write in self.writes.items():
            now = self.view.changes(key, self.beside)
            if write[0] in (SET, DELETE) and self.read.get(key, now) != now:
                return key
            if write[0] not in (SET, DELETE) and (cell := self.cell(key)) is not None and not cell.takes(write[0]):
                return key  # it is of another kind now
        return None

    def take(self) -> dict[str, Write]:
        """Hand over what was written; what is written from here on is a new buffer's."""
        writes, self.writes, self.read = self.writes, {}, {}
        return writes


def _added(before: Write, write: Write) -> Any:
    """A value that was set in this buffer, and then added to."""
    base = None if before[0] == DELETE else before[1]
    if write[0] == ADD:
        return (base or 0) + write[1]
    found = [*(base or []), *write[1]]
    return found if write[0] == APPEND else [decode(each) for each in sorted({encode(each) for each in found})]


class State:
    """`ctx.state`: dict-like, and atomic where it says so. Without await where nothing has to be waited for."""

    def __init__(
        self,
        buffer: Buffer,
        written: Callable[[str, Write], None],
        flush: Callable[[], Any],
        shape: Shape | None = None,
    ) -> None:
        self._shape = shape
        self._buffer = buffer
        self._written = written
        self._flush = flush

    # --- reading ---

    def __getitem__(self, key: str) -> Any:
        return self._buffer.value(check_key(key))

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default; a copy, which may be changed without changing the state."""
        try:
            return self._buffer.value(check_key(key))
        except KeyError:
            return default

    def get_many(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values of those keys that there are."""
        return {key: self[key] for key in keys if key in self}

    def all(self) -> dict[str, Any]:
        """The whole state."""
        return {key: self[key] for key in self}

    def __contains__(self, key: object) -> bool:
        try:
            self._buffer.value(check_key(key))
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(key for key in self._buffer.names() if key in self))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def typed(self) -> Any: ...
    @overload
    def typed(self, as_type: type[T]) -> T: ...

    def typed(self, as_type: type[Any] | None = None) -> Any:
        """The whole state as a dataclass, TypedDict, pydantic model or msgspec struct; by default as what the workflow declared."""
        wanted = as_type or (None if self._shape is None else self._shape.model)
        if wanted is None:
            raise InvalidInput("name a type, or declare one: @workflow(state=…)")
        return decode(encode(self.all()), wanted)

    # --- writing: buffered, and committed with the step ---

    def __setitem__(self, key: str, value: Any) -> None:
        plain: Any = decode(encode(value))
        self._check(key, plain)
        self._written(key, [SET, plain])

    def set(self, key: str, value: Any) -> None:
        """The same as `state[key] = value`."""
        self[key] = value

    def update(self, values: dict[str, Any]) -> None:
        """Set several keys; each is replaced as a whole, and no other is touched."""
        plain: dict[str, Any] = {key: decode(encode(value)) for key, value in values.items()}
        for key, value in plain.items():
            self._check(key, value)
        for key, value in plain.items():
            self._written(key, [SET, value])

    def __delitem__(self, key: str) -> None:
        self._buffer.value(check_key(key))
        self._written(key, [DELETE, None])

    async def increment(self, key: str, delta: int = 1) -> int:
        """Add to a number and give the sum, as far as it is known here; other tasks may add at the same time."""
        if type(delta) is not int or not INT64_MIN <= delta <= INT64_MAX:
            raise InvalidInput(f"{delta!r:.60} is not a signed 64-bit integer")
        before = self._peek(check_key(key), 0)
        if self._shape is not None:
            self._shape.check_name(key)
        if type(before) is not int or not INT64_MIN <= before + delta <= INT64_MAX:
            raise InvalidInput(f"{key!r} of the state is no 64-bit integer, or would be none; it cannot be incremented")
        self._check(key, before + delta)
        self._written(key, [ADD, delta])
        return before + delta

    async def append_to_list(self, key: str, *values: Any) -> None:
        """Add to the end of a list, together and in this order."""
        self._gather(key, APPEND, values)

    async def add_to_set(self, key: str, *members: Any) -> None:
        """Add members to a set; it is read as a list without doubles, in the order of their JSON."""
        self._gather(key, JOIN, members)

    async def flush(self) -> None:
        """Commit what is buffered, now. What is done again after a crash or a failure is then added again: look at the state first."""
        await self._flush()

    def _gather(self, key: str, kind: str, values: tuple[Any, ...]) -> None:
        cell = self._buffer.cell(check_key(key))
        write = self._buffer.writes.get(key)
        given: list[Any] = decode(encode(list(values)))
        if self._shape is not None:
            self._shape.check_added(key, given)
        if (cell is not None and cell.kind not in (kind, SET)) or (
            write is not None and write[0] not in (kind, SET, DELETE)
        ):
            raise InvalidInput(
                f"{key!r} of the state is a {'set' if kind == APPEND else 'list'}, and cannot be added to like this"
            )
        if (write is None and cell is not None and cell.kind == SET) or (write is not None and write[0] == SET):
            before = self.get(key)  # it is set as a whole, so what was there counts as read
            if not isinstance(before, list):
                raise InvalidInput(f"{key!r} of the state is no list, and cannot be added to")
            added = given if kind == APPEND else [each for each in given if each not in before]
            self._written(key, [SET, [*before, *added]])
            return
        if cell is not None and sum(len(chunk) for _, chunk in cell.chunks) + len(given) > ITEMS_MAX:
            raise InvalidInput(f"a list or set of the state has at most {ITEMS_MAX:,} items; keep so many as records")
        if given:
            self._written(key, [kind, given])

    def _check(self, key: str, value: Any) -> None:
        check_key(key)
        if self._shape is not None:
            self._shape.check(key, value)

    def _peek(self, key: str, default: Any) -> Any:
        """Look without having read: adding is right whatever others do meanwhile."""
        known = dict(self._buffer.read)
        try:
            return self.get(key, default)
        finally:
            self._buffer.read = known


def check_key(key: object) -> str:
    """The name of something in a state."""
    if not isinstance(key, str):
        raise InvalidInput(f"a key of the state is text, not {type(key).__name__}")
    check_name(key, "key of the state")
    if len(key.encode()) > KEY_BYTES_MAX:
        raise InvalidInput(f"a key of the state has at most {KEY_BYTES_MAX} bytes; {key[:40]!r}… has more")
    return key
