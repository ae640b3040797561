"""The task manager: a process that takes a space's spawn requests, runs them, and writes down what becomes of them.

    python -m holdfast.manager --store team.db --space contoso

| file | |
|---|---|
| `starting.py` | `ensure_manager`: one manager per host and space, started when it is needed |
| `place.py` | what a manager has on its host: the lock that makes it the only one, and its log |
| `options.py`, `command.py` | how it is told what to do |
| `serving.py` | a manager from its start to its end: one term after the other |
| `term.py` | a term: from one registration to its end; takes requests, adopts, is controlled |
| `running.py`, `orders.py` | one task: launched, listened to, controlled, ended |
| `patience.py` | a store that cannot be reached for a while |

A term is held by a lease in the store, and everything it writes is conditional on that (`layers/task_ledger.py`). Its processes
are children of this process's launcher (`holdfast.processes`) and die with it, however it dies. docs/guides/tasks.md shows how it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from holdfast.manager.command import main
    from holdfast.manager.options import ManagerOptions
    from holdfast.manager.serving import Manager
    from holdfast.manager.starting import ensure_manager

__all__ = ["Manager", "ManagerOptions", "ensure_manager", "main"]

_HOMES: Final = {
    "Manager": "holdfast.manager.serving",
    "ManagerOptions": "holdfast.manager.options",
    "ensure_manager": "holdfast.manager.starting",
    "main": "holdfast.manager.command",
}
"""Loaded when they are used: whoever looks whether there is a manager does not need all that one is made of."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.manager' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
