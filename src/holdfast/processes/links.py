"""A socket on which an event loop hears and says framed messages.

Also the descriptors that must not survive a fork of this process: a warden sees that its manager is dead when the manager's end of the
socket closes, and a copy in a forked process (as `multiprocessing` makes them) would keep it open.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Final

from holdfast.processes.messages import FRAME_BYTES_MAX, LENGTH_BYTES

READ_BYTES: Final = 64 * 1024

_open: Final[set[int]] = set()


def _close_copies() -> None:
    for fd in _open:
        with contextlib.suppress(OSError):
            os.close(fd)
    _open.clear()


os.register_at_fork(after_in_child=_close_copies)


class Link:
    """One end of a socket pair. `on_message` gets each body, `on_end` is called once when the other end is gone."""

    def __init__(self, sock: socket.socket, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self.sock = sock
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._ended = False
        sock.setblocking(False)
        _open.add(sock.fileno())
        self._loop.add_reader(sock.fileno(), self._hear)

    def say(self, data: bytes) -> None:
        """Send a frame, as soon as there is room."""
        if self._ended:
            return
        if not self._outgoing:
            try:
                data = data[self.sock.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                return  # the end will be heard
            if data:
                self._loop.add_writer(self.sock.fileno(), self._go_on)
        self._outgoing += data

    def close(self) -> None:
        """Hear no more; the other end sees that this one is gone. `on_end` is not called."""
        if not self._ended:
            self._ended = True
            fd = self.sock.fileno()
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
            _open.discard(fd)
            self.sock.close()

    def _go_on(self) -> None:
        try:
            del self._outgoing[: self.sock.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()
        if not self._outgoing:
            self._loop.remove_writer(self.sock.fileno())

    def _hear(self) -> None:
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self._on_end()
            return
        self._incoming += data
        while not self._ended and len(self._incoming) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._incoming[:LENGTH_BYTES], "big")
            if end > FRAME_BYTES_MAX:
                self.close()
                self._on_end()
                return
            if len(self._incoming) < end:
                return
            body = bytes(self._incoming[LENGTH_BYTES:end])
            del self._incoming[:end]
            self._on_message(body)
