"""Every limit of the HTTP port, by name. Tests inject shorter ones; operators may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from holdfast import codec

REQUEST_ID_CHARS_MAX: Final = 100
"""Of an Idempotency-Key or the id of a message; locks append a few characters to it, up to the engines' 128."""
PAGE_MAX: Final = 1000
"""Records, commits or audit records of one answer."""
PAGE_BYTES_MAX: Final = 4 * 1024 * 1024
"""A page ends after the value with which it reaches this."""
NESTING_MAX: Final = codec.NESTING_MAX
"""Levels of lists and objects in a body: as many as a value may have."""
PARAMETERS_MAX: Final = 32
"""In a query string."""
BODY_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of a body, whatever an operator allows."""
ELEMENTS_MAX: Final = 100_000
"""Values in a body, lists and objects counted: reading so many takes up to 25 ms, in which the server does nothing else."""

LOCK_TTL_MS_MAX: Final = 30 * 86_400_000
"""Of a lock that nobody renews for its client: more is taken for a mistake, such as nanoseconds in place of seconds."""


@dataclass(frozen=True)
class Limits:
    """What one client may take, in bytes, seconds and numbers."""

    body_bytes_max: int = BODY_BYTES_MAX
    head_bytes_max: int = 32 * 1024
    head_s_max: float = 10.0
    """From a connection, or the first byte of its next request, to the end of the head."""
    body_s_max: float = 60.0
    """From the head of a request to the end of its body."""
    idle_s_max: int = 75
    """Between two requests of a connection."""
    write_s_max: float = 30.0
    """How long a client may take nothing of an answer that waits for it."""
    connections: int = 1024
    """At a time, of those that have shown a token (`server/admission.py`); the next three are about them as well."""
    connections_before_hello: int = 512
    """That have not shown a token."""
    connections_per_token: int = 256
    connections_for_administrators: int = 16
    requests_max: int = 512
    """Running at once, those of administrators not counted among those that are refused."""
    requests_per_token_max: int = 128
    """Of them, with one token."""
    body_bytes_free: int = 16 * 1024
    """Of every body, that are not counted in the next two."""
    bodies_bytes_max: int = 256 * 1024 * 1024
    """Of all bodies that are under way."""
    bodies_bytes_per_token_max: int = 64 * 1024 * 1024
    """Of them, with one token."""
    feeds_per_token_max: int = 8
    lock_wait_ms_max: int = 30_000
    lock_ttl_ms: int = 5_000
    """Of a lock whose message names no timeout."""
    heartbeat_ms: int = 15_000
    """Between two comments of a feed in which nothing happens."""
    look_ms: int = 1_000
    """How often a feed looks whether its token is still good."""
    stop_s_max: int = 10
    """For what is running when the server stops."""
