"""What the two ports of a keeper need of it: who is asking, and what he may see."""

from __future__ import annotations

from typing import Protocol

from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.errors import Error
from holdfast.identity import Identity
from holdfast.middleware.denials import Denial
from holdfast.server.refusals import PortName
from holdfast.space import Space


class Served(Protocol):
    """A keeper as its ports know it."""

    clock: Clock

    def authenticate(self, token: str) -> Identity:
        """Whom a token speaks for; AuthenticationFailed, with one message for every cause."""
        ...

    def is_valid(self, identity: Identity) -> bool:
        """Whether the token behind it is still good: it may have ended or been revoked meanwhile."""
        ...

    def engine_for(self, identity: Identity) -> Engine:
        """The store as this identity may use it: rules, quotas and audit included."""
        ...

    def space_for(self, identity: Identity, name: str) -> Space:
        """A space as this identity may use it. Whoever asks keeps no lease alive: what it holds ends with its ttl."""
        ...

    def denied(self, denial: Denial, seconds: float) -> None:
        """A request was refused, and the rules have not told of it: audit and metrics hear of it from here."""
        ...

    def turned_away(self, port: PortName, error: Error, peer: str) -> None:
        """Somebody did not get in."""
        ...

    def require(self, identity: Identity, space: str, verb: str) -> None:
        """AccessDenied where its rules do not allow this verb: of what is asked for by its name, whatever is in it."""
        ...

    def look_at_rate(self, identity: Identity) -> None:
        """RateLimitExceeded if nothing it asks for would pass now; takes nothing."""
        ...

    def charge(self, identity: Identity) -> None:
        """A request came to nothing before the rules saw it: it costs 1."""
        ...

    def require_watch(self, identity: Identity, space: str, prefixes: tuple[str, ...]) -> None:
        """AccessDenied where its rules do not allow this watch, before anything is told of the space."""
        ...

    def ready(self) -> str | None:
        """None when requests are taken; otherwise why not."""
        ...
