"""Guards as text: what names a place in a line to whoever holds it. Opaque to clients, and no secret: only its owner may use it.

Nor is it a proof. That it is the asking agent's, and that the place is still there, are conditions of what is written under it.
That the turn of that place has come is looked up before: it may come meanwhile, and does not go.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final, NamedTuple

from holdfast.errors import InvalidInput, LeaseLost
from holdfast.keys import Subspace, check_name
from holdfast.layers.lines import KINDS, Kind
from holdfast.space import Space

_MARK: Final = "hfg_"
_PARTS: Final = Subspace("g")
_ID: Final = re.compile(r"[0-9]{19}", re.ASCII)


class Named(NamedTuple):
    """The kind and name of a line, and a place in it."""

    kind: Kind
    name: str
    id: str


def guard_text(kind: Kind, name: str, id: str) -> str:
    return _MARK + base64.urlsafe_b64encode(_PARTS.key(kind, name, id).encode()).decode().rstrip("=")


def read_guard(text: str) -> Named:
    """What a guard names; InvalidInput for anything this server did not make."""
    body = text.removeprefix(_MARK)
    try:
        key = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True).decode()
        kind, name, id = _PARTS.split(key, 3)
        if key.startswith(_PARTS.root) and kind in KINDS and _ID.fullmatch(id) and guard_text(kind, name, id) == text:
            check_name(name)
            return Named(kind, name, id)
    except (binascii.Error, ValueError):
        pass
    raise InvalidInput("this is no guard of this server; pass on exactly what acquiring the lock gave")


async def under(space: Space, guard: str | None) -> Space:
    """The space, or the view of it that writes only as long as the guard is held."""
    if guard is None:
        return space
    named = read_guard(guard)
    if await space.locks.waits(*named):
        raise LeaseLost(
            f"nothing was written: {named.kind} {named.name!r} is not held under this guard, whose turn has not come; "
            "use the one that acquiring it gave"
        )
    return space.guarded_by(*named)
