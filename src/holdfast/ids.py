"""Unique names, cheap to make, that sort in the order one process makes them.

An id is `<milliseconds><process><counter>` in hexadecimal: when the process began to make ids, a random part (drawn anew
after a fork), and a counter. Ids of one process ascend, so an index of them grows in one place.
"""

from __future__ import annotations

import itertools
import os
import re
import time


class _Source:
    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        prefix = f"{time.time_ns() // 1_000_000:012x}{os.urandom(5).hex()}"
        self.ids = map(f"{prefix}%08x".__mod__, itertools.count())


_GENERATED = re.compile(r"[0-9a-f]{30}")

_source = _Source()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_source.renew)


def new_id() -> str:
    """A fresh id, 30 characters."""
    return next(_source.ids)


def is_generated(id: str) -> bool:
    """Whether an id has the form of those made here; one that somebody chose has it only by accident."""
    return _GENERATED.fullmatch(id) is not None
