"""The rules of a keeper as people write them: who may do what, how often, how much. Document D's shape.

A rule applies to the agents whose name matches its pattern (`worker-*`; `*` is everybody). Sizes are bytes. A rule that
cannot be meant (an unknown verb, a burst of nothing) is InvalidInput when it is made.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from holdfast.errors import InvalidInput
from holdfast.middleware.verbs import check_verb

MB: Final = 1024 * 1024
GB: Final = 1024 * MB


class AccessRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Verbs that are allowed and denied; deny wins, and what no rule allows is denied."""

    agent_pattern: str
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for verb in (*self.allow, *self.deny):
            check_verb(verb)


class RateLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Operations a second, and how many at once after a pause."""

    agent_pattern: str
    max_ops_per_second: float = 100
    burst: int = 200

    def __post_init__(self) -> None:
        if not (self.max_ops_per_second > 0 and math.isfinite(self.max_ops_per_second)) or self.burst < 1:
            raise InvalidInput(
                f"the rate limit for {self.agent_pattern!r} must allow more than 0 operations a second and a burst of "
                f"at least 1, not {self.max_ops_per_second!r} and {self.burst!r}"
            )


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may be kept: keys of one agent, bytes of one value, bytes of the space in all."""

    agent_pattern: str
    max_keys_per_agent: int = 1000
    max_value_size: int = 10 * MB
    max_total_size: int = 1 * GB

    def __post_init__(self) -> None:
        if min(self.max_keys_per_agent, self.max_value_size, self.max_total_size) < 0:
            raise InvalidInput(f"the quota for {self.agent_pattern!r} must not be negative")


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of them. None: what ships with the product for the role."""

    access_control: tuple[AccessRule, ...] | None = None
    rate_limits: tuple[RateLimit, ...] | None = None
    quotas: tuple[Quota, ...] | None = None
