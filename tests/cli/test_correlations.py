"""correlation: make, signal, show, list, decide."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from tests.cli.conftest import Cli

MOMENTUM = '{"trend_direction": "bullish", "momentum_strength": 0.75, "confidence": 0.82}'
RISK = '{"risk_level": "medium", "overall_score": 0.65, "position_sizing": {"recommended_size": 10000}}'


def test_a_correlation_from_the_command_line(cli: Cli) -> None:
    cli("correlation", "create", "c-1", "--expect", "momentum", "--expect", "risk", "--timeout", "5m")
    signal = ("correlation", "signal", "c-1")
    assert cli(*signal, MOMENTUM, "--agent", "momentum", "--agent-version", "1.2.1").out == "accepted\n"
    assert cli(*signal, MOMENTUM, "--agent", "momentum", "--agent-version", "1.2.1").out == "duplicate\n"
    told = cli("correlation", "show", "c-1", "--json").json
    assert (told["status"], told["missing"], told["decision"]) == ("collecting", ["risk"], None)
    assert cli(*signal, "--agent", "risk", "--json", stdin=RISK).json["outcome"] == "accepted"
    assert cli("correlation", "show", "c-1").out.splitlines()[0].startswith("c-1: ready")
    decided = cli("correlation", "decide", "c-1", "--merge", "momentum_risk_fusion")
    assert decided.out == "decided: trade buy 8750, confidence 0.632\n"
    assert cli(*signal, '{"risk_level": "high"}', "--agent", "risk").out == "late\n"
    told = cli("correlation", "show", "c-1", "--json").json
    assert (told["status"], list(told["late"]), told["decision"]["size"]) == ("completed", ["risk"], 8750)
    assert [row.split("\t")[:2] for row in cli("correlation", "list").out.splitlines()] == [["c-1", "completed"]]
    [listed] = cli("correlation", "list", "--status", "completed", "--json").json
    assert (listed["id"], listed["expected_agents"]) == ("c-1", ["momentum", "risk"])
    assert cli("correlation", "list", "--status", "failed", "--json").json == []


def test_what_is_wrong_ends_with_the_right_code(cli: Cli) -> None:
    cli("correlation", "show", "c-1", code=4)
    cli("correlation", "signal", "c-1", RISK, code=4)
    cli("correlation", "create", "c-1", code=2)
    cli("correlation", "create", "c-1", "--profile", "simple")
    cli("correlation", "create", "c-1", "--expect", "risk", code=3)
    cli("correlation", "signal", "c-1", "7", code=2)
    cli("correlation", "decide", "c-1", "--merge", "odd", code=2)
    assert cli("correlation", "decide", "c-1").out == "decided: timeout (signals_missing)\n"
    cli("correlation", "decide", "c-1", code=3)
    cli("correlation", "list", "--status", "odd", code=2)


def test_correlations_without_await(folder: Path) -> None:
    with holdfast.blocking.open(str(folder / "b.db")) as store:
        desk, risk = store.space("default", agent="orchestrator"), store.space("default", agent="risk")
        correlation = desk.correlation("c-1", expect=["risk"])
        correlation.context.publish({"market_regime": "risk-on"})
        assert risk.correlation("c-1").context.read()["market_regime"] == "risk-on"
        assert risk.correlation("c-1").signal({"analysis": {"action": "hold"}}).outcome == "accepted"
        assert correlation.id == "c-1"
        published: list[holdfast.Decision] = []
        orchestrator = desk.orchestrator(merge="first", on_decision=published.append)
        decision = orchestrator.decide("c-1")
        assert (decision.action, published, orchestrator.decided) == ("hold", [decision], 1)
        assert correlation.decision() == decision
        assert [state.status for state in desk.correlations.list()] == ["completed"]
        with pytest.raises(holdfast.NotFound):
            risk.correlation("c-2")
