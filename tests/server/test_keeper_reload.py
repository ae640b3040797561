"""New settings while a keeper runs: no request is dropped, and what cannot be changed of a space is told and stays."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine import Batch, Increment, Put
from holdfast.errors import AuthenticationFailed, InvalidInput
from holdfast.layers.tokens import Tokens
from holdfast.middleware.audited_reads import NOTES
from holdfast.server.config import ConfigFile
from holdfast.server.keeper import Keeper
from holdfast.server.service import Service
from holdfast.wire import (
    PROTOCOL,
    Changes,
    Commit,
    Committed,
    Entries,
    Failed,
    Get,
    Hello,
    Watch,
    Watching,
    Welcome,
)
from tests.server.test_binary import Raw
from tests.server.test_keeper_tls import Authority

SPACE = "contoso"
DEADLINE_S = 10.0


class Settings:
    """A configuration file, and the keeper that follows it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keeper.yaml"
        self._rest = {
            "store": f"resident:{folder}/store.db",
            "listen": {"binary": "127.0.0.1:0", "http": None},
            "policies": {"rate_limits": []},
        }
        self.keeper: Keeper | None = None

    def write(self, **changes: Any) -> None:
        """Each space on a line of its own, the first on the third."""
        spaces = changes.pop("spaces", {})
        rest = {**self._rest, **changes}
        lines = [f"{name}: {json.dumps(value)}" for name, value in rest.items()]
        told = [f"  {name}: {json.dumps(value)}" for name, value in spaces.items()]
        self.path.write_text("\n".join(["# settings", "spaces:" if told else "# none", *told, *lines]))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Keeper]:
        file = ConfigFile(self.path, lambda config: keeper.reload(config))
        keeper = Keeper(file.config, background=False, about=file.about)
        self._file = file
        await keeper.start()
        try:
            yield keeper
        finally:
            await keeper.stop()

    async def reload(self, keeper: Keeper, **changes: Any) -> None:
        self.write(**changes)
        assert self._file.reload()
        if keeper._making is not None:
            await asyncio.wait([keeper._making])


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(tmp_path)
    settings.write()
    return settings


@contextlib.asynccontextmanager
async def agent(keeper: Keeper) -> AsyncIterator[Raw]:
    token, _ = await Tokens(keeper.store.engine, keeper.clock, "admin").create("market", SPACE, "agent")
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(AuthenticationFailed):
                keeper.authenticate(str(token))
                break
            await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection("127.0.0.1", keeper.binary_port)
    raw = Raw(reader, writer)
    try:
        raw.say(Hello(PROTOCOL, str(token), "c1"))
        assert isinstance(await raw.hear(), Welcome)
        yield raw
    finally:
        writer.close()


def increment(id: int) -> Commit:
    return Commit(id, SPACE, Batch("market", (Increment("records/n", 1),), (), f"request-{id}"))


async def noted(keeper: Keeper) -> list[tuple[str, str]]:
    page = await keeper.store.engine.scan(SPACE, NOTES)
    notes = [json.loads(entry.value) for entry in page.entries]
    return [(note["operation"], note["key"]) for note in notes]


async def test_requests_under_way_are_answered_when_their_space_begins_to_note_reads(settings: Settings) -> None:
    async with settings.serving() as keeper, agent(keeper) as raw:
        raw.say(*map(increment, range(1, 201)))
        await raw.writer.drain()
        while keeper.binary.in_flight == 0:
            await asyncio.sleep(0)
        await settings.reload(keeper, spaces={SPACE: {"audit_reads": True}})
        raw.say(*map(increment, range(201, 401)))
        answers = [await raw.hear() for _ in range(400)]
        assert sorted(each.id for each in answers if isinstance(each, Committed)) == list(range(1, 401))
        raw.say(Get(401, SPACE, ["records/n"]))
        heard = await raw.hear()
        assert isinstance(heard, Entries)
        assert [entry and entry.value for entry in heard.entries] == [b"400"]
        assert await noted(keeper) == [("get", "records/n")]


async def test_a_watch_goes_on_when_its_space_begins_to_note_reads_and_is_noted_before_it_shows_more(
    settings: Settings,
) -> None:
    async with settings.serving() as keeper, agent(keeper) as raw:
        raw.say(Watch(1, SPACE, ["records/"], None, True, 100_000))
        assert isinstance(await raw.hear(), Watching)
        seen = []
        for value in (b"1", b"2", b"3"):
            await keeper.store.engine.commit(SPACE, Batch("other", (Put("records/k", value),)))
            heard = await raw.hear()
            assert isinstance(heard, Changes)
            seen += [change.value for commit in heard.commits for change in commit.changes]
            if value == b"1":
                assert await noted(keeper) == []
                await settings.reload(keeper, spaces={SPACE: {"audit_reads": True}})
        assert seen == [b"1", b"2", b"3"]
        assert await noted(keeper) == [("watch", "records/")]


async def test_the_durability_of_a_space_that_exists_stays_and_the_others_are_made(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.write(spaces={SPACE: {"durability": "sync"}})
    async with settings.serving() as keeper:
        changed = {SPACE: {"durability": "volatile"}, "scratch": {"durability": "volatile"}}
        await settings.reload(keeper, spaces=changed)
        found = {info.name: info.durability for info in await keeper.store.engine.spaces()}
        assert (found[SPACE], found["scratch"]) == ("sync", "volatile")
    place = f"{settings.path}:3:27: spaces.contoso.durability: the space exists as 'sync' and stays so"
    assert caplog.text.count(place) == 1
    async with settings.serving() as keeper:  # and the next start says the same, and serves
        assert keeper.ready() is None
    assert caplog.text.count(place) == 2


async def test_a_setting_that_says_nothing_of_a_space_leaves_it_as_it_is(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.write(spaces={SPACE: {"durability": "volatile", "audit_reads": True}})
    async with settings.serving() as keeper:
        await settings.reload(keeper, spaces={SPACE: {}, "other": {}})
        [info] = await keeper.store.engine.spaces(SPACE)
        assert (info.durability, info.audit_reads) == ("volatile", True)
        [info] = await keeper.store.engine.spaces("other")
        assert (info.durability, info.audit_reads) == ("sync", False)
    assert "stays so" not in caplog.text


async def test_that_reads_are_noted_cannot_be_taken_back_and_is_told(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.write(spaces={SPACE: {"audit_reads": True}})
    async with settings.serving() as keeper, agent(keeper) as raw:
        await settings.reload(keeper, spaces={SPACE: {"audit_reads": False}})
        raw.say(Get(1, SPACE, ["records/k"]))
        assert isinstance(await raw.hear(), Entries)
        assert await noted(keeper) == [("get", "records/k")]
    assert (
        f"{settings.path}:3:28: spaces.contoso.audit_reads: the reads of this space are noted, and will be"
        in caplog.text
    )


async def test_a_watch_that_is_denied_hears_nothing_before_that(settings: Settings) -> None:
    settings.write(policies={"access_control": [], "rate_limits": []})
    async with settings.serving() as keeper, agent(keeper) as raw:
        raw.say(Watch(1, SPACE, ["records/"], None, True, 1000))
        heard = await raw.hear()
        assert isinstance(heard, Failed)
        assert (heard.id, heard.code) == (1, "access_denied")
        raw.say(Watch(2, SPACE, ["records/"], "r0", True, 1000))
        heard = await raw.hear()
        assert isinstance(heard, Failed)
        assert heard.id == 2


def test_a_certificate_that_does_not_fit_its_key_is_told_with_its_place(settings: Settings, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    certificate, _ = authority.signed("one")
    _, key = authority.signed("two")
    settings.write(tls={"certificate": str(certificate), "key": str(key)})
    place = rf"{settings.path}:6:22: tls.certificate: {certificate} and {key} are not a certificate and its key"
    with pytest.raises(InvalidInput, match=place):
        Service(settings.path)
