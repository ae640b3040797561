"""schema: what there is, whether data is as it should be, and migrating what is older."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

ORDER_1 = {"type": "object", "required": ["qty"], "properties": {"qty": {"type": "integer"}}}
ORDER_2 = {"type": "object", "required": ["amount"]}
MODULE = f"""
ORDER_2 = {ORDER_2!r}

def to_2(order):
    if order["qty"] == 13:
        raise ValueError("not thirteen")
    return {{"amount": order["qty"]}}

async def register(schemas):
    await schemas.register("order", "2.0.0", ORDER_2, migrate_from={{"1.0.0": to_2}})

def only_the_step(schemas):
    schemas.add_step("order", "1.0.0", "2.0.0", to_2)

NOTHING = 1
"""


@pytest.fixture
def orders(cli: Cli, folder: Path) -> None:
    """Three orders of 1.0.0, and the code for 2.0.0 in the module of the test's own name."""
    cli("schema", "register", "order", "v1.0.0", "-", stdin=json.dumps(ORDER_1))
    for number in (1, 2, 3):
        cli("set", f"o{number}", json.dumps({"qty": number}), "--type", "order")


@pytest.fixture
def module(folder: Path, request: pytest.FixtureRequest) -> str:
    """A module that no other test has imported."""
    name = f"desk_{request.node.name}"
    (folder / f"{name}.py").write_text(textwrap.dedent(MODULE))
    return name


@pytest.mark.usefixtures("orders")
def test_schemas_are_listed_and_shown(cli: Cli) -> None:
    assert cli("schema", "register", "order", "2.0.0", json.dumps(ORDER_2), "--agent", "boss").out == "2.0.0\n"
    rows = [line.split("\t")[:3] for line in cli("schema", "list").out.splitlines()]
    assert rows == [["order", "1.0.0", "cli"], ["order", "2.0.0", "boss"]]
    assert cli("schema").out == cli("schema", "list").out
    assert [each["schema"] for each in cli("schema", "list", "order", "--json").json] == [ORDER_1, ORDER_2]
    assert cli("schema", "list", "trade", "--json").json == []
    assert cli("schema", "show", "order").json == ORDER_2
    assert cli("schema", "show", "order", "--version", "v1.0.0", "--json").json["registered_by"] == "cli"
    cli("schema", "show", "trade", code=4)
    cli("schema", "register", "order", "2.0.0", "{}", code=3)
    cli("schema", "register", "order", "3", "{}", code=2)
    cli("schema", "register", "order", "3.0.0", '{"type": "odd"}', code=2)


def test_what_comes_with_holdfast_needs_no_schema(cli: Cli) -> None:
    told = cli("schema", "register", "correlation_state", "--json").json
    assert told == {"type": "correlation_state", "version": "1.1.0"}
    assert len(cli("schema", "list", "--json").json) == 2
    cli("set", "c", "anything", "--type", "correlation_state", code=22)
    cli("schema", "register", "order", code=4)


@pytest.mark.usefixtures("orders")
def test_values_and_records_are_validated(cli: Cli) -> None:
    assert cli("schema", "validate", "order", '{"qty": 1}').out == ""
    refused = cli("schema", "validate", "order", "-", "--json", stdin='{"qty": "x"}', code=22)
    assert refused.error["error"] == "schema_violation"
    assert "/qty" in refused.error["message"]
    cli("schema", "validate", "trade", "{}", code=4)
    cli("schema", "validate", "order", "{}", "--records", code=2)
    assert cli("schema", "validate", "order", "--records").out == ""
    assert cli("schema", "validate", "order", "--records", "--json").json["found"] == {"1.0.0": 3}
    cli("set", "bad", '{"qty": "x"}', "--type", "order", code=22)
    assert cli("entry", "o1", "--json").json["schema_version"] == "1.0.0"


@pytest.mark.usefixtures("orders")
def test_a_dry_run_tries_also_what_the_module_registers(cli: Cli, module: str) -> None:
    before = cli("export").out
    told = cli("schema", "migrate", "order", "--dry-run", "--module", module)
    assert told.out == "1.0.0\t3\n3 would be migrated to 2.0.0\n"
    assert json.loads(cli("schema", "migrate", "order", "--dry-run", "--module", module, "--json").out)["migrated"] == 3
    assert [line for line in cli("export").out.splitlines() if "audit" not in line][1:-1] == [
        line for line in before.splitlines() if "audit" not in line
    ][1:-1]


@pytest.mark.usefixtures("orders")
def test_migrating_rewrites_and_tells_what_it_could_not(cli: Cli, module: str) -> None:
    cli("set", "o4", '{"qty": 13}', "--type", "order")
    told = cli("schema", "migrate", "order", "--module", module, code=23)
    assert told.out.splitlines()[:2] == ["1.0.0\t4", "3 migrated to 2.0.0"]
    assert told.out.splitlines()[2].startswith("o4\t1.0.0\t")
    assert "not thirteen" in told.out
    assert "1 records could not be migrated" in told.err
    assert cli("get", "o1").json == {"amount": 1}
    missing = cli("get", "o4", code=23)
    assert "knows no step" in missing.err
    assert cli("entry", "o4", "--json").json["value"] == {"qty": 13}
    again = cli("schema", "migrate", "order", "--module", f"{module}:only_the_step", "--json", code=23)
    assert (again.json["migrated"], again.json["failures"][0]["reason"]) == (0, "step_raised")


@pytest.mark.usefixtures("orders")
def test_a_module_that_cannot_be_used_is_told(cli: Cli, module: str) -> None:
    for name in ("no_such_module_here", f"{module}:absent", f"{module}:NOTHING", ":x", ""):
        told = cli("schema", "migrate", "order", "--module", name, code=2)
        assert "Traceback" not in told.err
    cli("schema", "migrate", "trade", code=4)
    cli("schema", "register", "order", "2.0.0", json.dumps(ORDER_2))
    assert "missing_step" in cli("schema", "migrate", "order", "--json", code=23).out


def test_records_from_before_the_schema_are_taken_as_a_version(cli: Cli) -> None:
    cli("set", "early", '{"qty": 1}', "--type", "order")
    cli("schema", "register", "order", "1.0.0", json.dumps(ORDER_1))
    assert cli("schema", "migrate", "order").out == "unversioned\t1\n0 migrated to 1.0.0\n"
    assert cli("schema", "migrate", "order", "--unversioned", "1.0.0").out == "unversioned\t1\n1 migrated to 1.0.0\n"
    assert cli("entry", "early", "--json").json["schema_version"] == "1.0.0"
