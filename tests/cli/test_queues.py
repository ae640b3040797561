"""queue and dlq: put, look, reserve, settle; what failed for good."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import holdfast
from holdfast import ManualClock
from holdfast.clock import SystemClock
from tests.cli.conftest import Cli

STRANGE = "9" * 19


def depths(cli: Cli, name: str) -> tuple[int, ...]:
    told = cli("queue", "stats", name, "--json").json
    return tuple(told[state] for state in ("ready", "delayed", "reserved", "dead"))


def test_a_message_is_put_reserved_and_acknowledged_with_its_result_by_separate_commands(cli: Cli) -> None:
    low = cli("queue", "put", "orders", '{"id": 1}').out.strip()
    high = cli("queue", "put", "orders", "text", "--priority", "5").out.strip()
    assert depths(cli, "orders") == (2, 0, 0, 0)
    assert cli("queue", "reserve", "orders").out == f'{high}\t"text"\n'
    told = cli("queue", "reserve", "orders", "--lease", "1m", "--json").json
    assert (told["id"], told["body"], told["attempts"]) == (low, {"id": 1}, 0)
    assert depths(cli, "orders") == (0, 0, 2, 0)
    assert [row.split("\t")[1] for row in cli("queue", "peek", "orders.reserved").out.splitlines()] == ["reserved"] * 2
    assert cli("queue", "ack", "orders", high).out == f"{high}\n"
    assert cli("queue", "ack", "orders", low, "--result", '"shipped"', "--to", "done", "--json").json == {"id": low}
    assert (depths(cli, "orders"), depths(cli, "done")) == ((0, 0, 0, 0), (1, 0, 0, 0))
    assert cli("queue", "peek", "done", "--json").json[0]["body"] == "shipped"
    assert cli("queue", "peek", "done").out.endswith('\t"shipped"\n'), "JSON, and only once"
    told = cli("queue", "list", "--json").json
    assert [each["name"] for each in told] == ["done", "orders"]
    assert told[0]["has_pending"] is True
    assert cli("queue", "list", "--pattern", "d*").out.startswith("done\t1\t0\t0\t0\t2")
    assert cli("queue").out.splitlines()[1].startswith("orders\t0\t")


def test_many_messages_are_put_from_a_pipe_and_one_under_a_key_once(cli: Cli) -> None:
    assert len(cli("queue", "put", "numbers", "-", stdin="1\n2\n3\n").out.split()) == 3
    assert len(cli("queue", "put", "numbers", stdin='{"a": [1]}').out.split()) == 1
    assert len(cli("queue", "put", "numbers", "-4", "five", '"6"', "--text").out.split()) == 3
    bodies = [each["body"] for each in cli("queue", "peek", "numbers", "--json").json]
    assert bodies == [1, 2, 3, {"a": [1]}, "-4", "five", '"6"']
    first = cli("queue", "put", "numbers", "x", "--dedup", "once").out
    assert cli("queue", "put", "numbers", "x", "--dedup", "once").out == first
    cli("queue", "put", "numbers", "later", "--delay", "1h")
    assert depths(cli, "numbers") == (8, 1, 0, 0)
    cli("queue", "put", "numbers", "x", "y", "--dedup", "once", code=2)


def test_a_message_that_always_fails_ends_as_a_dead_letter_with_every_reason_and_nothing_is_lost(
    cli: Cli, folder: Path
) -> None:
    id = cli("queue", "put", "orders", "poison").out.strip()
    cli("queue", "reserve", "orders")
    cli("queue", "fail", "orders", id, "--reason", "out of stock", "--attempts", "2")
    assert depths(cli, "orders") == (0, 1, 0, 0)

    async def fail_again() -> None:
        clock = ManualClock(SystemClock().now_ms() + 3_600_000)  # when it is due again
        async with holdfast.open(str(folder / ".holdfast" / "store.db"), clock=clock, background=False) as store:
            q = store.space("default", agent="cli").queue("orders", on_error=holdfast.Requeue(attempts=2))
            with pytest.raises(ValueError, match="again"):
                async with q.reserve():
                    raise ValueError("again")

    asyncio.run(fail_again())
    assert depths(cli, "orders") == (0, 0, 0, 1)
    [letter] = cli("dlq", "list", "orders", "--json").json
    assert (letter["id"], letter["body"], letter["attempts"]) == (id, "poison", 2)
    assert [why["reason"] for why in letter["reasons"]] == ["out of stock", "ValueError: again"]
    assert cli("dlq").out == "orders\t1\n"
    assert cli("dlq", "--json").json == [{"name": "orders", "dead": 1}]
    assert "ValueError: again" in cli("dlq", "list", "orders").out
    assert cli("dlq", "retry", "orders", STRANGE, code=4).err.endswith("nothing was changed\n")
    assert cli("dlq", "retry", "orders").out == "1\n"
    assert cli("queue", "peek", "orders", "--json").json[0]["attempts"] == 2
    cli("queue", "reserve", "orders")
    cli("queue", "fail", "orders", id)
    assert cli("dlq", "retry", "orders", id, "--anew", "--json").json == {"retried": 1}
    assert cli("queue", "peek", "orders", "--json").json[0]["attempts"] == 0
    cli("queue", "reserve", "orders")
    cli("queue", "fail", "orders", id)
    cli("dlq", "clear", "orders", code=2)
    assert depths(cli, "orders") == (0, 0, 0, 1)
    assert cli("dlq", "clear", "orders", "--all").out == "1\n"
    assert depths(cli, "orders") == (0, 0, 0, 0)


def test_messages_are_released_moved_and_deleted(cli: Cli) -> None:
    first, second, third = cli("queue", "put", "orders", "1", "2", "3").out.split()
    cli("queue", "reserve", "orders")
    cli("queue", "delete", "orders", first, code=4)
    assert cli("queue", "release", "orders", first).out == f"{first}\n"
    assert cli("queue", "move", "orders", first, "--to", "slow").out == f"{first}\n"
    assert cli("queue", "delete", "orders", second).out == f"{second}\n"
    assert [each["id"] for each in cli("queue", "peek", "orders", "--json").json] == [third]
    assert [each["id"] for each in cli("queue", "peek", "slow", "--json").json] == [first]
    cli("queue", "move", "orders", third, code=2)
    cli("queue", "reserve", "orders")
    cli("queue", "release", "orders", third, "--delay", "1h")
    assert depths(cli, "orders") == (0, 1, 0, 0)


def test_watch_tells_where_each_message_goes_and_resumes(cli: Cli) -> None:
    id = cli("queue", "put", "orders", "1").out.strip()
    cli("queue", "reserve", "orders")
    cli("queue", "ack", "orders", id)
    told = cli("queue", "watch", "orders", "--from-start", "-n", "3", "--json").json_lines
    assert [(each["id"], each["state"]) for each in told] == [(id, "ready"), (id, "reserved"), (id, "done")]
    rest = cli("queue", "watch", "orders", "--cursor", told[1]["cursor"], "-n", "1").out
    assert rest.split()[1:] == ["cli", "done", id]
    cli("queue", "watch", "orders", "--cursor", told[1]["cursor"], "--from-start", code=2)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["queue", "reserve", "orders"], 24, "nothing came to queue 'orders' in time"),
        (["queue", "ack", "orders", STRANGE], 4, "is not reserved"),
        (["queue", "ack", "orders", "123"], 2, "has 19 digits"),
        (["queue", "ack", "orders", STRANGE, "--to", "done"], 2, "belong together"),
        (["queue", "put", "orders", "1", "--priority", "9999"], 2, "from -500 to 499"),
        (["queue", "put", "orders", "1", "--priority", "high"], 2, "not a whole number"),
        (["queue", "put", "orders", "1", "--delay", "soon"], 2, "delay"),
        (["queue", "put", "orders.reserved", "1"], 2, "shows what consumers of 'orders' have"),
        (["queue", "put", ""], 2, "must not be empty"),
        (["queue", "peek", "orders", "-n", "0"], 2, "between 1 and"),
        (["queue", "delete", "orders", STRANGE], 4, "has no message"),
        (["queue", "fail", "orders", STRANGE], 4, "is not reserved"),
        (["queue", "fail", "orders", STRANGE, "--attempts", "0"], 2, "attempts must be"),
        (["dlq", "clear", "orders", STRANGE], 4, "has no dead letter"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_bad_input_is_told_with_its_exit_code_and_changes_nothing(
    cli: Cli, words: list[str], code: int, said: str
) -> None:
    cli("queue", "put", "other", "1")
    outcome = cli(*words, stdin="" if words[-1] == "" else None, code=code)
    assert said in outcome.err
    assert outcome.out == ""
    assert [each["name"] for each in cli("queue", "list", "--json").json] == ["other"]
    assert cli(*words, "--json", stdin="", code=code).error["message"]


def test_without_a_store_nothing_is_made_by_looking(cli: Cli, folder: Path) -> None:
    for words in (["queue"], ["queue", "peek", "orders"], ["queue", "reserve", "orders"], ["dlq"]):
        cli(*words, code=4)
    assert not (folder / ".holdfast").exists()
