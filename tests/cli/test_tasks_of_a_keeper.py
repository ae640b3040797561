"""Tasks through a keeper: agents submit and see, an orchestrator's manager runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.testing.servers.keeper import KeeperServer
from tests.cli.conftest import Cli, gone


def test_an_agent_runs_tasks_under_the_manager_of_an_orchestrator_and_is_none_itself(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    with KeeperServer.temporary() as keeper:
        monkeypatch.setenv("HOLDFAST_STORE", f"holdfast://127.0.0.1:{keeper.port}")
        monkeypatch.setenv("HOLDFAST_TOKEN", keeper.admin)
        agent = cli("token", "create", "market", "--space", "contoso").out.strip()
        lead = cli("token", "create", "lead", "--space", "contoso", "--role", "orchestrator").out.strip()

        monkeypatch.setenv("HOLDFAST_TOKEN", agent)
        waiting = cli("run", "--detach", "--", "echo", "hello")
        assert "no manager serves this space" in waiting.err
        assert "needs an orchestrator's" in cli("manager", "start", code=11).err

        monkeypatch.setenv("HOLDFAST_TOKEN", lead)
        started = cli("manager", "start", "--json").json
        try:
            monkeypatch.setenv("HOLDFAST_TOKEN", agent)
            assert cli("result", waiting.out.strip()).out == "hello\n"
            ended = cli("run", "--", "sh", "-c", "cat; echo err >&2; exit 4", stdin="piped\n", code=4)
            assert (ended.out, ended.err) == ("piped\n", "err\n")
            cli("manager", "stop", code=11)
            assert [each["tid"] for each in cli("manager", "list", "--json").json] == [started["tid"]]
        finally:
            monkeypatch.setenv("HOLDFAST_TOKEN", lead)
            cli("manager", "stop", "--kill")
            gone(started["pid"])
