"""doc: what is in a document, who wrote it, what contradicts what, and settling that."""

from __future__ import annotations

from pathlib import Path

import holdfast
from tests.cli.conftest import Cli

NAME = "research/MSFT"


def contradiction(cli: Cli, *confidence: str) -> str:
    one, two = confidence or ("0.9", "0.8")
    say = ("doc", "contribute", NAME)
    cli(*say, '{"symbol":"MSFT","recommendation":"increase"}', "--confidence", one, "--agent", "market-analysis")
    cli(*say, '{"symbol":"MSFT","recommendation":"reduce"}', "--confidence", two, "--agent", "risk")
    [found] = cli("doc", "conflicts", NAME, "--json").json
    return str(found["id"])


def test_a_document_is_shown_with_its_contributions_and_what_is_stale(cli: Cli) -> None:
    etag = cli("doc", "replace", NAME, '{"round":1}', "--agent", "lead").out.strip()
    first = cli(
        "doc", "contribute", NAME, '{"outlook":"growth"}', "--confidence", "0.8", "--agent", "market"
    ).out.strip()
    cli("doc", "contribute", NAME, "elevated", "--agent", "risk")
    second = cli("doc", "contribute", NAME, "--agent", "market", stdin='{"outlook":"decline"}').out.strip()
    told = cli("doc", "show", NAME, "--json").json
    assert (told["etag"], told["body"]) == (int(etag), {"round": 1})
    assert told["contributions"]["risk/1"]["inputs"] == {"body": int(etag), "market/1": int(first)}
    assert told["stale"] == [{"section": "risk/1", "input": "market/1", "read": int(first), "present": int(second)}]
    shown = cli("doc", "show", NAME).out.splitlines()
    assert shown[:2] == [f"etag {etag}", 'body {"round":1}']
    assert shown[3].split("\t")[0] == "risk/1"
    assert shown[3].split("\t")[4:] == ["stale", "elevated"]
    assert shown[4] == f"stale: risk/1 read market/1 at {first}; it is at version {second}"
    assert [row.split("\t")[:3] for row in cli("doc").out.splitlines()] == [[NAME, etag, "lead"]]
    assert [each["name"] for each in cli("doc", "--prefix", "research/", "--json").json] == [NAME]
    assert cli("doc", "--prefix", "other", "--json").json == []


def test_instances_of_an_agent_have_a_contribution_each(cli: Cli) -> None:
    for instance in ("1", "2"):
        cli("doc", "contribute", NAME, instance, "--agent", "market", "--instance", instance)
    told = cli("doc", "show", NAME, "--json").json["contributions"]
    assert {section: each["data"] for section, each in told.items()} == {"market/1": 1, "market/2": 2}


def test_a_document_that_is_not_there_is_told_and_ends_with_4(cli: Cli) -> None:
    etag = cli("doc", "replace", NAME, '{"n":1}').out.strip()
    refused = cli("doc", "show", "research/MSTF", code=4)
    assert refused.out == ""
    assert "there is no document 'research/MSTF' in space 'default'" in refused.err
    assert cli("doc", "show", "research/MSTF", "--json", code=4).error["error"] == "not_found"
    cli("doc", "contribute", "notes", "1")
    assert cli("doc", "show", "notes", "--json").json["etag"] == 0
    assert cli("doc", "show", NAME, "--json").json["etag"] == int(etag)
    assert [each["name"] for each in cli("doc", "--json").json] == ["notes", NAME]


def test_history_conflicts_and_diff_of_no_document_end_with_4(cli: Cli) -> None:
    cli("doc", "replace", NAME, '{"n":1}')
    for words in (("history", "MSTF"), ("conflicts", "MSTF"), ("diff", "MSTF", "0")):
        refused = cli("doc", *words, code=4)
        assert refused.out == ""
        assert "there is no document 'MSTF'" in refused.err
    assert cli("doc", "conflicts", NAME, "--json").json == []
    assert cli("doc", "diff", NAME, "99").out == ""


def test_the_history_of_a_deleted_document_is_shown(cli: Cli) -> None:
    with holdfast.blocking.open("team.db", background=False) as store:
        document = store.space("default", agent="lead").document(NAME)
        document.replace({"n": 1}, etag=0)
        document.delete()
    told = cli("--store", "team.db", "doc", "history", NAME, "--json").json_lines
    assert [each["kind"] for each in told] == ["deleted", "body"]
    cli("--store", "team.db", "doc", "conflicts", NAME, code=4)
    assert cli("--store", "team.db", "doc", "diff", NAME, "99").out == ""


def test_a_document_that_is_listed_is_shown(cli: Cli) -> None:
    with holdfast.blocking.open("team.db", background=False) as store:
        space = store.space("default", agent="lead")
        space.document("deleted").replace({"n": 1}, etag=0)
        space.document("deleted").delete()
        space.document("declared").declare({"tags": "union"})
    assert [each["name"] for each in cli("--store", "team.db", "doc", "--json").json] == ["declared"]
    assert cli("--store", "team.db", "doc", "show", "declared", "--json").json["reducers"] == {"tags": "union"}
    cli("--store", "team.db", "doc", "show", "deleted", code=4)


def test_a_body_is_replaced_only_at_its_etag(cli: Cli) -> None:
    etag = cli("doc", "replace", NAME, '{"n":1}', "--json").json["etag"]
    refused = cli("doc", "replace", NAME, '{"n":2}', "--json", code=3)
    assert (refused.error["error"], refused.error["version"]) == ("conflict", etag)
    cli("doc", "replace", NAME, '{"n":2}', "--etag", str(etag))
    assert cli("doc", "show", NAME, "--json").json["body"] == {"n": 2}


def test_history_and_diff_tell_what_changed(cli: Cli) -> None:
    a = cli("doc", "replace", NAME, '{"n":1}', "--agent", "lead").out.strip()
    cli("doc", "contribute", NAME, "7", "--agent", "market")
    b = cli("doc", "replace", NAME, '{"n":2}', "--etag", a, "--agent", "lead").out.strip()
    events = cli("doc", "history", NAME, "--json").json_lines
    assert [(each["kind"], each["by"]) for each in events] == [
        ("body", "lead"),
        ("contributed", "market"),
        ("body", "lead"),
    ]
    assert events[1]["inputs"] == {"body": int(a)}
    rows = [row.split("\t") for row in cli("doc", "history", NAME, "-n", "2").out.splitlines()]
    assert [tuple(row[2:]) for row in rows] == [
        ("lead", "body", "", "~ n: 1 → 2", ""), ("market", "contributed", "market/1", "7", f"body {a}"),
    ]  # fmt: skip
    assert cli("doc", "history", NAME, "--before", events[1]["id"], "--json").json_lines == events[2:]
    assert cli("doc", "diff", NAME, a, b).out.splitlines() == ["~ body.n: 1 → 2", "+ contributions.market/1: 7"]
    assert cli("doc", "diff", NAME, b).out == ""
    assert cli("doc", "diff", NAME, a, b, "--json").json_lines[0] == {"op": "~", "path": "body.n", "old": 1, "new": 2}
    cli("doc", "diff", NAME, b, a, code=2)


def test_a_conflict_is_found_and_settled_by_priority(cli: Cli) -> None:
    id = contradiction(cli)
    [row] = cli("doc", "conflicts", NAME).out.splitlines()
    assert row.split("\t")[:4] == [id, "output-inconsistency", "opposite-recommendation", "MSFT"]
    assert cli("doc", "resolve", NAME, id, "--agent", "lead").out == "risk/1: risk/1 ranks highest, with 75\n"
    assert cli("doc", "conflicts", NAME, "--json").json == []
    [settled] = cli("doc", "resolutions", NAME, "--json").json
    assert (settled["winner"], settled["method"], settled["by"]) == ("risk/1", "priority", "lead")
    assert set(settled["outputs"]) == {"market-analysis/1", "risk/1"}
    assert cli("doc", "resolutions", NAME).out.split("\t")[:4] == [id, "risk/1", "priority", "lead"]


def test_what_waits_for_a_person_is_decided_by_one_who_says_why(cli: Cli) -> None:
    id = contradiction(cli, "0.3", "0.2")
    assert cli("doc", "resolve", NAME, id, "--by", "confidence").out.startswith("waits for a person")
    [waiting] = cli("doc", "escalations", "--json").json
    assert (waiting["document"], waiting["conflict"]["id"], waiting["winner"]) == (NAME, id, None)
    assert cli("doc", "escalations").out.split("\t")[:2] == [NAME, id]
    assert "waits for a person" in cli("doc", "conflicts", NAME).out
    refused = cli("doc", "resolve", NAME, id, "--winner", "risk/1", code=2)
    assert "justification" in refused.err
    cli("doc", "resolve", NAME, id, "--why", "because", code=2)
    cli("doc", "resolve", NAME, id, "--winner", "risk/1", "--by", "priority", "--why", "because", code=2)
    cli("doc", "resolve", NAME, id, "--winner", "risk/1", "--why", "the regulator called", "--agent", "alice")
    [settled] = cli("doc", "resolutions", NAME, "--json").json
    assert (settled["by"], settled["justification"]) == ("alice", "the regulator called")
    assert cli("doc", "escalations", "--json").json == []


def test_an_override_needs_a_reason_and_is_shown_as_one(cli: Cli) -> None:
    id = contradiction(cli)
    first = cli("doc", "resolve", NAME, id, "--json").json
    assert first["overrode"] is None
    again = ("doc", "resolve", NAME, id, "--by", "confidence")
    assert "needs a justification" in cli(*again, code=2).err
    words = cli(*again, "--why", "the ranks were a sample").out
    [settled] = cli("doc", "resolutions", NAME, "--json").json
    assert (settled["winner"], settled["justification"]) == ("market-analysis/1", "the ranks were a sample")
    assert words.endswith(f"; overrode the decision of version {settled['overrode']}\n")
    assert cli("doc", "resolutions", NAME).out.rstrip().split("\t")[5:] == [
        str(settled["overrode"]),
        settled["justification"],
    ]


def test_approvals_count_for_a_consensus(cli: Cli) -> None:
    id = contradiction(cli)
    votes = [word for name in ("ann", "bob", "eve") for word in ("--approve", f"{name}=market-analysis/1")]
    settled = cli("doc", "resolve", NAME, id, "--by", "consensus", "--quorum", "3/3", *votes, "--json").json
    assert (settled["winner"], len(settled["approvals"])) == ("market-analysis/1", 3)
    cli("doc", "resolve", NAME, id, "--approve", "ann", code=2)
    cli("doc", "resolve", NAME, "0123456789abcdef", code=4)
    cli("doc", "resolve", NAME, id, "--by", "dice", code=2)


def test_wrong_words_are_told(cli: Cli, folder: Path) -> None:
    cli("doc", "show", NAME, code=4)  # no store yet, and looking makes none
    assert not (folder / ".holdfast").exists()
    cli("doc", "contribute", NAME, "1", "--confidence", "high", code=2)
    cli("doc", "contribute", NAME, "1", "--confidence", "2", code=2)
    cli("doc", "replace", NAME, "1", "--etag", "x", code=2)
    cli("doc", "-n", "0", code=2)


def test_what_agents_wrote_cannot_move_the_cursor(cli: Cli, folder: Path) -> None:
    with holdfast.blocking.open(str(folder / "b.db")) as store:
        store.space("default", agent="a").document("d\x1b[2J").contribute({"x": "\x1b[2J"})
    for words in (("show", "d\x1b[2J"), ("history", "d\x1b[2J"), ("diff", "d\x1b[2J", "0")):
        assert "\x1b" not in cli("doc", *words, "--store", str(folder / "b.db")).out
