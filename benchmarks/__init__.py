"""How fast Holdfast is, beside a peer in the same run. `python -m benchmarks` runs all; README.md says how to read it.

One module per question; each has `run(plan)`, which gives the lines of its answer one by one. `rounds.py` does the
measuring, `peers.py` has the bare SQLite loops, `children.py` the processes, `report.py` the lines and the table.
`keeper_profile.py` shows where a keeper's time goes.
"""

from __future__ import annotations

from typing import Final

NAMES: Final = (
    "sqlite_set_sequential",
    "sqlite_set_64",
    "sqlite_set_processes",
    "sqlite_get",
    "memory_set",
    "policy_cost",
    "contribute",
    "resident_cpu",
    "redis_set",
    "postgres_set",
    "flat",
    "watch_latency",
    "copying",
    "cached_read",
    "correlations",
    "launching",
    "tasks",
    "commands",
    "queues",
    "workflows",
    "sleeping",
    "keeper_set",
    "keeper_get",
    "keeper_lock",
    "keeper_watch",
    "keeper_memory",
)
"""The modules with a `run`, in the order in which they run."""
