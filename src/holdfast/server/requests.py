"""What each request of the binary port does with the engine of whoever sent it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import msgspec

from holdfast.engine import Batch, Engine, Entry, Page, Put, Receipt
from holdfast.errors import AccessDenied, Error, InvalidInput, OutcomeUnknown, Unavailable
from holdfast.ids import is_generated
from holdfast.wire import (
    PAGE_BYTES_MAX,
    REPLY_BYTES_MAX,
    UNREADABLE,
    BackedUp,
    Backup,
    Commit,
    Committed,
    Compact,
    Create,
    Done,
    Drop,
    Entries,
    Findings,
    Get,
    Inspect,
    Load,
    Message,
    Piece,
    Ping,
    ReadBackup,
    Request,
    Scan,
    Scanned,
    SpaceInfos,
    Spaces,
    decode_request,
    failed,
    frame,
)

INDEXED: Final = "~"
"""Added to an id that the library made, where it has to be indexed."""

log = logging.getLogger("holdfast.server")


async def _commit(engine: Engine, message: Commit) -> Message:
    return Committed(message.id, await engine.commit(message.space, message.batch))


async def _get(engine: Engine, message: Get) -> Message:
    return Entries(message.id, await engine.get(message.space, message.keys))


async def _scan(engine: Engine, message: Scan) -> Message:
    after, limit, reverse = message.after, message.limit, message.reverse
    page = await engine.scan(message.space, message.prefix, after=after, limit=limit, reverse=reverse)
    return Scanned(message.id, page)


async def _create(engine: Engine, message: Create) -> Message:
    info = await engine.create(message.space, message.durability, audit_reads=message.audit_reads)
    return SpaceInfos(message.id, [info])


async def _spaces(engine: Engine, message: Spaces) -> Message:
    return SpaceInfos(message.id, await engine.spaces(message.name))


async def _drop(engine: Engine, message: Drop) -> Message:
    await engine.drop(message.space)
    return Done(message.id)


async def _load(engine: Engine, message: Load) -> Message:
    await engine.load(message.space, message.entries, message.revision)
    return Done(message.id)


async def _compact(engine: Engine, message: Compact) -> Message:
    await engine.compact(message.space, message.upto)
    return Done(message.id)


async def _inspect(engine: Engine, message: Inspect) -> Message:
    return Findings(message.id, await engine.inspect())


@runtime_checkable
class GivesBackups(Protocol):
    """What an administrator's engine can do besides."""

    async def begin_backup(self) -> tuple[str, int]: ...

    def read_backup(self, id: str, offset: int) -> bytes: ...


async def _gives_backups(engine: Engine) -> GivesBackups:
    """The same, if it is an administrator's."""
    if isinstance(engine, GivesBackups):
        return engine
    refusal = AccessDenied("only an administrator may back up the store")
    try:
        await engine.inspect()  # who may not look at the whole store: the rules tell the audit of it
    except AccessDenied as exc:
        raise refusal from exc
    raise refusal


async def _backup(engine: Engine, message: Backup) -> Message:
    return BackedUp(message.id, *await (await _gives_backups(engine)).begin_backup())


async def _read_backup(engine: Engine, message: ReadBackup) -> Message:
    return Piece(message.id, (await _gives_backups(engine)).read_backup(message.backup, message.offset))


async def _ping(engine: Engine, message: Ping) -> Message:
    return Done(message.id)


Work = Callable[[Engine, Any], Coroutine[Any, Any, Message]]

WORK: Final[dict[type[Message], tuple[str, Work]]] = {
    Commit: ("commit", _commit),
    Get: ("get", _get),
    Scan: ("scan", _scan),
    Create: ("create", _create),
    Spaces: ("spaces", _spaces),
    Drop: ("drop", _drop),
    Load: ("load", _load),
    Compact: ("compact", _compact),
    Inspect: ("inspect", _inspect),
    Ping: ("ping", _ping),
    Backup: ("backup", _backup),
    ReadBackup: ("backup", _read_backup),
}
"""Requests with one answer: the operation's name in metrics, and what is done."""

CHANGING: Final = frozenset({"commit", "create", "drop", "load", "compact"})
"""Those that may have been done although they failed unexpectedly."""


UNREPEATABLE: Final = frozenset({Drop, Load, Compact})
"""Those that a client does not say again by itself."""


def fitting(entries: list[Entry]) -> list[Entry]:
    """As many entries as an answer may have: the one that makes it large is the last."""
    size = 0
    for number, entry in enumerate(entries, 1):
        size += len(entry.value)
        if size > PAGE_BYTES_MAX:
            return entries[:number]
    return entries


def packed(message: Message) -> bytes:
    """An answer, ready to be sent, if it is not too large; that is found out before it is packed."""
    if type(message) is Scanned:
        page, entries = message.page, fitting(message.page.entries)
        if len(entries) < len(page.entries):
            message = Scanned(message.id, Page(entries, True, page.revision))
    elif type(message) is Entries and len(message.entries) > 1:
        size = sum(len(entry.value) for entry in message.entries if entry is not None)
        if size > REPLY_BYTES_MAX // 2:
            raise InvalidInput(f"the answer has {size:,} bytes; that is too much. Ask for less at once")
    data = frame(message)
    if len(data) > REPLY_BYTES_MAX:
        raise OutcomeUnknown(
            f"the answer has {len(data):,} bytes, more than can be sent; what was asked for was done. Take less at once"
        )
    return data


def unexpected(op: str, exc: BaseException) -> Error:
    """What a client hears of a fault of ours: nothing of the inside; a commit may have happened."""
    text = f"the keeper failed inside ({type(exc).__name__}); its log says more"
    return OutcomeUnknown(text) if op in CHANGING else Unavailable(text)


_NUMBERS: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
"""Bytes of an unsigned integer, by its first byte in msgpack."""


def id_in(body: bytes) -> int | None:
    """The id of a message that is otherwise wrong, if it can be found: its second element. Nothing else of it is read."""
    first = body[0] if body else 0
    at = 1 if 0x92 <= first <= 0x9F else 3 if first == 0xDC else 5 if first == 0xDD else 0
    if not at or len(body) < at + 2 or body[at] > 0x7F:
        return None
    at += 1
    size = _NUMBERS.get(body[at], 0)
    if not size:
        return body[at] if 0 < body[at] <= 0x7F else None
    return int.from_bytes(body[at + 1 : at + 1 + size], "big") or None


class Unreadable(NamedTuple):
    """A message that cannot be understood, by its id if that can be found, and why."""

    id: int | None
    reason: str


def understood(bodies: list[bytes]) -> list[Request | Unreadable]:
    """The messages in frames."""
    with contextlib.suppress(*UNREADABLE):
        return [decode_request(body) for body in bodies]
    return [_understood(body) for body in bodies]


def is_set(batch: Batch) -> bool:
    """Whether it is one Put: of the others there are never so many that it pays to try them together."""
    return len(batch.operations) == 1 and type(batch.operations[0]) is Put


def recognisable(message: Commit, sole_owner: bool) -> Commit:
    """A commit whose request id will be found again if it is repeated.

    `fresh` is believed only of an id that the library made, and only if nobody else commits to this store: otherwise another
    keeper may have answered it, or still will. Such an id is found by searching the feed, which is too slow to be done for
    each; so there it gets a form of its own, which engines index like an id that somebody chose.
    """
    batch = message.batch
    id = batch.request_id
    if id is None or (sole_owner and (not batch.fresh or is_generated(id))):
        return message
    if not sole_owner and is_generated(id):
        id += INDEXED
    elif not batch.fresh:
        return message
    return Commit(message.id, message.space, Batch(batch.actor, batch.operations, batch.conditions, id))


def _understood(body: bytes) -> Request | Unreadable:
    try:
        message: Request = decode_request(body)
    except UNREADABLE as exc:
        return Unreadable(id_in(body), f"the message cannot be understood: {exc}")
    return message


class Asker(Protocol):
    """The connection a request came from."""

    def send(self, message: Message) -> None: ...

    def committed(self, id: int, receipt: Receipt, began: float) -> None: ...

    def all_committed(self, ids: list[int], outcomes: list[Receipt | BaseException], began: float) -> None: ...

    def observed(self, op: str, outcome: str, began: float) -> None: ...


class Answer(msgspec.Struct, eq=False):
    """Whom to answer when a commit is done (`offers.Reply`)."""

    connection: Asker
    id: int
    began: float

    def set_result(self, receipt: Receipt) -> None:
        self.connection.committed(self.id, receipt, self.began)

    def set_exception(self, error: BaseException) -> None:
        connection = self.connection
        if not isinstance(error, Error):
            log.error("commit failed unexpectedly", exc_info=error)
            error = unexpected("commit", error)
        connection.send(failed(self.id, error))
        connection.observed("commit", error.code, self.began)


class Answers(msgspec.Struct, eq=False):
    """Whom to answer when commits that came together are done (`offers.Replies`)."""

    connection: Asker
    ids: list[int]
    began: float

    def set_results(self, outcomes: list[Receipt | BaseException]) -> None:
        self.connection.all_committed(self.ids, outcomes, self.began)
