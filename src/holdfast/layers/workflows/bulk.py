"""Writing more than fits into one commit: in order, as many operations at a time as a commit takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from holdfast.engine import OPERATIONS_MAX, Absent, Condition, Delete, Operation, Push, Put
from holdfast.layers.scope import Scope

BULK_MAX: Final = OPERATIONS_MAX - 28
"""Operations of one commit; the rest is for what must not be separated from the last one."""
BULK_BYTES_MAX: Final = 4_000_000


async def write_all(
    scope: Scope, parts: Iterable[tuple[Iterable[Operation], Iterable[Condition]]], *conditions: Condition
) -> None:
    """Commit these parts, none of them divided, each commit under the conditions."""
    operations: list[Operation] = []
    needed: list[Condition] = []
    size = 0
    for more, needs in parts:
        added = list(more)
        weight = sum(len(op.value) for op in added if isinstance(op, Put | Push))
        if operations and (len(operations) + len(added) > BULK_MAX or size + weight > BULK_BYTES_MAX):
            await scope.commit(tuple(operations), (*conditions, *dict.fromkeys(needed)))
            operations, needed, size = [], [], 0
        operations += added
        needed += needs
        size += weight
    if operations:
        await scope.commit(tuple(operations), (*conditions, *dict.fromkeys(needed)))


async def delete_all(scope: Scope, *prefixes: str, absent: Absent) -> None:
    """Remove everything under these prefixes, as long as there is no such entry."""
    for prefix in prefixes:
        while (page := await scope.engine.scan(scope.space, prefix, limit=BULK_MAX)).entries:
            await scope.commit(tuple(Delete(entry.key) for entry in page.entries), (absent,))
