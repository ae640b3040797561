"""A configuration file that is followed: what changes live, what waits for a restart, and that a bad file changes nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast import InvalidInput, ManualClock
from holdfast.server.config import Config, ConfigFile

DEADLINE_S = 20.0


class Followed:
    """A file, what it was said to be, and the clock by which it is looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.heard: list[Config] = []
        self.file = ConfigFile(path, self.heard.append, clock=self.clock)

    def write(self, text: str) -> None:
        """As an editor does that writes over the file."""
        before = self.path.stat().st_mtime_ns if self.path.exists() else 0
        self.path.write_text(text)
        os.utime(self.path, ns=(before + 1_000_000, before + 1_000_000))

    def replace(self, text: str) -> None:
        """As an editor does that puts a new file in its place."""
        other = self.path.with_suffix(".new")
        other.write_text(text)
        os.replace(other, self.path)

    async def look(self, times: int = 2) -> None:
        """Let it look at the file so often."""
        for _ in range(times):
            await self._asleep()
            self.clock.advance("1s")
            await asyncio.sleep(0)
        await self._asleep()

    async def _asleep(self) -> None:
        """It has done what there was to do, and waits for the clock."""
        async with asyncio.timeout(DEADLINE_S):
            while not self.clock._sleepers or any(sleeper.is_set() for sleeper in self.clock._sleepers):
                await asyncio.sleep(0.001)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.file.start()
        try:
            yield
        finally:
            await self.file.close()


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    path = tmp_path / "keeper.yaml"
    path.write_text("timeout_default: 1s\n")
    return Followed(path)


def test_a_reload_puts_new_settings_in_force(followed: Followed) -> None:
    followed.write("timeout_default: 2s\nlog: {level: debug}\n")
    assert followed.file.reload()
    [config] = followed.heard
    assert config is followed.file.config
    assert (config.timeout_default_ms, config.log.level) == (2000, "debug")
    assert followed.file.reload()
    assert len(followed.heard) == 1  # nothing new, nothing told


def test_a_bad_file_changes_nothing_and_is_told(followed: Followed, caplog: pytest.LogCaptureFixture) -> None:
    followed.write("timeout_default: never\n")
    assert not followed.file.reload()
    assert followed.file.config.timeout_default_ms == 1000
    assert followed.heard == []
    assert followed.file.last_error is not None
    assert "keeper.yaml:1:18: timeout_default: expected a duration" in followed.file.last_error
    assert "the old one stays" in caplog.text
    assert followed.file.last_error in caplog.text
    followed.write("timeout_default: 3s\n")
    assert followed.file.reload()
    assert followed.file.last_error is None
    assert followed.file.config.timeout_default_ms == 3000


def test_a_file_that_vanished_changes_nothing(followed: Followed) -> None:
    followed.path.unlink()
    assert not followed.file.reload()
    assert "there is no configuration file" in (followed.file.last_error or "")
    assert followed.file.config.timeout_default_ms == 1000


@pytest.mark.parametrize("failure", [InvalidInput("no such verb"), ZeroDivisionError("hidden")])
def test_settings_that_the_keeper_refuses_do_not_count(
    followed: Followed, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(config: Config) -> None:
        raise failure

    file = ConfigFile(followed.path, refuses)
    followed.write("timeout_default: 2s\n")
    assert not file.reload()
    assert file.config.timeout_default_ms == 1000
    assert file.last_error
    assert "hidden" not in file.last_error


def test_what_cannot_change_live_waits_for_a_restart(followed: Followed, caplog: pytest.LogCaptureFixture) -> None:
    port, store = followed.file.config.listen.binary, followed.file.config.store
    followed.write("timeout_default: 2s\nstore: other.db\nlisten: {binary: '127.0.0.1:9', unix: s}\n")
    caplog.set_level("INFO")
    assert followed.file.reload()
    assert followed.file.pending == ("store", "listen.binary", "listen.unix")
    assert "store, listen.binary, listen.unix changed in the file and needs a restart" in caplog.text
    [config] = followed.heard
    assert (config.timeout_default_ms, config.listen.binary, config.store) == (2000, port, store)
    followed.write("timeout_default: 2s\n")
    assert followed.file.reload()
    assert followed.file.pending == ()
    assert len(followed.heard) == 1


def test_a_start_with_a_bad_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keeper.yaml").write_text("nonsense: 1")
    with pytest.raises(InvalidInput, match="nonsense"):
        ConfigFile(tmp_path / "keeper.yaml", print)


async def test_a_changed_file_is_noticed(followed: Followed) -> None:
    async with followed.running():
        await followed.look(5)
        assert followed.heard == []
        followed.write("timeout_default: 2s\n")
        await followed.look()
        followed.replace("timeout_default: 3s\n")
        await followed.look()
        followed.path.unlink()
        await followed.look(4)
        assert followed.file.last_error
        followed.replace("timeout_default: 4s\n")
        await followed.look()
    assert [config.timeout_default_ms for config in followed.heard] == [2000, 3000, 4000]


async def test_a_file_that_is_still_being_written_is_not_read_halfway(followed: Followed) -> None:
    async with followed.running():
        followed.write("timeout_default: 2s\n")
        await followed.look(1)
        followed.write("timeout_default: 2s\nlog: {level: debug}\n")
        await followed.look(1)
        assert followed.heard == []
        await followed.look(1)
    assert [config.log.level for config in followed.heard] == ["debug"]


async def test_a_link_that_is_pointed_elsewhere_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("timeout_default: 1s\n")
    (tmp_path / "two.yaml").write_text("timeout_default: 2s\n")
    link = tmp_path / "keeper.yaml"
    link.symlink_to("one.yaml")
    followed = Followed(link)
    async with followed.running():
        (tmp_path / "new").symlink_to("two.yaml")
        os.replace(tmp_path / "new", link)
        await followed.look()
    assert followed.file.config.timeout_default_ms == 2000


async def test_a_bad_file_is_complained_about_once(followed: Followed, caplog: pytest.LogCaptureFixture) -> None:
    async with followed.running():
        followed.write("oops\n")
        await followed.look(10)
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


async def test_an_older_reading_never_replaces_a_newer_one(followed: Followed) -> None:
    followed.write("timeout_default: 2s\n")
    slow = asyncio.create_task(followed.file.reload_aside())
    await asyncio.sleep(0)
    followed.write("timeout_default: 3s\n")
    assert followed.file.reload()
    assert await slow
    assert [config.timeout_default_ms for config in followed.heard] == [3000]
