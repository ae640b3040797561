"""Several processes that write to one store, or to a bare peer of it, at the same time.

`python -m benchmarks.processes KIND URL WRITERS` is one of them. It is told the name of its space, and then, again and
again, `{"at", "seconds"}` (`at` on the machine's monotonic clock, which processes share): it writes from then on and
answers with what it finished and its slowest write.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import holdfast
from benchmarks import ours, server_peers
from benchmarks.children import Child, children, orders, say
from benchmarks.rounds import Turn

LEAD_S: Final = 0.02
"""From the order to the start, so that all have read it."""

Write = Callable[[str, str], Awaitable[object]]


class Processes:
    """Writing processes, and what each of them has done so far."""

    def __init__(self, workers: list[Child]) -> None:
        self._workers = workers
        self.done = [0] * len(workers)
        self.slowest_s = 0.0

    @property
    def turn(self) -> Turn:
        """All of them at once; gives their rate together."""

        async def turn(seconds: float) -> float:
            at = time.monotonic() + LEAD_S
            for worker in self._workers:
                worker.tell(at=at, seconds=seconds)
            answers = [worker.answer() for worker in self._workers]
            for number, answer in enumerate(answers):
                self.done[number] += answer["done"]
            self.slowest_s = max(self.slowest_s, *(answer["slowest_s"] for answer in answers))
            return float(sum(answer["done"] for answer in answers) / max(answer["took_s"] for answer in answers))

        return turn


@contextmanager
def processes(count: int, kind: str, url: str, writers: int, space: str = "bench") -> Iterator[Processes]:
    """So many processes with so many writers each; `{}` in the space's name becomes the process's number."""
    with children(count, "benchmarks.processes", kind, url, str(writers)) as workers:
        for number, worker in enumerate(workers):
            worker.tell(space=space.format(number))
            worker.answer()
        yield Processes(workers)


@asynccontextmanager
async def _writing(kind: str, url: str, writers: int, space: str) -> AsyncIterator[list[Write]]:
    """How each writer of this process writes."""
    if kind == "ours":
        async with holdfast.open(url) as store:
            records = store.space(space, agent="writer").records
            await records.set("warm", 0)
            yield [records.set] * writers
    else:
        async with server_peers.postgres_writers(url, writers) as writes:
            yield writes


async def work(kind: str, url: str, writers: int) -> None:
    """One of the processes."""
    say(ready=True)
    incoming = orders()
    space = next(incoming)["space"]
    async with _writing(kind, url, writers, space) as writes:
        say(writing=True)
        for order in incoming:
            slowest = 0.0

            async def write(write: Write, end: float) -> int:
                nonlocal slowest
                done, clock = 0, time.monotonic
                began = clock()
                while began < end:
                    await write(*ours.next_row())
                    done += 1
                    now = clock()
                    slowest = max(slowest, now - began)
                    began = now
                return done

            time.sleep(max(0.0, order["at"] - time.monotonic()))  # noqa: ASYNC251 - the start signal; nothing else runs yet
            end = order["at"] + order["seconds"]
            done = await asyncio.gather(*(write(each, end) for each in writes))
            say(done=sum(done), took_s=time.monotonic() - order["at"], slowest_s=slowest)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2], int(sys.argv[3])))
