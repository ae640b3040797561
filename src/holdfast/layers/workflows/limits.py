"""How many executions are begun at a time: of a workflow, or of each key of it.

`tallies/slots/<name>/<key>` is minus the number of those that are begun and not ended. Who starts takes a slot in the same commit, on
condition that there is one; otherwise the execution stands in line, `workflows/line/<name>/<key>/…`, on condition that all slots are
taken. Who ends gives its slot to the first in line, whose message is put in that commit, or gives it back, on condition that the line is
empty. So a slot is never lost or given twice, and nobody looks again and again.
"""

from __future__ import annotations

from holdfast.codec import decode, encode
from holdfast.engine import AtLeast, Condition, Delete, Empty, Increment, Operation, Present, Put, ValueIs
from holdfast.layers.queue_entries import new_message_id, priority_element
from holdfast.layers.queues import Queue, split
from holdfast.layers.scope import Scope
from holdfast.layers.workflows.entries import TALLIES, WORKFLOWS, Meta
from holdfast.layers.workflows.journal import Parts

LINE = WORKFLOWS.prefix("line")


def slots_key(meta: Meta) -> str:
    return TALLIES.key("slots", meta.name, meta.slot or "-")


def line_prefix(meta: Meta) -> str:
    return WORKFLOWS.prefix("line", meta.name, meta.slot or "-")


def taking(meta: Meta, limit: int) -> Parts:
    """A slot, if there is one."""
    key = slots_key(meta)
    return [Increment(key, -1)], [AtLeast(key, 1 - limit)]


def lining_up(meta: Meta, limit: int, now_ms: int) -> tuple[str, Parts]:
    """A place in the line, if there is no slot."""
    key = f"{line_prefix(meta)}{priority_element(meta.priority)}/{new_message_id(now_ms)}"
    place = Put(key, encode({"id": meta.id, "priority": meta.priority}))
    return key, ([place], [ValueIs(slots_key(meta), encode(-limit))])


async def leaving(scope: Scope, queue: Queue, meta: Meta, rests: str) -> Parts:
    """What an execution that ends does with its slot. Conflict when the line changed meanwhile: ask again."""
    if meta.slot is None:
        return [], []
    if rests.startswith(LINE):
        [entry] = await scope.engine.get(scope.space, [rests])
        if entry is not None:  # it has none
            return [Delete(rests)], [Present(rests)]
    prefix = line_prefix(meta)
    page = await scope.engine.scan(scope.space, prefix, limit=1)
    if not page.entries:
        return [Increment(slots_key(meta), 1)], [Empty(prefix)]
    first = page.entries[0]
    place = decode(first.value, dict)
    operations, conditions = split(queue.putting({"execution": place["id"]}, priority=place["priority"]))
    given: list[Operation] = [Delete(first.key), *operations]
    needed: list[Condition] = [Present(first.key), *conditions]
    return given, needed
