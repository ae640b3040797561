"""Unique names, cheap to make, that sort in the order one process makes them.

An id is `<milliseconds><process><counter>` in hexadecimal: when the process began to make ids, a random part (drawn anew
after a fork), and a counter. Ids of one process ascend, so an index of them grows in one place.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable

_FIRST = 0x1000_0000
"""The counter's eight digits from the start, so that none has to be filled in: every id of a commit is made here."""


ID_CHARS = 30
is_generated: Callable[[str], object] = re.compile(f"[0-9a-f]{{{ID_CHARS}}}").fullmatch
"""Whether an id has the form of those made here, or None; one that somebody chose has it only by accident."""


class _Source:
    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.prefix = f"{time.time_ns() // 1_000_000:012x}{os.urandom(5).hex()}"
        self.numbers = itertools.count(_FIRST)


_source = _Source()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_source.renew)


def new_id() -> str:
    """A fresh id, 30 characters."""
    return _source.prefix + hex(next(_source.numbers))[2:]
