"""What goes wrong, as HTTP tells it: `{"error", "message"}` and what helps, under the status of `holdfast.errors`."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from holdfast.errors import (
    AuthenticationFailed,
    Conflict,
    Error,
    InvalidInput,
    OutcomeUnknown,
    RateLimitExceeded,
    SchemaViolation,
    Unavailable,
)

UNEXPECTED: Final = "something unexpected happened; it was logged under this request's X-Request-Id"


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A refusal. `error` is stable and meant for programs, `message` says what happened and what to do."""

    error: str
    message: str
    key: str | None = None
    """Whose condition did not hold."""
    condition: str | None = None
    version: int | None = None
    """Of that key, as it is now."""
    retry_after: float | None = None
    """Seconds."""
    request_id: str | None = None
    """Repeat the request with this Idempotency-Key to learn its outcome."""
    path: str | None = None
    """Where in the value its type's schema is violated, as a JSON pointer."""


class EtagMismatch(Conflict):
    """If-Match or If-None-Match did not hold."""

    http_status = 412


class BodyTooLarge(InvalidInput):
    """The body is over its limit."""

    http_status = 413


class BodyTooSlow(InvalidInput):
    """The body did not arrive in time."""

    http_status = 408


class NoRoom(Unavailable):
    """There is no room for the connection, which ends with this answer."""


class NotJSON(InvalidInput):
    """The body is declared as something else."""

    http_status = 415


class MethodNotAllowed(InvalidInput):
    """The path exists, the method does not."""

    http_status = 405

    def __init__(self, message: str, allowed: list[str]) -> None:
        super().__init__(message)
        self.allowed = allowed


def failure_of(error: Exception) -> Failure:
    """What an error says to whoever asked. Of an unexpected one: nothing."""
    if not isinstance(error, Error):
        return Failure(Error.code, UNEXPECTED)
    message = str(error)
    if isinstance(error, Conflict):
        key = None if error.key is None else error.key.removeprefix("records/")
        version = None if error.actual is None else error.actual.version
        return Failure(error.code, message, key, error.condition, version)
    if isinstance(error, RateLimitExceeded):
        return Failure(error.code, message, retry_after=error.retry_after)
    if isinstance(error, OutcomeUnknown):
        return Failure(error.code, message, request_id=error.request_id)
    if isinstance(error, SchemaViolation):
        return Failure(error.code, message, path=error.path)
    return Failure(error.code, message)


def status_of(error: Exception) -> int:
    return error.http_status if isinstance(error, Error) else Error.http_status


def headers_of(error: Exception) -> dict[str, str]:
    """The headers a status brings with it."""
    if isinstance(error, AuthenticationFailed):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, RateLimitExceeded):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    if isinstance(error, NoRoom):
        return {"Retry-After": "1", "Connection": "close"}
    if isinstance(error, Unavailable) and error.http_status == Unavailable.http_status:
        return {"Retry-After": "1"}
    if isinstance(error, MethodNotAllowed):
        return {"Allow": ", ".join(error.allowed)}
    return {}
