"""The remote engine: a store that a keeper serves. `holdfast://host:7420`, `holdfasts://` (TLS), `holdfast+unix:///path`.

It is an engine like any other, and every guarantee is the keeper's engine's, brought over a connection that may break at
any moment (`remote_link.py`). A commit carries a request id wherever the library made the batch, so its outcome is found
out after a broken connection; without one it is `OutcomeUnknown`. The identity is the token's: a token that speaks for an
agent writes as that agent and no other.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.checking import check_batch, check_durability, check_keys, check_scan, check_start
from holdfast.clock import Clock
from holdfast.engine import Batch, ChangeSet, Durability, Entry, Finding, Page, Receipt, SpaceInfo, cursor_revision
from holdfast.engines.private import FILE_MODE
from holdfast.engines.remote_link import Address, Client
from holdfast.errors import InvalidInput, Unavailable
from holdfast.identity import Identity
from holdfast.wire import (
    PORT,
    PREFIXES_MAX,
    Backup,
    Commit,
    Compact,
    Create,
    Drop,
    Get,
    Inspect,
    Load,
    Message,
    ReadBackup,
    Scan,
    Spaces,
)

SCHEMES: Final = ("holdfast", "holdfasts", "holdfast+unix")
TLS_OPTIONS: Final = frozenset({"ca", "certificate", "key"})
"""Files in PEM: whom to trust, and what to show to a keeper that wants to see a certificate."""


class RemoteEngine:
    """A keeper's store. Use `await RemoteEngine.open(url, token=…)`; it belongs to that event loop."""

    @classmethod
    async def open(cls, url: str, *, token: str, clock: Clock | None = None) -> RemoteEngine:
        """Connect. The clock is the keeper's; the parameter is there as for every engine."""
        client = Client(address_of(url), token)
        await client.connect()
        return cls(client)

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def identity(self) -> Identity:
        """Whom the token speaks for."""
        identity = self._client.identity
        if identity is None:
            raise InvalidInput("the engine was never connected")
        return identity

    async def commit(self, space: str, batch: Batch) -> Receipt:
        check_batch(batch)
        id = batch.request_id
        make = lambda n: Commit(n, space, batch)  # noqa: E731
        receipt: Receipt
        if id is None:
            receipt = await self._client.ask(make, None)
        elif batch.fresh:
            again = lambda n: Commit(n, space, _repeated(batch))  # noqa: E731
            receipt = await self._client.ask(make, again, request_id=id, patient=batch.patience_ms > 0)
        else:
            receipt = await self._client.ask(make, make, request_id=id)
        return receipt

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        check_keys(keys)
        answer = await self._read(lambda n: Get(n, space, keys))
        entries: list[Entry | None] = answer.entries
        return entries

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        check_scan(prefix, after, limit)
        answer = await self._read(lambda n: Scan(n, space, prefix, after, limit, reverse))
        page: Page = answer.page
        return page

    async def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        for prefix in prefixes:
            check_start(prefix)
        if len(prefixes) > PREFIXES_MAX:
            raise InvalidInput(f"a watch has at most {PREFIXES_MAX} prefixes, not {len(prefixes)}")
        if cursor is not None:
            cursor_revision(cursor)
        follower = self._client.follow(space, list(prefixes), cursor, live)
        try:
            while (commit := await follower.next()) is not None:
                yield commit
        finally:
            follower.close()

    async def create(self, space: str, durability: Durability = "sync", *, audit_reads: bool = False) -> SpaceInfo:
        check_durability(durability)
        make = lambda n: Create(n, space, durability, audit_reads)  # noqa: E731
        answer = await self._client.ask(make, make)
        [info] = answer.spaces
        return info  # type: ignore[no-any-return]

    async def spaces(self, name: str | None = None) -> list[SpaceInfo]:
        answer = await self._read(lambda n: Spaces(n, name))
        infos: list[SpaceInfo] = answer.spaces
        return infos

    async def drop(self, space: str) -> None:
        await self._client.ask(lambda n: Drop(n, space), None)

    async def load(self, space: str, entries: list[Entry], revision: int) -> None:
        await self._client.ask(lambda n: Load(n, space, entries, revision), None)

    async def compact(self, space: str, upto: int) -> None:
        await self._client.ask(lambda n: Compact(n, space, upto), None)

    async def inspect(self) -> list[Finding]:
        answer = await self._read(Inspect)
        where = f"the keeper at {self._client.address}, as {self.identity.agent} ({self.identity.role})"
        return [Finding("ok", "remote", where), *answer.findings]

    async def backup(self, target: Path) -> None:
        """A consistent copy of the keeper's whole store, brought here in pieces; for administrators."""
        if target.exists():
            raise InvalidInput(f"{target} exists already; name a file that does not")
        part = target.with_name(f"{target.name}.part")
        try:
            file = open(part, "xb", opener=lambda name, flags: os.open(name, flags, FILE_MODE))  # noqa: ASYNC230, SIM115
        except FileExistsError:
            raise InvalidInput(
                f"{part} exists: another backup is being written, or was cut off; then remove it"
            ) from None
        except OSError as exc:
            raise Unavailable(f"the backup {target} cannot be written: {exc.strerror or exc}") from exc
        try:
            with file:
                await self._fetch_backup(file)
                file.flush()
                os.fsync(file.fileno())
            part.rename(target)
        except OSError as exc:
            raise Unavailable(f"the backup {target} cannot be written: {exc.strerror or exc}") from exc
        finally:
            part.unlink(missing_ok=True)

    async def _fetch_backup(self, file: BinaryIO) -> None:
        begun = await self._read(Backup)
        while (at := file.tell()) < begun.size:
            piece = await self._read(partial(ReadBackup, backup=begun.backup, offset=at))
            file.write(piece.data)

    def _read(self, make: Callable[[int], Message]) -> Awaitable[Any]:
        return self._client.ask(make, make, reading=True)

    async def close(self) -> None:
        await self._client.close()


def _repeated(batch: Batch) -> Batch:
    """A batch that was sent before: its request id is not fresh any more."""
    return Batch(batch.actor, batch.operations, batch.conditions, batch.request_id)


def address_of(url: str) -> Address:
    """Where a URL says the keeper is. What is wrong with it is told without what may be a secret in it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidInput(f"this is no keeper's address; write holdfast://host:{PORT}") from None
    if parts.username or parts.password:
        raise InvalidInput("a keeper's address has no user and no password; pass the token as token=")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(options.keys() - (TLS_OPTIONS if parts.scheme == "holdfasts" else set()))
    if parts.scheme not in SCHEMES or unknown:
        wrong = f"a keeper's address has no option {unknown[0]!r}" if unknown else "this is no keeper's address"
        raise InvalidInput(
            f"{wrong}; write holdfast://host:{PORT}, or holdfasts:// with TLS and {', '.join(sorted(TLS_OPTIONS))}"
        )
    if parts.scheme == "holdfast+unix":
        if not parts.path.strip("/"):
            raise InvalidInput("holdfast+unix:///path/to/keeper.sock needs the path of a socket")
        return Address(path=unquote(parts.path))
    try:
        port = parts.port or PORT
    except ValueError as exc:
        raise InvalidInput(f"this is no keeper's address: {exc}") from None
    if not parts.hostname or parts.path not in ("", "/"):
        raise InvalidInput(f"this is no keeper's address; write {parts.scheme}://host:{PORT}")
    return Address(parts.hostname, port, tls=_tls(options) if parts.scheme == "holdfasts" else None)


def _tls(options: dict[str, str]) -> ssl.SSLContext:
    """Trust the authorities of `ca`, or the system's; show `certificate` with its `key`, if the keeper asks for one."""
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "certificate" in options:
            context.load_cert_chain(options["certificate"], options.get("key"))
    except OSError as exc:
        raise InvalidInput(f"the certificates {', '.join(options.values())} cannot be read: {exc}") from exc
    return context
