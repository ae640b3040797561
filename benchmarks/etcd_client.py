"""The fastest way from Python into etcd that we know: its gRPC messages written by hand on a few HTTP/2 connections.

It is a peer's client, so it must not be what slows the peer down. Beside it, grpcio's asyncio client made 0.57 and the JSON
gateway through aiohttp 0.15 of its rate with 256 in flight; `etcdctl check perf` sends a fixed rate and measures no limit. It speaks the part of HTTP/2 that etcd needs from a well-behaved client: headers that never use the dynamic
table, windows large enough never to wait, answers to SETTINGS and PING.

How it fails: an answer without a message is a refusal of the server, and raises; so does a connection that ends.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from typing import Final, cast

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, RESET = 0, 1, 4, 6, 7, 8, 3
END_STREAM, ACK, END_HEADERS = 1, 1, 4
WINDOW_BYTES: Final = 2**31 - 1
WINDOW_DEFAULT: Final = 65_535
GIVEN_BACK_BYTES: Final = 2**24
"""The connection's window is given back in steps of this size."""
NO_TABLE, STREAM_WINDOW = 1, 4

PUT: Final = "/etcdserverpb.KV/Put"
RANGE: Final = "/etcdserverpb.KV/Range"
GRANT: Final = "/etcdserverpb.Lease/LeaseGrant"
LOCK: Final = "/v3lockpb.Lock/Lock"
UNLOCK: Final = "/v3lockpb.Lock/Unlock"


class EtcdClient:
    """So many connections to one server; calls go over them in turn."""

    def __init__(self, connections: list[_Connection]) -> None:
        self._connections = connections
        self._next = 0

    @classmethod
    async def connect(cls, host: str, port: int, connections: int) -> EtcdClient:
        loop, made = asyncio.get_running_loop(), []
        for _ in range(connections):
            _, connection = await loop.create_connection(lambda: _Connection(f"{host}:{port}"), host, port)
            made.append(connection)
        return cls(made)

    def _call(self, path: str, message: bytes) -> asyncio.Future[bytes]:
        self._next = (self._next + 1) % len(self._connections)
        return self._connections[self._next].call(path, message)

    async def put(self, key: bytes, value: bytes) -> None:
        await self._call(PUT, _field(1, key) + _field(2, value))

    async def get(self, key: bytes) -> bytes | None:
        """Linearizable: `serializable` is not set."""
        for number, found in _fields(await self._call(RANGE, _field(1, key))):
            if number == 2:
                return cast(bytes, dict(_fields(cast(bytes, found))).get(5, b""))
        return None

    async def lease(self, ttl_s: int) -> int:
        return cast(int, dict(_fields(await self._call(GRANT, b"\x08" + _varint(ttl_s))))[2])

    async def lock(self, name: bytes, lease: int) -> bytes:
        """Waits for it; gives the key that holds it."""
        return cast(bytes, dict(_fields(await self._call(LOCK, _field(1, name) + b"\x10" + _varint(lease))))[2])

    async def unlock(self, key: bytes) -> None:
        await self._call(UNLOCK, _field(1, key))

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class _Connection(asyncio.Protocol):
    """One HTTP/2 connection, and the calls that wait on it."""

    def __init__(self, authority: str) -> None:
        self._authority = authority.encode()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._stream = -1
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._bodies: dict[int, bytes] = {}
        self._heads: dict[str, bytes] = {}
        self._data = b""
        self._out: list[bytes] = []
        self._window = WINDOW_DEFAULT
        self._taken = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        settings = struct.pack(">HIHI", NO_TABLE, 0, STREAM_WINDOW, WINDOW_BYTES)
        more = struct.pack(">I", WINDOW_BYTES - WINDOW_DEFAULT)
        self._transport.write(PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, more))

    def call(self, path: str, message: bytes) -> asyncio.Future[bytes]:
        """The answer's message."""
        head = self._heads.get(path)
        if head is None:
            head = self._heads[path] = _head(path.encode(), self._authority)
        self._stream += 2
        stream, size = self._stream, len(message)
        self._window -= size + 5
        if self._window < 0:
            raise RuntimeError("more is under way on one connection than etcd's window allows")
        data = b"\x00" + size.to_bytes(4, "big") + message
        self._write(_frame(HEADERS, END_HEADERS, stream, head) + _frame(DATA, END_STREAM, stream, data))
        answer = self._waiting[stream] = self._loop.create_future()
        return answer

    def _write(self, data: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)

    def _flush(self) -> None:
        self._transport.write(b"".join(self._out))
        self._out.clear()

    def data_received(self, data: bytes) -> None:
        data = self._data + data if self._data else data
        at, end = 0, len(data)
        while end - at >= 9:
            length = int.from_bytes(data[at : at + 3], "big")
            if end - at - 9 < length:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            self._received(kind, flags, stream, data[at + 9 : at + 9 + length])
            at += 9 + length
        self._data = data[at:]

    def _received(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == DATA:
            self._bodies[stream] = self._bodies.get(stream, b"") + body
            self._taken += len(body)
            if self._taken > GIVEN_BACK_BYTES:
                self._write(_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._taken)))
                self._taken = 0
        elif kind == WINDOW_UPDATE:
            if stream == 0:
                self._window += int.from_bytes(body, "big")
        elif kind == SETTINGS and not flags & ACK:
            self._write(_frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self._write(_frame(PING, ACK, 0, body))
        elif kind == GOAWAY:
            self._fail(f"etcd goes away: {body[8:]!r}")
        if (kind in (HEADERS, DATA) and flags & END_STREAM) or kind == RESET:
            message, answer = self._bodies.pop(stream, b""), self._waiting.pop(stream)
            if answer.done():
                return
            if len(message) < 5:
                answer.set_exception(RuntimeError("etcd refused the call"))
            else:
                answer.set_result(message[5:])

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection to etcd ended: {exc}")

    def _fail(self, reason: str) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionError(reason))
        self._waiting.clear()

    def close(self) -> None:
        self._transport.close()


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def _head(path: bytes, authority: bytes) -> bytes:
    """POST, http, and four literals that no table remembers."""
    literals = b"\x04" + _text(path) + b"\x01" + _text(authority)
    return (
        b"\x83\x86" + literals + b"\x0f\x10" + _text(b"application/grpc") + b"\x00" + _text(b"te") + _text(b"trailers")
    )


def _text(text: bytes) -> bytes:
    if len(text) >= 127:
        raise ValueError("longer texts are not needed here")
    return bytes((len(text),)) + text


def _field(number: int, content: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: numbers and texts, all that etcd's answers have."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        value, at = _read_varint(message, at)
        if tag & 7 == 2:
            yield tag >> 3, message[at : at + value]
            at += value
        else:
            yield tag >> 3, value
