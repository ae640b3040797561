"""How a keeper starts: `holdfast serve` in an empty folder, a second time, and where it cannot."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import holdfast
from holdfast.clock import SystemClock
from holdfast.identity import TOKEN
from holdfast.layers.tokens import Tokens
from holdfast.testing.servers.keeper import KeeperServer
from tests.server.live import DEADLINE_S, clean_environment, command, run

BINARY, HTTP = 7420, 7421


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """`holdfast serve --json` in a folder: its process, and what it says when it is ready. It is stopped at the end."""
    with (folder / "stderr").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "serve", "--json", *options],
            cwd=folder,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    try:
        yield process.pid, json.loads(process.stdout.readline() or "{}")
    finally:
        process.terminate()
        rest, _ = process.communicate(timeout=DEADLINE_S)
        assert (rest, process.returncode) == ("", 0)


@pytest.fixture
def default_ports() -> None:
    """They must be free: a keeper of somebody else is not ours to stop."""
    for port in (BINARY, HTTP):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                pytest.skip(f"port {port} is in use")


def listening(pid: int) -> set[str]:
    """Addresses and ports, in the system's hexadecimal, at which a process listens."""
    inodes = {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1])
    return found


async def tokens_of(path: Path) -> list[str]:
    async with holdfast.open(str(path)) as store:
        return [token.name for token in await Tokens(store.engine, SystemClock(), "test").list()]


async def test_without_settings_it_serves_this_folder_to_this_machine_and_shows_its_token_once(
    default_ports: None, tmp_path: Path
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    with serving(home) as (pid, ready):
        token = ready["admin_token"]
        assert TOKEN.fullmatch(token)
        assert ready["store"] == f"resident:{home}/.holdfast/store.db"
        assert listening(pid) == {f"0100007F:{BINARY:04X}", f"0100007F:{HTTP:04X}"}
        async with holdfast.open(f"holdfast://127.0.0.1:{BINARY}", token=token) as store:
            await store.space("contoso").records.set("k", 1)

        busy = run("serve", folder=elsewhere)
        assert busy.code == holdfast.Unavailable.exit_code
        assert busy.out == ""
        assert f"cannot listen on 127.0.0.1:{BINARY}" in busy.err
        assert "another one running" in busy.err
        assert not await tokens_of(elsewhere / ".holdfast" / "store.db"), "nobody has seen it: the next start shows one"

        taken = KeeperServer(tmp_path / "taken", f"resident:{home}/.holdfast/store.db")
        owned = run("serve", "--config", str(taken.config))
        assert owned.code == holdfast.Unavailable.exit_code
        assert f"is owned by process {pid}" in owned.err

    with serving(home) as (_, again):
        assert "admin_token" not in again
        async with holdfast.open(f"holdfast://127.0.0.1:{BINARY}", token=token) as store:
            assert await store.space("contoso").records.get("k") == 1

    secret = TOKEN.fullmatch(token)[2].encode()  # type: ignore[index]
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        assert secret not in path.read_bytes(), path
    logged = (home / "stderr").read_text().splitlines()
    assert [line for line in logged if " info " not in line] == []


async def test_who_comes_to_the_wrong_port_is_told_the_right_one(default_ports: None, tmp_path: Path) -> None:
    with serving(tmp_path) as (_, ready):
        token = ready["admin_token"]
        with pytest.raises(holdfast.IncompatibleStore, match="it speaks HTTP"):
            await holdfast.open(f"holdfast://127.0.0.1:{HTTP}", token=token)
        with pytest.raises(holdfast.Unavailable, match="does not speak TLS"):
            await holdfast.open(f"holdfasts://127.0.0.1:{BINARY}", token=token)
        with pytest.raises(holdfast.InvalidInput, match="reached by holdfast://"):
            await holdfast.open(f"http://127.0.0.1:{HTTP}", token=token)


def test_what_it_shows_to_a_person_names_the_ports_and_the_token(tmp_path: Path) -> None:
    keeper = KeeperServer(tmp_path)
    with (tmp_path / "out").open("w+b") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "serve", "--config", str(keeper.config)],
            env=clean_environment(),
            stdout=out,
            stderr=out,
        )
        try:
            while "HOLDFAST_TOKEN" not in (text := (tmp_path / "out").read_text()):
                assert process.poll() is None, text
        finally:
            process.terminate()
            process.wait(DEADLINE_S)
    assert keeper.url in text
    assert keeper.http in text
    assert "hf_" in text
    assert process.returncode == 0


def test_without_its_extra_it_says_what_to_install(tmp_path: Path) -> None:
    module = "structlog"
    stub = tmp_path / "missing" / f"{module}.py"
    stub.parent.mkdir()
    stub.write_text(f"raise ModuleNotFoundError(\"No module named '{module}'\", name={module!r})\n")
    path = os.pathsep.join([str(stub.parent), os.environ.get("PYTHONPATH", "")])
    done = run("serve", folder=tmp_path, PYTHONPATH=path)
    assert done.code == holdfast.InvalidInput.exit_code
    assert f"serving needs {module}: pip install 'holdfast[server]'" in done.err
    assert not (tmp_path / ".holdfast").exists()


def test_wrong_settings_are_told_with_their_place_and_nothing_is_opened(tmp_path: Path) -> None:
    settings = {
        "listen": {"binary": "0.0.0.0:7420"},
        "policies": {"access_control": [{"agent_pattern": "*", "allow": ["Fly"]}]},
        "sotre": 1,
    }
    file = tmp_path / "keeper.yaml"
    file.write_text(json.dumps(settings, indent=1))
    done = run("serve", "--config", str(file), folder=tmp_path)
    assert done.code == holdfast.InvalidInput.exit_code
    assert f"{file}:10:" in done.err
    assert "'Fly' is no verb" in done.err
    assert "sotre" in done.err
    assert list(tmp_path.glob("*.db")) == []


@pytest.mark.parametrize("given", ["--store", "HOLDFAST_STORE"])
def test_it_cannot_serve_the_store_of_another_keeper_and_says_what_it_needs(tmp_path: Path, given: str) -> None:
    url = "holdfast://127.0.0.1:7420"
    option, setting = (["--store", url], {}) if given == "--store" else ([], {"HOLDFAST_STORE": url})
    done = run(*option, "serve", folder=tmp_path, HOLDFAST_TOKEN="hf_x", **setting)
    assert done.code == holdfast.InvalidInput.exit_code
    assert f"{given} names a keeper, {url}, and serving needs a store of its own" in done.err
    assert "HOLDFAST_TOKEN" not in done.err


DOCUMENTED = (Path(__file__).parents[2] / "docs/reference/keeper-config.md").read_text().split("```yaml\n")[1]
"""The page's own example, up to the end of its block."""


@pytest.mark.parametrize(
    ("settings", "store", "made"),
    [
        ("{}", ".holdfast/store.db", [".holdfast"]),
        (DOCUMENTED.split("```")[0], "data/team.db", ["data", "run"]),
        ("persistence: {wal_path: a/b/team.db}", "a/b/team.db", ["a", "a/b"]),
        ("store: here/team.db", "here/team.db", ["here"]),
    ],
)
def test_the_folders_its_settings_name_are_made_for_its_user_alone(
    tmp_path: Path, settings: str, store: str, made: list[str]
) -> None:
    file = tmp_path / "keeper.yaml"
    text = re.sub(r"127.0.0.1:742\d", "127.0.0.1:0", settings)
    if "listen" not in text:
        text = json.dumps({**yaml.safe_load(text), "listen": {"binary": "127.0.0.1:0", "http": "127.0.0.1:0"}})
    file.write_text(text)
    with serving(tmp_path, "--config", str(file)) as (_, ready):
        assert ready["store"].endswith(f":{tmp_path}/{store}")
        assert (tmp_path / store).is_file()
        assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in made] == [0o700] * len(made)


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ("log: {level: info}\nstore: file/team.db\n", "2:8: store"),
        ("state_keeper_config:\n  persistence: {wal_path: file/team.db}\n", "2:27: persistence.wal_path"),
        ("listen: {unix: file/keeper.sock}\n", "1:16: listen.unix"),
    ],
)
def test_a_folder_that_cannot_be_made_is_told_with_its_place(tmp_path: Path, settings: str, place: str) -> None:
    (tmp_path / "file").write_text("no folder")
    file = tmp_path / "keeper.yaml"
    file.write_text(settings)
    done = run("serve", "--config", str(file), folder=tmp_path)
    assert done.code == holdfast.InvalidInput.exit_code
    assert f"{file}:{place}: the folder {tmp_path}/file cannot be made" in done.err


def test_a_keeper_that_is_not_there_and_a_token_that_is_missing_or_wrong_are_told(tmp_path: Path) -> None:
    gone = run("spaces", folder=tmp_path, HOLDFAST_STORE="holdfast://127.0.0.1:1", HOLDFAST_TOKEN="hf_x")
    assert gone.code == holdfast.Unavailable.exit_code
    assert "Is it running? Start one with: holdfast serve" in gone.err
    with KeeperServer.temporary() as keeper:
        assert "not valid" in command(keeper, "spaces", token="hf_wrong", code=10).err
        assert "asks for a token" in command(keeper, "spaces", token="", code=2).err
