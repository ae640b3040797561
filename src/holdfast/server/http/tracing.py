"""What the logs of a request are bound to: its request_id, and the traceparent and correlation_id where the client sent them.

The request_id is its X-Request-Id, of each time it is sent. What it wrote is in the audit under another, its Idempotency-Key or
one made for the commit; the log has that as `audit_request_id`, so that one finds the other.

`current` follows the request through everything it awaits, and so does what structlog adds to each record: whatever is logged
while a request is under way says whose it is, also from deep inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

import structlog

from holdfast.ids import new_id

_REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")
_TRACE: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_NONE: Final[Mapping[str, str]] = MappingProxyType({})

current: ContextVar[Mapping[str, str]] = ContextVar("holdfast.http", default=_NONE)


def bound_to(headers: Mapping[str, str]) -> dict[str, str]:
    """What a request's headers say; a request id that is missing or strange is replaced."""
    asked, trace = headers.get("x-request-id", ""), headers.get("traceparent", "")
    bound = {"request_id": asked if _REQUEST_ID.fullmatch(asked) else new_id()}
    return {**bound, "traceparent": trace} if _TRACE.fullmatch(trace) else bound


@contextmanager
def bound_request(headers: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """While a request is under way: what its headers say, to which `bind` adds."""
    fields = bound_to(headers)
    before = current.set({})
    bind(**fields)
    try:
        yield fields
    finally:
        structlog.contextvars.unbind_contextvars(*current.get())
        current.reset(before)


def name_commit(request_id: str) -> None:
    """From here on, this request's logs also say under which request id the audit has what it wrote last."""
    bind(audit_request_id=request_id)


def bind(**names: str) -> None:
    """From here on, this request's logs also have these."""
    current.set({**current.get(), **names})
    structlog.contextvars.bind_contextvars(**names)
