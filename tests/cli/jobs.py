"""Functions that the tests of `holdfast run` call in a process of their own."""

from __future__ import annotations

from typing import Any

LIMIT = 3


def add(first: int, second: int = 0) -> int:
    print("adding")
    return first + second


def echo(message: Any, **fields: Any) -> Any:
    return [message, fields]


def fail() -> None:
    raise ValueError("out of stock")
