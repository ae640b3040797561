"""What the managers of the tests run."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import holdfast


def echo(*args: Any, **kwargs: Any) -> Any:
    return {"args": list(args), "kwargs": kwargs}


def fail(words: str) -> None:
    raise ValueError(words)


def surroundings() -> dict[str, Any]:
    return {"pid": os.getpid(), "session": os.getsid(0), "group": os.getpgid(0), "environment": dict(os.environ)}


def append(path: str, line: str = "x") -> None:
    with open(path, "a") as file:
        file.write(line + "\n")


def fail_until(path: str, times: int) -> int:
    """Fails so many times, counted in a file."""
    append(path)
    seen = len(Path(path).read_text().splitlines())
    if seen <= times:
        raise RuntimeError(f"attempt {seen}")
    return seen


def sleep(seconds: float, path: str | None = None) -> str:
    if path is not None:
        append(path, str(os.getpid()))
    time.sleep(seconds)
    return "slept"


async def submit_another(number: int) -> str:
    """Through connections of its own: what the manager has open is not here."""
    async with holdfast.open(os.environ["HOLDFAST_STORE"], background=False) as store:
        space = store.space(os.environ["HOLDFAST_SPACE"], agent="child")
        handle = await space.tasks.submit(holdfast.TaskSpec(function="tests.manager.targets:echo", args=[number]))
        result = await handle.result("20s")
        return str(result["args"][0])


async def effect(key: str) -> str:
    """Something that happens once, however often this runs: it carries its idempotency key."""
    token = os.environ.get("HOLDFAST_TOKEN")
    url, name = os.environ["HOLDFAST_STORE"], os.environ["HOLDFAST_SPACE"]
    for attempt in range(100):
        try:
            async with holdfast.open(url, background=False, durability=None, token=token) as store:
                space = store.space(name, agent=None if token else "effects")
                await space.records.increment(f"effects/{key}", request_id=f"effect-{key}")
                await space.records.increment(f"runs/{key}")
                return key
        except (holdfast.Unavailable, holdfast.OutcomeUnknown):
            if attempt == 99:
                raise
            await asyncio.sleep(0.1)
    raise AssertionError("unreachable")


def numbers(count: int) -> list[int]:
    return list(range(count))


def double(number: int) -> int:
    return 2 * number


def total(values: list[int]) -> int:
    return sum(values)


def letters(count: int) -> str:
    return "x" * count


def length(text: str) -> int:
    return len(text)
