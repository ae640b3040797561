"""What `ps` shows: `holdfast: 1234567890 running name`, the end of the task's id, its state and its name.

A command shows its own title; its warden has this one. Names come from users, so only printable ASCII of a bounded length
gets into a title.
"""

from __future__ import annotations

import re
from typing import Final

import setproctitle

from holdfast.processes.orders import NAME_CHARACTERS_MAX

_UNPRINTABLE: Final = re.compile(r"[^A-Za-z0-9_.:/@+=,-]+")


def title(short: str, state: str, name: str = "") -> str:
    """The title of a process."""
    clean = _UNPRINTABLE.sub("_", name)[:NAME_CHARACTERS_MAX]
    return " ".join(filter(None, ("holdfast:", _UNPRINTABLE.sub("_", short), state, clean)))


def show(short: str, state: str, name: str = "") -> None:
    """Give this process its title."""
    setproctitle.setproctitle(title(short, state, name))
