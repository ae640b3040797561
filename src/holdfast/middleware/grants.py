"""What an identity may do: its verbs, its rate, its quota, as the rules give them or as they ship with the product.

Access: the allowed verbs of all rules whose pattern matches the agent's name, without those that any of them denies. Rate
and quota: the first rule that matches, none if none does. Where there are no rules of a kind, the role decides, by the
tables below. An administrator has everything, without limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final, TypeVar

import msgspec

from holdfast.identity import Identity, Role
from holdfast.middleware.rules import AccessRule, Quota, RateLimit, Rules
from holdfast.middleware.verbs import ADMIN, EVERY_VERB, ORCHESTRATE, REMEMBER, VERBS

T = TypeVar("T", RateLimit, Quota)

DEFAULT_VERBS: Final[dict[Role, frozenset[str]]] = {
    "agent": frozenset(VERBS) - {"Audit"},
    "orchestrator": frozenset({*VERBS, ORCHESTRATE}),
    "admin": frozenset({*VERBS, ORCHESTRATE, ADMIN}),
}
DEFAULT_RATES: Final[dict[Role, RateLimit | None]] = {
    "agent": RateLimit("*", 100, 200),
    "orchestrator": RateLimit("*", 1000, 2000),
    "admin": None,
}
DEFAULT_QUOTAS: Final[dict[Role, Quota | None]] = {
    "agent": Quota("*"),
    "orchestrator": Quota("*", max_keys_per_agent=100_000),
    "admin": None,
}


class Grant(msgspec.Struct, frozen=True):
    """What one identity may do under some rules."""

    verbs: frozenset[str]
    rate: RateLimit | None
    quota: Quota | None


def grant_of(rules: Rules, identity: Identity) -> Grant:
    role, agent = identity.role, identity.agent
    if role == "admin":
        return Grant(DEFAULT_VERBS[role] | {REMEMBER}, None, None)
    verbs = DEFAULT_VERBS[role] if rules.access_control is None else _verbs(rules.access_control, agent)
    if role == "orchestrator" and verbs >= {"Get", "Set"}:  # rules that take these away take that with them
        verbs |= {ORCHESTRATE}
    return Grant(
        verbs | {REMEMBER},
        DEFAULT_RATES[role] if rules.rate_limits is None else _first(rules.rate_limits, agent),
        DEFAULT_QUOTAS[role] if rules.quotas is None else _first(rules.quotas, agent),
    )


def _verbs(rules: Iterable[AccessRule], agent: str) -> frozenset[str]:
    allowed: set[str] = set()
    denied: set[str] = set()
    for rule in rules:
        if fnmatchcase(agent, rule.agent_pattern):
            allowed.update(VERBS if EVERY_VERB in rule.allow else rule.allow)
            denied.update(VERBS if EVERY_VERB in rule.deny else rule.deny)
    return frozenset(allowed - denied)


def _first(limits: Iterable[T], agent: str) -> T | None:
    return next((limit for limit in limits if fnmatchcase(agent, limit.agent_pattern)), None)
