"""How many microseconds does a policy with access rules, rates and quotas add to a request?

The engine within answers at once, so what is left is the policy's own work and one more coroutine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from benchmarks.report import Goal, Line
from benchmarks.rounds import Plan, Turn, take_turns, timed_async
from holdfast.clock import SystemClock
from holdfast.engine import Batch, Delete, Engine, Entry, Push, Put, Receipt, SpaceInfo, VersionIs
from holdfast.engines.memory import MemoryEngine
from holdfast.identity import Identity
from holdfast.middleware.policy import Policy
from holdfast.middleware.rules import GB, AccessRule, Quota, RateLimit, Rules
from holdfast.middleware.wrapper import Wrapper

PER_STEP: Final = 256
AGENT: Final = "worker-1"
RULES: Final = Rules(
    (AccessRule("worker-*", ("*",), ("Audit",)),),
    (RateLimit("*", 1e9, 1_000_000_000),),
    (Quota("*", 1_000_000_000_000, GB, 1_000_000 * GB),),
)
KEY: Final = "records/orders/1"
PLACE: Final = "locks/lock/orders/1835008000000000002"
BATCHES: Final = {
    "set": Batch(AGENT, (Put(KEY, b"x" * 256),), (), "0123456789", True),
    "compare_and_swap": Batch(AGENT, (Put(KEY, b"x" * 256),), (VersionIs(KEY, 7),), "0123456789", True),
    "lock": Batch(AGENT, (Push("locks/lock/orders/", b'{"instance":"1"}', 30_000),), (), "0123456789", True),
    "unlock": Batch(AGENT, (Delete(PLACE),), (), "0123456789", True),
}
GOALS: Final = {"set": Goal("ours", "at most", 1.5), "get": Goal("ours", "at most", 1.0)}


class AnswersAtOnce(Wrapper):
    """An engine that does nothing."""

    _receipt = Receipt(1, 1, [None])
    _entries: list[Entry | None] = [None]  # noqa: RUF012 - nobody changes it

    async def commit(self, space: str, batch: Batch) -> Receipt:
        return self._receipt

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        return self._entries

    async def spaces(self, name: str | None = None) -> list[SpaceInfo]:
        return []


async def run(plan: Plan) -> AsyncIterator[Line]:
    bare = AnswersAtOnce(MemoryEngine())
    guarded = Policy(bare, SystemClock(), RULES).engine_for(Identity(AGENT, "agent", "bench"))
    for name in (*BATCHES, "get"):
        rates = await take_turns(plan, {"guarded": _turn(guarded, name), "bare": _turn(bare, name)})
        added = [
            1e6 / ours - 1e6 / theirs
            for ours, theirs in zip(rates["guarded"].values, rates["bare"].values, strict=True)
        ]
        best = max(min(added), 0.001)  # of a machine that does other things too, the quietest moment tells most
        more = {"median": sorted(added)[len(added) // 2]}
        yield Line(f"policy_cost_{name}", best, "us", goal=GOALS.get(name), runs=len(added), more=more)


def _turn(engine: Engine, name: str) -> Turn:
    def call() -> Awaitable[object]:
        return engine.get("bench", keys) if name == "get" else engine.commit("bench", BATCHES[name])

    keys = [KEY]
    return timed_async(_repeat(call), PER_STEP)


def _repeat(call: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[None]]:
    async def step() -> None:
        for _ in range(PER_STEP):
            await call()

    return step
