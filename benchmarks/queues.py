"""How many no-op messages a second are put, reserved and completed, beside other queues on the same store? How fast is a bulk put?

Durable and at least once, 32 in flight: 32 tasks of one process each put a message, reserve one, and complete it. The peers do the same with
what they have (`queue_peers.py`), in turns of the same run. Then the same with one message at a time, ours and theirs, in lines without a
goal. The bulk put is `put_many` without order, on SQLite.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

import holdfast
from benchmarks import queue_peers
from benchmarks.queue_peers import IN_FLIGHT, environment
from benchmarks.report import Goal, Line, compare
from benchmarks.rounds import Plan, Turn, take_turns
from holdfast.testing.servers.postgres import PostgresServer
from holdfast.testing.servers.process import MissingServer
from holdfast.testing.servers.redis import RedisServer

GOALS: Final = {
    "sqlite": {"huey": 1.5, "simplebroker": 3.0},
    "postgres": {"procrastinate": 4.0, "awa-pg": 1.0},
    "redis": {"celery": 2.0, "rq": 4.0},
}
BULK: Final = 127 * 40
BULK_PER_S: Final = 80_000
READY_S: Final = 60


async def run(plan: Plan) -> AsyncIterator[Line]:
    for kind, peers in GOALS.items():
        with ExitStack() as stack:
            try:
                url, place = _place(kind, plan, stack)
            except MissingServer as missing:
                print(f"# {kind} is left out: {missing}", file=sys.stderr)
                continue
            store = holdfast.open(url)
            async with store:
                queue = store.space("bench", agent="worker").queue("work", prefetch=IN_FLIGHT)
                contenders: dict[str, dict[int, Turn]] = {"ours": {n: _turn(queue, n) for n in (IN_FLIGHT, 1)}}
                for name in peers:
                    try:
                        command = [str(environment()), queue_peers.__file__, name, place(name)]
                        turn = stack.enter_context(peer(name, command))
                        contenders[name] = {n: partial(turn, in_flight=n) for n in (IN_FLIGHT, 1)}
                    except (OSError, subprocess.SubprocessError) as exc:
                        print(f"# {name} is left out: {exc}", file=sys.stderr)
                for in_flight, bench in ((IN_FLIGHT, f"queues_{kind}"), (1, f"queues_{kind}_one_at_a_time")):
                    turns = {name: ways[in_flight] for name, ways in contenders.items()}
                    rates = await take_turns(plan, turns)
                    for name in peers:
                        if name in rates:
                            goal = Goal("ratio", "at least", peers[name]) if in_flight > 1 else None
                            yield compare(bench, rates["ours"], rates[name], name, goal, "messages/s")
                if kind == "sqlite":
                    yield await _bulk(plan, store)


async def _bulk(plan: Plan, store: holdfast.Store) -> Line:
    queue = store.space("bench", agent="sender").queue("bulk")

    async def turn(seconds: float) -> float:
        began = time.perf_counter()
        await queue.put_many(range(BULK), ordered=False)
        return BULK / (time.perf_counter() - began)

    rates = (await take_turns(plan, {"bulk": turn}))["bulk"]
    goal = Goal("ours", "at least", BULK_PER_S)
    return Line(
        "queues_bulk_put",
        rates.median,
        "messages/s",
        goal=goal,
        runs=len(rates.values),
        more={"best": max(rates.values)},
    )


def _turn(queue: holdfast.Queue, tasks: int) -> Turn:
    async def turn(seconds: float) -> float:
        began = time.perf_counter()
        end, count = began + seconds, 0

        async def work() -> None:
            nonlocal count
            while time.perf_counter() < end:
                await queue.put(count)
                async with queue.reserve(wait="30s") as message:
                    await message.complete()
                count += 1

        await asyncio.gather(*(work() for _ in range(tasks)))
        return count / (time.perf_counter() - began)

    return turn


def _place(kind: str, plan: Plan, stack: ExitStack) -> tuple[str, Callable[[str], str]]:
    """Our URL, and what gives each peer its own place."""
    if kind == "sqlite":
        return str(plan.folder / "queues.db"), lambda name: str(plan.folder / f"{name}.db")
    if kind == "redis":
        redis = stack.enter_context(RedisServer.temporary())
        numbers = iter(range(1, 16))
        return f"{redis.url}?prefix=queues", lambda name: f"{redis.url}/{next(numbers)}"
    postgres = stack.enter_context(PostgresServer.temporary())
    return f"{postgres.url}?schema=queues", lambda name: postgres.url


@contextmanager
def peer(name: str, command: list[str]) -> Iterator[Callable[..., Awaitable[float]]]:
    """A peer that takes its turns as long as this lasts; what it says of itself when it is ready is shown."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    async def turn(seconds: float, in_flight: int | None = None) -> float:
        stdin.write(f"{seconds}\n" if in_flight is None else f"{seconds} {in_flight}\n")
        stdin.flush()
        answer = await asyncio.to_thread(stdout.readline)
        if not answer:
            raise OSError(f"{name} ended in its turn")
        return float(answer)

    try:
        is_ready, _, words = stdout.readline().strip().partition(" ")
        if is_ready != "ready":
            raise OSError(f"it ended with {process.wait(READY_S)}")
        if words:
            print(f"# {name}: {words}", file=sys.stderr)
        yield turn
    finally:
        process.kill()
        process.wait()
