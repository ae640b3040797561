"""A manager: serves one space of a store, from its start to its end.

    async with holdfast.open("team.db") as store:
        await Manager(store, "contoso").run()

It is registered before it serves, and then serves term after term (`term.py`): a term ends when its lease is lost, because the store
could not be reached, or the process was held up, for longer than that. Its processes are dead then, and the manager registers
anew, under another tid, as soon as the store answers. A store that does not answer for as long as a manager may be idle is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from holdfast.clock import Clock, SystemClock, duration_ms
from holdfast.errors import AccessDenied, Error, Unavailable
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.layers.task_launch import ManagerInfo
from holdfast.layers.task_states import StopReason
from holdfast.layers.tid import short_tid
from holdfast.manager.options import ManagerOptions
from holdfast.manager.patience import PatientEngine
from holdfast.manager.place import store_id
from holdfast.manager.term import Lock, Term
from holdfast.processes import Allowed, Launcher
from holdfast.processes.titles import show
from holdfast.space import Space
from holdfast.store import Store

AGENT: Final = "manager"

log = logging.getLogger("holdfast.manager")


class NoPlace:
    """The place of a manager that is part of another program: it is the only one there."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        """There is nothing to let go of."""


class Manager:
    """Runs the tasks of a space. `run` returns when it was idle for long, or was told to leave."""

    def __init__(
        self,
        store: Store,
        space: str,
        options: ManagerOptions | None = None,
        *,
        agent: str | None = None,
        clock: Clock | None = None,
        place: Lock | None = None,
        titled: bool = False,
    ) -> None:
        """`titled` shows its tid in the process's title: for a process that is nothing but a manager."""
        self._store = store
        self._name = space
        self._options = options or ManagerOptions()
        identity = store.identity
        self._agent = agent or (AGENT if identity is None else identity.agent)
        self._clock = clock or SystemClock()
        self._place = place or NoPlace()
        self._titled = titled
        self._term: Term | None = None
        self._registering: asyncio.Timeout | None = None
        """How long the store is waited for, until there is a term."""
        self._told: StopReason | None = None

    def stop(self, reason: StopReason = "shutdown") -> None:
        """Leave: with "stop" or "shutdown" tasks get the grace to end, with "cancel" and "kill" they do not."""
        self._told = reason
        if self._registering is not None:
            self._registering.reschedule(asyncio.get_running_loop().time() + duration_ms(self._options.grace) / 1000)
        elif self._term is not None:
            self._leaving = asyncio.get_running_loop().create_task(self._term.leave(reason))

    async def run(self, ready: Callable[[ManagerInfo], None] | None = None) -> None:
        """Serve. `ready` is called when it is registered, and can be found, for the first time."""
        identity = self._store.identity
        if identity is None:
            self._store.look_after(self._name)
        elif identity.role == "agent":
            raise AccessDenied(
                f"the token of {identity.agent!r} is an agent's; a manager writes what becomes of everybody's tasks, and needs an orchestrator's"
            )
        options = self._options
        launcher = Launcher(allowed=_allowed(options), preload=options.preload, clock=self._clock, spare=True)
        opening = asyncio.get_running_loop().create_task(launcher.open())  # while it registers
        try:
            while await self._serve(launcher, opening, ready):
                ready = None
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            await launcher.close()

    async def _serve(
        self, launcher: Launcher, opening: asyncio.Task[None], ready: Callable[[ManagerInfo], None] | None
    ) -> bool:
        """One term; tells whether there is to be another."""
        engine = PatientEngine(self._store.engine, self._clock)
        coordination = Coordination(Leases(self._clock))
        space = self._store.seen_through(engine, self._name, self._agent, coordination)
        idle_s, lease_s = duration_ms(self._options.idle) / 1000, duration_ms(self._options.lease) / 1000
        patience = asyncio.timeout(max(idle_s, lease_s))  # with a store that does not answer
        try:
            async with patience:
                return await self._registered(space, engine, patience, launcher, opening, ready)
        except TimeoutError as exc:
            if self._term is None:
                raise Unavailable("the store has not answered for too long, and was given up") from exc
            log.warning("the store does not answer; the manager is in the registry until its lease ends")
            return not self._term.is_leaving
        finally:
            self._term = self._registering = None
            try:
                async with asyncio.timeout(0 if patience.expired() else lease_s):
                    await coordination.close()
            except (Error, TimeoutError) as exc:
                log.info("what was held ends with its leases: %s", exc)

    async def _registered(
        self,
        space: Space,
        engine: PatientEngine,
        patience: asyncio.Timeout,
        launcher: Launcher,
        opening: asyncio.Task[None],
        ready: Callable[[ManagerInfo], None] | None,
    ) -> bool:
        """Be registered, serve, and leave; tells whether it has to register anew."""
        options, now = self._options, asyncio.get_running_loop().time
        self._registering = patience
        async with space.tasks.ledger(host=options.host, capacity=options.concurrency, lease=options.lease) as ledger:
            self._registering = None
            patience.reschedule(None)
            await asyncio.shield(opening)
            ledger.lease.tell(engine.given_up)
            log.info("manager %s serves %s on %s", ledger.tid, self._name, options.host)
            if self._titled:
                show(short_tid(ledger.tid), "running", "manager")
            if ready is not None:
                ready(ledger.info)
            marker = store_id(self._store.url, self._name)
            env = {} if options.is_restricted else self._env()
            term = self._term = Term(space, engine, self._clock, ledger, launcher, options, self._place, marker, env)
            if self._told is not None:
                self.stop(self._told)
            try:
                if await term.serve():
                    log.info("manager %s leaves", ledger.tid)
                    return False
            finally:  # what it has left to write counts for as long as its lease
                patience.reschedule(now() + duration_ms(options.lease) / 1000)
            await asyncio.gather(*(child.kill() for child in launcher.children), return_exceptions=True)
            told = "does not serve again" if term.is_leaving else "registers anew"
            log.warning("manager %s has lost its lease; its processes are ended, and it %s", ledger.tid, told)
            return not term.is_leaving

    def _env(self) -> dict[str, str]:
        """What tasks get, so that they can submit tasks themselves. Not where only what is allowed may be run."""
        return {"HOLDFAST_STORE": _absolute(self._store.url), "HOLDFAST_SPACE": self._name}


def _absolute(url: str) -> str:
    from holdfast.engines.registry import file_of, split_url

    file = file_of(url)
    return url if file is None else f"{split_url(url)[0]}:{file}"


def _allowed(options: ManagerOptions) -> Allowed | None:
    if not options.is_restricted:
        return None
    return Allowed(
        commands=frozenset(options.allow_commands),
        modules=frozenset(options.allow_modules),
        env=frozenset(options.allow_env),
    )
