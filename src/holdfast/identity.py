"""Who a credential speaks for, what agents and spaces may be called, and what a credential looks like.

The keeper makes an Identity from a token; policies decide by it, never by a field of a message. A token is
`hf_<id>_<secret>`: the id names it and may be shown, the secret may not. `hidden` is a text without the secrets of the
tokens in it; `Secret` is a token that prints itself so.
"""

from __future__ import annotations

import re
from typing import Final, Literal, TypeAlias

import msgspec

from holdfast.errors import InvalidInput

Role: TypeAlias = Literal["agent", "orchestrator", "admin"]
ROLES: Final[tuple[Role, ...]] = ("agent", "orchestrator", "admin")

EVERY_SPACE: Final = "*"
"""The space of an administrator's token."""

AGENT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,127}", re.ASCII)
STRICT_AGENT: Final = re.compile(r"[a-z_]{1,128}", re.ASCII)
AgentNames: TypeAlias = Literal["plain", "strict"]
"""What agents of a store may be called: AGENT, or document A's small letters and underscores alone."""
AGENT_NAMES: Final[tuple[AgentNames, ...]] = ("plain", "strict")
SPACE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", re.ASCII)

TOKEN_ID: Final = re.compile(r"[a-z2-7]{16}", re.ASCII)
TOKEN: Final = re.compile(r"hf_([a-z2-7]{16})_([a-z2-7]{52})", re.ASCII)
_IN_TEXT: Final = re.compile(r"(hf_[a-z2-7]{16}_)[A-Za-z0-9]+", re.ASCII)
"""A token, or the beginning of one that was cut off."""


class Identity(msgspec.Struct, frozen=True):
    """An agent with a role in a space; for administrators in every space."""

    agent: str
    role: Role
    space: str
    token_id: str = ""

    def may_enter(self, space: str) -> bool:
        return self.space in (space, EVERY_SPACE)


class Secret(str):
    """A token's text. Its repr shows the id alone, so that no traceback or log of objects gives it away."""

    __slots__ = ()

    def __repr__(self) -> str:
        match = TOKEN.fullmatch(self)
        return f"<token hf_{match[1]}_…>" if match else "<token …>"


def hidden(text: str) -> str:
    """The text with `hf_<id>_…` in place of every token."""
    return _IN_TEXT.sub(r"\1…", text) if "hf_" in text else text


def check_agent(name: str, names: AgentNames = "plain", what: str = "an agent's name") -> None:
    if not isinstance(name, str) or AGENT.fullmatch(name) is None:
        raise InvalidInput(
            f"{what} is 1 to 128 letters, digits, '_' and '-', of which the first is no '-'; it cannot be {name!r:.60}"
        )
    if names == "strict" and STRICT_AGENT.fullmatch(name) is None:
        raise InvalidInput(f"{what} is small letters and '_' in this store (agent_names: strict), not {name!r:.60}")
    if name == "holdfast":
        raise InvalidInput(f"{what} cannot be 'holdfast', which is what the store itself is called; choose another")


def check_space(name: str) -> None:
    if not isinstance(name, str) or SPACE.fullmatch(name) is None:
        raise InvalidInput(
            "a space's name is 1 to 128 letters, digits, '_', '-' and '.', of which the first is a letter or a digit; "
            f"it cannot be {name!r:.60}"
        )
