"""The keeper: a store, its rules, its tokens and its ports, put together.

    request → authenticate (TokenBook) → access, rate, quota, ownership (Policy) → the store's engine → audit, metrics

Both ports use the store only through `engine_for`, so there is no way around the rules. The keeper looks after every space
that is used through it (sweeping, sealing, pruning), as any open store does.

Starting makes an administrator's token if the store has no token; it is shown once and kept hashed. A configuration file
is followed while the keeper runs: rules, limits and log level change between two requests.

Stopping, in this order and within STOP_S: nothing new is taken, what was taken is finished and answered, the audit is
sealed, the log is folded into the file, the file is closed. When the engine cannot go on (a failed fsync), everything is
refused, `failed` is set, and whoever runs the keeper ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from holdfast.clock import Clock, SystemClock
from holdfast.engine import Engine
from holdfast.errors import InvalidInput
from holdfast.identity import Identity, Secret
from holdfast.layers.leases import Leases
from holdfast.layers.locks import Coordination
from holdfast.layers.tokens import TokenBook, Tokens
from holdfast.middleware.denials import DenialNotes
from holdfast.middleware.policy import Policy
from holdfast.server.binary import BinaryPort, Limits
from holdfast.server.config import Config, Tls
from holdfast.server.door import enter
from holdfast.server.http import HttpPort
from holdfast.server.metrics import Metrics
from holdfast.space import Space
from holdfast.store import Store, open

STOP_S: Final = 10.0
"""How long a keeper that stops waits for what is under way."""
ADMIN: Final = "admin"
"""The name on the token that the first start makes."""

log = logging.getLogger("holdfast.keeper")


@runtime_checkable
class _Owns(Protocol):
    """An engine that owns its storage alone, and may have to stop."""

    on_failure: Any

    @property
    def failure(self) -> str | None: ...


class Keeper:
    """A store, served. `await keeper.start()`, then `await keeper.stop()`."""

    def __init__(self, config: Config, *, clock: Clock | None = None, background: bool = True) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self.metrics = Metrics()
        self.failed = asyncio.Event()
        self.failure: str | None = None
        self.admin_token: Secret | None = None
        """Made by this start, because the store had no token; to be shown once."""
        self.store: Store = open(config.store or "memory:", clock=self.clock, background=background)
        self.audited: set[str] = set()
        self._stopping: str | None = "it is starting"
        self._tls = None if config.tls is None else tls_context(config.tls)

    # --- its life ---

    async def start(self) -> None:
        """Open the store and the ports; whatever fails, nothing is left open."""
        await self.store.__aenter__()
        try:
            await self._prepare()
            await self._listen()
        except BaseException:
            await self.stop("it could not start")
            raise
        self._stopping = None

    async def _prepare(self) -> None:
        engine = self.store.engine
        self._owned = isinstance(engine, _Owns)
        if isinstance(engine, _Owns):
            engine.on_failure = self._fail
        for name, settings in self.config.spaces.items():
            await engine.create(name, settings.durability, audit_reads=settings.audit_reads)
        for info in await engine.spaces():
            self.look_after(info.name)
            if info.audit_reads:
                self.audited.add(info.name)
        self._book = TokenBook(engine, self.clock)
        await self._book.start()
        if not len(self._book):
            self.admin_token, _ = await Tokens(engine, self.clock, ADMIN).create(ADMIN, None, "admin")
        self._denials = DenialNotes(engine, self.clock)
        self._policy = Policy(engine, self.clock, self.config.policies, denied=self._denials)
        self._coordination = Coordination(Leases(self.clock, renew=False))
        self._book.on_revoked(self._revoked)

    async def _listen(self) -> None:
        config = self.config
        self.binary = BinaryPort(self, limits_of(config), self.metrics.observe, sole_owner=self._owned)
        self.binary_port = self.http_port = 0
        if config.listen.binary is not None:
            at = config.listen.binary
            self.binary_port = await _bound(str(at), self.binary.listen(at.host, at.port, self._tls))
        if config.listen.unix is not None:
            await _bound(config.listen.unix, self.binary.listen_at(Path(config.listen.unix)))
        self.http = HttpPort(self, config)
        if config.listen.http is not None:
            at = config.listen.http
            self.http_port = await _bound(str(at), self.http.listen(at.host, at.port, self._tls))

    async def stop(self, reason: str = "the keeper is stopping") -> None:
        """Refuse what is new, finish what is under way, fold the log, close."""
        self._stopping = reason
        ports = [port.stop(reason, STOP_S) for name in ("binary", "http") if (port := self.__dict__.get(name))]
        await asyncio.gather(*ports)
        for part in ("_coordination", "_book", "_denials"):
            if part in self.__dict__:
                await self.__dict__[part].close()
        await self.store.close()

    def reload(self, config: Config) -> None:
        """New settings, as far as they can change while it runs; they count from the next request on."""
        self._policy.reload(config.policies)
        self.binary.limits = limits_of(config)
        self.config = config
        if config.tls is not None and self._tls is not None:
            self._tls.load_cert_chain(config.tls.certificate, config.tls.key)

    def _fail(self, reason: str) -> None:
        log.critical("the store cannot go on: %s", reason)
        self.failure = self._stopping = reason
        self.failed.set()

    # --- what the ports ask ---

    @property
    def store_engine(self) -> Engine:
        return self.store.engine

    def ready(self) -> str | None:
        return self._stopping

    def authenticate(self, token: str) -> Identity:
        return self._book.authenticate(token)

    def is_valid(self, identity: Identity) -> bool:
        return self._book.is_valid(identity)

    def engine_for(self, identity: Identity) -> Engine:
        return enter(self._policy.engine_for(identity), identity, self)

    def space_for(self, identity: Identity, name: str) -> Space:
        engine = self.engine_for(identity)
        return self.store.seen_through(engine, name, identity.agent, self._coordination)

    def look_after(self, space: str) -> None:
        """A space is used: sweep and seal it from now on."""
        self.store.look_after(space)

    def audit_reads_of(self, space: str) -> None:
        """Reads of a space leave a note from now on, also of those who are connected."""
        if space not in self.audited:
            self.audited.add(space)
            self.binary.disconnect(lambda identity: identity.may_enter(space))

    def _revoked(self, token_id: str) -> None:
        if "binary" in self.__dict__:
            self.binary.disconnect(lambda identity: identity.token_id == token_id)


def limits_of(config: Config) -> Limits:
    limits = config.limits
    return Limits(
        connections=limits.connections,
        in_flight=limits.in_flight,
        frame_bytes=limits.frame_bytes,
        idle_s=limits.idle_ms / 1000,
    )


def tls_context(tls: Tls) -> ssl.SSLContext:
    """What both ports use; InvalidInput when the files are no certificate and key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        if tls.client_ca is not None:
            context.load_verify_locations(tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as exc:
        raise InvalidInput(f"tls: {tls.certificate} and {tls.key} are not a certificate and its key: {exc}") from exc
    return context


async def _bound(where: str, listening: Any) -> Any:
    try:
        return await listening
    except OSError as exc:
        raise InvalidInput(
            f"the keeper cannot listen on {where}: {exc.strerror or exc}. Is another one running?"
        ) from exc
