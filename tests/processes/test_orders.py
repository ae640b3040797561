"""Orders are checked before anything is started, and say what is wrong with them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from holdfast.errors import AccessDenied, InvalidInput
from holdfast.processes import Allowed, Limits, Order, kernel
from holdfast.processes.orders import WORD_BYTES_MAX
from holdfast.processes.titles import title


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "either argv or a function"),
        ({"argv": ["true"], "function": "a:b"}, "either argv or a function"),
        ({"argv": []}, "list of text"),
        ({"argv": "rm -rf"}, "list of text"),
        ({"argv": [""]}, "empty word"),
        ({"argv": ["true", 3]}, "list of text"),
        ({"argv": ["true", "a\0b"]}, "zero byte"),
        ({"argv": ["true", "x" * (WORD_BYTES_MAX + 1)]}, "at most"),
        ({"argv": ["true"] * 5000}, "at most"),
        ({"argv": ["true"], "args": [1]}, "are a function's"),
        ({"argv": ["true"], "env": {"A B": "c"}}, "no name of a variable"),
        ({"argv": ["true"], "env": {"1A": "c"}}, "no name of a variable"),
        ({"argv": ["true"], "env": {"A=B": "c"}}, "no name of a variable"),
        ({"argv": ["true"], "env": {"A": 1}}, "must be text"),
        ({"argv": ["true"], "env": {"A": "\0"}}, "zero byte"),
        ({"argv": ["true"], "env": {"HOLDFAST_TASK": "x"}}, "set by the launcher"),
        ({"argv": ["true"], "env": []}, "must be an object"),
        ({"argv": ["true"], "cwd": 3}, "no path"),
        ({"argv": ["true"], "cwd": "a\0b"}, "no path"),
        ({"argv": ["true"], "timeout": 0}, "more than zero"),
        ({"argv": ["true"], "timeout": "soon"}, "not a duration"),
        ({"argv": ["true"], "marker": "a b"}, "marker"),
        ({"argv": ["true"], "marker": "x" * 201}, "marker"),
        ({"argv": ["true"], "marker": "../a=b"}, "marker"),
        ({"argv": ["true"], "name": None}, "name must be text"),
        ({"function": "f"}, "package.module:function"),
        ({"function": "a.b:"}, "package.module:function"),
        ({"function": "a:<lambda>"}, "package.module:function"),
        ({"function": "a:f()"}, "package.module:function"),
        ({"function": "os:__builtins__.eval"}, "private"),
        ({"function": "a:_private"}, "private"),
        ({"function": "a:B._private"}, "private"),
        ({"function": "builtins:eval"}, "Python's own"),
        ({"function": "a:f", "args": "text"}, "must be a list"),
        ({"function": "a:f", "kwargs": {1: 2}}, "with names"),
        ({"function": "a:f", "args": [object()]}, "JSON"),
        ({"function": "a:f", "args": [float("nan")]}, "nan"),
        ({"function": "a:f", "args": ["x" * (17 * 1024 * 1024)]}, "pass a reference"),
    ],
)
def test_a_wrong_order_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Order(**fields)


@pytest.mark.parametrize(
    "limits",
    [
        {"memory_mb": 0},
        {"memory_mb": -1},
        {"memory_mb": float("inf")},
        {"memory_mb": "200"},
        {"memory_mb": True},
        {"cpu_percent": 0.9},
        {"cpu_percent": float("nan")},
        {"max_fds": 0},
        {"max_fds": 1.5},
    ],
)
def test_an_impossible_limit_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(limits))):
        Limits(**limits)


def test_the_smallest_limits_and_more_than_one_core_are_expressible() -> None:
    assert Limits(memory_mb=0.5, cpu_percent=1, max_fds=1) == Limits(0.5, 1, 1)
    assert Limits(cpu_percent=250).cpu_percent == 250


def test_an_inherited_environment_keeps_the_launchers_own_names_back() -> None:
    own = {"PATH": "/bin", "HOLDFAST_TOKEN": "secret", "HOLDFAST_TASK": "outer/1", "X": "y"}
    env = Order(argv=["true"], env={"A": "b", "X": "z"}, marker="s/1").environment(own)
    assert env == {"PATH": "/bin", "X": "z", "A": "b", "HOLDFAST_TASK": "s/1"}


def test_a_clean_environment_has_the_few_names_that_every_program_needs() -> None:
    own = {"PATH": "/bin", "LC_ALL": "C", "AWS_SECRET": "x", "LD_PRELOAD": "y"}
    env = Order(argv=["true"], inherit=False, marker="s/1").environment(own)
    assert env == {"PATH": "/bin", "LC_ALL": "C", "HOLDFAST_TASK": "s/1"}


@pytest.mark.parametrize(
    ("module", "is_allowed"),
    [
        ("tasks", True),
        ("tasks.inner", False),
        ("package.a", True),
        ("package.a.b", True),
        ("package", False),
        ("packages.a", False),
        ("os", False),
    ],
)
def test_a_module_is_allowed_by_name_or_below_a_package(module: str, is_allowed: bool) -> None:
    allowed = Allowed(modules=frozenset({"tasks", "package.*"}))
    assert allowed.has_module(module) is is_allowed
    if not is_allowed:
        with pytest.raises(AccessDenied):
            allowed.check(Order(function=f"{module}:f"))


def test_what_is_not_named_is_not_allowed() -> None:
    with pytest.raises(AccessDenied):
        Allowed().check(Order(argv=["true"]))
    with pytest.raises(AccessDenied):
        Allowed(commands=frozenset({"true"})).check(Order(argv=["true"], env={"PATH": "/tmp"}))


def test_a_title_is_printable_and_short_whatever_the_name() -> None:
    assert title("1234567890", "running", "train") == "holdfast: 1234567890 running train"
    assert title("x", "running", "a\x1b[31m\n b") == "holdfast: x running a_31m_b"
    assert title("x", "running") == "holdfast: x running"
    assert len(title("x", "running", "n" * 1000)) < 100


def test_the_short_tid_is_the_last_ten_digits_of_the_task() -> None:
    assert Order(argv=["true"], marker="store/1837025672140161024").short == "2140161024"


def test_orders_have_markers_of_their_own() -> None:
    assert Order(argv=["true"]).marker != Order(argv=["true"]).marker


def test_another_system_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(InvalidInput, match="Linux"):
        kernel.check()
