"""A launcher for a module's tests, and the proof after each of them that the machine is clean."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest_asyncio

from holdfast.processes import Child, Launcher, Order

_numbers = itertools.count(1)

MakeOrder = Callable[..., Order]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def launcher() -> AsyncIterator[Launcher]:
    """One launcher, and so one zygote, for the tests of a module."""
    async with Launcher() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def order() -> AsyncIterator[MakeOrder]:
    """Makes orders with a marker of this test's own; afterwards nobody has it any more."""
    store = f"test-{os.getpid()}-{next(_numbers)}"

    def make(*argv: str, **options: Any) -> Order:
        options.setdefault("marker", f"{store}/{next(_numbers):019d}")
        return Order(argv=argv or None, **options)

    yield make
    assert await until(lambda: not living(store)), [process.pid for process in living(store)]


def living(store: str) -> list[psutil.Process]:
    """The processes whose environment has a marker of this store; found without the code that is tested."""
    found = []
    for process in psutil.process_iter():
        try:
            if f"HOLDFAST_TASK={store}/".encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.append(process)
        except OSError:
            continue
    return found


def below(pid: int) -> list[psutil.Process]:
    """The living descendants of a process."""
    return [each for each in psutil.Process(pid).children(recursive=True) if is_alive(each.pid)]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until(holds: Callable[[], Any], seconds: float = 10.0) -> bool:
    """Wait for something that another process brings about."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.005)
    return True


async def printed(child: Child) -> dict[str, bytes]:
    """All that it prints, by stream."""
    texts = {"stdout": b"", "stderr": b""}
    async for stream, data in child.output():
        texts[stream] += data
    return texts


async def first_line(child: Child) -> str:
    """What it prints first; the rest is left for others."""
    text = b""
    async for _, data in child.output():
        text += data
        if b"\n" in text:
            return text.decode().splitlines()[0]
    raise AssertionError(f"it printed only {text!r}")
