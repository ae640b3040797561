"""Who a credential speaks for. The keeper makes one from a token; policies decide by it, never by a field of a message."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

Role: TypeAlias = Literal["agent", "orchestrator", "admin"]
ROLES: Final[tuple[Role, ...]] = ("agent", "orchestrator", "admin")

EVERY_SPACE: Final = "*"
"""The space of an administrator's token."""


class Identity(msgspec.Struct, frozen=True):
    """An agent with a role in a space; for administrators in every space."""

    agent: str
    role: Role
    space: str
    token_id: str = ""

    def may_enter(self, space: str) -> bool:
        return self.space in (space, EVERY_SPACE)
