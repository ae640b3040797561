"""The rules of a keeper as people write them: who may do what, how often, how much. Document D's shape.

A rule applies to the agents whose name matches its pattern (`worker-*`; `*` is everybody). Sizes are bytes.
"""

from __future__ import annotations

from typing import Final

import msgspec

MB: Final = 1024 * 1024
GB: Final = 1024 * MB


class AccessRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Verbs that are allowed and denied; deny wins, and what no rule allows is denied."""

    agent_pattern: str
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


class RateLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Operations a second, and how many at once after a pause."""

    agent_pattern: str
    max_ops_per_second: float = 100
    burst: int = 200


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may be kept: keys of one agent, bytes of one value, bytes of the space in all."""

    agent_pattern: str
    max_keys_per_agent: int = 1000
    max_value_size: int = 10 * MB
    max_total_size: int = 1 * GB


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of them. None: what ships with the product for the role."""

    access_control: tuple[AccessRule, ...] | None = None
    rate_limits: tuple[RateLimit, ...] | None = None
    quotas: tuple[Quota, ...] | None = None
