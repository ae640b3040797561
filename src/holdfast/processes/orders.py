"""Orders: what to run, checked before anything is started.

An Order names a command (`argv`, never a shell's text) or a function (`package.module:function`) with JSON arguments, and
what it may use. Whoever may order anything may run anything: without an `Allowed` there is no border here. With one, only
what it names is run. It then also refuses environment variables that it does not name (LD_PRELOAD, PYTHONPATH and many
others change what a harmless program does), and a function is looked for where the launcher finds its modules, not in the
order's working directory.

The environment of a target is the order's `env` on top of the launcher's own (`inherit`, all but names that begin with
HOLDFAST_, which speak of the launcher's store and not of the task) or of a clean one (ENV_KEPT), and its marker.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.clock import Duration, duration_ms
from holdfast.codec import encode
from holdfast.errors import AccessDenied, InvalidInput
from holdfast.ids import new_id

ARGUMENTS_MAX: Final = 4_096
"""How many words a command may have."""
WORD_BYTES_MAX: Final = 128 * 1024 - 1
"""The longest word of a command or of an environment; Linux has the same limit."""
PARAMETERS_BYTES_MAX: Final = 16 * 1024 * 1024
"""A function's arguments, as JSON."""
ENV_MAX: Final = 1_024
"""How many variables an order may add."""
MARKER_CHARACTERS_MAX: Final = 200
NAME_CHARACTERS_MAX: Final = 64
"""Of an order's name in a process title; the rest is cut off."""
MARKER_VARIABLE: Final = "HOLDFAST_TASK"
"""Every process of a tree has its marker in its environment under this name."""
OWN_PREFIX: Final = "HOLDFAST_"
ENV_KEPT: Final = frozenset({"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM"})
"""What a clean environment has; and all that begins with LC_."""

_FUNCTION: Final = re.compile(r"[A-Za-z]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z]\w*(?:\.[A-Za-z]\w*)*", re.ASCII)
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_MARKER: Final = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.:/@-]{{0,{MARKER_CHARACTERS_MAX - 1}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tree of processes may use, all its members together."""

    memory_mb: float | None = None
    """Resident memory in MiB; more ends the tree."""
    cpu_percent: float | None = None
    """Of one core, 250 is two and a half; a tree that wants more is held back, not ended."""
    max_fds: int | None = None
    """Open files, sockets and pipes; more ends the tree."""

    def __post_init__(self) -> None:
        _check_number("memory_mb", self.memory_mb, above=0)
        _check_number("cpu_percent", self.cpu_percent, least=1)
        _check_number("max_fds", self.max_fds, least=1)
        if self.max_fds is not None and not isinstance(self.max_fds, int):
            raise InvalidInput(f"max_fds {self.max_fds!r} must be a whole number")


@dataclass(frozen=True, slots=True)
class Order:
    """What to run: either `argv` or `function`."""

    argv: tuple[str, ...] | list[str] | None = None
    """A command and its arguments, as the program gets them."""
    function: str | None = None
    """`package.module:function`; a dotted name after the colon goes through classes."""
    args: tuple[Any, ...] | list[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    inherit: bool = True
    """Whether the launcher's environment is beneath `env`, or a clean one."""
    cwd: str | os.PathLike[str] | None = None
    """The launcher's own if None."""
    timeout: Duration | None = None
    """How long it may run; time in which it is paused does not count."""
    limits: Limits = field(default_factory=Limits)
    interactive: bool = False
    """Whether it has an input that can be written to; otherwise it reads an empty one."""
    quiet: bool = False
    """Whether what it prints goes nowhere: for those who will not read it."""
    name: str = ""
    """For the process title."""
    marker: str = field(default_factory=lambda: f"launch/{new_id()}")
    """`<store>/<task id>`: finds what is left of it when all who knew it are dead."""

    def __post_init__(self) -> None:
        if (self.argv is None) == (self.function is None):
            raise InvalidInput("an order names either argv or a function")
        if self.argv is not None:
            _check_argv(self.argv)
            if self.args or self.kwargs:
                raise InvalidInput("args and kwargs are a function's; a command has its arguments in argv")
        else:
            _check_function(self.function)
            _check_parameters(self.args, self.kwargs)
        _check_env(self.env)
        if self.cwd is not None and (not isinstance(self.cwd, str | os.PathLike) or "\0" in os.fspath(self.cwd)):
            raise InvalidInput(f"cwd {self.cwd!r} is no path")
        if self.timeout is not None:
            duration_ms(self.timeout, name="timeout")
        if not isinstance(self.marker, str) or _MARKER.fullmatch(self.marker) is None:
            raise InvalidInput(
                f"marker {self.marker!r} must be up to {MARKER_CHARACTERS_MAX} letters, digits and ._:/@- , as <store>/<task id>"
            )
        if not isinstance(self.name, str):
            raise InvalidInput(f"name must be text, not {type(self.name).__name__}")

    @property
    def short(self) -> str:
        """The last ten characters of the task's id, as titles have it."""
        return self.marker.rpartition("/")[2][-10:]

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """What the target gets, when the launcher's own environment is this."""
        if self.inherit:
            env = {name: value for name, value in own.items() if not name.startswith(OWN_PREFIX)}
        else:
            env = {name: value for name, value in own.items() if name in ENV_KEPT or name.startswith("LC_")}
        if self.interactive:
            env.setdefault("PYTHONUNBUFFERED", "1")  # who talks to a program wants its answer at once
        return {**env, **self.env, MARKER_VARIABLE: self.marker}


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may be run, where not everybody who orders is trusted. What is not named is refused."""

    commands: frozenset[str] = frozenset()
    """First words of commands, compared as they are written: name absolute paths."""
    modules: frozenset[str] = frozenset()
    """Modules whose functions may be called; `package.*` is everything below the package."""
    env: frozenset[str] = frozenset()
    """Variables that an order may set."""

    def check(self, order: Order) -> None:
        """Raise AccessDenied for what is not allowed. A function is looked at once more when it has been found."""
        if order.argv is not None and order.argv[0] not in self.commands:
            raise AccessDenied(f"the command {order.argv[0]!r} is not among those allowed here")
        if order.function is not None and not self.has_module(order.function.partition(":")[0]):
            raise AccessDenied(f"the function {order.function!r} is of no module that is allowed here")
        for name in order.env:
            if name not in self.env:
                raise AccessDenied(f"the variable {name!r} is not among those that may be set here")

    def has_module(self, module: str) -> bool:
        """Whether functions of this module may be called."""
        return is_below(module, self.modules)


def is_below(module: str, patterns: frozenset[str]) -> bool:
    """Whether a module is named, or is below one that is named with `.*`."""
    parts = module.split(".")
    return module in patterns or any(".".join(parts[:count]) + ".*" in patterns for count in range(1, len(parts)))


def _check_number(name: str, value: float | None, *, above: float | None = None, least: float | None = None) -> None:
    if value is None:
        return
    bound = f"more than {above}" if above is not None else f"at least {least}"
    fits = (
        not isinstance(value, bool)
        and isinstance(value, int | float)
        and math.isfinite(value)
        and (value > above if above is not None else least is None or value >= least)
    )
    if not fits:
        raise InvalidInput(f"{name} {value!r} must be a number, {bound}")


def _check_argv(argv: Any) -> None:
    if not isinstance(argv, tuple | list) or not argv or not all(isinstance(word, str) for word in argv):
        raise InvalidInput("argv must be a list of text: the command and its arguments")
    if len(argv) > ARGUMENTS_MAX:
        raise InvalidInput(f"argv has {len(argv):,} words; at most {ARGUMENTS_MAX:,} are allowed")
    if not argv[0]:
        raise InvalidInput("argv begins with an empty word; name the command")
    for word in argv:
        _check_word("a word of argv", word)


def _check_function(name: Any) -> None:
    if not isinstance(name, str) or _FUNCTION.fullmatch(name) is None:
        raise InvalidInput(
            f"function {name!r} must be written package.module:function; names that begin with an underscore are private"
        )
    if name.partition(":")[0] == "builtins":
        raise InvalidInput(f"function {name!r} is Python's own; name a function of yours that calls it")


def _check_parameters(args: Any, kwargs: Any) -> None:
    if not isinstance(args, tuple | list):
        raise InvalidInput(f"args must be a list, not {type(args).__name__}")
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise InvalidInput("kwargs must be an object with names")
    size = len(encode([list(args), dict(kwargs)]))
    if size > PARAMETERS_BYTES_MAX:
        raise InvalidInput(
            f"the arguments have {size:,} bytes; at most {PARAMETERS_BYTES_MAX:,} are allowed: pass a reference"
        )


def _check_env(env: Any) -> None:
    if not isinstance(env, Mapping):
        raise InvalidInput(f"env must be an object of names and text, not {type(env).__name__}")
    if len(env) > ENV_MAX:
        raise InvalidInput(f"env has {len(env):,} variables; at most {ENV_MAX:,} are allowed")
    for name, value in env.items():
        if not isinstance(name, str) or _VARIABLE.fullmatch(name) is None:
            raise InvalidInput(
                f"env: {name!r} is no name of a variable; letters, digits and underscores, no digit first"
            )
        if name == MARKER_VARIABLE:
            raise InvalidInput(f"env: {name} is set by the launcher; give the order a marker")
        if not isinstance(value, str):
            raise InvalidInput(f"env: {name} must be text, not {type(value).__name__}")
        _check_word(f"env: {name}", f"{name}={value}")


def _check_word(what: str, word: str) -> None:
    if "\0" in word:
        raise InvalidInput(f"{what} contains a zero byte")
    try:
        size = len(os.fsencode(word))
    except UnicodeEncodeError:
        raise InvalidInput(f"{what} contains text that this system cannot express") from None
    if size > WORD_BYTES_MAX:
        raise InvalidInput(f"{what} has {size:,} bytes; at most {WORD_BYTES_MAX:,} are allowed: pass a file")
