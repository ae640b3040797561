"""The words that several parts of the port share: names, durations, ids, and the headers of whatever changes something."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from holdfast.clock import duration_ms
from holdfast.codec import STORED_NESTING_MAX, is_deeper, passed_on
from holdfast.errors import Damaged, InvalidInput
from holdfast.keys import NAME_BYTES_MAX
from holdfast.server.http.limits import LOCK_TTL_MS_MAX, PAGE_MAX, REQUEST_ID_CHARS_MAX

SpaceName: TypeAlias = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$", description="The space.", examples=["contoso"])
]
Key: TypeAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=NAME_BYTES_MAX,
        pattern="^[^\\x00]+$",
        description=f"The name of a record, list or set: at most {NAME_BYTES_MAX} bytes of UTF-8. Slashes are part of it.",
        examples=["portfolio/MSFT"],
    ),
]
_TIMES: Final = (
    r"^(?=[0-9.]*[1-9])([0-9]{1,9}(\.[0-9]{1,3})? ?(ms|s)?|[0-9]{1,7}(\.[0-9]{1,3})? ?m"
    r"|[0-9]{1,5}(\.[0-9]{1,3})? ?h|[0-9]{1,4}(\.[0-9]{1,3})? ?d|[0-9]{1,3}(\.[0-9]{1,3})? ?w)$"
)
DurationText: TypeAlias = Annotated[
    str, Meta(pattern=_TIMES, description='Seconds, or such as "250ms", "90s", "5m", "1h", "7d".', examples=["90s"])
]
WaitText: TypeAlias = Annotated[
    str,
    Meta(pattern=f"^0$|{_TIMES}", description='How long to wait, such as "20s"; 0 is not at all.', examples=["20s"]),
]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=1_000_000_000, description="Seconds.")]
Lifetime: TypeAlias = DurationText | Seconds
HoldingTime: TypeAlias = (
    DurationText
    | Annotated[
        float,
        Meta(gt=0, description="Seconds.", extra_json_schema={"maximum": LOCK_TTL_MS_MAX / 1000}),
    ]
)
"""How long a lock is held; read by `holding_ms`, which says more than that it is too much."""
RequestId: TypeAlias = Annotated[
    str,
    Meta(
        pattern=rf"^[!-~]{{1,{REQUEST_ID_CHARS_MAX}}}$",
        description="Names this request: repeated with the same one within an hour it has one effect and gets the same answer.",
        examples=["order-17-paid"],
    ),
]
GuardText: TypeAlias = Annotated[
    str, Meta(pattern="^hfg_[A-Za-z0-9_-]{1,1600}$", description="A guard, as acquiring a lock gave it.")
]
Word: TypeAlias = Annotated[str, Meta(pattern=r"^[!-9;-~]{1,100}$", description="A name without spaces and colons.")]
Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Version: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
PageSize: TypeAlias = Annotated[int, Meta(ge=1, le=PAGE_MAX, description="How many at most.")]
Prefix: TypeAlias = Annotated[
    str,
    Meta(max_length=NAME_BYTES_MAX, pattern="^[^\\x00]*$", description="Only what begins with this."),
]
_ETAG: Final = re.compile(r'"([0-9]{1,18})"')
EtagText: TypeAlias = Annotated[
    str,
    Meta(pattern=r'^(\*|"[0-9]{1,18}")$', description='A version as an ETag, "17", or * for any.', examples=['"17"']),
]


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Anything that is read: what it does not name is refused."""


class InSpace(Wire, frozen=True):
    """A path that names a space."""

    space: SpaceName


class At(InSpace, frozen=True):
    """A path that names a space and something in it."""

    key: Key


class Changing(Wire, frozen=True, rename={"request_id": "Idempotency-Key", "guard": "Holdfast-Guard"}):
    """The headers of everything that changes something."""

    request_id: RequestId | None = None
    guard: GuardText | None = None
    """Only as long as this guard is held: otherwise lease_lost, and nothing is changed."""


class Repeatable(Wire, frozen=True, rename={"request_id": "Idempotency-Key"}):
    """The header of what may be repeated."""

    request_id: RequestId | None = None


class Conditional(
    Wire,
    frozen=True,
    rename={
        "request_id": "Idempotency-Key",
        "guard": "Holdfast-Guard",
        "if_match": "If-Match",
        "if_none_match": "If-None-Match",
    },
):
    """The headers of what changes one record."""

    request_id: RequestId | None = None
    guard: GuardText | None = None
    """Only as long as this guard is held: otherwise lease_lost, and nothing is changed."""
    if_match: EtagText | None = None
    if_none_match: Annotated[str, Meta(pattern=r"^\*$", description="Only if there is nothing yet.")] | None = None


def holding_ms(time: float | str, name: str) -> int:
    """For how long to hold a lock; InvalidInput when nobody can mean it."""
    if isinstance(time, str) or time * 1000 <= LOCK_TTL_MS_MAX:
        ms = duration_ms(time, name=name)
        if ms <= LOCK_TTL_MS_MAX:
            return ms
    days = LOCK_TTL_MS_MAX // 86_400_000
    raise InvalidInput(
        f"{name}: a lock is held for at most {days} days, not {time!r:.60}; write seconds, or '500ms', '5s', '1h', and renew it"
    )


def etag(version: int) -> str:
    return f'"{version}"'


def version_of(etag: str) -> int:
    found = _ETAG.fullmatch(etag)
    if found is None:
        raise InvalidInput(f'{etag!r:.60} is no ETag of this server; it looks like "17"')
    return int(found[1])


def shown(data: bytes) -> tuple[Any, str | None]:
    """A stored value as it is told among others, or null and why it cannot be: one that cannot be read spoils no page."""
    if is_deeper(data, STORED_NESTING_MAX):
        return None, f"the value is nested more than {STORED_NESTING_MAX} levels deep; the library may read it"
    try:
        return passed_on(msgspec.Raw(data)), None
    except Damaged as exc:
        return None, str(exc)


def plain(value: Any) -> Any:
    """A struct as the JSON it is on the wire."""
    return msgspec.to_builtins(value)
