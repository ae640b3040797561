"""One client's connection to the binary port: who it is, what it asks, what it is answered.

Requests are begun in the order they came and answered when they are done. `in_flight` counts those that were taken and are
not answered; a connection that waits to be welcome counts as one. Reading stops (`_pause`) while too much is in flight, while
the client does not take its answers, and while something holds it (`hold`): a welcome, a watch that does not know yet where it
stands, a rate that was exceeded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast

from holdfast.clock import elapsed_s
from holdfast.engine import Engine, Receipt
from holdfast.errors import AuthenticationFailed, Error, InvalidInput, RateLimitExceeded, Unavailable
from holdfast.identity import Identity
from holdfast.ids import is_generated
from holdfast.offers import Submits
from holdfast.server.requests import (
    UNREPEATABLE,
    WORK,
    Answer,
    Answers,
    Unreadable,
    Work,
    is_set,
    packed,
    recognisable,
    understood,
    unexpected,
)
from holdfast.server.sockets import peer_of
from holdfast.server.watches import Watches
from holdfast.wire import (
    HELLO_BYTES_MAX,
    PROTOCOL,
    Cancel,
    Commit,
    Committed,
    Entries,
    Frames,
    Get,
    Grant,
    Hello,
    Message,
    Receipts,
    Request,
    Scan,
    Watch,
    Welcome,
    failed,
    frame,
)

if TYPE_CHECKING:
    from holdfast.server.binary import BinaryPort

HELLO_S: Final = 10.0
"""How long a connection may take to say who it is."""
TURN_FRAMES: Final = 64
"""How many requests are started of one connection before the others have a turn."""
PENALTY_S_MAX: Final = 0.1
"""How long nothing more is read of a connection that was over its rate; less if there is less to wait."""
STUCK_S: Final = 30.0
"""How long a client may take next to nothing of what is ready for it, or of a connection's last words."""
UNSENT_BYTES_MAX: Final = 256 * 1024
"""Answers collected for one write; more are written at once."""
LARGE_READS_MAX: Final = 4
"""Scans, and reads of many keys, of one connection under way at once."""
CLIENT_ID_MAX: Final = 64

_NOTHING_TOLD: Final = [None]
"""The results of a Put."""

log = logging.getLogger("holdfast.server")


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, port: BinaryPort) -> None:
        self.port = port
        self._loop = asyncio.get_running_loop()
        self._frames = Frames(HELLO_BYTES_MAX, partial(port.unfinished.wait_for, self))
        self._unfinished: tuple[list[bytes], float] = ([], 0.0)
        """The frame that was not complete when it was last looked at, and since when."""
        self._transport: asyncio.Transport
        self._requests: deque[Request | Unreadable] = deque()
        """What has come and was not begun."""
        self._began = 0.0
        """When the requests that are being read began (`elapsed_s`: the loop's own time may be one of whole milliseconds)."""
        self._out: list[bytes] = []
        self._unsent = 0
        self._together = False
        self._done: list[int] = []
        """The requests of commits that were done in this step of the loop; they are answered together."""
        self._receipts: list[Receipt] = []
        self._begun: dict[float, int] = {}
        """When they began, and how many of them at once."""
        self._ended = False
        """Nothing more can be written."""
        self.identity: Identity | None = None
        self._held = 0
        """Why nothing more is read, besides a full pipe: a welcome, a watch that does not know where it stands, its rate."""
        self.engine: Engine
        self._at_once: Submits | None = None
        self._client: tuple[str, str] | None = None
        self._heard_at = self._began_at = self._loop.time()
        self._stuck_at: float | None = None
        """Since when nothing was taken of what is ready, or the connection has its last words."""
        self._written = self._taken = 0
        """How many bytes, of all that were ever sent; and how many of them had been taken then."""
        self._closed = False
        self._paused = False
        self._slowed = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.watches = Watches()
        self.in_flight = 0
        self._behind = 0
        """Commits that are tasks: what comes after them must not overtake them."""
        self._large_reads = asyncio.Semaphore(LARGE_READS_MAX)
        self._settled: asyncio.Event | None = None

    # --- the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, port = cast(asyncio.Transport, transport), self.port
        if port.closing is not None:
            self.turn_away(Unavailable(port.closing))
        else:
            port.connections.add(self)
            port.admission.come(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._forget_input()
        self.port.gone(self)
        if self._client is not None and self.port.clients.get(self._client) is self and not self.in_flight:
            del self.port.clients[self._client]
        self.watches.end()
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        self._heard_at = self._loop.time()
        self._frames.feed(data)
        self._read()

    def pause_writing(self) -> None:
        self._stuck_at = self._loop.time()
        self._taken = self._written - self._transport.get_write_buffer_size()
        self._writable.clear()
        self._pause()

    def resume_writing(self) -> None:
        if not self._closed:  # otherwise it still has to close
            self._stuck_at = None
        self._writable.set()
        self._resume()

    async def writable(self) -> None:
        """Return when the client has taken what was sent, or has gone."""
        while not self._writable.is_set() and not self._closed:
            await self._writable.wait()

    def _pause(self) -> None:
        if not self._paused and not self._closed:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._paused and not self._closed and self._writable.is_set() and not self._held:
            self._paused = False
            self._read()
            if not self._paused and not self._closed:
                self._transport.resume_reading()

    def hold(self) -> None:
        self._held += 1
        self._pause()

    def let_go(self) -> None:
        self._held -= 1
        self._resume()

    def _slow_down(self, retry_after: float) -> None:
        """It is over its rate: whatever else it has sent can wait."""
        if not self._slowed:
            self._slowed = True
            self.hold()
            self._loop.call_later(min(retry_after, PENALTY_S_MAX), self._go_on)

    def _go_on(self) -> None:
        self._slowed = False
        self.let_go()

    def _read(self) -> None:
        """Start every request that has come, up to what may be in flight."""
        limit, left, singly, requests = self.port.limits.in_flight, TURN_FRAMES, 0, self._requests
        self._began = elapsed_s()
        try:
            while not self._paused and not self._closed:
                if self.in_flight >= limit:
                    self._pause()
                    return
                if not left:
                    self.hold()
                    self._loop.call_soon(self.let_go)
                    return
                if not requests:
                    requests.extend(understood(self._frames.take(1 if self.identity is None else left)))
                    if not requests:
                        return
                if singly <= 0 and len(requests) > 1 and self._at_once is not None and type(requests[0]) is Commit:
                    together, tried = self._commit_all(self._at_once, min(left, limit - self.in_flight))
                    if together:
                        left -= together
                        continue
                    singly = tried
                left -= 1
                singly -= 1
                message = requests.popleft()
                if type(message) is Commit and self._at_once is not None:  # what is sent most
                    self._commit(self._at_once, message)
                elif isinstance(message, Unreadable):
                    self._send_failure(None if self.identity is None else message.id, InvalidInput(message.reason))
                elif self.identity is None:
                    self._hello(message)
                else:
                    self._request(message)
        except Error as exc:
            self.turn_away(exc)
        except Exception:
            log.exception("a connection is closed: what it sent could not be dealt with")
            self.turn_away(Unavailable("the keeper failed inside; its log says more"))

    def _request(self, message: Request) -> None:
        if isinstance(message, Watch):
            self.watches.begin(self, message)
        elif isinstance(message, Grant):
            self.watches.grant(message)
        elif isinstance(message, Cancel):
            self.watches.cancel(message)
        elif isinstance(message, Hello):
            raise InvalidInput("Hello was said already")
        else:
            self._start(message)

    # --- sending ---

    def send(self, message: Message) -> None:
        self.write(frame(message))

    def write(self, data: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)
        self._unsent += len(data)
        if self._unsent > UNSENT_BYTES_MAX:
            self._flush()

    def committed(self, id: int, receipt: Receipt, began: float) -> None:
        """A commit was done: it is answered with all that were done in this step of the loop."""
        if len(receipt.results) != 1 or type(receipt.results[0]) is list:  # it may be large
            self.send(Committed(id, receipt))
            self.observed("commit", "ok", began)
            return
        if not self._done:
            self._loop.call_soon(self._flush)
        self._done.append(id)
        self._receipts.append(receipt)
        self._begun[began] = self._begun.get(began, 0) + 1

    def all_committed(self, ids: list[int], outcomes: list[Receipt | BaseException], began: float) -> None:
        """Commits that went together were done, or refused."""
        if all([type(each) is Receipt and each.results == _NOTHING_TOLD for each in outcomes]):  # noqa: C419 - it is quicker
            if not self._done:
                self._loop.call_soon(self._flush)
            self._done += ids
            self._receipts += cast(list[Receipt], outcomes)
            self._begun[began] = self._begun.get(began, 0) + len(ids)
            return
        for id, outcome in zip(ids, outcomes, strict=True):
            if isinstance(outcome, Receipt):
                self.committed(id, outcome, began)
            else:
                Answer(self, id, began).set_exception(outcome)

    def _answer_commits(self) -> None:
        done, receipts, begun, now = self._done, self._receipts, self._begun, elapsed_s()
        self._done, self._receipts, self._begun = [], [], {}
        if self._together and len(done) > 1:
            self._out.append(frame(Receipts(done, receipts)))
        else:
            self._out += [frame(Committed(*each)) for each in zip(done, receipts, strict=True)]
        for began, count in begun.items():
            self.port.observe("commit", "ok", now - began, count)
        self._finished(len(done))

    def _flush(self) -> None:
        if self._done:
            self._answer_commits()
        if self._out and not self._ended and not self._transport.is_closing():
            data = b"".join(self._out) if len(self._out) > 1 else self._out[0]
            self._written += len(data)
            self._transport.write(data)
        self._out = []
        self._unsent = 0

    def _send_failure(self, id: int | None, error: Error) -> None:
        """Answer a request with an error; without an id, it is the connection's and its last answer."""
        if id is None:
            self.turn_away(error)
        else:
            self.send(failed(id, error))

    def turn_away(self, error: Error) -> None:
        """Say why, and end."""
        self.send(failed(0, error))
        if self.identity is None:
            self.port.turned_away(error, peer_of(self._transport))
            self.close()
        else:
            self.finish()  # it may be in the middle of a long request, and should hear why that is of no use

    def close(self) -> None:
        """Send what is ready, and end."""
        self._flush()
        self._closed = True
        self._stuck_at = self._stuck_at or self._loop.time()
        self._transport.close()

    def finish(self) -> None:
        """Send what is ready, say that nothing follows, and let the other side close.

        What it still sends is thrown away, but taken: closing with something unread makes the system forget what was sent.
        """
        self._flush()
        self._closed = True
        self._stuck_at = self._stuck_at or self._loop.time()
        self._forget_input()
        if self._transport.is_closing():
            return
        try:
            self._ended = True
            if self._transport.can_write_eof():
                self._transport.write_eof()
                self._transport.resume_reading()
            else:  # TLS
                self._transport.close()
        except (OSError, RuntimeError):  # it is gone, or reading is on
            log.debug("a connection ended while the keeper stopped")

    def _forget_input(self) -> None:
        """What was sent of a request that will not be read; it is freed, and the connection, which it knows, with it."""
        self._frames = Frames(0)
        self.port.unfinished.forget(self)

    def look(self, now: float) -> None:
        """Called about once a second."""
        limits, identity = self.port.limits, self.identity
        if self._stuck_at is not None and not self._closed:
            taken = self._written - self._transport.get_write_buffer_size()
            if taken - self._taken >= UNSENT_BYTES_MAX:
                self._stuck_at, self._taken = now, taken  # slowly, but it takes it
        if self._stuck_at is not None and now - self._stuck_at > STUCK_S:
            self._transport.abort()  # it takes nothing
        elif self._closed:
            return
        elif identity is None:
            if now - self._began_at > HELLO_S and not self._held:
                self.turn_away(AuthenticationFailed(f"no Hello within {HELLO_S:g} s"))
        elif not self.port.keeper.is_valid(identity):
            self.turn_away(AuthenticationFailed("the token has ended or was revoked"))
        elif now - self._heard_at > limits.idle_s and not self.in_flight:
            self.turn_away(Unavailable(f"nothing was heard for {limits.idle_s:g} s"))
        elif self._is_late(now):
            self.turn_away(
                Unavailable(
                    f"a request was not complete {limits.frame_s:g} s after it began; it was not done. Send less at once"
                )
            )

    def _is_late(self, now: float) -> bool:
        """Whether a request is still not complete, although there was time to send it. While nothing is read, no time passes."""
        parts, since = self._frames.parts, self._unfinished[1]
        if parts and parts is self._unfinished[0] and not self._paused:
            return now - since > self.port.limits.frame_s
        self._unfinished = (parts, now)
        return False

    # --- the beginning ---

    def _hello(self, message: Request) -> None:
        if not isinstance(message, Hello):
            raise AuthenticationFailed("the first message must be Hello with a token")
        if message.protocol != PROTOCOL:
            raise InvalidInput(f"this keeper speaks version {PROTOCOL} of the protocol, not {message.protocol}")
        if not 0 < len(message.client) <= CLIENT_ID_MAX:
            raise InvalidInput(f"a client's id has between 1 and {CLIENT_ID_MAX} characters")
        identity = self.port.keeper.authenticate(message.token)
        self._client, self._together = (identity.token_id, message.client), message.together
        before = self.port.clients.get(self._client)
        self.port.admission.enter(self, identity, before)
        self.port.clients[self._client] = self
        if before is None or before is self:
            self._welcome(identity)
            return
        self.hold()
        self.in_flight += 1  # until it is welcome, whoever comes after it waits for what it waits for
        self._spawn(self._welcome_after(before, identity))

    async def _welcome_after(self, before: Connection, identity: Identity) -> None:
        try:
            before.abandon()
            await before.settled()
            if not self._closed:
                self._welcome(identity)
        except Error as exc:
            self.turn_away(exc)
        finally:
            self.let_go()
            self._finished()

    def _welcome(self, identity: Identity) -> None:
        limits = self.port.limits
        self.identity = identity
        self.renew()
        self._frames.frame_bytes_max = limits.frame_bytes
        self.send(Welcome(identity, limits.in_flight, limits.frame_bytes))

    def renew(self) -> None:
        """Ask for its engine, maybe anew: requests that were begun end as they are, watches go on through the new one."""
        if self.identity is not None:
            self.engine = engine = self.port.keeper.engine_for(self.identity)
            self._at_once = engine if self.port.span is None and isinstance(engine, Submits) else None

    def abandon(self) -> None:
        """Take nothing more from this connection: its client has another one."""
        self._closed = True
        self._transport.abort()

    async def settled(self) -> None:
        """Return when everything that was taken from it is done."""
        if self.in_flight:
            if self._settled is None:
                self._settled = asyncio.Event()
            await self._settled.wait()

    # --- requests ---

    def _start(self, message: Any) -> None:
        """Do it, and answer."""
        if self.port.closing is not None:
            self._leave(message, self.port.closing)
            return
        self.in_flight += 1
        if type(message) is Commit:
            self._commit_aside(recognisable(message, self.port.sole_owner))
        elif type(message) is not Get or self._at_once is None or not self._read_at_once(self._at_once, message):
            self._spawn(self._run(message, self._began))

    def _commit(self, engine: Submits, message: Commit) -> None:
        """Without a task, where the engine can."""
        port, batch, began = self.port, message.batch, self._began
        if port.closing is not None:
            self._leave(message, port.closing)
            return
        if not batch.fresh or not port.sole_owner or not is_generated(batch.request_id or ""):
            message = recognisable(message, port.sole_owner)
            batch = message.batch
        self.in_flight += 1
        try:
            if self._behind or not engine.submit(message.space, batch, Answer(self, message.id, began)):
                self._commit_aside(message)
        except Error as exc:
            self._refuse(message.id, exc)
            self.observed("commit", exc.code, began)
        except Exception as exc:
            self._failed_inside("commit", message.id, exc)

    def _commit_all(self, engine: Submits, most: int) -> tuple[int, int]:
        """The next commits, at most so many, as one; how many went, and how many go one by one because they could not."""
        port, first, run = self.port, cast(Commit, self._requests[0]), []
        for message in islice(self._requests, most):
            if type(message) is not Commit or message.space != first.space:
                break
            batch = message.batch
            if not batch.fresh or not is_generated(batch.request_id or ""):
                break
            run.append(message)
        count = len(run)
        if count < 2 or not is_set(first.batch) or self._behind or port.closing is not None or not port.sole_owner:
            return 0, count
        replies = Answers(self, [message.id for message in run], self._began)
        if not engine.submit_all(first.space, [message.batch for message in run], replies):
            return 0, count
        self.in_flight += count
        for _ in run:
            self._requests.popleft()
        return count, count

    def _commit_aside(self, message: Commit) -> None:
        self._behind += 1
        self._spawn(self._run(message, self._began))

    def _leave(self, message: Any, reason: str) -> None:
        """The keeper is going: its client says this again to the next one, unless that could do it twice."""
        if type(message) in UNREPEATABLE or (type(message) is Commit and message.batch.request_id is None):
            self.send(failed(message.id, Unavailable(reason)))

    def _read_at_once(self, engine: Submits, message: Get) -> bool:
        """Without a task, where the engine can: most gets."""
        if not self._writable.is_set():
            return False
        try:
            entries = engine.read(message.space, message.keys)
            if entries is None:
                return False
            self.write(packed(Entries(message.id, entries)))
            self.observed("get", "ok", self._began)
        except Error as exc:
            self._refuse(message.id, exc)
            self.observed("get", exc.code, self._began)
        except Exception as exc:
            self._failed_inside("get", message.id, exc)
        return True

    def _failed_inside(self, op: str, id: int, exc: Exception) -> None:
        log.error("%s failed unexpectedly", op, exc_info=exc)
        self.send(failed(id, unexpected(op, exc)))
        self.observed(op, "error", self._began)

    def _refuse(self, id: int, error: Error) -> None:
        self.send(failed(id, error))
        if isinstance(error, RateLimitExceeded):
            self._slow_down(error.retry_after)

    def observed(self, op: str, outcome: str, began: float) -> None:
        """It was answered, or has to be forgotten."""
        self.port.observe(op, outcome, elapsed_s() - began)
        self._finished()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, message: Any, began: float) -> None:
        op, work = WORK[type(message)]
        outcome = "ok"
        try:
            await self.writable()
            span = self.port.span
            if span is None:
                await self._do(message, work)
            else:
                with span(op, getattr(message, "space", "")):
                    await self._do(message, work)
        except Error as exc:
            outcome = exc.code
            self._refuse(message.id, exc)
        except Exception as exc:
            outcome = "error"
            log.exception("%s failed unexpectedly", op)
            self.send(failed(message.id, unexpected(op, exc)))
        finally:
            self._behind -= type(message) is Commit
            self.observed(op, outcome, began)

    async def _do(self, message: Any, work: Work) -> None:
        if type(message) is Scan or (type(message) is Get and len(message.keys) > 1):
            async with self._large_reads:
                self.write(packed(await work(self.engine, message)))
                await self.writable()
        else:
            answer = await work(self.engine, message)
            await self.writable()  # others may have answered meanwhile, and nobody has taken it
            self.write(packed(answer))

    def _finished(self, count: int = 1) -> None:
        self.in_flight -= count
        if not self.in_flight:
            if self._settled is not None:
                self._settled.set()
            if self._closed and self._client is not None and self.port.clients.get(self._client) is self:
                del self.port.clients[self._client]
        if self._paused and self.in_flight <= self.port.limits.in_flight // 2:
            self._loop.call_soon(self._resume)  # not here: whoever answers has others to answer
