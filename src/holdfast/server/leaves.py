"""How single values of the configuration are read: durations, sizes, numbers, addresses, the store.

Each function takes what YAML made of the text and gives the value; what does not fit is Expected, or InvalidInput with a
sentence of its own. A size without a unit is bytes; a KB is 1024 bytes, an MB 1024 KB, a GB 1024 MB.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any, Final

import msgspec

from holdfast.clock import duration_ms
from holdfast.engines.registry import KEEPERS, file_of, split_url
from holdfast.errors import InvalidInput
from holdfast.middleware.rules import GB, MB
from holdfast.server.documents import Expected, Leaf

KB: Final = 1024
PATTERN_CHARS_MAX: Final = 128
INT64_MAX: Final = 2**63 - 1
RATE_MAX: Final = 1e9

_SIZE: Final = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)\s*(?:([KMGT])i?)?B?", re.ASCII | re.IGNORECASE)
_SIZES: Final = {"": 1, "K": KB, "M": MB, "G": GB, "T": 1024 * GB}
_PORT_MAX: Final = 65_535


class Address(msgspec.Struct, frozen=True):
    """Where a port listens."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def duration(value: Any) -> int:
    try:
        return duration_ms(value)
    except InvalidInput:
        raise Expected("a duration such as 30, 250ms, 90s, 5m or 1h") from None


def sized(least: int, most: int = INT64_MAX) -> Leaf:
    def read(value: Any) -> int:
        match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is not None:
            number = round(float(match[1]) * _SIZES[(match[2] or "").upper()])
        elif isinstance(value, int) and not isinstance(value, bool):
            number = value
        else:
            raise Expected('a size such as 65536, "512 KB", "10 MB" or "1 GB"')
        if not least <= number <= most:
            raise Expected(f"a size of at least {shown_size(least)} and at most {shown_size(most)}")
        return number

    return read


def shown_size(number: int) -> str:
    for unit in ("TB", "GB", "MB", "KB"):
        if number >= _SIZES[unit[0]]:
            return f"{number / _SIZES[unit[0]]:.4g} {unit}"
    return f"{number} bytes"


def whole(least: int, most: int = INT64_MAX) -> Leaf:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            limits = f"of at least {least}" if most == INT64_MAX else f"between {least} and {most:,}"
            raise Expected(f"a whole number {limits}")
        return value

    return read


def positive(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= RATE_MAX:  # also no NaN
        raise Expected("a number greater than 0")
    return value


def pattern(value: Any) -> str:
    if not isinstance(value, str):
        raise Expected("a pattern of agents' names in quotes, such as 'worker-*'")
    if not 0 < len(value) <= PATTERN_CHARS_MAX or not value.isprintable():
        raise Expected(f"a pattern of agents' names of at most {PATTERN_CHARS_MAX} characters")
    return value


def address(value: Any) -> Address:
    if isinstance(value, str):
        host, colon, port = value.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        fits = colon and host and host.isascii() and host.isprintable() and " " not in host and "/" not in host
        if fits and (":" in host) == bracketed and port.isascii() and port.isdigit() and len(port) <= 5:
            if int(port) <= _PORT_MAX:
                return Address(host, int(port))
            raise Expected(f"a port of at most {_PORT_MAX}")
    raise Expected('host:port such as "127.0.0.1:7420", or null for none')


def unix_path(value: Any) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise Expected("the path of a socket, or null for none")
    return value


def store(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise InvalidInput("expected a file's path or a URL such as resident:team.db")
    scheme, _ = split_url(value)  # its refusals name the scheme alone: a URL may have a password in it
    if scheme in KEEPERS:
        raise InvalidInput("a keeper keeps a store itself; it cannot serve the store of another keeper")
    file_of(value)
    return value
