"""Collecting what tasks leave behind when their record may go.

The state of a task that has ended expires by itself, and with it everything that is read through it; so do its result and the
envelope that names a blob. Its spec, its log, its output and what is left of its messages are removed here, by the caretaker: the
index of finished tasks is in the order in which they may go, so looking costs one page, however many tasks are kept.

The log also tells of a message that was too large and is in a blob: the reference to that is removed with it.

What belongs to a task goes first, in batches; its place in the index and its count go last, in one batch, on condition that it
is still there. So whoever is killed in between, or does it twice, removes and counts nothing twice. An entry of the index whose task
is still there is left alone: clocks differ, and clients that bypass the library write what they like.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from holdfast.engine import OPERATIONS_MAX, SYSTEM_ACTOR, Batch, Delete, Engine, Entry, Increment, Present
from holdfast.errors import Conflict, Damaged, Error
from holdfast.layers.blobs import reference_key
from holdfast.layers.queue_entries import RESERVED, ready_prefix
from holdfast.layers.task_output import holder_of, outbox_prefix
from holdfast.layers.task_states import (
    COUNTS,
    CTRL_IN,
    CTRL_OUT,
    FINISHED,
    LOG,
    RESULTS,
    event_of,
    log_prefix,
    spec_key,
    state_key,
    status_in,
)
from holdfast.layers.task_submission import inbox, reasons_key

PAGE: Final = 256
COLLECTED_MAX: Final = 10_000
"""Tasks removed in one round; the rest comes in the next."""


async def collect_tasks(engine: Engine, space: str, now_ms: int) -> int:
    """Remove what is left of the tasks whose record may go; gives their number."""
    after, removed = None, 0
    while removed < COLLECTED_MAX:
        page = await engine.scan(space, FINISHED, after=after, limit=PAGE)
        due = [entry for entry in page.entries if _due_ms(entry) <= now_ms]
        if due:
            states = await engine.get(space, [state_key(_tid(entry)) for entry in due])
            for entry, state in zip(due, states, strict=True):
                if state is None and await _collect(engine, space, entry):
                    removed += 1
        if len(due) < len(page.entries) or not page.more:
            return removed
        after = page.entries[-1].key
    return removed


async def _collect(engine: Engine, space: str, entry: Entry) -> bool:
    tid = _tid(entry)
    name = inbox(tid)
    for prefix in (
        log_prefix(tid),
        outbox_prefix(tid),
        f"{CTRL_IN}{tid}/",
        f"{CTRL_OUT}{tid}/",
        ready_prefix(name),
        RESERVED.prefix(name),
    ):
        while found := (await engine.scan(space, prefix, limit=OPERATIONS_MAX // 2)).entries:
            keys = {each.key: None for each in found} | dict.fromkeys(_references(tid, found))
            await engine.commit(space, Batch(SYSTEM_ACTOR, tuple(map(Delete, keys))))
    counted: tuple[Increment, ...]
    try:
        counted = (Increment(COUNTS + status_in(entry.tag), -1),)
    except Damaged:
        counted = ()
    rest = (Delete(spec_key(tid)), Delete(RESULTS + tid), Delete(reasons_key(tid)), Delete(entry.key), *counted)
    try:
        await engine.commit(space, Batch(SYSTEM_ACTOR, rest, (Present(entry.key),)))
    except Conflict:
        return False  # another process did it
    return True


def _references(tid: str, entries: Iterable[Entry]) -> Iterator[str]:
    """The references to blobs that were its input, as its log tells; most tasks have none."""
    for entry in entries:
        if entry.key.startswith(LOG) and b'"input"' in entry.value:
            try:
                state = event_of(entry.key, entry.value, entry.tag).state
            except Error:
                continue  # clients that bypass the library write what they like
            if state is not None and state.link is not None and state.link.input is not None:
                yield reference_key(state.link.input, holder_of(tid, "inbox"))


def _tid(entry: Entry) -> str:
    return entry.key.rpartition("/")[2]


def _due_ms(entry: Entry) -> int:
    digits = entry.key[len(FINISHED) :].partition("/")[0]
    return int(digits) if digits.isascii() and digits.isdigit() else 0
