"""What may be said in a line and of its size, whoever says it: the claims of `verbs.py` for `locks/` and `permits/`.

    locks/      a place comes by Push and says then what it takes. Written anew, as the library does when a turn begins, it says the
                same but for its token, on condition of what it said: nobody takes more than it had and pushes others out
    permits/    how many permits a semaphore or pool has: a whole number, written once, that does not end by itself. It counts as a key
                of whoever made it; who made it, or an orchestrator, deletes it while its line is empty

Whoever acquires by the library does so on condition of the size it knows, so one that was deleted in between is agreed on anew.
"""

from __future__ import annotations

import re
from typing import Any, Final

from holdfast.codec import decode, integer
from holdfast.engine import ID_DIGITS, Absent, Batch, Condition, Empty, Mine, Operation, Put, ValueIs
from holdfast.errors import Error
from holdfast.keys import KEY_BYTES_MAX, Subspace
from holdfast.middleware.messages import Misplaced

UNITS_MAX: Final = 1_000_000
"""Permits of a semaphore, and units of a pool."""
PLACE_BYTES_MAX: Final = 4096
"""A longer value is no place. The feed shows values up to a limit, and everybody must see the same."""
TOKEN_MAX: Final = 2**63 - 1
_LOCKS: Final = Subspace("locks")
_SIZE: Final = re.compile(r"permits/(semaphore|pool)/(.+)", re.S)


def check_place(op: Put, batch: Batch) -> None:
    """Refuse a place that is written anew and does not say what it said before."""
    for condition in batch.conditions:
        if type(condition) is ValueIs and condition.key == op.key and _same(condition.value, op.value):
            return
    raise Misplaced(
        op.key,
        "a place comes by Push; it is written anew on condition of what it says (ValueIs), and says the same but for its token",
    )


def _same(before: bytes, after: bytes) -> bool:
    """Whether two values are the same place, but for the token."""
    if before == after:
        return True
    was, now = _said(before), _said(after)
    if was is None or now is None or len(after) > PLACE_BYTES_MAX:
        return False
    token = now.pop("token", None)
    was.pop("token", None)
    return was == now and type(token) is int and 0 < token <= TOKEN_MAX


def _said(value: bytes) -> dict[str, Any] | None:
    try:
        told: Any = decode(value)
    except Error:
        return None
    return told if isinstance(told, dict) else None


def size_claims(op: Operation, *, orchestrator: bool) -> list[Condition]:
    """What one Put or Delete of the size of a line adds to its batch."""
    key: str = op.key  # type: ignore[union-attr]
    match = _SIZE.fullmatch(key)
    line = None if match is None else _LOCKS.prefix(match[1], match[2])
    if isinstance(op, Put):
        number = integer(op.value)
        if line is None or len(line.encode()) + ID_DIGITS > KEY_BYTES_MAX:
            raise Misplaced(key, "no semaphore and no pool can have this name")
        if number is None or not 0 < number <= UNITS_MAX or op.ttl_ms is not None:
            raise Misplaced(key, f"the size of a line is a whole number from 1 to {UNITS_MAX:,}, and has no ttl")
        return [Absent(key)]
    unused: list[Condition] = [] if line is None else [Empty(line)]
    return unused if orchestrator else [Mine(key), *unused]
