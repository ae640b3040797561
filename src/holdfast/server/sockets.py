"""Sockets of the ports of a keeper: unix ones, and from where a connection comes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Final

from holdfast.errors import InvalidInput, Unavailable

UNIX_BACKLOG: Final = 1024


def unix_socket(path: Path) -> socket.socket:
    """A socket that its user alone may open. One that is left over is replaced, anything else is not."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InvalidInput(f"{path} exists and is no socket; name another path")
        if _answers(path):
            raise Unavailable(f"the keeper cannot listen at {path}: another one does. Stop it, or choose another path")
        path.unlink()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(path))
        os.chmod(path, 0o600)
        listening.listen(UNIX_BACKLOG)
    except OSError as exc:
        listening.close()
        raise Unavailable(f"the keeper cannot listen at {path}: {exc.strerror or exc}; choose another path") from exc
    return listening


def peer_of(transport: asyncio.BaseTransport) -> str:
    """From where a connection comes, as the log tells it; nothing for a unix socket."""
    peer = transport.get_extra_info("peername")
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else ""


def _answers(path: Path) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(str(path))
        except BlockingIOError:
            return True  # so many ask that one has to wait
        except OSError:
            return False
    return True
