"""The servers of the tests: real, private, started when a test first asks for them.

A program that is not installed skips the test, and fails it where CI=true: nothing is left untested unnoticed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn, TypeVar

import pytest

from holdfast.testing.servers.process import MissingServer

T = TypeVar("T")


@contextmanager
def started(server: AbstractContextManager[T]) -> Iterator[T]:
    """A server that was started, or a skipped test."""
    try:
        running = server.__enter__()
    except MissingServer as exc:
        missing(exc)
    try:
        yield running
    finally:
        server.__exit__(None, None, None)


def missing(exc: MissingServer) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(str(exc))
    pytest.skip(str(exc))
