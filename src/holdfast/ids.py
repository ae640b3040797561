"""Unique names that sort by the time they were made.

A request id is `<milliseconds><process><counter>` in hexadecimal: unique by its process part (random, drawn anew after
a fork) and its counter, and ordered by time so that an index of them grows at its end.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time


class _Source:
    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.process = secrets.token_hex(5)
        self.counter = itertools.count(secrets.randbelow(0x10000))


_source = _Source()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_source.renew)


def new_id() -> str:
    """A fresh id, 30 characters."""
    return f"{time.time_ns() // 1_000_000:012x}{_source.process}{next(_source.counter):08x}"
