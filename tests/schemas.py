"""Schemas of PostgreSQL for tests that want an empty store: made once, emptied after each use.

Making one takes some 40 ms of the server, emptying it two; thousands of tests want one. A test that changes the schema itself,
or leaves an engine open, takes a name of its own instead.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Iterator

import psycopg
from psycopg import sql

from holdfast.testing.servers.postgres import PostgresServer

_TABLES = ("entries", "feed", "requests", "usage", "spaces")


class Schemas:
    """The schemas of one server that nobody uses at the moment."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._free: list[str] = []
        self._names = map(f"pool_{uuid.uuid4().hex[:8]}_{{}}".format, itertools.count(1))
        self._shell: psycopg.Connection | None = None

    def take(self) -> str:
        """The URL of an empty store."""
        name = self._free.pop() if self._free else next(self._names)
        return f"{self._server.url}?schema={name}"

    def give_back(self, url: str) -> None:
        """Nobody uses it any more: empty it for the next."""
        name = url.partition("schema=")[2]
        if self._shell is None:
            self._shell = psycopg.connect(self._server.url, autocommit=True)
            self._shell.execute("SET synchronous_commit = off")
        there = self._shell.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [name]).fetchone()
        if there is not None:
            deletes = [sql.SQL("DELETE FROM {}").format(sql.Identifier(name, table)) for table in _TABLES]
            self._shell.execute(sql.SQL("; ").join(deletes))
        self._free.append(name)

    @contextlib.contextmanager
    def empty(self) -> Iterator[str]:
        url = self.take()
        yield url
        self.give_back(url)

    def close(self) -> None:
        if self._shell is not None:
            self._shell.close()
