"""Who waits for the commits of other processes has the kernel tell it; who does not costs nobody anything."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from holdfast.clock import ManualClock
from holdfast.engine import Batch, Put, cursor_at
from holdfast.engines.sqlite import SqliteEngine


def _listening() -> int:
    """How many inotify watches this process has."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing itself had one
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names.count("anon_inode:inotify")


async def test_the_feed_is_read_to_its_end_without_listening_and_followed_with_it(tmp_path: Path) -> None:
    before = _listening()
    engine, other = [await SqliteEngine.open(tmp_path / "k.db", clock=ManualClock()) for _ in range(2)]
    for number in range(3):
        await engine.commit("s", Batch("a", (Put("records/n", b"%d" % number),)))
    read = [commit.version async for commit in engine.watch("s", cursor=cursor_at(1), live=False)]
    assert read == [2, 3]
    assert _listening() == before

    await other.commit("s", Batch("b", (Put("records/n", b"3"),)))
    read = [commit.version async for commit in engine.watch("s", cursor=cursor_at(1), live=False)]
    assert read == [2, 3, 4]

    following = engine.watch("s", cursor=cursor_at(3))
    assert (await anext(following)).version == 4
    assert _listening() == before + 1
    await following.aclose()  # type: ignore[attr-defined]
    await engine.close()
    await other.close()
    assert _listening() == before
