"""What can be asked for: a method, a path, a function, and the types of what goes in and comes out.

The function's own signature is the description. It takes the call, and by these names what it needs:

    path      a struct with the path's parameters        query     a struct with the query's
    headers   a struct with the headers it reads         body      the body's type

and returns its answer's type, or `Answer[type]` to add a status or headers. `app.py` reads a request by these types, and
`openapi.py` writes the document from them, so that neither can say something else than the other.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, get_args, get_origin, get_type_hints

from starlette.types import Receive

from holdfast.clock import elapsed_s
from holdfast.errors import AccessDenied, AuthenticationFailed, Error, InvalidInput
from holdfast.identity import EVERY_SPACE, Identity
from holdfast.middleware.denials import Denial
from holdfast.server.http.failures import Failure
from holdfast.server.http.tracing import bind
from holdfast.server.refusals import DENIALS, told
from holdfast.space import Space, check_space

if TYPE_CHECKING:
    from holdfast.server.http.port import Port

T = TypeVar("T")
NOT_MODIFIED: Final = 304
"""The status of an answer that is its headers alone."""

VERBS: Final = {"GET": "Get", "DELETE": "Delete"}
"""What a method is where an endpoint does not say more; others write."""


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What is sent back, with another status than 200 or with headers of its own."""

    body: T
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


async def gone(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True)
class Asked:
    """What a request is about, in the words of rules and audit, and when it began (`clock.elapsed_s`)."""

    verb: str
    space: str
    key: str
    began: float


@dataclass(frozen=True)
class Call:
    """One request, as a function sees it: who asks, for what, and of which port."""

    port: Port
    identity: Identity
    receive: Receive
    asked: Asked

    def refused(self, error: Error, asked: Asked | None = None) -> None:
        """Tell of a refusal that the rules have not told of: it came before them, or after."""
        if isinstance(error, DENIALS) and not told.get():
            of = asked or self.asked
            space = of.space or self.identity.space
            denial = Denial(self.identity, space, of.verb, of.key, error.code, str(error))
            self.port.keeper.denied(denial, elapsed_s() - of.began)

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Something that may wait for long: as long as the server runs, and the client is there and welcome."""
        return await self.port.unless_stopped(work, self._left())

    async def _left(self) -> None:
        """Return when the client has gone; AuthenticationFailed when its token is no longer good."""
        keeper, left = self.port.keeper, asyncio.ensure_future(gone(self.receive))
        try:
            while not left.done():
                look_at = keeper.clock.now_ms() + self.port.limits.look_ms
                look = asyncio.ensure_future(keeper.clock.sleep_until(look_at))
                await asyncio.wait((left, look), return_when=asyncio.FIRST_COMPLETED)
                look.cancel()
                if not keeper.is_valid(self.identity):
                    raise AuthenticationFailed("the token is no longer valid; what it waited for was given up")
        finally:
            left.cancel()

    def space(self, name: str) -> Space:
        """A space as whoever asks may use it."""
        check_space(name)
        self.enter(name)
        bind(space=name)
        return self.port.keeper.space_for(self.identity, name)

    def require(self, space: str, verb: str) -> None:
        """AccessDenied where the rules of whoever asks do not allow this verb."""
        self.port.keeper.require(self.identity, space, verb)

    def enter(self, name: str) -> None:
        """AccessDenied when the token is for another space, whether or not this one exists."""
        if not self.identity.may_enter(name):
            # In the words of the rules: the name of another space is nothing for this one's audit.
            who = self.identity
            raise AccessDenied(f"the token of {who.agent!r} is for space {who.space!r} and no other")

    def require_admin(self, what: str) -> None:
        if self.identity.role != "admin":
            raise AccessDenied(f"only an administrator may {what}")

    def own_space(self, named: str | None) -> str:
        """The token's space; an administrator's is the one that was named."""
        if named is not None:
            return named
        if self.identity.space == EVERY_SPACE:
            raise InvalidInput("this token is for every space: name one with the header Holdfast-Space")
        return self.identity.space


Function = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    run: Function
    errors: tuple[type[Error], ...]
    statuses: dict[int, str]
    """Statuses of success and what they mean."""
    media: tuple[str, ...]
    """What a success is sent as."""
    failures: tuple[type, ...]
    """How a refusal may look."""
    verb: str
    """What it is, to those who are told that it was refused."""
    is_open: bool
    """Whether it needs no token."""
    raw: bool
    """Whether the function makes the response itself."""
    summary: str
    types: dict[str, Any]
    """Of path, query, headers, body and return, as far as there are any."""
    body_shown: Any


def endpoint(
    method: str,
    path: str,
    *,
    errors: tuple[type[Error], ...] = (),
    statuses: dict[int, str] | None = None,
    media: tuple[str, ...] = ("application/json",),
    failures: tuple[type, ...] = (Failure,),
    verb: str | None = None,
    is_open: bool = False,
    raw: bool = False,
    body_shown: Any = None,
) -> Callable[[Function], Endpoint]:
    """Describe a function. `body_shown` is a body's type for readers, where the function reads it itself."""

    def describe(run: Function) -> Endpoint:
        hints = get_type_hints(run, include_extras=True)
        hints.pop("call", None)
        if get_origin(hints.get("return")) is Answer:
            [hints["return"]] = get_args(hints["return"])
        summary = " ".join((inspect.getdoc(run) or "").split("\n\n")[0].split())
        found = statuses or {200: "done"}
        shown = hints.get("body") if body_shown is None else body_shown
        meant = verb or VERBS.get(method, "Set")
        return Endpoint(method, path, run, errors, found, media, failures, meant, is_open, raw, summary, hints, shown)

    return describe
