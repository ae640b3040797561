"""Specs of tasks: what is accepted, what is refused and in which words, what is shown of secrets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import InvalidInput, Limits, Redaction, TaskRetry, TaskSpec
from holdfast.codec import decode, encode
from holdfast.layers.task_spec import SHOWN_BYTES_MAX, SPEC_BYTES_MAX, is_redacted, load_function, shown
from holdfast.layers.tid import check_tid, made_at_ms, new_tid, short_tid

WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of them"),
    ({"function": "a:b", "command": ["true"]}, "exactly one of them"),
    ({"functon": "a:b"}, "no field 'functon'; did you mean function?"),
    ({"function": "a:b", "memory": 5}, "no field 'memory'"),
    ({"function": "a:b", "limits": {"memory": 5}}, "no field 'limits.memory'; did you mean limits.memory_mb?"),
    ({"function": "a:b", "retry": {"attempt": 5}}, "did you mean retry.attempts?"),
    ({"function": "nothing"}, "'package.module:function'"),
    ({"function": "a b:c"}, "'package.module:function'"),
    ({"function": "os:_exit"}, "private"),
    ({"function": "a:b.__globals__"}, "private"),
    ({"command": []}, "must not be empty"),
    ({"command": "ls -l"}, "command is a list, the program and its arguments, such as ['ls', '-l']"),
    ({"command": "ls -l"}, "['sh', '-c', 'ls -l']"),
    ({"command": ["ls", 1]}, "command[1] must be text, not a whole number"),
    ({"function": load_function}, "write 'holdfast.layers.task_spec:load_function'"),
    ({"function": lambda: 1}, "put it into a module"),
    ({"function": "a:b", "args": 3}, "args must be a list, not a whole number"),
    ({"function": "a:b", "kwargs": {1: 2}}, "a key of kwargs must be text"),
    ({"function": "a:b", "kwargs": {"a": {1: 2}}}, "1 is no key for an object"),
    ({"command": ["a\0b"]}, "NUL"),
    ({"command": ["true"], "args": [1]}, "are a function's"),
    ({"command": ["true"], "env": {"1A": "x"}}, "no variable's name"),
    ({"command": ["true"], "env": {"A B": "x"}}, "no variable's name"),
    ({"command": ["true"], "env": {"A": 1}}, "a value of env must be text, not a whole number"),
    ({"command": ["true"], "env": {"A": "x\0"}}, "NUL"),
    ({"command": ["true"], "env": {"HOLDFAST_TASK": "x"}}, "known by it"),
    ({"command": ["true"], "limits": {"memory_mb": 0}}, "limits.memory_mb must be more than 0"),
    ({"command": ["true"], "limits": {"memory_mb": -1}}, "limits.memory_mb must be more than 0"),
    ({"command": ["true"], "limits": {"cpu_percent": 0.5}}, "limits.cpu_percent must be at least 1"),
    ({"command": ["true"], "limits": {"max_fds": 0}}, "limits.max_fds must be at least 1"),
    ({"command": ["true"], "limits": {"max_fds": 1.5}}, "limits.max_fds must be a whole number, not a decimal"),
    ({"command": ["true"], "timeout": 0}, "timeout 0 must be more than zero"),
    ({"command": ["true"], "timeout": "soon"}, "not a duration"),
    ({"command": ["true"], "working_dir": ""}, "working_dir"),
    ({"command": ["true"], "output_size_limit_mb": 11}, "at most 10"),
    ({"command": ["true"], "reserved_policy_on_error": "drop"}, "must be keep, requeue or clear, not 'drop'"),
    ({"command": ["true"], "retry": {"attempts": 0}}, "retry.attempts must be at least 1"),
    ({"command": ["true"], "priority": 5000}, "priority"),
    ({"command": ["true"], "name": "a\nb"}, "printable"),
    ({"command": ["true"], "tags": ["x" * 65]}, "a tag is printable"),
    ({"function": "a:b", "interactive": True}, "interactive is for commands"),
    ({"function": "a:b", "args": ["x" * SPEC_BYTES_MAX]}, "the limit is 262,144"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG)
def test_a_wrong_spec_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        TaskSpec.of(fields)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "words"), [each for each in WRONG if "no field" not in each[1] and "mean" not in each[1]]
)
def test_a_wrong_spec_is_refused_in_python_as_well(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        TaskSpec(**fields)
    assert words in str(refused.value)


def test_a_spec_never_changes() -> None:
    spec = TaskSpec(function="jobs:build", args=[3])  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        spec.timeout = 5
    assert spec.args == (3,)
    assert decode(encode(spec), TaskSpec) == spec


def test_a_spec_says_what_it_does_when_little_is_said() -> None:
    spec = TaskSpec(command=["python", "train.py"], limits={"cpu_percent": 250})  # type: ignore[arg-type]
    assert (spec.output_size_limit_mb, spec.timeout_ms, spec.reserved_policy_on_error) == (10, None, "keep")
    assert (spec.title, spec.limits, spec.retry) == ("python", Limits(cpu_percent=250), TaskRetry())


def test_pauses_between_attempts_grow_up_to_a_bound() -> None:
    retry = TaskRetry(backoff="1s", factor=3, backoff_max="10s")
    assert [retry.pause_ms(attempt) for attempt in (1, 2, 3, 100)] == [1000, 3000, 9000, 10_000]


def test_a_function_is_loaded_where_it_runs_or_the_reason_is_told() -> None:
    assert load_function("json:dumps")([1]) == "[1]"
    assert load_function("collections:OrderedDict.fromkeys")(["a"]) == {"a": None}
    for target, words in (
        ("no_such_module_here:f", "cannot be imported here"),
        ("json:nothing", "has no 'nothing'"),
        ("json:decoder", "is no function"),
    ):
        with pytest.raises(InvalidInput, match=words):
            load_function(target)


SECRETS = TaskSpec(
    function="jobs:build",
    args=[{"token": "t-1"}, "plain", "hf_" + "a" * 16 + "_" + "x" * 43],  # type: ignore[arg-type]
    kwargs={"password": "p-1", "deep": {"apiKey": "k-1"}, "name": "n"},
    env={"DB_PASSWORD": "p-2", "PATH": "/bin", "REGION": "eu"},
    metadata={"client_secret": "s-1", "team": "blue"},
)


def test_what_is_shown_has_no_secrets_and_keeps_the_names() -> None:
    told = encode(shown(SECRETS, Redaction())).decode()
    for secret in ("t-1", "p-1", "k-1", "p-2", "s-1", "x" * 40):
        assert secret not in told
    for plain in ("plain", '"n"', "/bin", "blue", "DB_PASSWORD", "apiKey"):
        assert plain in told
    assert is_redacted(SECRETS, Redaction())
    assert not is_redacted(TaskSpec(function="jobs:build", kwargs={"name": "n"}), Redaction())


def test_fields_and_patterns_that_were_declared_secret_are_not_shown() -> None:
    told = shown(SECRETS, Redaction(fields=["team"], keys=["tasks/env/REG*"]))
    assert (told["metadata"]["team"], told["env"]["REGION"]) == ("[redacted]", "[redacted]")
    assert told["env"]["PATH"] == "/bin"


def test_options_of_a_command_lose_their_values_when_they_are_secret() -> None:
    argv = ["run", "--api-key=k-1", "--password", "p-1", "-v", "--token", "--name", "x", "PASSWORD=p-2", "y=z"]
    told = shown(TaskSpec(command=argv), Redaction())  # type: ignore[arg-type]
    assert told["command"] == [
        "run", "--api-key=[redacted]", "--password", "[redacted]", "-v", "--token", "--name", "x",
        "PASSWORD=[redacted]", "y=z",
    ]  # fmt: skip


def test_what_is_too_long_to_repeat_is_left_out_of_what_is_shown() -> None:
    spec = TaskSpec(function="jobs:build", args=["x" * 50_000], metadata={"team": "blue"})  # type: ignore[arg-type]
    told = shown(spec, Redaction())
    assert len(encode(told)) <= SHOWN_BYTES_MAX
    assert (told["args"], told["metadata"]) == ("[50,004 bytes]", {"team": "blue"})


@given(
    st.dictionaries(
        st.text(max_size=12), st.recursive(st.none() | st.text() | st.integers(), st.lists, max_leaves=4), max_size=4
    )
)
def test_whatever_is_sent_as_a_spec_is_read_or_refused_in_words(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        TaskSpec.of({**fields, "command": 5})


def test_tids_ascend_and_tell_when_they_were_made() -> None:
    now = made_at_ms(new_tid(1_750_000_000_000)) + 1  # other tests in this process may have been ahead
    tids = [new_tid(now) for _ in range(1000)]
    assert tids == sorted(set(tids))
    assert all(len(tid) == 19 for tid in tids)
    assert made_at_ms(tids[0]) == now
    assert short_tid(tids[0]) == tids[0][9:]
    assert new_tid(now - 5000) > tids[-1]  # a clock that went back
    assert made_at_ms(new_tid(now + 900)) == now + 900


@pytest.mark.parametrize("tid", ["", "12", "1" * 20, "x" * 19, "1" * 18 + "\u0661", None, 5])
def test_a_wrong_tid_is_refused(tid: Any) -> None:
    with pytest.raises(InvalidInput, match="19 digits"):
        check_tid(tid)


def test_a_spec_from_json_equals_the_one_from_python() -> None:
    fields = {"function": "jobs:build", "args": [1], "limits": {"memory_mb": 5}, "tags": ["a"], "timeout": "5m"}
    assert TaskSpec.of(fields) == TaskSpec(
        function="jobs:build", args=(1,), limits=Limits(memory_mb=5), tags=("a",), timeout="5m"
    )
    assert msgspec.to_builtins(TaskSpec.of(fields))["args"] == (1,)
