"""Records: values under names, with versions, lifetimes, counters, lists and sets.

Keys. A record `orders/1` is the entry `records/orders/1`. A list is a record tagged `list` whose value is the list's
own id; its items are entries `lists/<name>/<id>/<19 digits>`, in order of arrival. A set is the same with `sets/` and one
entry per member, named by its canonical JSON (or its hash, when that is long). Appending therefore costs what the item
costs, never what the list costs, and appends never conflict with each other.

Life. A list's items live and die with its record: they are read through it. Deleting or replacing the record, or letting
it expire, hides all items at once, because the next list of that name gets another id; the items themselves are removed
in the background (`collector.py`). A write names its ttl or has none: a later `set` without one makes a record that stays.

How it fails. A refused condition raises Conflict and changes nothing. A read-then-write belongs into `transact`.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import datetime
from typing import Any, Final, Literal, TypeVar, cast, overload

import msgspec

from holdfast.clock import Duration, as_datetime, optional_ms
from holdfast.codec import decode, encode
from holdfast.engine import (
    SCAN_MAX,
    Absent,
    Condition,
    Delete,
    Entry,
    Increment,
    Operation,
    Push,
    Put,
    Receipt,
    Touch,
    ValueIs,
    VersionIs,
)
from holdfast.errors import InvalidInput
from holdfast.ids import new_id
from holdfast.keys import Subspace, check_prefix
from holdfast.layers.answers import answered, once
from holdfast.layers.batch import ABSENT, LIST, RECORDS, SET, record_key, split_tag, tag_version, type_tag
from holdfast.layers.consistency import Consistency, read
from holdfast.layers.scope import Scope
from holdfast.layers.transact import ATTEMPTS_MAX, Transaction, transact
from holdfast.layers.typed import admitted, current

LISTS: Final = Subspace("lists")
SETS: Final = Subspace("sets")
MEMBER_BYTES_MAX: Final = 256
"""A set's member whose JSON is longer than this is named by its hash."""
ITEMS_MAX: Final = 100
"""Items or members written by one call."""
GET_MANY_MAX: Final = 10_000
SKEW_MS_MAX: Final = 60_000
"""By how much a server's clock may be ahead of ours, for a count to leave out what has expired there."""

T = TypeVar("T")
D = TypeVar("D")
Items = list
_UNSET: Final = object()


class Record(msgspec.Struct, frozen=True):
    """A record with everything known about it."""

    key: str
    value: Any
    version: int
    owner: str
    created_at: datetime
    updated_at: datetime
    expires_at: datetime | None
    type: str | None = None
    state: str | None = None
    schema_version: str | None = None
    """Of its type's schema, which the value is as; None when there is no schema."""


class Records:
    """The records of a space, as `space.records`."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._engine = scope.engine
        self._space = scope.space
        self._session = scope.session

    # --- reading ---

    @overload
    async def get(self, key: str, *, consistency: Consistency = "strong") -> Any: ...
    @overload
    async def get(self, key: str, default: D, *, consistency: Consistency = "strong") -> Any | D: ...
    @overload
    async def get(
        self, key: str, default: None = None, *, as_type: type[T], consistency: Consistency = "strong"
    ) -> T | None: ...
    @overload
    async def get(self, key: str, default: D, *, as_type: type[T], consistency: Consistency = "strong") -> T | D: ...

    async def get(
        self,
        key: str,
        default: Any = None,
        *,
        as_type: type[Any] | None = None,
        consistency: Consistency = "strong",
    ) -> Any:
        """The value, or the default. `as_type` reads it as a dataclass, TypedDict, pydantic model or msgspec struct.

        `consistency` is "strong" (what is there now), "session" (what this view wrote or read before, or newer) or
        "eventual"; the last two may be answered by a cache.
        """
        if consistency == "strong":
            [entry] = await self._engine.get(self._space, [record_key(key)])
        else:
            [entry] = await read(self._scope, [record_key(key)], consistency)
        if entry is None:
            return default
        if entry.tag:
            _refuse_collection(entry)
            entry = await current(self._scope, entry)
        return decode(entry.value, as_type)

    async def entry(
        self,
        key: str,
        *,
        as_type: type[Any] | None = None,
        as_stored: bool = False,
        consistency: Consistency = "strong",
    ) -> Record | None:
        """The record with version, owner, times and expiry; None if there is none. `as_stored` leaves older data as it is."""
        [entry] = await read(self._scope, [record_key(key)], consistency)
        if entry is None:
            return None
        return _record(entry if as_stored else await current(self._scope, entry), as_type)

    async def get_many(
        self, keys: Iterable[str], *, as_type: type[Any] | None = None, consistency: Consistency = "strong"
    ) -> dict[str, Any]:
        """The values of those keys that exist, from one snapshot. Lists and sets are no values; they are left out."""
        if isinstance(keys, str) or not isinstance(keys, Iterable):
            raise InvalidInput(f"get_many takes a list of keys, not {keys!r:.60}")
        names = Items(keys)
        if len(names) > GET_MANY_MAX:
            raise InvalidInput(f"get_many reads at most {GET_MANY_MAX:,} keys at once, not {len(names):,}")
        entries = await read(self._scope, [record_key(name) for name in names], consistency)
        return {
            name: decode((await current(self._scope, entry) if entry.tag else entry).value, as_type)
            for name, entry in zip(names, entries, strict=True)
            if entry is not None and entry.tag not in (LIST, SET)
        }

    async def exists(self, key: str) -> bool:
        """Whether there is a record, list or set of this name."""
        [entry] = await self._engine.get(self._space, [record_key(key)])
        return entry is not None

    async def keys(self, prefix: str = "") -> Items[str]:
        """The names of all records, lists and sets that begin with the prefix, in order."""
        return [record.key async for record in self.scan(prefix)]

    async def scan(
        self,
        prefix: str = "",
        *,
        after: str | None = None,
        page: int = 1000,
        reverse: bool = False,
        as_type: type[Any] | None = None,
    ) -> AsyncIterator[Record]:
        """All records under a prefix, behind `after`, page by page; a page is one snapshot. A list or set shows with value None.

        Values are as they are stored, also those of an older version of their type's schema: `schema_version` tells.
        """
        root = RECORDS.root + check_prefix(prefix)
        after = None if after is None else record_key(after)
        if type(page) is not int or page < 1:
            raise InvalidInput(f"a page has at least 1 record, not {page!r:.60}")
        while True:
            found = await self._engine.scan(self._space, root, after=after, limit=min(page, SCAN_MAX), reverse=reverse)
            for entry in found.entries:
                yield _record(entry, as_type, collections=True)
            if not found.more:
                return
            after = found.entries[-1].key

    async def size(self) -> int:
        """How many records, lists and sets there are. Counted as they are written, not by looking."""
        while True:
            found = await self._engine.spaces(self._space)
            if not found:
                return 0
            due, count = (
                found[0].next_expiry,
                sum(each.keys for each in found[0].usage if each.subspace == RECORDS.name),
            )
            if not count:  # who may not read is not told how many there are, and hears so here
                await self._engine.scan(self._space, RECORDS.root, limit=1)
            if due is None or due > self._scope.clock.now_ms() + SKEW_MS_MAX:
                return count
            swept = await self._scope.commit(
                ()
            )  # an empty commit sweeps what has expired, and tells the store's own time
            if due > swept.at:
                return count

    # --- writing ---

    async def set(
        self,
        key: str,
        value: Any,
        *,
        ttl: Duration | None = None,
        type: str | None = None,
        state: str | None = None,
        request_id: str | None = None,
    ) -> int:
        """Write a value and give its version. Without a ttl it never expires, unless its type has a retention."""
        if ttl is None and type is None and state is None:
            put = Put(record_key(key), encode(value))
        else:
            put = Put(record_key(key), encode(value), optional_ms(ttl), type_tag(type, state))
            if put.tag:
                put = await admitted(self._scope, put)
        receipt = await self._scope.send((put,), (), request_id)
        version, session = receipt.version, self._session
        if version > session.seen:  # written out: this is what is done most
            session.seen = version
        return version

    async def delete(self, key: str, *, request_id: str | None = None) -> bool:
        """Remove a record, list or set; tells whether there was one."""
        receipt = await self._scope.commit((Delete(record_key(key)),), (), request_id)
        return bool(receipt.results[0])

    async def increment(
        self, key: str, delta: int = 1, *, ttl: Duration | None = None, request_id: str | None = None
    ) -> int:
        """Add to a 64-bit number and give the sum; a record that does not exist counts as 0."""
        receipt = await self._scope.commit((Increment(record_key(key), delta, optional_ms(ttl)),), (), request_id)
        return receipt.results[0]  # type: ignore[return-value]

    async def compare_and_swap(
        self,
        key: str,
        value: Any,
        *,
        expect: Any = _UNSET,
        expect_version: int | None = None,
        ttl: Duration | None = None,
        type: str | None = None,
        state: str | None = None,
        request_id: str | None = None,
    ) -> int:
        """Write only if the record holds `expect` (ABSENT: does not exist), or is at `expect_version`; Conflict otherwise."""
        if (expect is _UNSET) == (expect_version is None):
            raise InvalidInput("compare_and_swap needs either expect= or expect_version=")
        name = record_key(key)
        condition: Condition
        if expect_version is not None:
            condition = VersionIs(name, expect_version)
        elif expect is ABSENT:
            condition = Absent(name)
        else:
            condition = ValueIs(name, encode(expect))
        put = await admitted(self._scope, Put(name, encode(value), optional_ms(ttl), type_tag(type, state)))
        return (await self._scope.commit((put,), (condition,), request_id)).version

    async def commit(self, *parts: Condition | Operation, request_id: str | None = None) -> Receipt:
        """Conditions and operations in one batch: all of it happens, or nothing and a Conflict is raised."""
        conditions: Items[Condition] = []
        operations: Items[Operation] = []
        for part in parts:
            if isinstance(part, Operation):
                operations.append(await admitted(self._scope, part) if isinstance(part, Put) else part)
            elif isinstance(part, Condition):
                conditions.append(part)
            else:
                raise InvalidInput(
                    f"{part!r:.60} is neither a condition nor an operation; see holdfast.set_, at_least, …"
                )
        return await self._scope.commit(tuple(operations), tuple(conditions), request_id)

    # --- lists and sets ---

    async def append_to_list(
        self, key: str, *values: Any, ttl: Duration | None = None, request_id: str | None = None
    ) -> None:
        """Add values to the end of a list, together and in this order. A ttl is the whole list's, and only extends."""
        asked = ["append", key, values, ttl]
        await self.transact(lambda tx: tx.append_to_list(key, *values, ttl=ttl), request_id=request_id, asked=asked)

    async def list(self, key: str, *, as_type: type[Any] | None = None) -> Items[Any]:
        """The values of a list in order; empty if there is none."""
        return [decode(entry.value, as_type) async for entry in self._children(LISTS, LIST, key)]

    async def add_to_set(
        self, key: str, *members: Any, ttl: Duration | None = None, request_id: str | None = None
    ) -> int:
        """Add members to a set; gives how many were new. A ttl is the whole set's, and only extends."""
        asked = ["add", key, members, ttl]
        return await self.transact(lambda tx: tx.add_to_set(key, *members, ttl=ttl), request_id=request_id, asked=asked)

    async def remove_from_set(self, key: str, *members: Any, request_id: str | None = None) -> int:
        """Remove members from a set; gives how many were there."""
        asked = ["remove", key, members]
        return await self.transact(lambda tx: tx.remove_from_set(key, *members), request_id=request_id, asked=asked)

    async def members(self, key: str, *, as_type: type[Any] | None = None) -> Items[Any]:
        """The members of a set, in the order of their JSON; empty if there is none."""
        return [decode(entry.value, as_type) async for entry in self._children(SETS, SET, key)]

    async def parts(
        self,
        key: str,
        kind: Literal["list", "set"],
        *,
        after: str | None = None,
        page: int = 1000,
        as_type: type[Any] | None = None,
    ) -> AsyncIterator[tuple[str, Any]]:
        """The items of a list or the members of a set, each with its place; `after` is the last place already seen."""
        subspace = LISTS if kind == LIST else SETS
        async for entry in self._children(subspace, kind, key, after, page):
            yield subspace.split(entry.key, 3)[2], decode(entry.value, as_type)

    async def _children(
        self, subspace: Subspace, kind: str, key: str, place: str | None = None, limit: int = 1000
    ) -> AsyncIterator[Entry]:
        [root] = await self._engine.get(self._space, [record_key(key)])
        if root is None:
            return
        prefix = subspace.prefix(key, collection_id(root, kind))
        after = None if place is None else prefix + place
        while True:
            page = await self._engine.scan(self._space, prefix, after=after, limit=limit)
            for entry in page.entries:
                yield entry
            if not page.more:
                return
            after = page.entries[-1].key

    # --- transactions ---

    async def transact(
        self,
        work: Callable[[RecordTransaction], Awaitable[T]],
        *,
        attempts: int = ATTEMPTS_MAX,
        request_id: str | None = None,
        asked: Any = None,
    ) -> T:
        """Run a function that reads and writes through `tx`; all of it happens, or nothing. It may run several times.

        Under a request id what it gives, which must be JSON then, is remembered with what it wrote: asked again within an
        hour, it is not run, and the same is given. `asked` is what the function was asked to do; the same id with
        something else is InvalidInput.
        """

        async def run(transaction: Transaction) -> T:
            async def do() -> T:
                pending = work(RecordTransaction(self, transaction)) if callable(work) else None
                if not isinstance(pending, Awaitable):
                    raise InvalidInput(
                        "transact takes an async function, and was given something that is not; nothing was written"
                    )
                return await pending

            transaction.request_id = request_id
            answer: T = await once(transaction, request_id, asked, do)
            transaction.operations = [
                await admitted(self._scope, op) if isinstance(op, Put) else op for op in transaction.operations
            ]
            return answer

        try:
            return await transact(lambda: Transaction(self._scope), run, attempts)
        except InvalidInput:
            # The same request twice at once, which read or answered something else: the id is the other's by now.
            before = await answered(Transaction(self._scope), request_id, asked)
            if before is None:
                raise
            return cast(T, before.answer)


class RecordTransaction:
    """What a function given to `transact` works with: reads are remembered, writes happen at the end or not at all."""

    def __init__(self, records: Records, transaction: Transaction) -> None:
        self._records = records
        self._transaction = transaction
        self._made: dict[str, str] = {}
        """Lists and sets made by this transaction: key and kind."""

    async def get(self, key: str, default: Any = None, *, as_type: type[Any] | None = None) -> Any:
        """The value as this transaction sees it, its own writes included."""
        name = record_key(key)
        value = await self._transaction.value(name)
        if value is None:
            return default
        if name in self._made:
            raise InvalidInput(f"{key!r} was made by this transaction as a {self._made[name]}, which is no value")
        entry = self._transaction._read.get(name)
        if entry is not None and entry.value is value and entry.tag:
            _refuse_collection(entry)
            value = (await current(self._transaction.scope, entry)).value
        return decode(value, as_type)

    async def entry(self, key: str, *, as_type: type[Any] | None = None) -> Record | None:
        """The record as it was before this transaction."""
        [entry] = await self._transaction.read(record_key(key))
        return None if entry is None else _record(await current(self._transaction.scope, entry), as_type)

    async def exists(self, key: str) -> bool:
        return await self._transaction.value(record_key(key)) is not None

    def set(
        self, key: str, value: Any, *, ttl: Duration | None = None, type: str | None = None, state: str | None = None
    ) -> None:
        name = record_key(key)
        self._transaction.put(Put(name, encode(value), optional_ms(ttl), type_tag(type, state)))
        self._made.pop(name, None)

    def delete(self, key: str) -> None:
        name = record_key(key)
        self._transaction.delete(name)
        self._made.pop(name, None)

    def increment(self, key: str, delta: int = 1, *, ttl: Duration | None = None) -> None:
        self._transaction.increment(Increment(record_key(key), delta, optional_ms(ttl)))

    def require(self, *conditions: Condition) -> None:
        """Further conditions of the commit, such as `at_least("available", 1)`; one that fails ends the transaction."""
        self._transaction.require(*conditions)

    async def append_to_list(self, key: str, *values: Any, ttl: Duration | None = None) -> None:
        prefix = await self._collection(LISTS, LIST, key, values, ttl)
        self._transaction.operations.extend(Push(prefix, encode(value)) for value in values)

    async def add_to_set(self, key: str, *members: Any, ttl: Duration | None = None) -> int:
        prefix = await self._collection(SETS, SET, key, members, ttl)
        return await self._change_members(prefix, members, adding=True)

    async def remove_from_set(self, key: str, *members: Any) -> int:
        _check_count(members)
        id = await self._id(SET, key)
        return 0 if id is None else await self._change_members(SETS.prefix(key, decode(id)), members, adding=False)

    async def _change_members(self, prefix: str, members: tuple[Any, ...], *, adding: bool) -> int:
        wanted = {prefix + member_name(value): value for value in map(encode, members)}
        changed = 0
        await self._transaction.read(*wanted)
        for name, value in wanted.items():
            if (await self._transaction.value(name) is None) == adding:
                changed += 1
                if adding:
                    self._transaction.put(Put(name, value))
                else:
                    self._transaction.delete(name)
        return changed

    async def _collection(
        self, subspace: Subspace, kind: str, key: str, values: tuple[Any, ...], ttl: Duration | None
    ) -> str:
        """The prefix of a list's or set's entries; makes the record that stands for it if there is none."""
        _check_count(values)
        name, ttl_ms = record_key(key), optional_ms(ttl)
        id = await self._id(kind, key)
        self._transaction.check_open()
        if id is None:
            id = encode(new_id())
            self._transaction.put(Put(name, id, ttl_ms, kind))
            self._made[name] = kind
        elif ttl_ms is not None:
            self._transaction.operations.append(Touch(name, ttl_ms))
        return subspace.prefix(key, decode(id))

    async def _id(self, kind: str, key: str) -> bytes | None:
        """The id of the list or set as this transaction sees it; None when there is none."""
        name, transaction = record_key(key), self._transaction
        if not transaction.changes(name):
            [root] = await transaction.read(name)
            if not transaction.changes(name):  # somebody else may have used this transaction meanwhile
                if root is not None:
                    collection_id(root, kind)
                return None if root is None else root.value
        id = await transaction.value(name)
        if id is not None and self._made.get(name) != kind:
            raise InvalidInput(f"{key!r} was written by this transaction, and not as a {kind}")
        return id


def member_name(value: bytes) -> str:
    """A set's member as the last element of its key."""
    if len(value) <= MEMBER_BYTES_MAX:
        return value.decode()
    return "#" + hashlib.sha256(value).hexdigest()


def collection_id(root: Entry, kind: str) -> str:
    """The id of a list or set, from the record that stands for it."""
    if root.tag != kind:
        raise InvalidInput(f"{root.key.removeprefix(RECORDS.root)!r} is {_kind(root)}, not a {kind}")
    return decode(root.value, str)


def _kind(entry: Entry) -> str:
    return f"a {entry.tag}" if entry.tag in (LIST, SET) else "a record"


def _refuse_collection(entry: Entry) -> None:
    if entry.tag in (LIST, SET):
        name, read = entry.key.removeprefix(RECORDS.root), "list()" if entry.tag == LIST else "members()"
        raise InvalidInput(f"{name!r} is {_kind(entry)}; read it with {read}")


def _check_count(values: tuple[Any, ...]) -> None:
    if not 0 < len(values) <= ITEMS_MAX:
        raise InvalidInput(f"give between 1 and {ITEMS_MAX} values at once, not {len(values)}")


def _record(entry: Entry, as_type: type[Any] | None, *, collections: bool = False) -> Record:
    type, state = split_tag(entry.tag)
    if collections and entry.tag in (LIST, SET):
        type, value = entry.tag, None
    else:
        _refuse_collection(entry)
        value = decode(entry.value, as_type)
    return Record(
        key=entry.key.removeprefix(RECORDS.root),
        value=value,
        version=entry.version,
        owner=entry.owner,
        created_at=as_datetime(entry.created_at),
        updated_at=as_datetime(entry.updated_at),
        expires_at=None if entry.expires_at is None else as_datetime(entry.expires_at),
        type=type,
        state=state,
        schema_version=tag_version(entry.tag),
    )
