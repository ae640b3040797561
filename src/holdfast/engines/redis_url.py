"""URLs of Redis stores.

    redis://[user:password@]host[:port][/db]          one server; rediss:// for TLS
    redis+sentinel://host[:port],host[:port]…/name[/db]   the primary that the sentinels name
    redis+cluster://host[:port],host[:port]…          a cluster, found through any of its nodes

Options, after a `?`:

    prefix=holdfast        what every key of the store begins with
    durable=asserted       the server fsyncs every write (appendfsync always), although CONFIG cannot be asked
    wait=1                 a commit is acknowledged when this many replicas have it too
    wait_timeout=1000      … within this many milliseconds; otherwise its outcome is unknown
    tls=yes                TLS with sentinels and clusters
    ca=/path/ca.pem        the certificates to trust instead of the system's
    sentinel_password=…    what the sentinels ask for, if they do (and sentinel_user=…)

What is wrong with a URL is told without repeating it: it may hold a password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import parse_qsl, unquote

from holdfast.errors import InvalidInput

Address = tuple[str, int]

SCHEMES: Final = ("redis", "rediss", "redis+sentinel", "redis+cluster")
PORT: Final = 6379
SENTINEL_PORT: Final = 26379
WAIT_TIMEOUT_MS: Final = 1000
_OPTIONS: Final = frozenset(
    {"prefix", "durable", "wait", "wait_timeout", "tls", "ca", "sentinel_user", "sentinel_password"}
)
_PREFIX: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@]+)(?::([0-9]{1,5}))?")


@dataclass(frozen=True)
class RedisUrl:
    """A Redis store's URL, read."""

    kind: Literal["single", "sentinel", "cluster"]
    addresses: tuple[Address, ...]
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    master: str = ""
    tls: bool = False
    ca: str | None = None
    prefix: str = "holdfast"
    asserted: bool = False
    wait: int = 0
    wait_timeout_ms: int = WAIT_TIMEOUT_MS
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)


def parse(scheme: str, rest: str) -> RedisUrl:
    """Read what follows the scheme's colon."""
    kind: Literal["single", "sentinel", "cluster"] = "single"
    if scheme == "redis+sentinel":
        kind = "sentinel"
    elif scheme == "redis+cluster":
        kind = "cluster"
    if not rest.startswith("//"):
        raise InvalidInput(f"a Redis URL begins with {scheme}://")
    location, _, query = rest[2:].partition("?")
    authority, _, path = location.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    username, _, password = credentials.partition(":")
    options = _options(query)
    addresses = tuple(_address(host, SENTINEL_PORT if kind == "sentinel" else PORT) for host in hosts.split(","))
    if kind == "single" and len(addresses) > 1:
        raise InvalidInput("a redis:// URL names one server; several are redis+sentinel:// or redis+cluster://")
    master, db = "", path
    if kind == "sentinel":
        master, _, db = path.partition("/")
        if not master:
            raise InvalidInput("a redis+sentinel:// URL names the primary: redis+sentinel://host,host/name")
    if kind == "cluster" and db:
        raise InvalidInput("a Redis cluster has no numbered databases; leave the path away")
    if options.get("durable", "asserted") != "asserted":
        raise InvalidInput("durable= can only be 'asserted': that the server runs with appendfsync always")
    prefix = options.get("prefix", "holdfast")
    if _PREFIX.fullmatch(prefix) is None:
        raise InvalidInput("prefix= is 1 to 64 letters, digits and the characters _ . : -")
    return RedisUrl(
        kind,
        addresses,
        unquote(username) or None,
        unquote(password) or None,
        _number("the database", db or "0", 0, 1 << 20),
        unquote(master),
        scheme == "rediss" or _yes(options, "tls"),
        options.get("ca"),
        prefix,
        "durable" in options,
        _number("wait=", options.get("wait", "0"), 0, 100),
        _number("wait_timeout=", options.get("wait_timeout", str(WAIT_TIMEOUT_MS)), 1, 600_000),
        options.get("sentinel_user"),
        options.get("sentinel_password"),
    )


def _options(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise InvalidInput("the options of a Redis URL are name=value, joined by &") from None
    for name, _ in pairs:
        if name not in _OPTIONS:
            raise InvalidInput(f"a Redis URL has no option {name[:40]!r}; it has {', '.join(sorted(_OPTIONS))}")
    return dict(pairs)


def _address(host: str, port: int) -> Address:
    match = _HOST.fullmatch(host)
    if match is None:
        raise InvalidInput("a Redis URL names its servers as host or host:port")
    return unquote(match[1].strip("[]")), _number("a port", match[2] or str(port), 1, 65535)


def _number(what: str, digits: str, low: int, high: int) -> int:
    if not digits.isascii() or not digits.isdigit() or not low <= int(digits) <= high:
        raise InvalidInput(f"{what} of a Redis URL is a number from {low} to {high}")
    return int(digits)


def _yes(options: dict[str, str], name: str) -> bool:
    value = options.get(name, "no")
    if value not in ("yes", "no"):
        raise InvalidInput(f"{name}= of a Redis URL is yes or no")
    return value == "yes"
