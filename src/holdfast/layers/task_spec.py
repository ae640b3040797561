"""What a task is to do: a function or a command, with its arguments, environment, limits and policies.

    TaskSpec(function="reports.daily:build", args=[3], timeout="10m", limits=Limits(memory_mb=512))
    TaskSpec.of(json.load(file))

A spec is checked when it is made, whoever makes it, and never changes: it is written once (`specs/<tid>`) and read from
there. What is wrong is InvalidInput, in words that name the field; a field that does not exist is refused with the name of
the nearest one that does. Whether a function can be imported depends on where it runs, so it is checked there
(`load_function`).

Secrets. The full spec is for managers. Everybody else, and the log, gets `shown`: fields of env, kwargs and metadata whose
names are secret, options of a command such as `--api-key=…`, and keeper's tokens anywhere are redacted (`redaction.py`); what is too long to
repeat with each event is left out.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args

import msgspec

from holdfast.clock import duration_ms
from holdfast.codec import encode, mistake
from holdfast.errors import InvalidInput
from holdfast.layers.queue_entries import PRIORITY_MAX, PRIORITY_MIN
from holdfast.layers.redaction import REDACTED, Redaction

SPEC_BYTES_MAX: Final = 256 * 1024
SHOWN_BYTES_MAX: Final = 16 * 1024
"""Of a spec in an event. The feed shows values up to a limit, and an event must be in it."""
NAME_MAX: Final = 128
TAGS_MAX: Final = 32
TAG_MAX: Final = 64
ARGV_MAX: Final = 4096
ENV_MAX: Final = 1024
ATTEMPTS_MAX: Final = 100
OUTPUT_LIMIT_MB: Final = 10
OUTPUT_LIMIT_MB_MAX: Final = 10
"""What is inline goes into the commit that ends the task."""
MEMORY_MB_MAX: Final = 64 * 1024 * 1024
CPU_PERCENT_MAX: Final = 1_000_000
FDS_MAX: Final = 1 << 30
MARKER: Final = "HOLDFAST_TASK"
"""The variable by which the processes of a task are known; it is not the spec's to set."""

ReservedPolicy = Literal["keep", "requeue", "clear"]

_FUNCTION: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def _check_number(
    name: str, value: float | None, *, least: float | None = None, above: float | None = None, upto: float
) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidInput(f"{name} must be a number, not {value!r:.60}")
    if (least is not None and value < least) or (above is not None and value <= above) or value > upto:
        floor = f"at least {least:g}" if least is not None else f"more than {above:g}"
        raise InvalidInput(f"{name} must be {floor} and at most {upto:,}, not {value!r}")


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the whole tree of a task's processes may use. 250 percent of cpu are two and a half cores."""

    memory_mb: float | None = None
    cpu_percent: float | None = None
    max_fds: int | None = None

    def __post_init__(self) -> None:
        _check_number("limits.memory_mb", self.memory_mb, above=0, upto=MEMORY_MB_MAX)
        _check_number("limits.cpu_percent", self.cpu_percent, least=1, upto=CPU_PERCENT_MAX)
        _check_number("limits.max_fds", self.max_fds, least=1, upto=FDS_MAX)


class TaskRetry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How often a task is begun at most, also after its manager died, and the pause before it is begun again."""

    attempts: int = 3
    backoff: str | int | float = "1s"
    factor: float = 2.0
    backoff_max: str | int | float = "5m"

    def __post_init__(self) -> None:
        _check_number("retry.attempts", self.attempts, least=1, upto=ATTEMPTS_MAX)
        _check_number("retry.factor", self.factor, least=1, upto=100)
        duration_ms(self.backoff, name="retry.backoff")
        duration_ms(self.backoff_max, name="retry.backoff_max")

    def pause_ms(self, attempt: int) -> int:
        """Before the next attempt, when this one failed."""
        first, most = duration_ms(self.backoff), duration_ms(self.backoff_max)
        return int(min(first * self.factor ** min(attempt - 1, 64), most))


class TaskSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What a task is to do. Exactly one of `function` ("module:function") and `command` (argv) is given.

    What the task's inbox message holds, if there is one, is the function's first argument; a command reads it as JSON from
    its standard input. `reserved_policy_on_error` says what becomes of the message when the task fails: keep leaves it in
    reserved, requeue begins the task again (`retry`) before it fails for good, clear removes it.
    """

    function: str | None = None
    command: tuple[str, ...] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    env: dict[str, str] = {}
    working_dir: str | None = None
    timeout: str | int | float | None = None
    limits: Limits = msgspec.field(default_factory=Limits)
    stream_output: bool = False
    interactive: bool = False
    output_size_limit_mb: float = OUTPUT_LIMIT_MB
    reserved_policy_on_stop: ReservedPolicy = "keep"
    reserved_policy_on_error: ReservedPolicy = "keep"
    retry: TaskRetry = msgspec.field(default_factory=TaskRetry)
    priority: int = 0
    name: str | None = None
    tags: tuple[str, ...] = ()
    metadata: dict[str, Any] = {}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> TaskSpec:
        """From JSON; what it says wrongly is told by name."""
        if not isinstance(fields, Mapping):
            raise InvalidInput(f"a task's spec is an object with its fields, not {type(fields).__name__}")
        refuse_unknown(fields, cls.__struct_fields__, "a task's spec")
        return cls(**fields)

    def __post_init__(self) -> None:
        self._check_types()
        if (self.function is None) == (self.command is None):
            raise InvalidInput("a task has either a function or a command; give exactly one of them")
        if self.function is not None:
            check_function(self.function)
        else:
            self._check_command()
        if self.interactive and self.function is not None:
            raise InvalidInput("interactive is for commands; a function has no standard input of its own")
        self._check_env()
        if self.working_dir is not None and (not self.working_dir or "\0" in self.working_dir):
            raise InvalidInput(f"working_dir must name a folder, not {self.working_dir!r:.60}")
        if self.timeout is not None:
            duration_ms(self.timeout, name="timeout")
        _check_number("output_size_limit_mb", self.output_size_limit_mb, above=0, upto=OUTPUT_LIMIT_MB_MAX)
        _check_number("priority", self.priority, least=PRIORITY_MIN, upto=PRIORITY_MAX)
        self._check_labels()
        if (size := len(encode(self))) > SPEC_BYTES_MAX:
            raise InvalidInput(
                f"the task's spec has {size:,} bytes; the limit is {SPEC_BYTES_MAX:,}. Send large input as the message, or as a blob"
            )

    def _check_types(self) -> None:
        """A list is as good as a tuple, and an object as the struct that it describes."""
        for name in ("args", "command", "tags"):
            given = getattr(self, name)
            if isinstance(given, list):
                msgspec.structs.force_setattr(self, name, tuple(given))
        if isinstance(self.limits, Mapping):
            msgspec.structs.force_setattr(self, "limits", _part(self.limits, Limits, "limits"))
        if isinstance(self.retry, Mapping):
            msgspec.structs.force_setattr(self, "retry", _part(self.retry, TaskRetry, "retry"))
        if isinstance(self.command, str):
            raise InvalidInput(
                "command is a list, the program and its arguments, such as ['ls', '-l']; for a shell's line it is "
                f"['sh', '-c', {self.command!r:.80}]"
            )
        if callable(self.function):
            raise InvalidInput(f"function is a name, which is imported where the task runs; {_name_of(self.function)}")
        for name in ("reserved_policy_on_stop", "reserved_policy_on_error"):
            if (given := getattr(self, name)) not in get_args(ReservedPolicy):
                raise InvalidInput(f"{name} must be keep, requeue or clear, not {given!r:.60}")
        try:
            msgspec.convert({name: getattr(self, name) for name in _PLAIN}, _Plain)
        except msgspec.ValidationError as exc:
            raise InvalidInput(f"the task's spec is wrong: {mistake(exc)}") from None
        if not isinstance(self.limits, Limits) or not isinstance(self.retry, TaskRetry):
            raise InvalidInput("limits is a Limits and retry a TaskRetry, or an object with their fields")

    def _check_command(self) -> None:
        argv = self.command or ()
        if not argv or not argv[0]:
            raise InvalidInput("command is a list: the program and its arguments; it must not be empty")
        if self.args or self.kwargs:
            raise InvalidInput("args and kwargs are a function's; a command has all its arguments in command")
        if len(argv) > ARGV_MAX or any("\0" in word for word in argv):
            raise InvalidInput(f"a command has at most {ARGV_MAX:,} words, and none with a NUL character")

    def _check_env(self) -> None:
        if len(self.env) > ENV_MAX:
            raise InvalidInput(f"env has at most {ENV_MAX:,} variables, not {len(self.env):,}")
        for name, value in self.env.items():
            if _ENV_NAME.fullmatch(name) is None:
                raise InvalidInput(f"env has {name!r:.60}, which is no variable's name: letters, digits and _ only")
            if "\0" in value:
                raise InvalidInput(f"env {name} has a NUL character in its value, which no variable can hold")
            if name == MARKER:
                raise InvalidInput(f"env must not set {MARKER}: the processes of a task are known by it")

    def _check_labels(self) -> None:
        for what, words, most in (
            ("name", () if self.name is None else (self.name,), NAME_MAX),
            ("tag", self.tags, TAG_MAX),
        ):
            for word in words:
                if not 0 < len(word) <= most or not word.isprintable():
                    raise InvalidInput(f"a {what} is printable text of at most {most} characters, not {word!r:.80}")
        if len(self.tags) > TAGS_MAX:
            raise InvalidInput(f"a task has at most {TAGS_MAX} tags, not {len(self.tags)}")

    @property
    def timeout_ms(self) -> int | None:
        """How long it may run; None: as long as it takes."""
        return None if self.timeout is None else duration_ms(self.timeout, name="timeout")

    @property
    def output_bytes_max(self) -> int:
        """Output above this goes into a blob."""
        return int(self.output_size_limit_mb * 1024 * 1024)

    @property
    def title(self) -> str:
        """What people call it: its name, or what it runs."""
        return self.name or self.function or (self.command or ("?",))[0]


class _Plain(msgspec.Struct, frozen=True):
    """The fields whose types need no more than to be looked at."""

    function: str | None
    command: tuple[str, ...] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    env: dict[str, str]
    working_dir: str | None
    timeout: str | int | float | None
    stream_output: bool
    interactive: bool
    output_size_limit_mb: float
    priority: int
    name: str | None
    tags: tuple[str, ...]
    metadata: dict[str, Any]


_PLAIN: Final = _Plain.__struct_fields__


def check_function(target: str) -> None:
    """Refuse what cannot name a function: `module:function`, no part of it private."""
    if _FUNCTION.fullmatch(target) is None:
        raise InvalidInput(f"function must read 'package.module:function', not {target!r:.80}")
    if any(part.startswith("_") for part in target.partition(":")[2].split(".")):
        raise InvalidInput(f"function {target!r:.80} is private: its name begins with _")


def load_function(target: str) -> Callable[..., Any]:
    """The function itself, where it is to run; InvalidInput when there is none to call."""
    check_function(target)
    module_name, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as exc:
        raise InvalidInput(f"function {target!r}: {module_name!r} cannot be imported here: {exc}") from exc
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise InvalidInput(f"function {target!r}: {module_name!r} has no {path!r}") from None
    if not callable(found):
        raise InvalidInput(f"function {target!r} is no function but {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def shown(spec: TaskSpec, redaction: Redaction) -> dict[str, Any]:
    """The spec as it may be shown to everybody."""
    fields: dict[str, Any] = msgspec.to_builtins(spec)
    for group in ("env", "kwargs", "metadata"):
        if group in fields:
            fields[group] = {
                name: redaction.value(f"tasks/{group}/{name}", {name: value})[name]
                if not redaction.is_secret_key(f"tasks/{group}/{name}")
                else REDACTED
                for name, value in fields[group].items()
            }
    if "args" in fields:
        fields["args"] = redaction.value("tasks/args", list(fields["args"]))
    if "command" in fields:
        fields["command"] = _shown_argv(list(fields["command"]), redaction)
    for name in ("args", "kwargs", "metadata", "env", "command"):
        if len(encode(fields)) <= SHOWN_BYTES_MAX:
            break
        if name in fields:
            fields[name] = f"[{len(encode(fields[name])):,} bytes]"
    return fields


def is_redacted(spec: TaskSpec, redaction: Redaction) -> bool:
    """Whether something of it is not shown."""
    return encode(shown(spec, redaction)) != encode(spec)


def _shown_argv(argv: list[str], redaction: Redaction) -> list[str]:
    """`--password=x` and `--password x` keep the option and lose the value."""
    told: list[str] = []
    hide_next = False
    for word in argv:
        option, is_assigned, _ = word.partition("=")
        is_option = word.startswith("-") or bool(is_assigned)
        if hide_next and not word.startswith("-"):
            told.append(REDACTED)
            hide_next = False
            continue
        hide_next = False
        if is_option and redaction.is_secret_field(option):
            hide_next = not is_assigned
            told.append(f"{option}={REDACTED}" if is_assigned else word)
        else:
            told += redaction.value("tasks/command", [word])
    return told


def _part(fields: Mapping[str, Any], kind: type[Any], name: str) -> Any:
    refuse_unknown(fields, kind.__struct_fields__, "a task's spec", f"{name}.")
    try:
        return msgspec.convert(dict(fields), kind)
    except msgspec.ValidationError as exc:
        raise InvalidInput(f"the task's spec is wrong: {name}.{mistake(exc)}") from None


def _name_of(function: Any) -> str:
    """How a function that was given itself is to be named."""
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    if _FUNCTION.fullmatch(name) is None or name.startswith("__main__:"):
        return "put it into a module and write 'package.module:function'"
    return f"write {name!r:.120}"


def refuse_unknown(fields: Mapping[str, Any], known: tuple[str, ...], what: str, within: str = "") -> None:
    """Refuse fields that there are not, with the name of the nearest one that there is."""
    for name in fields:
        if name not in known:
            import difflib

            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            hint = f"did you mean {within}{near[0]}?" if near else f"there are {', '.join(known)}"
            raise InvalidInput(f"{what} has no field {within + str(name)!r:.80}; {hint}")
