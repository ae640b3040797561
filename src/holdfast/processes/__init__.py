"""Processes that are really controlled: started in milliseconds, measured, limited, paused and ended as trees. Linux.

    Launcher ── zygote ── warden ── target ── whatever it starts
       │                     │
       └──── a socket ───────┘        control; its end is how each learns that the other is dead
       └──── pipes ──────────────── target       output, input, a function's outcome

| file | |
|---|---|
| `orders.py` | what to run, and what may be run |
| `launcher.py`, `child.py`, `links.py` | the side of the event loop |
| `zygote.py` | forks wardens |
| `warden.py` | answers for one tree: reasons, limits, timeouts, the proof of death |
| `target.py` | becomes the command or calls the function |
| `tree.py`, `kernel.py` | descendants by /proc; what Linux offers |
| `leftovers.py` | what is left when everybody was killed |
| `messages.py`, `titles.py` | what they say; what `ps` shows |

No store and no layer is known here. Nothing is executed through a shell, and nothing that comes over a socket or a pipe is
executed at all. How it survives the death of each part is drawn in docs/decisions/0032-processes-under-wardens.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from holdfast.processes.child import Child, Ended, Usage
    from holdfast.processes.launcher import Launcher
    from holdfast.processes.leftovers import settle_leftovers
    from holdfast.processes.messages import Failure
    from holdfast.processes.orders import Allowed, Limits, Order

__all__ = [
    "Allowed",
    "Child",
    "Ended",
    "Failure",
    "Launcher",
    "Limits",
    "Order",
    "Usage",
    "settle_leftovers",
]

_HOMES: Final = {
    "Allowed": "holdfast.processes.orders",
    "Child": "holdfast.processes.child",
    "Ended": "holdfast.processes.child",
    "Failure": "holdfast.processes.messages",
    "Launcher": "holdfast.processes.launcher",
    "Limits": "holdfast.processes.orders",
    "Order": "holdfast.processes.orders",
    "Usage": "holdfast.processes.child",
    "settle_leftovers": "holdfast.processes.leftovers",
}
"""Loaded when they are used: a zygote is in this package too, and needs none of the launcher's side."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.processes' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
