"""Merge strategies: what they decide, and what they can be trusted with."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Fusion, InvalidInput, Merged, Priority, Question, WeightedAverage
from holdfast.layers.merging import (
    STRATEGIES,
    action_of,
    combined_confidence,
    merged_of,
    multiplier_of,
    strategy_of,
)

ASKED = Question("c-1", ("momentum", "risk"))
shares = st.floats(0, 1)
anything = st.floats(-1e6, 1e6)


def momentum(strength: float = 0.75, trend: str = "bullish", confidence: float = 0.82) -> dict[str, Any]:
    analysis = {"trend_direction": trend, "momentum_strength": strength, "confidence": confidence}
    return {
        "agent_name": "momentum",
        "agent_version": "1.2.1",
        "enriched_at": "2025-06-15T15:06:40+00:00",
        "analysis": analysis,
    }


def risk(level: str = "medium", score: float = 0.65, **sizing: Any) -> dict[str, Any]:
    analysis = {"risk_level": level, "overall_score": score, "position_sizing": {"recommended_size": 10_000, **sizing}}
    return {
        "agent_name": "risk",
        "agent_version": "2.0.0",
        "enriched_at": "2025-06-15T15:06:41+00:00",
        "analysis": analysis,
    }


def fused(*signals: dict[str, Any], **options: Any) -> Merged:
    return Fusion(**options)({signal["agent_name"]: signal for signal in signals}, ASKED)


def test_the_documents_sample_gives_the_worked_values() -> None:
    merged = fused(momentum(), risk())
    assert merged.decision == {"action": "trade", "direction": "buy", "size": 8750.0, "confidence": 0.632}
    assert merged.analysis == {
        "overall_confidence": 0.632,
        "recommended_action": "trade",
        "position_sizing": {
            "base_size": 10_000,
            "momentum_multiplier": 0.875,
            "final_size": 8750.0,
            "currency": "USD",
        },
        "risk_constraints": {"stop_loss": None, "max_risk_pct": 0.02},
    }
    assert merged.sources == {
        "momentum": {
            "agent_version": "1.2.1",
            "enriched_at": "2025-06-15T15:06:40+00:00",
            "trend_direction": "bullish",
            "momentum_strength": 0.75,
            "confidence": 0.82,
        },
        "risk": {
            "agent_version": "2.0.0",
            "enriched_at": "2025-06-15T15:06:41+00:00",
            "risk_level": "medium",
            "overall_score": 0.65,
            "recommended_size": 10_000,
        },
    }


@pytest.mark.parametrize(
    ("strength", "trend", "level", "score", "action", "direction", "size", "confidence"),
    [
        (0.75, "bearish", "medium", 0.65, "trade", "sell", 8750.0, 0.632),
        (1.0, "bullish", "low", 0.0, "trade", "buy", 10_000.0, 0.892),
        (0.75, "bullish", "blocked", 0.65, "no_trade", None, 0, 0.632),
        (0.95, "bullish", "blocked", 1.0, "no_trade", None, 0, 0.492),
        (0.79, "bullish", "high", 0.9, "monitor", None, 0, 0.532),
        (0.8, "bullish", "high", 0.9, "trade", "buy", 9000.0, 0.532),
        (0.6, "bullish", "low", 0.1, "monitor", None, 0, 0.852),
        (0.61, "bearish", "low", 0.1, "trade", "sell", 8050.0, 0.852),
        (0.9, "neutral", "low", 0.1, "monitor", None, 0, 0.852),
    ],
)
def test_actions_and_sizes_follow_the_table(
    strength: float,
    trend: str,
    level: str,
    score: float,
    action: str,
    direction: str | None,
    size: float,
    confidence: float,
) -> None:
    decision = fused(momentum(strength, trend), risk(level, score)).decision
    assert decision == {"action": action, "direction": direction, "size": size, "confidence": confidence}


def test_a_size_is_capped_by_the_largest_position_when_there_is_one() -> None:
    assert fused(momentum(), risk(max_position_size=5_000)).decision["size"] == 5_000
    assert fused(momentum(), risk(max_position_size=50_000)).decision["size"] == 8_750


def test_the_risk_agent_says_how_much_may_be_lost_and_in_which_currency() -> None:
    signal = risk(currency="EUR")
    signal["analysis"]["recommendations"] = {"max_risk_per_trade": 0.01}
    merged = fused(momentum(), signal)
    assert merged.analysis["risk_constraints"]["max_risk_pct"] == 0.01
    assert merged.analysis["position_sizing"]["currency"] == "EUR"


def test_a_stop_loss_is_what_ones_own_function_says() -> None:
    merged = fused(momentum(), risk(), stop_loss=lambda momentum, risk: risk["overall_score"] * 100)
    assert merged.analysis["risk_constraints"]["stop_loss"] == 65


@pytest.mark.parametrize("there", [(), ("momentum",), ("risk",)])
def test_without_both_agents_nothing_is_traded(there: tuple[str, ...]) -> None:
    signals = [signal for signal in (momentum(), risk("low", 0.0)) if signal["agent_name"] in there]
    decision = fused(*signals).decision
    assert (decision["action"], decision["size"]) == ("monitor", 0)
    assert decision["confidence"] == {(): 0.0, ("momentum",): 0.492, ("risk",): 0.4}[there]


@pytest.mark.parametrize("level", ["blocked", "Blocked"])
def test_what_is_blocked_is_not_traded_whoever_is_missing(level: str) -> None:
    assert fused(risk(level)).decision["action"] == "no_trade"
    assert fused(momentum(0.95), risk(level)).decision["action"] == "no_trade"


@pytest.mark.parametrize("level", [None, "", "extreme", 3, ["low"]])
def test_a_risk_level_that_is_missing_or_unknown_counts_as_high(level: Any) -> None:
    signal = risk(level)
    assert fused(momentum(0.79), signal).decision["action"] == "monitor"
    assert fused(momentum(0.8), signal).decision["action"] == "trade"
    del signal["analysis"]["risk_level"]
    assert fused(momentum(0.79), signal).decision["action"] == "monitor"


def test_without_a_risk_signal_nothing_is_traded_however_strong_the_momentum() -> None:
    assert fused(momentum(1.0)).decision["action"] == "monitor"


@given(anything, st.none() | anything, anything)
def test_no_size_is_negative_or_above_what_is_recommended_or_allowed(
    recommended: float, limit: float | None, strength: float
) -> None:
    sizing = {} if limit is None else {"max_position_size": limit}
    merged = fused(momentum(strength), risk(recommended_size=recommended, **sizing))
    for size in (merged.decision["size"], merged.analysis["position_sizing"]["final_size"]):
        assert 0 <= size <= max(recommended, 0) + 1e-9
        assert limit is None or size <= max(limit, 0)


@given(st.sampled_from(sorted(STRATEGIES)), st.lists(anything, min_size=1, max_size=4))
def test_no_strategy_gives_a_negative_size_or_a_confidence_that_is_no_share(merge: str, sizes: list[float]) -> None:
    wants = {f"a{number}": {**BUY, "size": size, "confidence": size} for number, size in enumerate(sizes)}
    decision = decided(merge, said(**wants))
    assert decision["size"] >= 0
    assert 0 <= decision["confidence"] <= 1


@pytest.mark.parametrize("bad", ["much", True, [1]])
def test_a_number_that_is_none_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidInput, match="momentum_strength must be a number"):
        fused(momentum(bad), risk())


@given(anything, anything)
def test_confidence_is_a_share_whatever_agents_send(one: float, other: float) -> None:
    assert 0 <= combined_confidence(one, other) <= 1


@given(shares, shares, shares)
def test_confidence_grows_with_momentum_and_falls_with_risk(low: float, high: float, other: float) -> None:
    low, high = min(low, high), max(low, high)
    assert combined_confidence(low, other) <= combined_confidence(high, other)
    assert combined_confidence(other, low) >= combined_confidence(other, high)


@given(anything, anything)
def test_the_size_grows_with_the_strength_from_a_half_to_the_whole(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    assert 0.5 <= multiplier_of(low) <= multiplier_of(high) <= 1


@given(st.text(max_size=5) | st.none(), shares, st.sampled_from(["low", "medium", "high", "blocked"]))
def test_more_strength_never_makes_a_trade_less_likely(trend: str | None, strength: float, level: str) -> None:
    if action_of(trend, strength, level) == "trade":
        assert action_of(trend, min(strength + 0.1, 1), level) == "trade"
        assert trend in ("bullish", "bearish")


# --- the others ---


def said(**agents: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {agent: {"agent_name": agent, "analysis": analysis} for agent, analysis in agents.items()}


BUY = {"action": "trade", "direction": "buy", "size": 100, "confidence": 0.9}
SMALL = {"action": "trade", "direction": "buy", "size": 40, "confidence": 0.5}
WAIT = {"action": "monitor", "confidence": 0.4}


def decided(merge: Any, signals: dict[str, Any], expected: tuple[str, ...] = ()) -> Any:
    _, strategy = strategy_of(merge)
    answer: Any = strategy(signals, Question("c", expected, tuple(set(expected) - set(signals))))
    return merged_of(answer).decision


@pytest.mark.parametrize(
    ("merge", "signals", "decision"),
    [
        ("majority", said(a=BUY, b=SMALL, c=WAIT), ("trade", "buy", 40, 0.6666666667)),
        ("majority", said(a=BUY, b=WAIT), ("trade", "buy", 100, 0.5)),
        ("majority", said(a={}, b={}), ("monitor", None, 0, 0.0)),
        ("priority", said(a=WAIT, b=BUY), ("trade", "buy", 100, 0.9)),
        (Priority(["a"]), said(b=BUY, a=WAIT), ("monitor", None, 0, 0.4)),
        (Priority(["z"]), said(b=BUY, a=WAIT), ("monitor", None, 0, 0.4)),
        ("first", said(b=BUY, a=WAIT), ("trade", "buy", 100, 0.9)),
        ("first", {}, ("monitor", None, 0, 0.0)),
        ("all", said(a=BUY, b=SMALL), ("trade", "buy", 40, 0.5)),
        ("all", said(a=BUY, b=WAIT), ("review", None, 0, 0.4)),
        ("all", said(b=BUY), ("trade", "buy", 100, 0.9)),
        ("weighted_average", said(a=BUY, b=SMALL, c=WAIT), ("trade", "buy", 70.0, 0.6)),
        (WeightedAverage({"a": 3}), said(a=WAIT, b=BUY), ("monitor", None, 100.0, 0.525)),
    ],
)
def test_a_strategy_decides_by_what_the_agents_want(
    merge: Any, signals: dict[str, Any], decision: tuple[Any, ...]
) -> None:
    expected = ("b", "a") if merge == "priority" else ()
    assert tuple(decided(merge, signals, expected).values()) == decision


def test_all_is_no_agreement_while_somebody_is_missing() -> None:
    assert decided("all", said(a=BUY), ("a", "b"))["action"] == "review"


@given(st.lists(st.tuples(shares, st.floats(0.1, 10)), min_size=1, max_size=8))
def test_a_weighted_average_is_within_what_it_averages(values: list[tuple[float, float]]) -> None:
    signals = said(**{f"a{number}": {"confidence": value} for number, (value, _) in enumerate(values)})
    average = WeightedAverage({f"a{number}": weight for number, (_, weight) in enumerate(values)})
    confidence = average(signals, ASKED).decision["confidence"]
    assert min(value for value, _ in values) - 1e-9 <= confidence <= max(value for value, _ in values) + 1e-9


def test_every_strategy_that_ships_has_its_name() -> None:
    assert set(STRATEGIES) == {"momentum_risk_fusion", "weighted_average", "majority", "priority", "first", "all"}


def test_a_strategy_of_ones_own_is_a_callable_under_a_name() -> None:
    def cautious(signals: Any, question: Question) -> dict[str, Any]:
        return {"action": "monitor"}

    assert strategy_of(cautious) == ("cautious", cautious)
    assert strategy_of("mine", {"mine": cautious}) == ("mine", cautious)
    with pytest.raises(InvalidInput, match="no merge strategy 'mine'"):
        strategy_of("mine")
    with pytest.raises(InvalidInput, match="decision with an action"):
        merged_of({"size": 3})
