"""The feed over HTTP: Server-Sent Events without end, or one page of JSON.

    id: r17
    data: {"version": 17, "at": …, "actor": "market", "changes": […]}

An event is one commit, so what happened together arrives together. Its id is the cursor behind it: a client that connects
again sends it as Last-Event-ID, as browsers do by themselves, and misses nothing. While nothing happens there is a comment
every 15 s. A stream ends with `event: error` when the cursor is gone (compacted), the token is no longer good
(authentication_failed), the store fails, or the server stops (unavailable). Commits are pulled, so a client that
reads slowly costs nothing; one that reads nothing is cut off by the connection's limit (`protocol.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.errors import AccessDenied, AuthenticationFailed, Compacted, Error, RateLimitExceeded, Unavailable
from holdfast.layers.watching import RecordChange, RecordChanges
from holdfast.server.http.endpoint import Call, endpoint, gone
from holdfast.server.http.failures import failure_of
from holdfast.server.http.limits import PAGE_BYTES_MAX
from holdfast.server.http.shapes import InSpace, PageSize, Prefix, Wire, shown
from holdfast.space import Space

EVENTS: Final = "text/event-stream"
JSON: Final = "application/json"
Cursor = Annotated[
    str,
    Meta(
        pattern="^r[0-9]{1,18}$",
        description="A cursor such as r17: go on behind this commit; without one, from now on.",
    ),
]


class FeedQuery(Wire, frozen=True):
    """Which commits."""

    prefix: Prefix = ""
    cursor: Cursor | None = None
    limit: PageSize = 100


class FeedHeaders(Wire, frozen=True, rename={"last_event_id": "Last-Event-ID", "accept": "Accept"}):
    """Where a stream was interrupted, and what is wanted: application/json is one page, anything else the stream."""

    last_event_id: Cursor | None = None
    accept: str = EVENTS


class Changed(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happened to one record. `large` means that the value must be read by itself, `error` why it cannot be shown."""

    op: str
    key: str
    value: Any
    large: bool
    owner: str
    expires_at: datetime | None
    type: str | None
    state: str | None
    error: str | None = None


class Commit(msgspec.Struct, frozen=True):
    """One commit."""

    version: int
    at: datetime
    actor: str
    request_id: str | None
    cursor: str
    changes: list[Changed]


class FeedPage(msgspec.Struct, frozen=True):
    """Commits in order, and the cursor behind what was looked at; `more` says whether to ask again at once."""

    commits: list[Commit]
    cursor: str
    more: bool


@endpoint(
    "GET",
    "/v1/spaces/{space}/feed",
    errors=(AccessDenied, Compacted, RateLimitExceeded),
    media=(JSON, EVENTS),
    verb="Watch",
    raw=True,
)
async def read_feed(call: Call, path: InSpace, query: FeedQuery, headers: FeedHeaders) -> FeedPage:
    """Every commit that changes records: a stream of events, or with Accept: application/json one page."""
    space, cursor = call.space(path.space), headers.last_event_id or query.cursor
    if JSON in headers.accept and EVENTS not in headers.accept:
        if cursor is None:
            await _check(space, query.prefix, await space.cursor())
        page = await _page(space, query, cursor)
        return Response(msgspec.json.encode(page), media_type=JSON)  # type: ignore[return-value]
    token = call.identity.token_id or call.identity.agent
    if call.port.feeds[token] >= call.port.limits.feeds_per_token_max:
        raise RateLimitExceeded(
            f"this token has {call.port.limits.feeds_per_token_max} feeds open; close one", retry_after=5
        )
    start = cursor or await space.cursor()
    await _check(space, query.prefix, start)
    return _Stream(call, space.watch(query.prefix, cursor=start), start, token)  # type: ignore[return-value]


async def _check(space: Space, prefix: str, cursor: str) -> None:
    """Compacted or AccessDenied now, as a status, rather than as the first event of a stream that its client opens again and again."""
    async with aclosing(space.watch(prefix, cursor=cursor, live=False)) as commits:  # type: ignore[type-var]
        await anext(commits, None)


async def _page(space: Space, query: FeedQuery, cursor: str | None) -> FeedPage:
    upto = await space.cursor()
    if cursor is None:
        return FeedPage([], upto, False)
    commits: list[Commit] = []
    size = 0
    async for changes in space.watch(query.prefix, cursor=cursor, live=False):
        if len(commits) == query.limit or size >= PAGE_BYTES_MAX:
            return FeedPage(commits, commits[-1].cursor, True)
        commits.append(_commit(changes))
        size += len(msgspec.json.encode(commits[-1]))
    last = commits[-1].cursor if commits else cursor
    return FeedPage(commits, max((last, upto), key=_number), False)


def _number(cursor: str) -> int:
    return int(cursor[1:])


def _commit(commit: RecordChanges) -> Commit:
    changes = [_changed(each) for each in commit]
    return Commit(commit.version, commit.at, commit.actor, commit.request_id, commit.cursor, changes)


def _changed(each: RecordChange) -> Changed:
    value, error = shown(each.encoded) if each.encoded else (None, None)
    return Changed(each.op, each.key, value, each.large, each.owner, each.expires_at, each.type, each.state, error)


class _Stream(Response):
    """An answer that goes on."""

    def __init__(self, call: Call, commits: AsyncIterator[RecordChanges], cursor: str, token: str) -> None:
        self._call = call
        self._commits = commits
        self._cursor = cursor
        self._token = token
        self.background = None
        self.status_code = 200
        self.init_headers({"Content-Type": f"{EVENTS}; charset=utf-8", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        feeds, token = self._call.port.feeds, self._token
        feeds[token] += 1
        left = asyncio.ensure_future(gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _write(send, f"id: {self._cursor}\n\n")
            try:
                await self._tell(send, left)
            except Error as error:
                data = msgspec.json.encode(failure_of(error)).decode()
                await _write(send, f"event: error\ndata: {data}\n\n")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            left.cancel()
            feeds[token] -= 1
            if not feeds[token]:
                del feeds[token]

    async def _tell(self, send: Send, left: asyncio.Future[None]) -> None:
        """Until the client goes, or an error ends it."""
        port = self._call.port
        keeper, limits, clock = port.keeper, port.limits, port.keeper.clock
        stopped = asyncio.ensure_future(port.stopping.wait())
        following = asyncio.ensure_future(anext(self._commits))
        look = asyncio.ensure_future(clock.sleep_until(clock.now_ms() + limits.look_ms))
        beat_at = clock.now_ms() + limits.heartbeat_ms
        try:
            while not left.done():
                await asyncio.wait((left, stopped, following, look), return_when=asyncio.FIRST_COMPLETED)
                if stopped.done():
                    raise Unavailable("the server is stopping; connect again with Last-Event-ID when it is back")
                if not keeper.is_valid(self._call.identity):
                    raise AuthenticationFailed("the token is no longer valid")
                if following.done():
                    commit = following.result()
                    following = asyncio.ensure_future(anext(self._commits))
                    data = msgspec.json.encode(_commit(commit)).decode()
                    await _write(send, f"id: {commit.cursor}\ndata: {data}\n\n")
                    beat_at = clock.now_ms() + limits.heartbeat_ms
                if look.done():
                    if clock.now_ms() >= beat_at:
                        await _write(send, ":\n\n")
                        beat_at = clock.now_ms() + limits.heartbeat_ms
                    look = asyncio.ensure_future(clock.sleep_until(clock.now_ms() + limits.look_ms))
        finally:
            waits = (stopped, following, look)
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


async def _write(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


ENDPOINTS = (read_feed,)
