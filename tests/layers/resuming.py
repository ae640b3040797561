"""What the tests of resumed executions share: steps that note that they ran, and gates to hold them at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast import Context, Space
from tests.layers.hosting import Hosts, soon, until

RUNS: list[str] = []
GATES: dict[str, asyncio.Event] = {}
two = pytest.mark.parametrize("url", ["memory", "sqlite"], indirect=True)


@pytest.fixture(autouse=True)
def forget() -> None:
    RUNS.clear()
    GATES.clear()


@pytest.fixture
async def hosts(boss: Space) -> AsyncIterator[Hosts]:
    made = Hosts(boss)
    yield made
    await soon(made.close())


def gate(name: str) -> asyncio.Event:
    return GATES.setdefault(name, asyncio.Event())


async def passes(name: str) -> None:
    await gate(name).wait()


async def fails_behind(name: str) -> None:
    await gate(name).wait()
    raise ValueError("no")


async def double(n: int) -> int:
    await asyncio.sleep(0)
    return n * 2


async def note(text: str) -> str:
    RUNS.append(text)
    return text


async def look(ctx: Context) -> dict[str, Any]:
    return ctx.state.all()


async def noted(text: str) -> None:
    """Return when this step has begun."""

    async def found() -> bool:
        return text in RUNS

    await until(found)
