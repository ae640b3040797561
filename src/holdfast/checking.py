"""What every engine refuses before anything is read or written, in one place, with words for each.

What is plain is seen most often, and is let through without a call: these are asked of everything that is ever committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from holdfast.clock import TTL_MS_MAX
from holdfast.codec import INT64_MAX, INT64_MIN
from holdfast.engine import (
    BATCH_BYTES_MAX,
    CONDITIONS_MAX,
    DURABILITIES,
    ID_DIGITS,
    NAME_BYTES_MAX,
    OPERATIONS_MAX,
    REQUEST_ID_BYTES_MAX,
    SCAN_MAX,
    TAG_BYTES_MAX,
    TAKE_MAX,
    VALUE_BYTES_MAX,
    Absent,
    AtLeast,
    Batch,
    Condition,
    Delete,
    Empty,
    Increment,
    Mine,
    Operation,
    Present,
    Push,
    Put,
    Take,
    Touch,
    ValueIs,
    VersionIs,
)
from holdfast.errors import InvalidInput
from holdfast.keys import KEY_BYTES_MAX, check_key, shown, too_long

ACTORS_KNOWN_MAX: Final = 1024
_ACTORS: Final[set[str]] = set()
"""Names of actors that were found to be good; the same few come with every batch."""


def check_label(value: str, what: str, limit: int) -> None:
    """Actors, owners, tags and request ids: short text without control characters."""
    if type(value) is str and 0 < len(value) <= limit and value.isascii() and value.isprintable():
        return
    if (
        type(value) is not str
        or not value
        or not value.isprintable()
        or len(value) > limit
        or len(value.encode()) > limit
    ):
        raise InvalidInput(f"{what} must be printable text of at most {limit} bytes, not {value!r:.60}")


def check_durability(durability: str) -> None:
    if durability not in DURABILITIES:
        raise InvalidInput(f"durability must be one of {', '.join(DURABILITIES)}, not {durability!r}")


def check_batch(batch: Batch) -> int:
    """Refuse a batch no engine may accept, before anything is read or written. Gives its size in bytes."""
    operations, conditions = batch.operations, batch.conditions
    actor, id = batch.actor, batch.request_id
    if actor not in _ACTORS:
        check_label(actor, "an actor", NAME_BYTES_MAX)
        if len(_ACTORS) < ACTORS_KNOWN_MAX:
            _ACTORS.add(actor)
    plain = type(id) is str and 0 < len(id) <= REQUEST_ID_BYTES_MAX and id.isascii() and id.isprintable()
    if not plain and id is not None:
        check_label(id, "a request id", REQUEST_ID_BYTES_MAX)
    if len(operations) == 1 and not conditions and type(op := operations[0]) is Put:
        # What is seen most often: one value, which is never too much for a batch. If it is plain nothing is called.
        key, value = op.key, op.value
        if (
            type(key) is str
            and key.isascii()
            and key.find("/") > 0
            and "\0" not in key
            and type(value) is bytes
            and op.ttl_ms is None
            and op.tag == ""
            and op.owner is None
            and (size := len(key) + len(value)) <= KEY_BYTES_MAX
        ):
            return size
        return _check_put(op)
    if len(operations) > OPERATIONS_MAX:
        raise InvalidInput(f"a batch has at most {OPERATIONS_MAX} operations; this one has {len(operations)}")
    if len(conditions) > CONDITIONS_MAX:
        raise InvalidInput(f"a batch has at most {CONDITIONS_MAX} conditions; this one has {len(conditions)}")
    size = _check_conditions(conditions)
    if operations:
        size += _check_operations(operations)
    if size > BATCH_BYTES_MAX:
        raise InvalidInput(f"a batch holds at most {BATCH_BYTES_MAX:,} bytes; this one has {size:,}")
    return size


# By type and not by isinstance, the most frequent kinds first: these are asked of everything that is ever committed.


_ON_KEYS: Final = frozenset({Absent, Present, Mine})
"""Conditions that have nothing but a key."""


def _check_conditions(conditions: tuple[Condition, ...]) -> int:
    size = 0
    for condition in conditions:
        if type(condition) is VersionIs:
            if type(condition.version) is not int or not INT64_MIN <= condition.version <= INT64_MAX:
                _check_int64(condition.version)
        elif type(condition) in _ON_KEYS:
            pass
        elif type(condition) is ValueIs:
            check_key(condition.key)
            size += _check_value(condition.key, condition.value)
        elif type(condition) is AtLeast:
            _check_int64(condition.number)
        elif type(condition) is Empty:
            check_prefix(condition.prefix)
            continue
        else:
            raise InvalidInput(f"{condition!r:.60} is not a condition")
        key = condition.key  # type: ignore[union-attr]
        if not (
            type(key) is str and key.isascii() and len(key) <= KEY_BYTES_MAX and "\0" not in key and key.find("/") > 0
        ):
            check_key(key)  # a plain one needs no call, as in `_check_put`
    return size


def _check_operations(operations: tuple[Operation, ...]) -> int:
    size = taken = 0
    checked: str | None = None
    for op in operations:
        if type(op) is Put:
            size += _check_put(op)
        elif type(op) is Push:
            # Of many that are appended together only the first is looked at.
            if checked is None or op.prefix is not checked:
                check_prefix(op.prefix)
                checked = op.prefix
            size += len(op.prefix) + _check_value(op.prefix, op.value)
            if op.ttl_ms is not None or op.tag != "":
                _check_extras(op.ttl_ms, op.tag)
        elif type(op) is Delete:
            key = op.key
            if not (
                type(key) is str
                and len(key) <= KEY_BYTES_MAX
                and key.isascii()
                and "\0" not in key
                and key.find("/") > 0
            ):
                check_key(key)
        elif type(op) is Increment:
            check_key(op.key)
            _check_int64(op.delta)
            if op.ttl_ms is not None:
                _check_extras(op.ttl_ms, "")
        elif type(op) is Touch:
            check_key(op.key)
            _check_extras(op.ttl_ms, "")
        elif type(op) is Take:
            _check_take(op)
            taken += op.n
            if taken > TAKE_MAX:
                raise InvalidInput(f"a batch takes at most {TAKE_MAX} entries; this one takes {taken}")
        else:
            raise InvalidInput(f"{op!r:.60} is not an operation")
    return size


def _check_put(op: Put) -> int:
    key, value, tag = op.key, op.value, op.tag
    # A plain key and its value, written out: the first line of `check_key` and of `_check_value`.
    if not (type(key) is str and len(key) <= KEY_BYTES_MAX and key.isascii() and "\0" not in key and key.find("/") > 0):
        check_key(key)
    if type(value) is not bytes or len(value) > VALUE_BYTES_MAX:
        _check_value(key, value)
    if op.ttl_ms is not None or tag != "":
        _check_extras(op.ttl_ms, tag)
    if op.owner is not None:
        check_label(op.owner, "an owner", NAME_BYTES_MAX)
    return len(key) + len(value)


def check_keys(keys: Iterable[str]) -> None:
    for key in keys:
        check_key(key)


def check_prefix(prefix: str) -> None:
    """A prefix ends in a slash, so that it names whole elements; room is left for an id below it."""
    check_key(prefix)
    size = len(prefix.encode())
    if size > KEY_BYTES_MAX - ID_DIGITS:
        raise too_long(prefix, size, KEY_BYTES_MAX - ID_DIGITS)
    if prefix[-1] != "/":
        raise InvalidInput(
            f"prefix {prefix!r:.60} must end in '/', so that an id of {ID_DIGITS} digits can stand behind it"
        )


def _check_value(key: str, value: bytes) -> int:
    if type(value) is not bytes:
        raise InvalidInput(f"the value of {shown(key)} must be bytes made by the codec, not {type(value).__name__}")
    if len(value) > VALUE_BYTES_MAX:
        raise InvalidInput(
            f"the value of {shown(key)} is {len(value):,} bytes; the limit is {VALUE_BYTES_MAX:,}. Keep large data as a blob"
        )
    return len(value)


def _check_extras(ttl_ms: int | None, tag: str) -> None:
    if ttl_ms is not None and (type(ttl_ms) is not int or not 0 < ttl_ms <= TTL_MS_MAX):
        raise InvalidInput(
            f"a ttl must be a positive number of milliseconds, at most a hundred years, not {ttl_ms!r:.60}"
        )
    if tag != "":
        check_label(tag, "a tag", TAG_BYTES_MAX)


def _check_int64(number: int) -> None:
    if type(number) is not int or not INT64_MIN <= number <= INT64_MAX:
        raise InvalidInput(f"{number!r:.60} is not a signed 64-bit integer")


def _check_take(op: Take) -> None:
    check_prefix(op.source)
    check_prefix(op.target)
    if op.source.startswith(op.target) or op.target.startswith(op.source):
        raise InvalidInput(f"take needs two separate prefixes, not {op.source!r} and {op.target!r}")
    if type(op.n) is not int or not 0 < op.n <= TAKE_MAX:
        raise InvalidInput(f"take moves between 1 and {TAKE_MAX} entries, not {op.n!r}")
    check_keys(key for key in (op.upto, op.source_counter, op.target_counter) if key is not None)


def check_start(prefix: str) -> None:
    """The beginning of keys, as scans and watches take it: any text, also a part of a subspace's name."""
    if type(prefix) is not str:
        raise InvalidInput(f"a prefix must be text, not {type(prefix).__name__}")
    if prefix:
        check_key(prefix if "/" in prefix[1:] else prefix + "/")


def check_scan(prefix: str, after: str | None, limit: int) -> None:
    check_start(prefix)
    if after is not None:
        check_key(after)
    if type(limit) is not int or not 0 < limit <= SCAN_MAX:
        raise InvalidInput(f"a page has between 1 and {SCAN_MAX:,} entries, not {limit!r}")
