"""What the desk computes: a workflow that fans out over symbols and reduces them, and two functions that run as tasks.

The numbers come from a seed of the symbol, so every day of the demo is the same day. Each step writes down beside the
store when it began, which is how the verdict can tell whether a step that was finished has run again.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Any

from holdfast import Context, Retry, step, workflow

SYMBOLS = ["AAPL", "AMZN", "GOOG", "MSFT", "NVDA", "TSLA"]
UNLUCKY = "NVDA"
"""Its prices do not come at the first attempt."""
FOLDER, STEP_S = "DESK_FOLDER", "DESK_STEP_S"
"""Variables of the environment: where notes are written, and how long an analysis takes."""


@workflow(name="research", version="1", timeout="2m")
class Research:
    """Fetch what is to be looked at, analyse each in parallel, reduce it to one note."""

    @step
    async def fetch(self, ctx: Context) -> list[str]:
        note_start("fetch", ctx)
        return list(ctx.input["symbols"])

    @step(each="fetch", max_workers=2, retry=Retry(4, initial="50ms"))
    async def analyse(self, ctx: Context, symbol: str) -> dict[str, Any]:
        note_start(symbol, ctx)
        await ctx.state.increment("analysed")  # committed with the result: counted once, however often it is tried
        await ctx.state.append_to_list("symbols", symbol)
        await asyncio.sleep(float(os.environ.get(STEP_S, "0.5")))
        if symbol == UNLUCKY and ctx.attempt == 1:
            raise ConnectionError("no prices came")
        return {"symbol": symbol, "score": round(random.Random(symbol).uniform(-1, 1), 3)}

    @step(after="analyse")
    async def report(self, ctx: Context, results: list[dict[str, Any]]) -> dict[str, Any]:
        note_start("report", ctx)
        best = max(results, key=lambda each: each["score"])
        return {"best": best["symbol"], "mean": round(sum(each["score"] for each in results) / len(results), 3)}


def note_start(what: str, ctx: Context) -> None:
    """One line beside the store, in one write: what began, when, in which process."""
    line = f"{what} {time.time_ns() // 1_000_000} {os.getpid()} {ctx.attempt}\n"
    notes = os.open(Path(os.environ[FOLDER]) / "starts", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(notes, line.encode())
    os.close(notes)


def backtest(days: int) -> dict[str, Any]:
    """A year of prices, held in memory; well within its limits."""
    walk, price = random.Random("backtest"), 100.0
    prices = []
    for _ in range(days):
        price *= 1 + walk.gauss(0.0003, 0.01)
        prices.append(price)
    held = bytearray(24 << 20)
    held[::4096] = b"x" * len(held[::4096])  # touched, so that it is really used
    time.sleep(0.6)  # long enough to be measured
    return {"days": days, "worst": round(min(prices), 2), "last": round(prices[-1], 2)}


def runaway() -> None:
    """Takes more and more memory, until somebody stops it."""
    held = []
    while True:
        held.append(b"x" * (8 << 20))
        time.sleep(0.02)
