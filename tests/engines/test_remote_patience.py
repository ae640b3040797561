"""What is patient is sent to a keeper with whatever is said next, in the order in which it was said; alone, a moment later."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from holdfast.engines import remote_line
from holdfast.engines.remote_line import Line
from holdfast.engines.remote_link import Client


class Transport:
    """Notes what is written, each time."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return False


@pytest.fixture
async def line() -> tuple[Line, list[bytes]]:
    made, transport = Line(cast(Client, None)), Transport()
    made._transport = cast(asyncio.Transport, transport)
    return made, transport.written


async def steps() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_what_is_patient_goes_with_the_next(
    line: tuple[Line, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_line, "HELD_S", 600.0)
    made, written = line
    made.write(b"a", patient=True)
    made.write(b"b", patient=True)
    await steps()
    assert written == []
    made.write(b"c")
    made.write(b"d", patient=True)
    await steps()
    assert written == [b"abcd"]
    made.write(b"e", patient=True)
    await steps()
    assert written == [b"abcd"], "it waits anew"


async def test_alone_it_goes_a_moment_later_once(line: tuple[Line, list[bytes]]) -> None:
    made, written = line
    for number in range(3):
        made.write(b"%d" % number, patient=True)
        async with asyncio.timeout(10):
            while len(written) <= number:
                await asyncio.sleep(0.001)
    assert written == [b"0", b"1", b"2"]


async def test_what_is_in_a_hurry_goes_in_the_next_step(line: tuple[Line, list[bytes]]) -> None:
    made, written = line
    made.write(b"a")
    await steps()
    made.write(b"b")
    await steps()
    assert written == [b"a", b"b"]
