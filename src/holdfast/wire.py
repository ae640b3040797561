"""What a client and a keeper say to each other on the binary port.

A frame is its length (four bytes, the high one first, itself not counted) and one message in msgpack: an array whose first
element says what it is. A connection begins with `Hello` and `Welcome`. After that the client sends any number of requests
without waiting; each has an id of the client's choosing and gets exactly one answer with that id, in whatever order they
are ready; commits that were done together are answered by one message, if the client knows it (`Receipts`). A watch is the
exception: it is answered by `Watching`, then by any number of `Changes`, as many bytes as the client has granted with
`Grant`, until `Cancel`, `Done` or `Failed`.

Order. Commits of one connection are begun in the order of their frames. When a client connects again (same `client`), the
keeper first lets go of its old connection: nothing sent there can take effect any more, so that a request that is repeated
is never overtaken by its own first attempt.

Versions. `Hello` names the protocol's version; a keeper that does not speak it says which it speaks and closes. Elements
are only ever added at the end of a message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from holdfast import errors
from holdfast.engine import Batch, ChangeSet, Durability, Entry, Finding, Page, Receipt, SpaceInfo
from holdfast.identity import Identity

PROTOCOL: Final = 1
PORT: Final = 7420
LENGTH: Final = struct.Struct(">I")
FRAME_BYTES_MAX: Final = 24 * 1024 * 1024
"""The largest frame of a client: a batch of 16 MiB with everything around it."""
REPLY_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest frame of a keeper."""
PAGE_BYTES_MAX: Final = 8 * 1024 * 1024
"""A page of a scan ends with the entry that reaches this."""
KEYS_MAX: Final = 10_000
"""Keys of one Get."""
PREFIXES_MAX: Final = 64
"""Prefixes of one Watch."""
HELLO_BYTES_MAX: Final = 4096
"""The largest frame of somebody who has not said who he is."""
LARGE_FRAME_BYTES: Final = 64 * 1024
"""A longer frame is told of while it is not complete (`Frames`)."""
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises when a body is no message."""


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Anything that is sent."""


# --- what a client says ---


class Hello(Message, frozen=True, tag=1):
    """The first message. `client` is one client through all its connections; drawn by it at random."""

    protocol: int
    token: str
    client: str
    together: bool = False
    """It understands `Receipts`."""


class Commit(Message, frozen=True, tag=2):
    id: int
    space: str
    batch: Batch


class Get(Message, frozen=True, tag=3):
    id: int
    space: str
    keys: Annotated[list[str], msgspec.Meta(max_length=KEYS_MAX)]


class Scan(Message, frozen=True, tag=4):
    id: int
    space: str
    prefix: str
    after: str | None
    limit: int
    reverse: bool


class Watch(Message, frozen=True, tag=5):
    """Follow the feed; `granted` bytes of commits may be sent before the client grants more."""

    id: int
    space: str
    prefixes: Annotated[list[str], msgspec.Meta(max_length=PREFIXES_MAX)]
    cursor: str | None
    live: bool
    granted: int


class Grant(Message, frozen=True, tag=6):
    """So many more bytes of a watch may be sent."""

    id: int
    more: int


class Cancel(Message, frozen=True, tag=7):
    """The client is not interested in this watch any more. There is no answer."""

    id: int


class Create(Message, frozen=True, tag=8):
    id: int
    space: str
    durability: Durability
    audit_reads: bool


class Spaces(Message, frozen=True, tag=9):
    id: int
    name: str | None


class Drop(Message, frozen=True, tag=10):
    id: int
    space: str


class Load(Message, frozen=True, tag=11):
    id: int
    space: str
    entries: list[Entry]
    revision: int


class Compact(Message, frozen=True, tag=12):
    id: int
    space: str
    upto: int


class Inspect(Message, frozen=True, tag=13):
    id: int


class Ping(Message, frozen=True, tag=14):
    id: int


class Backup(Message, frozen=True, tag=15):
    """Copy the whole store as it is now."""

    id: int


class ReadBackup(Message, frozen=True, tag=16):
    """A piece of a copy, from this byte on; after its last piece the copy is gone."""

    id: int
    backup: str
    offset: int


Request: TypeAlias = (
    Hello
    | Commit
    | Get
    | Scan
    | Watch
    | Grant
    | Cancel
    | Create
    | Spaces
    | Drop
    | Load
    | Compact
    | Inspect
    | Ping
    | Backup
    | ReadBackup
)


# --- what a keeper says ---


class Welcome(Message, frozen=True, tag=1):
    """The answer to Hello: whom the token speaks for, and what one connection may do."""

    identity: Identity
    in_flight_max: int
    frame_bytes_max: int


class Committed(Message, frozen=True, tag=2):
    id: int
    receipt: Receipt


class Receipts(Message, frozen=True, tag=14):
    """Commits that were done together: the answers to these ids, for a client that asked for it in its Hello."""

    ids: list[int]
    receipts: list[Receipt]


class Entries(Message, frozen=True, tag=3):
    id: int
    entries: list[Entry | None]


class Scanned(Message, frozen=True, tag=4):
    id: int
    page: Page


class Watching(Message, frozen=True, tag=5):
    """The watch stands at this cursor; None: the space does not exist yet."""

    id: int
    cursor: str | None


class Changes(Message, frozen=True, tag=6):
    id: int
    commits: list[ChangeSet]


class Done(Message, frozen=True, tag=7):
    """It was done; or a watch that is not live has told everything."""

    id: int


class SpaceInfos(Message, frozen=True, tag=8):
    id: int
    spaces: list[SpaceInfo]


class Findings(Message, frozen=True, tag=9):
    id: int
    findings: list[Finding]


class Failed(Message, frozen=True, tag=10):
    """An error, as `raised` understands it. Id 0 means the connection: it is closed after this."""

    id: int
    code: str
    message: str
    details: dict[str, Any] = {}
    entry: Entry | None = None


class Goodbye(Message, frozen=True, tag=11):
    """The keeper is going away: what is under way is still answered. What is sent now is not, and is to be said again to the
    next one; only what a client cannot repeat is refused."""

    reason: str


class BackedUp(Message, frozen=True, tag=12):
    """A copy was made: its name, for ReadBackup, and how many bytes it has."""

    id: int
    backup: str
    size: int


class Piece(Message, frozen=True, tag=13):
    id: int
    data: bytes


Reply: TypeAlias = (
    Welcome
    | Committed
    | Receipts
    | Entries
    | Scanned
    | Watching
    | Changes
    | Done
    | SpaceInfos
    | Findings
    | Failed
    | Goodbye
    | BackedUp
    | Piece
)

_pack = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: Message) -> bytes:
    """A message, ready to be sent."""
    body = _pack(message)
    return LENGTH.pack(len(body)) + body


class Frames:
    """Takes the bytes of a connection as they come and gives the frames that are complete.

    It holds at most one frame that is not: a length over the limit is refused before anything of it is kept. `waits_for` is told
    of the length of a large one that has begun and is not complete, before more of it is kept, and may refuse it by raising; and
    of 0 when it is complete.
    """

    def __init__(self, frame_bytes_max: int, waits_for: Callable[[int], None] | None = None) -> None:
        self.frame_bytes_max = frame_bytes_max
        self.parts: list[bytes] = []
        """Of a frame that is longer than what has come of it; another list for another frame."""
        self._waits_for = waits_for
        self._data = b""
        self._at = 0
        self._missing = 0
        self._large = False

    def feed(self, data: bytes) -> None:
        if self.parts:
            self.parts.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return
            data = b"".join(self.parts)
            self.parts = []
            if self._large:
                self._tell(0)
        elif self._at < len(self._data):
            data = self._data[self._at :] + data
        self._data, self._at = data, 0

    def take(self, most: int) -> list[bytes]:
        """The next whole frames, without their lengths: as many as there are, and at most so many."""
        found: list[bytes] = []
        data, at, size, length_at = self._data, self._at, len(self._data), LENGTH.unpack_from
        while len(found) < most and size >= at + 4:
            (length,) = length_at(data, at)
            if length > self.frame_bytes_max:
                if found:
                    break  # they came before it; the next call is about this one
                raise errors.InvalidInput(
                    f"a frame of {length:,} bytes; the limit is {self.frame_bytes_max:,}. Send less at once"
                )
            end = at + 4 + length
            if size < end:
                if length > LARGE_FRAME_BYTES:
                    if found:
                        break
                    self._tell(length)
                self.parts, self._missing = [data[at:]], end - size
                data, at = b"", 0
                break
            found.append(data[at + 4 : end])
            at = end
        self._data, self._at = data, at
        return found

    def _tell(self, length: int) -> None:
        self._large = length > 0
        if self._waits_for is not None:
            self._waits_for(length)


# --- errors ---


def _tree(cls: type[errors.Error]) -> dict[str, type[errors.Error]]:
    found = {cls.code: cls}
    for below in cls.__subclasses__():
        if below.__module__ == errors.__name__:
            found.update(_tree(below))
    return found


_CLASSES: Final = _tree(errors.Error)


def failed(id: int, error: errors.Error) -> Failed:
    """An error as it travels."""
    details: dict[str, Any] = {}
    entry = None
    if isinstance(error, errors.Conflict):
        details, entry = {"key": error.key, "condition": error.condition}, error.actual
    elif isinstance(error, errors.RateLimitExceeded):
        details = {"retry_after": error.retry_after}
    elif isinstance(error, errors.OutcomeUnknown):
        details = {"request_id": error.request_id}
    return Failed(id, error.code, str(error), details, entry)


def raised(failure: Failed) -> errors.Error:
    """The error that `failed` was given; a code of a newer keeper is a plain Error."""
    cls, details = _CLASSES.get(failure.code, errors.Error), failure.details
    if issubclass(cls, errors.Conflict):
        return cls(failure.message, key=details.get("key"), condition=details.get("condition"), actual=failure.entry)
    if issubclass(cls, errors.RateLimitExceeded):
        return cls(failure.message, retry_after=float(details.get("retry_after", 1.0)))
    if issubclass(cls, errors.OutcomeUnknown):
        return cls(failure.message, request_id=details.get("request_id"))
    return cls(failure.message)
