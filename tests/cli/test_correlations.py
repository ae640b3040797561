"""correlation: make, signal, show, list, decide."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.testing.servers.keeper import KeeperServer
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


def test_what_one_may_say_of_a_correlation_when_it_is_made(cli: Cli) -> None:
    cli("correlation", "create", "any", "--expect", "3", "--pattern", "fan_out")
    cli("correlation", "create", "quick", "--profile", "simple")
    any_ = cli("correlation", "show", "any", "--json").json
    assert (any_["metadata"]["expected_agents"], any_["missing_count"]) == ([], 3)
    assert any_["metadata"]["orchestration_pattern"] == "fan_out"
    cli("correlation", "signal", "quick", RISK, "--for", "risk", "--agent", "lead")
    told = cli("correlation", "show", "quick").out.splitlines()
    assert told[0].startswith("quick: collecting, 1 of 2 signals, until ")
    assert [row.split("\t")[:2] for row in told[1:]] == [["signal", "risk"], ["missing", "any 1"]]
    cli("correlation", "create", "odd", "--expect", "3", "--pattern", "star", code=2)


def test_what_is_ready_is_listed_as_ready_and_what_has_ended_says_when(cli: Cli) -> None:
    cli("correlation", "create", "c-1", "--expect", "risk")
    cli("correlation", "signal", "c-1", RISK, "--agent", "risk")
    assert [each["id"] for each in cli("correlation", "list", "--status", "ready", "--json").json] == ["c-1"]
    assert cli("correlation", "list").out.split("\t")[:2] == ["c-1", "ready"]
    cli("correlation", "decide", "c-1")
    ended = cli("correlation", "show", "c-1")
    assert ended.out.startswith("c-1: completed at ")
    assert ", kept until " in ended.out
    assert " until " not in ended.out.splitlines()[0].replace("kept until", "")


def test_a_refusal_speaks_of_what_one_can_do_here(cli: Cli) -> None:
    cli("correlation", "create", "c-1", "--expect", "risk")
    cli("correlation", "signal", "c-1", RISK, "--agent", "risk")
    for refused in (
        cli("correlation", "signal", "c-1", "{}", "--agent", "risk", code=3),
        cli("correlation", "create", "c-1", "--expect", "2", code=3),
        cli("correlation", "signal", "c-2", "{}", code=4),
    ):
        assert "=" not in refused.err, "that is how Python is called"
        assert "{" not in refused.err
    assert cli("correlation", "signal", "c-1", "{}", "--agent", "risk", "--replace").out == "accepted\n"


def test_to_publish_and_not_to_publish_is_a_contradiction(cli: Cli) -> None:
    cli("correlation", "create", "c-1", "--expect", "risk")
    cli("correlation", "decide", "c-1", "--publish", "--no-publish", code=2)
    assert "it is in the outbox" in cli("correlation", "decide", "c-1", "--publish").out


def test_an_agent_of_a_keeper_is_shown_what_it_may_see_and_told_what_is_for_orchestrators(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KeeperServer.temporary() as keeper:
        monkeypatch.setenv("HOLDFAST_STORE", f"holdfast://127.0.0.1:{keeper.port}")
        monkeypatch.setenv("HOLDFAST_TOKEN", keeper.admin)
        agent = cli("token", "create", "risk", "--space", "contoso").out.strip()
        lead = cli("token", "create", "lead", "--space", "contoso", "--role", "orchestrator").out.strip()
        monkeypatch.setenv("HOLDFAST_TOKEN", agent)
        for refused in (
            cli("correlation", "create", "c-1", "--expect", "risk", code=11),
            cli("correlation", "create", "c-1", "--profile", "simple", code=11),
        ):
            assert "'risk' may not make correlation 'c-1': that is for orchestrators" in refused.err
            assert "decisions/outbox" not in refused.err
        monkeypatch.setenv("HOLDFAST_TOKEN", lead)
        cli("correlation", "create", "c-1", "--expect", "risk", "--expect", "momentum")
        assert cli("correlation", "signal", "c-1", MOMENTUM, "--for", "momentum").out == "accepted\n"
        monkeypatch.setenv("HOLDFAST_TOKEN", agent)
        cli("correlation", "signal", "c-1", RISK, "--for", "momentum", code=11)
        assert cli("correlation", "signal", "c-1", RISK).out == "accepted\n"
        assert cli("correlation", "show", "c-1", "--wait", "1ms").out.startswith("c-1: ready")
        assert "may not decide correlation 'c-1'" in cli("correlation", "decide", "c-1", code=11).err
        monkeypatch.setenv("HOLDFAST_TOKEN", lead)
        assert cli("correlation", "decide", "c-1").out.startswith("decided: ")
        monkeypatch.setenv("HOLDFAST_TOKEN", agent)
        shown = cli("correlation", "show", "c-1", "--wait", "1s")
        assert shown.out.startswith("c-1: completed at ")
        assert "is for orchestrators" in shown.err
        told = cli("correlation", "show", "c-1", "--json")
        assert (told.json["status"], told.json["decision"]) == ("completed", None)
