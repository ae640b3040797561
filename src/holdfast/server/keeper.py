"""The keeper: a store, its rules, its tokens and its ports, put together.

    request → authenticate (TokenBook) → access, rate, quota, ownership (Policy) → the store's engine → audit, metrics

Both ports use the store only through `engine_for`, so there is no way around the rules. The keeper looks after every space
that is used through it (sweeping, sealing, pruning), as any open store does.

Starting makes an administrator's token if the store has no token; it is shown once and kept hashed. A configuration file
is followed while the keeper runs: rules, limits and log level change between two requests.

Stopping, in this order and within ten seconds (PORTS_STOP_S, LINGER_S, LAST_ROUND_S): nothing new is taken, what was taken
is finished and answered, the audit is sealed, the log is folded into the file, the file is closed. When the engine cannot
go on (a failed fsync), everything is refused, `failed` is set, and whoever runs the keeper ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from contextlib import AbstractContextManager, AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from msgspec.structs import replace

from holdfast.clock import Clock, SystemClock, elapsed_s
from holdfast.engine import Engine
from holdfast.engines.registry import file_of, shown_url
from holdfast.errors import AuthenticationFailed, Error, InvalidInput, Unavailable
from holdfast.identity import Identity, Secret, check_agent
from holdfast.ids import is_generated
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.layers.tokens import TokenBook, Tokens
from holdfast.middleware.denials import Denial, DenialNotes
from holdfast.middleware.policy import Policy
from holdfast.middleware.telemetry import Observed
from holdfast.middleware.tolls import Tolls
from holdfast.server.backups import Backups
from holdfast.server.binary import BinaryPort, Limits
from holdfast.server.config import Config, Tls
from holdfast.server.door import enter
from holdfast.server.gauges import Gauges
from holdfast.server.http.app import make_app
from holdfast.server.http.limits import BODY_BYTES_MAX
from holdfast.server.http.limits import Limits as HttpLimits
from holdfast.server.http.serving import HttpServer, serve_http
from holdfast.server.http.tracing import current
from holdfast.server.metrics import Metrics
from holdfast.server.refusals import PortName, Strangers, operation_of, told
from holdfast.server.traces import Traces
from holdfast.space import Space
from holdfast.store import Store, open

PORTS_STOP_S: Final = 5
"""How long a keeper that stops waits for what is under way. With what follows it stops within ten seconds."""
ADMIN: Final = "admin"
"""The name on the token that the first start makes."""

log = logging.getLogger("holdfast.keeper")


@runtime_checkable
class _Owns(Protocol):
    """An engine that owns its storage alone, and may have to stop."""

    on_failure: Any

    @property
    def failure(self) -> str | None: ...

    def fold_every(self, seconds: float) -> None: ...


class Keeper:
    """A store, served. `await keeper.start()`, then `await keeper.stop()`."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock | None = None,
        background: bool = True,
        traces: Traces | None = None,
    ) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self._given_traces = traces
        self.failed = asyncio.Event()
        self.failure: str | None = None
        self.admin_token: Secret | None = None
        """Made by this start, because the store had no token; to be shown once."""
        self.store: Store = open(
            config.store or "memory:", clock=self.clock, background=background, agent_names=config.agent_names
        )
        self.audited: set[str] = set()
        file = file_of(self.store.url)
        self.backups = Backups(self.store, None if file is None else file.absolute().parent, self.clock)
        self.binary_port = self.http_port = 0
        self._stopping: str | None = "the keeper is starting"
        self._tls = None if config.tls is None else tls_context(config.tls)
        self._parts = AsyncExitStack()
        """What was opened, to be closed in the opposite order."""
        self._http: HttpServer | None = None
        self._making: asyncio.Task[None] | None = None

    # --- its life ---

    async def start(self) -> None:
        """Open the store and the ports; whatever fails, nothing is left open."""
        began = elapsed_s()
        await self.store.__aenter__()
        loaded_s = elapsed_s() - began
        self._parts.push_async_callback(self.store.close)
        try:
            self._parts.callback(self.backups.close)
            await self._prepare()
            await self._listen()
        except BaseException:
            with contextlib.suppress(Error):
                await self._take_back_token()
            await self._parts.aclose()
            raise
        self._stopping = None
        log.info("the keeper takes requests", extra={**self._told(), "loaded_s": round(loaded_s, 3)})

    def _told(self) -> dict[str, Any]:
        """Itself, in the log."""
        listen = self.config.listen
        at = {
            "binary": listen.binary and f"{listen.binary.host}:{self.binary_port}",
            "http": listen.http and f"{listen.http.host}:{self.http_port}",
            "unix": listen.unix,
        }
        about = {"version": version("holdfast"), "store": shown_url(self.store.url), "spaces": self._spaces}
        return {**about, **{name: where for name, where in at.items() if where}, "tls": self._tls is not None}

    async def _take_back_token(self) -> None:
        """Nobody has seen it; the next start makes another, and shows it."""
        if self.admin_token is not None:
            await Tokens(self.store.engine, self.clock, ADMIN).revoke(ADMIN)

    async def _prepare(self) -> None:
        engine = self.store.engine
        self._owned = isinstance(engine, _Owns)
        if isinstance(engine, _Owns):
            engine.on_failure = self._fail
            engine.fold_every(self.config.persistence.snapshot_interval_ms / 1000)
        await self._make_spaces(self.config)
        spaces = await engine.spaces()
        self._spaces = sum(not info.name.startswith("_") for info in spaces)
        for info in spaces:
            self.look_after(info.name)
            if info.audit_reads:
                self.audited.add(info.name)
        tokens = Tokens(engine, self.clock, ADMIN)
        if not await tokens.list():  # before the book is opened: it would hear of this one only by the feed
            self.admin_token, made = await tokens.create(ADMIN, None, "admin")
            log.info("the first start made an administrator's token", extra={"id": made.id, "agent": made.name})
        self._book = TokenBook(engine, self.clock)
        await self._book.start()
        self._parts.push_async_callback(self._book.close)
        denials = DenialNotes(engine, self.clock)
        self._parts.push_async_callback(denials.close)
        self._notes = denials
        self._policy = Policy(engine, self.clock, self.config.policies, denied=self._denied)
        self._tolls = Tolls(self._policy)
        self._coordination = Coordination(Leases(self.clock, renew=False), engine)
        self._parts.push_async_callback(self._coordination.close)
        gauges = Gauges(self.store, self.clock)
        gauges.start()
        self._parts.push_async_callback(gauges.close)
        self._traces = self._given_traces or Traces()
        span = self._traces.span if self._traces.enabled else None
        self.binary = BinaryPort(self, limits_of(self.config), self._observe, span, sole_owner=self._owned)
        self.metrics = Metrics(
            version("holdfast"),
            {
                "state_bytes": lambda: gauges.state_bytes,
                "locks_held": lambda: gauges.locks_held,
                "queue_depth": lambda: gauges.queue_depth,
                "connections": lambda: len(self.binary.connections) + (self._http.connections if self._http else 0),
                "watchers": lambda: self.binary.watchers,
                "in_flight": lambda: self.binary.in_flight,
            },
            cache=lambda: None if self.store.cache is None else self.store.cache.stats,
            labelled={
                "queue_messages": lambda: gauges.messages,
                "tasks": lambda: gauges.tasks,
                "executions": lambda: gauges.executions,
            },
        )
        self._strangers = Strangers(self.clock, self.metrics.count_stranger)
        self._parts.push_async_callback(self._strangers.close)
        self._observed = Observing(self)
        self._book.on_revoked(lambda id: self.binary.disconnect(lambda identity: identity.token_id == id))

    async def _listen(self) -> None:
        config, listen = self.config, self.config.listen
        self._parts.push_async_callback(self._stop_ports)
        if listen.binary is not None:
            at = listen.binary
            self.binary_port = await _bound(str(at), self.binary.listen(at.host, at.port, self._tls))
        if listen.unix is not None:
            await _bound(listen.unix, self.binary.listen_at(Path(listen.unix)))
        if listen.http is not None:
            at = listen.http
            metrics, limits = self.metrics.text if config.metrics.enabled else None, http_limits_of(config)
            app = make_app(self._observed, metrics=metrics, metrics_open=config.metrics.public, limits=limits)
            self._http = await serve_http(app, host=at.host, port=at.port, tls=self._tls)
            self.http_port = self._http.port or 0

    async def stop(self, reason: str = "the keeper is stopping") -> None:
        """Refuse what is new, finish what is under way, fold the log, close."""
        self._stopping = reason
        log.info("%s: nothing new is taken, what is under way is finished", reason)
        began = elapsed_s()
        if self._making is not None:
            await asyncio.wait([self._making])
        await self._parts.aclose()
        log.info("the keeper has stopped", extra={"took_s": round(elapsed_s() - began, 3)})

    async def _stop_ports(self) -> None:
        ports = [self.binary.stop(self._stopping or "the keeper is stopping", PORTS_STOP_S)]
        if self._http is not None:
            ports.append(self._http.stop())
        await asyncio.gather(*ports)

    def reload(self, config: Config) -> None:
        """New settings, as far as they can change while it runs; they count from the next request on."""
        self._policy.reload(config.policies)
        self.binary.limits = limits_of(config)
        if self._http is not None:
            self._http.limit(http_limits_of(config))
        if config.spaces != self.config.spaces:
            self._making = asyncio.create_task(self._remake_spaces(config, self._making))
        self.config = config

    async def _make_spaces(self, config: Config) -> None:
        for name, settings in config.spaces.items():
            await self.store.engine.create(name, settings.durability, audit_reads=settings.audit_reads)

    async def _remake_spaces(self, config: Config, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            await self._make_spaces(config)
            for name, settings in config.spaces.items():
                self.look_after(name)
                if settings.audit_reads:
                    self.audit_reads_of(name)
        except Error as exc:
            log.error("not every space of the new configuration could be made: %s", exc)

    def renew_certificate(self) -> bool:
        """Read the certificate anew, if there is one; connections that are open keep the old one. InvalidInput, and no change,
        when it is none."""
        if self.config.tls is None or self._tls is None:
            return False
        # Elsewhere first: what does not fit together would leave this one without a key.
        tls_context(self.config.tls)
        self._tls.load_cert_chain(self.config.tls.certificate, self.config.tls.key)
        return True

    def _fail(self, reason: str) -> None:
        log.critical("the store cannot go on: %s", reason)
        self.failure = self._stopping = reason
        self.failed.set()

    def _observe(self, op: str, outcome: str, seconds: float, count: int = 1) -> None:
        self.metrics.observe(op, outcome, seconds, count)

    def _denied(self, denial: Denial) -> None:
        """The rules have refused something. What has no request id that its sender chose has that of its HTTP request."""
        if denial.request_id is None or is_generated(denial.request_id):
            denial = replace(denial, request_id=current.get().get("request_id", denial.request_id))
        if (heard := told.get()) is not None:
            heard.append(denial)
        self._notes(denial)

    # --- what the ports ask ---

    @property
    def store_engine(self) -> Engine:
        return self.store.engine

    def ready(self) -> str | None:
        return self._stopping

    def authenticate(self, token: str) -> Identity:
        identity = self._book.authenticate(token)
        if self.store.agent_names == "strict":  # it may have been made before that was asked for
            try:
                check_agent(identity.agent, "strict")
            except InvalidInput as exc:
                raise AuthenticationFailed(f"{exc}: make a token of another name") from exc
        return identity

    def is_valid(self, identity: Identity) -> bool:
        return self._book.is_valid(identity)

    def denied(self, denial: Denial, seconds: float) -> None:
        self._policy.tell(denial)
        self._observe(operation_of(denial.verb), denial.code, seconds)

    def turned_away(self, port: PortName, error: Error, peer: str) -> None:
        self._strangers.note(port, error, peer)

    def engine_for(self, identity: Identity) -> Engine:
        return enter(self._policy.engine_for(identity), identity, self)

    def space_for(self, identity: Identity, name: str) -> Space:
        return self.shown(self.engine_for(identity), identity, name)

    def require(self, identity: Identity, space: str, verb: str) -> None:
        self._policy.engine_for(identity).require(space, verb)

    def look_at_rate(self, identity: Identity) -> None:
        self._tolls.look(identity)

    def charge(self, identity: Identity) -> None:
        self._tolls.charge(identity)

    def shown(self, engine: Engine, identity: Identity, name: str) -> Space:
        """A space seen through an engine, on behalf of somebody whose leases are not kept alive here."""
        return self.store.seen_through(engine, name, identity.agent, self._coordination)

    def look_after(self, space: str) -> None:
        """A space is used: sweep and seal it from now on."""
        self.store.look_after(space)

    async def note_drop(self, space: str, agent: str) -> None:
        """Who dropped a space stays in the store's own audit."""
        await self.store.note_drop(space, agent)

    def audit_reads_of(self, space: str) -> None:
        """Reads of a space leave a note from now on, also of those who are connected."""
        if space not in self.audited:
            self.audited.add(space)
            self.binary.disconnect(lambda identity: identity.may_enter(space) and identity.role != "admin")


class Observing:
    """The keeper as the HTTP port knows it: every operation is counted and traced. The binary port counts by itself."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.clock = keeper.clock
        self.authenticate = keeper.authenticate
        self.is_valid = keeper.is_valid
        self.ready = keeper.ready
        self.denied = keeper.denied
        self.turned_away = keeper.turned_away
        self.require = keeper.require
        self.look_at_rate = keeper.look_at_rate
        self.charge = keeper.charge

    def engine_for(self, identity: Identity) -> Engine:
        keeper = self._keeper
        return Observed(keeper.engine_for(identity), keeper._observe, self._span)

    def _span(self, op: str, space: str) -> AbstractContextManager[None]:
        """A span that goes on with the trace of the HTTP request, and carries its correlation id."""
        bound = current.get()
        return self._keeper._traces.span(op, space, bound.get("correlation_id"), bound)

    def space_for(self, identity: Identity, name: str) -> Space:
        return self._keeper.shown(self.engine_for(identity), identity, name)


def limits_of(config: Config) -> Limits:
    limits = config.limits
    return Limits(
        connections=limits.connections,
        connections_before_hello=limits.connections_before_hello,
        connections_per_token=limits.connections_per_token,
        connections_for_administrators=limits.connections_for_administrators,
        in_flight=limits.in_flight,
        frame_bytes=limits.frame_bytes,
        idle_s=limits.idle_ms / 1000,
    )


def http_limits_of(config: Config) -> HttpLimits:
    return HttpLimits(
        body_bytes_max=min(config.limits.frame_bytes, BODY_BYTES_MAX),
        connections=config.limits.connections,
        connections_before_hello=config.limits.connections_before_hello,
        connections_per_token=config.limits.connections_per_token,
        connections_for_administrators=config.limits.connections_for_administrators,
        lock_ttl_ms=config.timeout_default_ms,
        stop_s_max=PORTS_STOP_S,
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
        why = os.strerror(exc.errno) if exc.errno else exc
        raise Unavailable(f"the keeper cannot listen on {where}: {why}. Is another one running?") from exc
