"""The watches of one connection: the feed, passed on as far as the client has granted.

A watch is a task that reads the feed and sends what it finds. It costs no memory while its client grants nothing: it stands
still at its place in the feed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, cast

from holdfast.engine import ChangeSet, Engine, cursor_at
from holdfast.errors import Compacted, Error, InvalidInput, Unavailable
from holdfast.server.requests import unexpected
from holdfast.wire import Cancel, Changes, Done, Grant, Watch, Watching, failed, frame

if TYPE_CHECKING:
    from holdfast.server.connection import Connection

GRANTED_BYTES_MAX: Final = 8 * 1024 * 1024

log = logging.getLogger("holdfast.server")


class _State:
    """One watch: how much may still be sent."""

    __slots__ = ("granted", "more", "task")

    def __init__(self, granted: int) -> None:
        self.granted = min(granted, GRANTED_BYTES_MAX)
        self.more = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Watches:
    """All watches of a connection, by the id of their request.

    It does not know the connection, which is named in each call: so one that ends is freed at once, and a flood of them takes no room.
    """

    def __init__(self) -> None:
        self._states: dict[int, _State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def begin(self, connection: Connection, message: Watch) -> None:
        port = connection.port
        if message.id in self._states:
            raise InvalidInput(f"request {message.id} is under way already")
        if port.closing is not None:
            return  # its client asks the next keeper
        if len(self._states) >= port.limits.watches:
            reason = f"a connection has at most {port.limits.watches:,} watches"
            connection.send(failed(message.id, Unavailable(reason)))
            return
        state = self._states[message.id] = _State(message.granted)
        if message.cursor is None:
            connection.hold()  # it begins before whatever this connection sends after it
        state.task = asyncio.get_running_loop().create_task(self._follow(connection, message, state))

    def grant(self, message: Grant) -> None:
        state = self._states.get(message.id)
        if state is not None:
            state.granted = min(state.granted + message.more, GRANTED_BYTES_MAX)
            state.more.set()

    def cancel(self, message: Cancel) -> None:
        state = self._states.pop(message.id, None)
        if state is not None and state.task is not None:
            state.task.cancel()

    def end(self) -> None:
        for state in self._states.values():
            if state.task is not None:
                state.task.cancel()
        self._states.clear()

    async def _follow(self, connection: Connection, message: Watch, state: _State) -> None:
        id, outcome = message.id, "ok"
        try:
            await _tell(connection, message, state)
            connection.send(Done(id))
        except Error as exc:
            outcome = exc.code
            connection.send(failed(id, exc))
        except Exception as exc:
            outcome = "error"
            log.exception("watch failed unexpectedly")
            connection.send(failed(id, unexpected("watch", exc)))
        finally:
            if self._states.get(id) is state:
                del self._states[id]
            state.task = None
            connection.port.observe("watch", outcome, 0.0)


async def _tell(connection: Connection, message: Watch, state: _State) -> None:
    cursor, guessed, identity = message.cursor, False, connection.identity
    try:
        if identity is not None:
            connection.port.keeper.require_watch(identity, message.space, tuple(message.prefixes))
        found = await connection.engine.spaces(message.space) if cursor is None else []
    finally:
        if message.cursor is None:
            connection.let_go()
    if cursor is None:
        guessed = not found  # a space that is not there begins at 0, unless there was one of that name
        cursor = cursor_at(found[0].revision if found else 0)
    connection.send(Watching(message.id, cursor))
    try:
        await _pass_on(connection, message, state, cursor)
    except Compacted:
        if not guessed:
            raise
        await _pass_on(connection, message, state, None)


async def _pass_on(connection: Connection, message: Watch, state: _State, cursor: str | None) -> None:
    while True:
        engine, passed_over = connection.engine, None
        async with aclosing(_commits(engine, message, cursor)) as commits:
            async for commit in commits:
                while state.granted <= 0:
                    state.more.clear()
                    await state.more.wait()
                await connection.writable()
                if connection.engine is not engine:
                    passed_over = commit  # the new one shows it, and notes that, if it has to
                    break
                data = frame(Changes(message.id, [commit]))
                state.granted -= len(data)
                connection.write(data)
        if passed_over is None:
            return
        cursor = cursor_at(passed_over.version - 1)


def _commits(engine: Engine, message: Watch, cursor: str | None) -> AsyncGenerator[ChangeSet, None]:
    commits = engine.watch(message.space, *message.prefixes, cursor=cursor, live=message.live)
    return cast("AsyncGenerator[ChangeSet, None]", commits)
