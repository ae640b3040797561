"""The part of a worker that serves queues of steps: which messages it does, and when it stops doing one.

A message is dropped when its step does not wait for it: it was done, tried again under another message, or its execution has ended. It is
offered to others, after a while, when this worker does not know the workflow, or has older code. What is under way is cancelled when
its execution ends, of which the worker's watch of the feed tells; when the lease is lost; and when the worker stops, which gives the
message back at once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, Protocol

from holdfast.codec import decode
from holdfast.engine import Entry
from holdfast.errors import Error, LeaseLost
from holdfast.layers.messages import Message
from holdfast.layers.workflows.definitions import Definition, is_older
from holdfast.layers.workflows.entries import (
    StepRecord,
    execution_key,
    execution_of,
    meta_key,
    meta_of,
    state_key,
    state_version,
    steps_prefix,
)
from holdfast.layers.workflows.mail import waking
from holdfast.layers.workflows.running import Host
from holdfast.layers.workflows.serving import Guest, Outdated, Unwanted, is_aside, is_wanted
from holdfast.layers.workflows.shape import is_earlier

RETRY_S: Final = 0.2
UNKNOWN_S: Final = 5.0
"""After what time a step that this worker cannot do is offered again, to whoever can."""
DEATHS_MAX: Final = 20

log = logging.getLogger("holdfast.workflows")


class Knowing(Host, Protocol):
    """A worker."""

    workflows: dict[str, Definition]


class Service:
    """Does steps for executions that may be anywhere. A part of a worker."""

    def __init__(self, host: Knowing) -> None:
        self._host = host
        self._doing: dict[Guest, asyncio.Task[Any]] = {}
        self._stopping = False

    async def work(self, message: Message) -> None:
        """Do what a message asks for, as far as it is to be done here."""
        try:
            guest = await self._guest(message)
            if guest is None:
                return
            if self._stopping:
                await message.release()
            elif message.attempts >= DEATHS_MAX:
                await guest.die(message.attempts)
            else:
                await self._serve(guest)
        except Unwanted:
            await self._drop(message)
        except Outdated:
            await message.give_back(delay=RETRY_S)
        except LeaseLost as exc:
            log.info("a step is another worker's: %s", exc)
        except Error as exc:
            log.warning("message %s of queue %s is given back: %s", message.id, message.queue, exc)
            await message.give_back(delay=RETRY_S)

    async def _guest(self, message: Message) -> Guest | None:
        """What is to be done; None when it was offered to others. Unwanted when it is nothing."""
        body, scope = message.body, self._host.scope
        id, path = (body.get("execution"), body.get("step")) if isinstance(body, dict) else (None, None)
        if not isinstance(id, str) or not isinstance(path, str) or not id or not path:
            raise Unwanted
        keys = [execution_key(id), meta_key(id), steps_prefix(id) + path, state_key(id)]
        entry, described, stored, typed = await scope.engine.get(scope.space, keys)
        if entry is None or described is None or stored is None:
            raise Unwanted
        meta, record = meta_of(described), decode(stored.value, StepRecord)
        if not is_wanted(execution_of(entry), record, message) or record.away is None:
            raise Unwanted
        definition = self._host.workflows.get(meta.name)
        step = record.away.step
        if (
            definition is None
            or is_older(definition.version, meta.version)
            or (step and all(each.name != step for each in definition.steps))
        ):
            await message.release(delay=UNKNOWN_S)
            return None
        mine = "" if definition.shape is None else definition.shape.version
        theirs = state_version(None if typed is None else decode(typed.value, StepRecord))
        if mine != theirs:  # one of both has older code
            if is_earlier(theirs, mine):
                await self._wake(entry)
            await message.release(delay=UNKNOWN_S)
            return None
        return Guest(self._host, definition, message, meta, path, record)

    async def _wake(self, entry: Entry) -> None:
        """Let a worker with code like this have the execution: it migrates its state."""
        execution = execution_of(entry)
        if is_aside(execution):
            operations, conditions = waking(self._host.queue_of(execution.name), execution)
            await self._host.scope.commit(tuple(operations), tuple(conditions))

    async def _serve(self, guest: Guest) -> None:
        serving = self._doing[guest] = asyncio.get_running_loop().create_task(guest.serve())
        try:
            await asyncio.wait([serving])
        finally:
            del self._doing[guest]
            if not serving.done():  # the process is ending
                serving.cancel()
        if not serving.cancelled():
            serving.result()
        elif guest.message.lost or self._stopping:
            await guest.message.give_back()
        else:
            await self._drop(guest.message)

    async def _drop(self, message: Message) -> None:
        try:
            await message.ack()
        except Error as exc:
            log.info("message %s is dropped by whoever gets it next: %s", message.id, exc)
            if not message.settled:
                message.forsake()

    # --- what ends it ---

    async def mailed(self, id: str) -> None:
        """Something has happened to an execution: see whether its steps are still wanted."""
        for guest, serving in list(self._doing.items()):
            if guest.meta.id == id and not await guest.wanted():
                serving.cancel()

    def doing(self, id: str | None = None) -> bool:
        """Whether a step of this execution, or any, is being done."""
        return any(id is None or guest.meta.id == id for guest in self._doing)

    def ids(self) -> set[str]:
        """The executions whose steps are being done."""
        return {guest.meta.id for guest in self._doing}

    def lose(self) -> None:
        """A lease has ended: cancel what was done under it."""
        for guest, serving in self._doing.items():
            if guest.message.lost:
                serving.cancel()

    def stop(self) -> None:
        """Cancel everything, and give it back."""
        self._stopping = True
        for serving in self._doing.values():
            serving.cancel()
