"""What a task prints and returns: envelopes in its outbox up to a limit, a blob above it.

    tasks/outbox/<tid>/<10 digits>   one envelope: {type: stream, chunk, final, encoding, size, data, attempt}
    tasks/results/<tid>              what a function returned: {type: result, …}, or the envelope of its blob

Envelopes are numbered from 0 and the last one is final. Data is base64; an interactive task's is text, with `stream` (stdout or
stderr), except for bytes that are no text. Of another task that streams, what it printed to stderr has `stream` too. Whatever was
written comes back as it was, byte for byte.

Above `output_size_limit_mb` an output is a blob, and the last envelope names it: {type: large_output, path, size, size_mb,
truncated_preview, sha256, message}. It is written in the commit that ends the task, which also attaches the blob, and has a
ttl that ends before the blob's reference does: the reference to a blob never outlives it. What was streamed before the limit
was reached is in the blob as well, so the blob is the whole output.

`Spool` collects output that still grows: in memory up to the limit, and from there on straight into the blob's file, with at most
SPOOL_CHUNKS_MAX pieces under way, so that memory is bounded whatever is printed.

How it fails. A blob that was altered or removed behind our back raises Damaged or NotFound when it is read; nothing is served in
its place. A spool that is discarded, or whose process is killed, leaves an upload that the next sweep removes.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import codecs
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from holdfast.codec import decode, encode
from holdfast.engine import Put
from holdfast.errors import Damaged, Error, InvalidInput, NotFound
from holdfast.layers.blobs import CHUNK_BYTES, BlobRef, Blobs
from holdfast.layers.task_states import OUTBOX, RESULTS, Kept, Parts

PREVIEW_BYTES: Final = 1024
PIECE_BYTES_MAX: Final = 256 * 1024
"""Of output in one envelope."""
SPOOL_CHUNKS_MAX: Final = 16
CHUNK_DIGITS: Final = 10
RESULT_INLINE_MAX: Final = 9 * 1024 * 1024
"""Of a result in its entry, whatever the limit says: an entry has one too."""

StreamName: TypeAlias = Literal["stdout", "stderr"]


def outbox_prefix(tid: str) -> str:
    return f"{OUTBOX}{tid}/"


def chunk_key(tid: str, chunk: int) -> str:
    return f"{OUTBOX}{tid}/{chunk:0{CHUNK_DIGITS}d}"


def chunk_number(key: str) -> int:
    return int(key[key.rindex("/") + 1 :])


def pieces(data: bytes) -> Iterator[bytes]:
    """Data in parts that an envelope may hold."""
    for start in range(0, len(data), PIECE_BYTES_MAX):
        yield data[start : start + PIECE_BYTES_MAX]


def envelope(
    chunk: int,
    data: bytes,
    *,
    final: bool = False,
    attempt: int = 1,
    stream: StreamName | None = None,
    text: bool = True,
) -> dict[str, Any]:
    """Output on its way. With a `stream`, as an interactive task's has, it is text where it can be, unless told otherwise."""
    told: dict[str, Any] = {"type": "stream", "chunk": chunk, "final": final, "attempt": attempt}
    if stream is not None:
        told["stream"] = stream
        if text:
            with suppress(UnicodeDecodeError):
                return {**told, "encoding": "text", "size": len(data), "data": data.decode()}
    return {**told, "encoding": "base64", "size": len(data), "data": base64.b64encode(data).decode()}


def data_of(told: dict[str, Any]) -> bytes:
    """The bytes of an envelope, as they were."""
    try:
        if told["encoding"] == "text":
            data = str(told["data"]).encode()
        else:
            data = base64.b64decode(told["data"], validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error) as exc:
        raise Damaged(f"an envelope of a task's output cannot be read: {exc!r:.120}") from exc
    if len(data) != told.get("size"):
        raise Damaged(f"an envelope of a task's output has {len(data)} bytes and should have {told.get('size')}")
    return data


def large_output(ref: BlobRef, path: str, preview: bytes) -> dict[str, Any]:
    """The envelope of what was too large."""
    return {
        "type": "large_output",
        "path": path,
        "size": ref.size,
        "size_mb": round(ref.size / (1024 * 1024), 2),
        "truncated_preview": preview[:PREVIEW_BYTES].decode("utf-8", errors="replace"),
        "sha256": ref.sha256,
        "message": f"Output too large ({ref.size:,} bytes), saved to {path}",
    }


def ref_of(told: dict[str, Any]) -> BlobRef:
    """The blob that an envelope names."""
    try:
        return BlobRef(str(told["sha256"]), int(told["size"]))
    except (KeyError, TypeError, ValueError) as exc:
        raise Damaged(f"the envelope of a large output cannot be read: {exc!r:.120}") from exc


def holder_of(tid: str, what: str) -> str:
    """Under which name a task holds a blob."""
    return f"tasks/{what}/{tid}"


class TextSplitter:
    """Cuts what an interactive task prints where characters end, so that it is text; what never becomes text passes as bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._held = b""

    def feed(self, data: bytes, *, final: bool = False) -> bytes:
        """What may be sent now; the beginning of a character waits for its end."""
        data, self._held = self._held + data, b""
        if final:
            return data
        self._decoder.reset()
        with suppress(UnicodeDecodeError):
            self._decoder.decode(data)
            waiting: bytes = self._decoder.getstate()[0]
            if waiting:
                data, self._held = data[: -len(waiting)], waiting
        return data


class Spool:
    """Output that still grows: in memory up to the limit, then into a blob. Memory is bounded; `write` waits for the disk."""

    def __init__(self, blobs: Blobs, limit: int) -> None:
        self.size = 0
        self.preview = b""
        self._blobs = blobs
        self._limit = limit
        self._parts: list[bytes] = []
        self._way: asyncio.Queue[bytes | None] = asyncio.Queue(SPOOL_CHUNKS_MAX)
        self._upload: asyncio.Task[BlobRef] | None = None

    @property
    def spilled(self) -> bool:
        """Whether it has become too large to be kept inline."""
        return self._upload is not None

    async def write(self, data: bytes) -> None:
        """Add to it."""
        self.size += len(data)
        if len(self.preview) < PREVIEW_BYTES:
            self.preview += data[: PREVIEW_BYTES - len(self.preview)]
        if self._upload is None and self.size <= self._limit:
            self._parts.append(data)
            return
        if self._upload is None:
            self._upload = asyncio.get_running_loop().create_task(self._blobs.put(self._arriving()))
            parts, self._parts = self._parts, []
            for part in parts:
                await self._send(part)
        await self._send(data)

    async def _send(self, data: bytes | None) -> None:
        """Hand it to the upload; what has made that fail is raised here."""
        upload = self._upload
        assert upload is not None  # noqa: S101 - only called once it is begun
        sending = asyncio.ensure_future(self._way.put(data))
        await asyncio.wait([sending, upload], return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():  # the upload ended before everything was there: it failed
            sending.cancel()
            upload.result()

    async def _arriving(self) -> AsyncIterator[bytes]:
        while (data := await self._way.get()) is not None:
            yield data

    async def finish(self) -> bytes | BlobRef:
        """All of it: as it is, or the blob it has become, durable and not referenced yet."""
        if self._upload is None:
            return b"".join(self._parts)
        await self._send(None)
        return await self._upload

    async def discard(self) -> None:
        """It is not wanted any more."""
        self._parts = []
        if self._upload is not None and not self._upload.done():
            self._upload.cancel()
            with suppress(asyncio.CancelledError, Error):
                await self._upload


class Written(NamedTuple):
    """How far the envelopes of a task have come."""

    chunks: int = 0
    """How many there are, of all attempts."""
    attempt: int = 1
    size: int = 0
    """Bytes of this attempt that are in envelopes."""


def final_output(
    tid: str,
    rest: bytes | BlobRef,
    preview: bytes,
    blobs: Blobs,
    written: Written,
    *,
    interactive: bool,
    kept_ms: int | None,
    spilled_ms: int | None,
) -> tuple[Kept, Parts]:
    """How an output goes into the commit that ends its task: the rest that is in no envelope yet, or its blob.

    `kept_ms` is for how long the task is kept, `spilled_ms` for how long its blob is.
    """
    number, attempt = written.chunks, written.attempt
    if isinstance(rest, BlobRef):
        told = {**large_output(rest, blobs.path(rest), preview), "chunk": number, "final": True, "attempt": attempt}
        reference = blobs.attach(rest, holder_of(tid, "outbox"), ttl=_ttl(spilled_ms))
        put = Put(chunk_key(tid, number), encode(told), kept_ms)
        return Kept(rest.size, number + 1, rest), Parts((), (put,)) | reference
    stream: StreamName | None = "stdout" if interactive else None
    parts = [*pieces(rest)] or [b""]
    operations = [
        chunk_put(tid, number + place, part, final=part is parts[-1], attempt=attempt, stream=stream)
        for place, part in enumerate(parts)
    ]
    return Kept(written.size + len(rest), number + len(parts)), Parts((), tuple(operations))


def chunk_put(
    tid: str,
    number: int,
    data: bytes,
    *,
    final: bool = False,
    attempt: int = 1,
    stream: StreamName | None = None,
    text: bool = True,
) -> Put:
    """The operation that writes one envelope."""
    told = envelope(number, data, final=final, attempt=attempt, stream=stream, text=text)
    return Put(chunk_key(tid, number), encode(told))


async def kept_result(
    tid: str, value: Any, blobs: Blobs, *, limit: int, kept_ms: int | None, spilled_ms: int | None
) -> tuple[Kept, Parts]:
    """How a result goes into that commit; one that is too large is put as a blob first."""
    data = encode(value)
    if len(data) <= min(limit, RESULT_INLINE_MAX):
        put = Put(RESULTS + tid, encode({"type": "result", "size": len(data), "data": value}, known=True), kept_ms)
        return Kept(len(data)), Parts((), (put,))
    ref = await blobs.put(data)
    put = Put(RESULTS + tid, encode(large_output(ref, blobs.path(ref), data)), kept_ms)
    reference = blobs.attach(ref, holder_of(tid, "results"), ttl=_ttl(spilled_ms))
    return Kept(ref.size, spilled=ref), Parts((), (put,)) | reference


def _ttl(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


async def read_spilled(blobs: Blobs, ref: BlobRef, *, skip: int = 0, chunk: int = CHUNK_BYTES) -> AsyncIterator[bytes]:
    """A blob of a task's, from an offset on, verified, piece by piece."""
    if skip < 0:
        raise InvalidInput(f"an offset is not negative: {skip}")
    try:
        async for piece in blobs.stream(ref, chunk):
            if skip >= len(piece):
                skip -= len(piece)
                continue
            yield piece[skip:]
            skip = 0
    except NotFound as exc:
        raise NotFound(
            f"the output of this task was too large to be kept inline, and its blob {ref.sha256} is gone: it was removed "
            "behind the store's back, or lies in another folder; restore it from a backup"
        ) from exc


async def read_result(blobs: Blobs, told: dict[str, Any]) -> Any:
    """What a function returned."""
    if told.get("type") != "large_output":
        return told.get("data")
    parts = [piece async for piece in read_spilled(blobs, ref_of(told))]
    return decode(b"".join(parts))


def whole(envelopes: Iterable[dict[str, Any]], attempt: int) -> bytes | BlobRef:
    """What an attempt printed, from its envelopes in order."""
    parts = []
    for told in envelopes:
        if told.get("attempt") != attempt:
            continue
        if told.get("type") == "large_output":
            return ref_of(told)
        parts.append(data_of(told))
    return b"".join(parts)
