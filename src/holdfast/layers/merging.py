"""Merging signals into one decision: strategies, each a plain callable under a name.

    def cautious(signals, question): return {"action": "monitor", "confidence": 0.5}

A strategy gets the signals by agent, in the order in which they arrived, and the `Question`: which correlation, who was
expected, who is missing. It gives a `Merged`, or just the decision, and may be asynchronous. It reads nothing else and
writes nothing: an orchestrator that dies in it is replaced by another that asks again.

`momentum_risk_fusion` is for two agents, "momentum" and "risk": confidence is clamp(0.6 momentum + 0.4 (1 - risk)); blocked
gives no_trade, whoever else is missing; high risk with a strength below 0.8 monitor; bullish or bearish with a strength over 0.6
trade, if both agents are there; anything else monitor. The others look at what any analysis may have: `action`, `direction`, `size`, `confidence`.

    weighted_average   numbers averaged by weight, the action with the most weight behind it
    majority           the action most agents want; equal numbers: the more confident ones, then the first by name
    priority           what the most important agent says; unless told otherwise, the one that was expected first
    first              what came first
    all                an action only if everybody wants it, otherwise review; all analyses side by side

How it fails. A field that is missing is taken at its most careful: no risk signal is the highest risk, no momentum none, no
recommended size 0; a risk level that is missing, or none of LEVELS, is high. No size is below 0. A field that is there and no
number is InvalidInput, which fails the correlation.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from holdfast.errors import InvalidInput

MOMENTUM_SHARE: Final = 0.6
RISK_SHARE: Final = 0.4
STRENGTH_TO_TRADE: Final = 0.6
STRENGTH_AT_HIGH_RISK: Final = 0.8
MAX_RISK_PCT: Final = 0.02
CURRENCY: Final = "USD"
DIRECTIONS: Final = {"bullish": "buy", "bearish": "sell"}
LEVELS: Final = ("low", "medium", "high", "blocked")
DIGITS: Final = 10
"""Places of a confidence or size; behind them is only what binary fractions leave."""

Signal: TypeAlias = Mapping[str, Any]
StopLoss: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any]], float | None]
"""From the analyses of momentum and risk to a price, or None."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a strategy is asked."""

    corr_id: str
    expected: tuple[str, ...] = ()
    """Empty where any agents will do."""
    missing: tuple[str, ...] = ()
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Merged:
    """What a strategy answers."""

    decision: Mapping[str, Any]
    """action, direction, size, confidence."""
    analysis: Mapping[str, Any] = field(default_factory=dict)
    """What the merged context has as `merged_analysis`."""
    sources: Mapping[str, Any] | None = None
    """What it has as `source_signals`; None: each signal's version, time and analysis."""


Answer: TypeAlias = Merged | Mapping[str, Any]
Strategy: TypeAlias = Callable[[Mapping[str, Signal], Question], Answer | Awaitable[Answer]]


# --- momentum and risk ---


@dataclass(frozen=True, slots=True)
class Fusion:
    """`momentum_risk_fusion`, with a stop loss or a highest risk of one's own."""

    stop_loss: StopLoss | None = None
    max_risk_pct: float = MAX_RISK_PCT

    def __call__(self, signals: Mapping[str, Signal], question: Question) -> Merged:
        momentum, risk = _analysis(signals.get("momentum")), _analysis(signals.get("risk"))
        sizing = _part(risk, "position_sizing")
        trend, level = momentum.get("trend_direction"), level_of(risk.get("risk_level"))
        strength = number(momentum, "momentum_strength", 0.0)
        confidence = combined_confidence(number(momentum, "confidence", 0.0), number(risk, "overall_score", 1.0))
        action = (
            action_of(trend, strength, level) if risk else "monitor"
        )  # without momentum there is no trend to follow
        base, limit = max(0, number(sizing, "recommended_size", 0.0)), number(sizing, "max_position_size", None)
        multiplier = multiplier_of(strength)
        size = _rounded(base * multiplier)
        size = size if limit is None else max(0, min(size, limit))
        stop_loss = None if self.stop_loss is None else self.stop_loss(momentum, risk)
        max_risk = number(_part(risk, "recommendations"), "max_risk_per_trade", self.max_risk_pct)
        trades = action == "trade"
        return Merged(
            decision={
                "action": action,
                "direction": DIRECTIONS.get(str(trend)) if trades else None,
                "size": size if trades else 0,
                "confidence": confidence,
            },
            analysis={
                "overall_confidence": confidence,
                "recommended_action": action,
                "position_sizing": {
                    "base_size": base,
                    "momentum_multiplier": multiplier,
                    "final_size": size,
                    "currency": sizing.get("currency", CURRENCY),
                },
                "risk_constraints": {"stop_loss": stop_loss, "max_risk_pct": max_risk},
            },
            sources=_fused_sources(signals, sizing),
        )


def combined_confidence(momentum: float, risk: float) -> float:
    """Between 0 and 1; it grows with the momentum's confidence and falls with the risk."""
    return _rounded(clamp(MOMENTUM_SHARE * momentum + RISK_SHARE * (1.0 - risk)))


def level_of(told: Any) -> str:
    """A level of risk, however it is capitalised; high where nobody knows what was meant."""
    level = told.strip().lower() if isinstance(told, str) else ""
    return level if level in LEVELS else "high"


def action_of(trend: Any, strength: float, risk_level: Any) -> str:
    if risk_level == "blocked":
        return "no_trade"
    if risk_level == "high" and strength < STRENGTH_AT_HIGH_RISK:
        return "monitor"
    return "trade" if trend in DIRECTIONS and strength > STRENGTH_TO_TRADE else "monitor"


def multiplier_of(strength: float) -> float:
    """From a half to the whole of what is recommended."""
    return _rounded(0.5 + 0.5 * clamp(strength))


_FUSED: Final = {
    "momentum": ("trend_direction", "momentum_strength", "confidence"),
    "risk": ("risk_level", "overall_score"),
}
_SIGNED: Final = ("agent_version", "enriched_at")
_SIZED: Final = {"risk": ("max_position_size", "recommended_size")}


def _fused_sources(signals: Mapping[str, Signal], sizing: Mapping[str, Any]) -> dict[str, Any]:
    """What was merged, as far as it was there: the merged context repeats no signal whole."""
    found: dict[str, Any] = {}
    for agent, signal in signals.items():
        analysis = _analysis(signal)
        told = found[agent] = {}
        for names, values in ((_SIGNED, signal), (_FUSED.get(agent, ()), analysis), (_SIZED.get(agent, ()), sizing)):
            for name in names:
                if name in values:
                    told[name] = values[name]
    return found


# --- any agents ---


@dataclass(frozen=True, slots=True)
class WeightedAverage:
    """`weighted_average`: every number of the analyses, by the agents' weights (1 unless told)."""

    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(number(self.weights, agent, 0.0) < 0 for agent in self.weights):
            raise InvalidInput("a weight must not be negative")

    def __call__(self, signals: Mapping[str, Signal], question: Question) -> Merged:
        sums: dict[str, float] = {}
        weights: dict[str, float] = {}
        votes: dict[str, float] = {}
        for agent, signal in signals.items():
            weight, analysis = float(self.weights.get(agent, 1.0)), _analysis(signal)
            for name, value in analysis.items():
                if is_number(value):
                    sums[name] = sums.get(name, 0.0) + weight * value
                    weights[name] = weights.get(name, 0.0) + weight
            if isinstance(action := analysis.get("action"), str):
                votes[action] = votes.get(action, 0.0) + weight
        averages = {name: _rounded(total / weights[name]) for name, total in sums.items() if weights[name] > 0}
        action = min(votes, key=lambda each: (-votes[each], each), default="monitor")
        confidence = clamp(averages.get("confidence", 0.0))
        direction = _direction_of(signals, action)
        decision = _decision(action, direction, averages.get("size", 0), confidence)
        return Merged(decision, {**_told(decision), "averages": averages, "votes": votes})


def majority(signals: Mapping[str, Signal], question: Question) -> Merged:
    """`majority`: the action most agents want."""
    votes: dict[str, list[float]] = {}
    for signal in signals.values():
        analysis = _analysis(signal)
        if isinstance(action := analysis.get("action"), str):
            votes.setdefault(action, []).append(number(analysis, "confidence", 0.0))
    action = min(votes, key=lambda each: (-len(votes[each]), -sum(votes[each]), each), default="monitor")
    share = len(votes.get(action, ())) / len(signals) if signals else 0.0
    decision = _decision(action, _direction_of(signals, action), _size_of(signals, action), _rounded(share))
    return Merged(decision, {**_told(decision), "votes": {each: len(given) for each, given in votes.items()}})


@dataclass(frozen=True, slots=True)
class Priority:
    """`priority`: what the most important agent says. Agents that are not in the order come last, by name."""

    order: Sequence[str] = ()

    def __call__(self, signals: Mapping[str, Signal], question: Question) -> Merged:
        ranks = {agent: rank for rank, agent in reversed([*enumerate(self.order or question.expected)])}
        return _choose(signals, min(signals, key=lambda each: (ranks.get(each, len(ranks)), each), default=None))


def first(signals: Mapping[str, Signal], question: Question) -> Merged:
    """`first`: what came first."""
    return _choose(signals, next(iter(signals), None))


def unanimous(signals: Mapping[str, Signal], question: Question) -> Merged:
    """`all`: what everybody wants, and otherwise that somebody looks at it."""
    analyses = {agent: dict(_analysis(signal)) for agent, signal in signals.items()}
    actions = {_action_in(analysis, "") for analysis in analyses.values()}
    agreed = len(actions) == 1 and "" not in actions and not question.missing
    action = actions.pop() if agreed else "review"
    confidence = min((number(analysis, "confidence", 0.0) for analysis in analyses.values()), default=0.0)
    decision = _decision(action, _direction_of(signals, action), _size_of(signals, action), clamp(confidence))
    return Merged(decision, {**_told(decision), "analyses": analyses})


def _action_in(analysis: Mapping[str, Any], default: str) -> str:
    """What it wants to be done; what is no text counts as not said."""
    action = analysis.get("action")
    return action if isinstance(action, str) and action else default


def _choose(signals: Mapping[str, Signal], agent: str | None) -> Merged:
    """One agent's word."""
    analysis = {} if agent is None else _analysis(signals[agent])
    action = _action_in(analysis, "monitor")
    confidence = clamp(number(analysis, "confidence", 0.0))
    decision = _decision(action, analysis.get("direction"), number(analysis, "size", 0), confidence)
    return Merged(decision, {**_told(decision), "chosen": agent})


def _decision(action: str, direction: Any, size: float, confidence: float) -> dict[str, Any]:
    return {"action": action, "direction": direction, "size": max(0, size), "confidence": confidence}


def _told(decision: Mapping[str, Any]) -> dict[str, Any]:
    return {"overall_confidence": decision["confidence"], "recommended_action": decision["action"]}


def _direction_of(signals: Mapping[str, Signal], action: str) -> Any:
    """Which direction those who want this action agree on; None when they do not."""
    found = [_analysis(signal).get("direction") for signal in _wanting(signals, action)]
    return found[0] if found and all(each == found[0] for each in found) else None


def _size_of(signals: Mapping[str, Signal], action: str) -> float:
    """The smallest size of those who want this action: nobody has agreed to more."""
    return min((number(_analysis(signal), "size", 0) for signal in _wanting(signals, action)), default=0)


def _wanting(signals: Mapping[str, Signal], action: str) -> list[Signal]:
    return [signal for signal in signals.values() if _analysis(signal).get("action") == action]


# --- names ---

STRATEGIES: Final[Mapping[str, Strategy]] = {
    "momentum_risk_fusion": Fusion(),
    "weighted_average": WeightedAverage(),
    "majority": majority,
    "priority": Priority(),
    "first": first,
    "all": unanimous,
}
"""What ships with the product, by the name under which it is asked for."""


def strategy_of(merge: str | Strategy, more: Mapping[str, Strategy] | None = None) -> tuple[str, Strategy]:
    """A strategy and its name; InvalidInput for a name nobody gave."""
    if not isinstance(merge, str):
        if not callable(merge):
            raise InvalidInput(f"merge must be a strategy's name or a callable, not {type(merge).__name__}")
        return getattr(merge, "__name__", type(merge).__name__), merge
    known = {**STRATEGIES, **(more or {})}
    if merge not in known:
        raise InvalidInput(f"there is no merge strategy {merge!r:.60}; there are {', '.join(sorted(known))}")
    return merge, known[merge]


def merged_of(answer: Any) -> Merged:
    """What a strategy answered, as Merged; InvalidInput when it is no decision."""
    merged = answer if isinstance(answer, Merged) else None
    if merged is None and isinstance(answer, Mapping):
        merged = Merged(
            answer, {"recommended_action": answer.get("action"), "overall_confidence": answer.get("confidence")}
        )
    if merged is None or not isinstance(merged.decision.get("action"), str):
        raise InvalidInput("a merge strategy must give a decision with an action, such as {'action': 'monitor'}")
    return merged


# --- reading analyses ---


def clamp(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def is_number(value: Any) -> bool:
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, int | float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold: nobody could reckon with it
        return False


def number(values: Mapping[str, Any], name: str, default: Any) -> Any:
    """A number of an analysis, or the default when there is none; InvalidInput for anything else."""
    value = values.get(name)
    if value is None:
        return default
    if not is_number(value):
        raise InvalidInput(f"{name} must be a number, not {value!r:.60}")
    return value


def _analysis(signal: Signal | None) -> Mapping[str, Any]:
    return {} if signal is None else _part(signal, "analysis")


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    if found is None:
        return {}
    if type(found) is not dict and not isinstance(found, Mapping):
        raise InvalidInput(f"{name} must be an object, not {found!r:.60}")
    return found


def _rounded(value: float) -> float:
    return round(value, DIGITS)
