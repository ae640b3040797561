"""What the logs of a request are bound to: its request_id, and the traceparent and correlation_id where the client sent them.

`current` follows the request through everything it awaits, so that a log handler can add it to every line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

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


def bind(**names: str) -> None:
    """From here on, this request's logs also have these."""
    current.set({**current.get(), **names})
