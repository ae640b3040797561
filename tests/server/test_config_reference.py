"""The page about the configuration lists what there is, with the defaults there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from holdfast.clock import duration_ms
from holdfast.middleware.rules import Rules
from holdfast.server.config import LIVE, Config, Persistence, SpaceSettings, Tls, read
from holdfast.server.leaves import sized

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "keeper-config.md"
ROW = re.compile(r"^\| (`[^|]+`) \| ([^|]+) \| ([^|]*) \| ([^|]+) \|$", re.MULTILINE)
SECTIONS: dict[str, type[msgspec.Struct]] = {"tls": Tls, "spaces": SpaceSettings}


def keys() -> dict[str, tuple[Any, bool]]:
    """Every key with its default, and whether it is live."""
    found: dict[str, tuple[Any, bool]] = {}
    for field in msgspec.structs.fields(Config):
        live = field.name in LIVE
        inner = SECTIONS.get(field.encode_name, field.type)
        if not (isinstance(inner, type) and issubclass(inner, msgspec.Struct)):
            found[field.encode_name] = (field.default, live)
            continue
        middle = ".<name>" if field.encode_name == "spaces" else ""
        for each in msgspec.structs.fields(inner):
            found[f"{field.encode_name}{middle}.{each.encode_name}"] = (each.default, live)
    return found


def test_every_key_is_listed_with_its_default_and_whether_it_is_live() -> None:
    listed: dict[str, tuple[str, str]] = {}
    for names, default, live, _ in ROW.findall(PAGE.read_text()):
        for name in re.findall(r"`([^`]+)`", names):
            listed[name] = (default.strip().strip("`"), live.strip())
    actual = keys()
    assert set(listed) == set(actual)
    for name, (default, live) in listed.items():
        value, is_live = actual[name]
        assert live == ("yes" if is_live else "no"), name
        if name == "store":
            config = read(b"{}", "k", folder=Path("/srv"))
            assert config.store == default.replace(":", ":/srv/", 1)
        elif default in ("none", "what ships"):
            assert value in (None, msgspec.NODEFAULT), name
        elif isinstance(value, bool):
            assert default == str(value).lower(), name
        elif isinstance(value, int):
            assert value == (duration_ms(default) if default[-1] in "smh" else sized(1)(default)), name
        else:
            assert default == str(value), name


def test_the_first_example_says_what_the_defaults_are() -> None:
    text = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    config = read(text.encode(), "keeper.yaml", folder=Path("/srv"))
    assert (config.limits, config.timeout_default_ms) == (Config().limits, Config().timeout_default_ms)
    rules = config.policies
    assert isinstance(rules, Rules)
    assert rules.rate_limits is not None
    assert rules.quotas is not None
    [rate], [quota] = rules.rate_limits, rules.quotas
    assert rate == type(rate)("*")
    assert quota == type(quota)("*")
    assert Persistence().snapshot_interval_ms == duration_ms("5m")
