"""A manager when one is needed: the first who asks starts it, the others find it.

    handle = await space.tasks.submit(spec)
    await ensure_manager(space)

Ask after the submission: a manager that is about to leave because nobody needs it looks for requests once more after it has given up
its place, so what was submitted before the place was found taken is seen.

A manager is started detached: in a session of its own, and no child of whoever asked. Several who ask at once may start several; the
lock of the place (`place.py`) lets one of them serve, the others end. It works in the folder of whoever started it and with that
environment; its log is beside the store.

How it fails. What a manager says against its store or its options (no such server, a token that is refused, a module that is not there)
is raised here. One that does not become ready is given up after READY_S_MAX.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from typing import Any, Final

import msgspec

from holdfast.clock import Duration
from holdfast.codec import decode
from holdfast.engines.registry import file_of
from holdfast.errors import AccessDenied, AuthenticationFailed, InvalidInput, Unavailable
from holdfast.layers.task_launch import ManagerInfo
from holdfast.manager.options import ManagerOptions
from holdfast.manager.place import Place
from holdfast.space import Origin, Space

READY_S_MAX: Final = 20.0
LOOK_S: Final = 1.0
"""While another starts a manager: how often it is looked whether that one is still there."""
DYING_S: Final = 0.02
"""The same while it is one that is about to die."""
PF_EXITING: Final = 0x4
"""Linux's mark of a process that is being taken down."""
LINE_BYTES_MAX: Final = 64 * 1024


async def ensure_manager(space: Space, options: ManagerOptions | None = None, **changes: Any) -> ManagerInfo:
    """See that a manager serves this space on this host; gives what the registry says of it.

    `options`, or single ones by name (`concurrency=4`, `idle="5m"`), are for a manager that is started now; one that is there
    already keeps its own.
    """
    if space.origin is None:
        raise InvalidInput("this view of a space does not tell of which store it is; use the one of store.space(…)")
    options = options or ManagerOptions()
    if changes:
        options = msgspec.structs.replace(options, **changes)
    place = Place.of(space.origin.url, space.name, options.host)
    try:
        async with asyncio.timeout(READY_S_MAX):
            while True:
                if place.is_held():
                    found = await _registered(space, options.host, place)
                else:
                    found = await _start(space, space.origin, options, place)
                if found is not None:
                    return found
    except TimeoutError:
        raise Unavailable(f"no manager was ready within {READY_S_MAX:.0f} s; see {place.log}") from None


async def _registered(space: Space, host: str, place: Place) -> ManagerInfo | None:
    """The manager of this host, as soon as it is registered; None when it is gone again."""
    while place.is_held():
        cursor, dying = await space.cursor(), False
        for info in await space.tasks.managers():
            if info.host == host and not info.draining:
                if _lives(info.pid):
                    return info
                dying = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DYING_S if dying else LOOK_S):
                await space.tasks.managers_changed(cursor)
    return None


def _lives(pid: int) -> bool:
    """Whether there is such a process here, and it is not about to die: the registry knows of one that was killed until its
    lease ends, and its lock is free a moment after its memory is."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    return fields[0] not in b"ZX" and not int(fields[6]) & PF_EXITING


async def _start(space: Space, origin: Origin, options: ManagerOptions, place: Place) -> ManagerInfo | None:
    """Start one and wait until it says that it serves; None when another was quicker."""
    place.make()
    reading, writing = os.pipe()
    try:
        with os.fdopen(os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as errors:
            process = subprocess.Popen(  # noqa: S603, ASYNC220 - this interpreter; it forks at once and ends
                [sys.executable, "-P", "-m", "holdfast.manager", *_arguments(space, origin, options, writing)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(writing,),
                env=_environment(origin),
            )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    try:
        line = await _line(reading)
    finally:
        os.close(reading)
        await asyncio.to_thread(process.wait)
    if not line:
        raise Unavailable(f"the manager ended before it was ready; {place.log} says why")
    told = decode(line, dict)
    if "error" in told:
        kind = _REFUSALS.get(told.get("code", ""), Unavailable)
        raise kind(f"the manager cannot serve: {told['error']}")
    return None if "other" in told else msgspec.convert(told, ManagerInfo)


def _arguments(space: Space, origin: Origin, options: ManagerOptions, ready_fd: int) -> list[str]:
    given = ["--detach", "--log", f"--ready-fd={ready_fd}", f"--space={space.name}", f"--host={options.host}"]
    given += [f"--concurrency={options.concurrency}", *(f"--{name}={_text(getattr(options, name))}" for name in _TIMES)]
    blobs = options.blobs or (None if file_of(origin.url) is not None else origin.blobs)
    given += [] if blobs is None else [f"--blobs={blobs}"]
    given += [f"--allow-module={name}" for name in options.allow_modules]
    given += [f"--allow-command={name}" for name in options.allow_commands]
    given += [f"--allow-env={name}" for name in options.allow_env]
    given += [f"--preload={name}" for name in options.preload]
    return given + (["--restrict"] if options.is_restricted else [])


_REFUSALS: Final = {each.code: each for each in (AccessDenied, AuthenticationFailed, InvalidInput)}
"""What a manager may say of its store or its options; everything else may get better."""
_TIMES: Final = ("idle", "lease", "grace")


def _text(value: Duration) -> str:
    return str(value.total_seconds()) if not isinstance(value, str | int | float) else str(value)


def _environment(origin: Origin) -> dict[str, str]:
    """What is secret, and the store, are in the environment: arguments are shown to everybody."""
    file = file_of(origin.url)
    url = origin.url if file is None else f"sqlite:{file}"
    env = {**os.environ, "HOLDFAST_STORE": url}
    return env if origin.token is None else {**env, "HOLDFAST_TOKEN": str(origin.token)}


async def _line(fd: int) -> bytes:
    """What comes through a pipe, up to its end."""
    loop, text, ended = asyncio.get_running_loop(), bytearray(), asyncio.Event()
    os.set_blocking(fd, False)

    def read() -> None:
        try:
            data = os.read(fd, LINE_BYTES_MAX)
        except BlockingIOError:
            return
        text.extend(data)
        if not data or len(text) >= LINE_BYTES_MAX:
            loop.remove_reader(fd)
            ended.set()

    loop.add_reader(fd, read)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
    return bytes(text)
