"""Times for programs: one form, whatever tells them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from tests.cli.conftest import Cli

TIME = re.compile(r"\d{4}-\d\d-\d\dT.*")
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def times(told: Any) -> Iterator[str]:
    if isinstance(told, str) and TIME.fullmatch(told):
        yield told
    elif isinstance(told, dict | list):
        for each in told.values() if isinstance(told, dict) else told:
            yield from times(each)


@pytest.fixture
async def desk() -> None:
    """A store in which everything that has times is waiting."""
    async with holdfast.open("team.db", background=False) as store:
        space = store.space("default", agent="cli")
        await space.records.set("regime", "risk-on", ttl="1h")
        await space.queue("orders").put({"id": 1})
        await space.tasks.submit(holdfast.TaskSpec(command=["true"]))
        stage = {"name": "one", "spec": {"command": ["true"]}}
        await space.tasks.pipelines.start({"name": "daily", "stages": [stage]}, id="daily")
        await space.correlation("c-1", expect=["risk"], timeout="1h")
        await space.document("research").contribute({"view": 1})
        await space.workflows.start("research", id="msft")
        await space.workflows.schedules.add("0 7 * * *", "research")


@pytest.mark.parametrize(
    "words",
    [
        ["entry", "regime"],
        ["keys"],
        ["audit"],
        ["spaces"],
        ["queue", "peek", "orders"],
        ["queue", "list"],
        ["status"],
        ["task", "list"],
        ["pipeline", "status", "daily"],
        ["pipeline", "list"],
        ["correlation"],
        ["correlation", "show", "c-1"],
        ["doc", "show", "research"],
        ["doc", "history", "research"],
        ["workflow", "list"],
        ["workflow", "show", "msft"],
        ["schedule", "list"],
    ],
    ids=" ".join,
)
def test_every_time_in_json_is_utc_to_the_millisecond(cli: Cli, desk: None, words: list[str]) -> None:
    lines = cli("--store", "team.db", *words, "--json").json_lines
    told = [{name: each for name, each in line.items() if name != "value"} for line in lines if isinstance(line, dict)]
    found = list(times(told or lines))
    assert found
    assert [each for each in found if not MOMENT.fullmatch(each)] == []
