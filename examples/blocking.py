"""Without await: the same store from ordinary code, threads and processes.

python examples/blocking.py
"""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from holdfast import blocking

AGENTS = ["market", "risk", "news", "research"]


def agent(path: str, name: str) -> None:
    """A process of its own: it opens the store by its path."""
    with blocking.open(path) as store:
        records = store.space("contoso", agent=name).records
        for _ in range(25):
            records.increment("visits")
        records.append_to_list("finished", name)


def main(folder: Path) -> None:
    path = str(folder / "team.db")
    with blocking.open(path) as store:
        space = store.space("contoso", agent="director")
        space.records.set("regime", "risk-on", ttl="1h")
        print(f"regime    {space.records.get('regime')}")

        with ThreadPoolExecutor(16) as threads:
            threads.map(lambda _: space.records.increment("threads"), range(50))
        print(f"threads   {space.records.get('threads')} increments by 16 threads")

        def spend(tx: Any) -> int:
            cash: int = tx.get("cash", 1000)
            tx.set("cash", cash - 100)
            return cash - 100

        print(f"cash      {space.transact(spend)} left after a transaction")

        start = space.cursor()
        spawn = multiprocessing.get_context("spawn")  # open a store after a fork, never before
        with ProcessPoolExecutor(len(AGENTS), spawn) as processes:
            list(processes.map(agent, [path] * len(AGENTS), AGENTS))
        commits = space.watch("finished", cursor=start)  # from before they began
        finished = [change.value for _, commit in zip(AGENTS, commits, strict=False) for change in commit]
        commits.close()
        print(f"visits    {space.records.get('visits')} by processes, finished in this order: {', '.join(finished)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
