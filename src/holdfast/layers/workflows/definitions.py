"""What a workflow is: a function, or a class whose methods are steps. Checked when it is defined; nothing here runs.

    @workflow(name="research", version="2", timeout="1h")
    class Research:
        @step(name="fetch", retry=Retry(3))
        async def fetch(self, ctx): ...
        @step(name="analyse", each="fetch", max_workers=4)
        async def analyse(self, ctx, item): ...

    @workflow
    async def approve_trade(ctx, order): ...

Cycles, names that are there twice, steps that depend on unknown ones, durations that are none: InvalidInput, at the decorator. The
order of a class's steps is worked out here, once, so that everybody who has the same class has the same order.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Final, Literal, TypeVar, overload

from holdfast.clock import Duration, duration_ms, optional_ms
from holdfast.errors import InvalidInput
from holdfast.keys import check_name
from holdfast.layers.queue_entries import check_queue
from holdfast.layers.versions import Step as Migration
from holdfast.layers.workflows.shape import FIRST, Shape

NAME_BYTES_MAX: Final = 128
"""Of a workflow or a step: names become parts of keys."""
ATTEMPTS_MAX: Final = 1_000
WORKERS_MAX: Final = 1_000
CONCURRENCY_MAX: Final = 1_000_000
MAP_WORKERS: Final = 16
"""How many items of a map are worked at, at once, unless told otherwise."""
DEFINITION: Final = "__holdfast_workflow__"
STEP: Final = "__holdfast_step__"

Backoff = Literal["exponential", "linear", "constant"]
BACKOFFS: Final = ("exponential", "linear", "constant")

T = TypeVar("T")


@dataclass(frozen=True)
class Retry:
    """How often a step is tried, and how long it waits in between: `Retry(3, backoff="exponential", initial="1s")`.

    `attempts` counts the first one. Each pause is `initial`, times 2, 4, 8 … (exponential) or 2, 3, 4 … (linear), at most `longest`,
    and shortened or lengthened at random by up to the share `jitter`. `on` is what is worth another attempt.
    """

    attempts: int = 3
    backoff: Backoff = "exponential"
    initial: Duration = "1s"
    longest: Duration = "5m"
    jitter: float = 0.1
    on: tuple[type[BaseException], ...] = (Exception,)
    initial_ms: int = field(init=False)
    longest_ms: int = field(init=False)

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or not 1 <= self.attempts <= ATTEMPTS_MAX:
            raise InvalidInput(f"a step is tried between 1 and {ATTEMPTS_MAX:,} times, not {self.attempts!r}")
        if self.backoff not in BACKOFFS:
            raise InvalidInput(f"backoff is one of {', '.join(BACKOFFS)}, not {self.backoff!r}")
        if isinstance(self.jitter, bool) or not isinstance(self.jitter, int | float) or not 0 <= self.jitter <= 1:
            raise InvalidInput(f"jitter is a share between 0 and 1, not {self.jitter!r}")
        object.__setattr__(self, "initial_ms", duration_ms(self.initial, name="initial"))
        object.__setattr__(self, "longest_ms", duration_ms(self.longest, name="longest"))

    def pause_ms(self, failures: int) -> int:
        """How long to wait after so many failures."""
        grown: int = {"exponential": 1 << min(failures - 1, 62), "linear": failures, "constant": 1}[self.backoff]
        pause = min(self.initial_ms * grown, self.longest_ms)
        return max(1, round(pause * (1 + random.uniform(-self.jitter, self.jitter))))  # noqa: S311 - spreads, guards nothing


ONCE: Final = Retry(1)


def retry_of(retry: Retry | int | None) -> Retry:
    if retry is None:
        return ONCE
    if isinstance(retry, Retry):
        return retry
    if type(retry) is int:
        return Retry(retry)
    raise InvalidInput(f"retry is a number of attempts or Retry(…), not {retry!r:.60}")


@dataclass(frozen=True)
class Step:
    """One step of a class."""

    name: str
    function: Callable[..., Any]
    after: tuple[str, ...] = ()
    each: str | None = None
    max_workers: int = MAP_WORKERS
    when: Callable[..., Any] | None = None
    timeout_ms: int | None = None
    retry: Retry = ONCE
    on_error: Callable[..., Any] | None = None
    min_success_rate: float = 1.0
    queue: str | None = None
    """Where it is done, if that is not where its execution runs."""
    task: bool = False
    """Whether it gives a TaskSpec, which is run as a process of its own."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The steps before it."""
        return self.after if self.each is None or self.each in self.after else (self.each, *self.after)

    @property
    def takes(self) -> int:
        """How many arguments it takes beside self and ctx."""
        return positional(self.function, "step") - 2


@dataclass(frozen=True)
class Definition:
    """A workflow, as it is registered with a worker."""

    name: str
    version: str
    target: Any
    """The function, or the class."""
    timeout_ms: int | None = None
    retry: Retry = ONCE
    concurrency: int | None = None
    key: Callable[[Any], str] | None = None
    shape: Shape | None = None
    """What its state looks like, if it says so."""
    archive: bool | int = False
    """Whether executions are archived when they have ended; a number is for how many milliseconds archives are kept."""
    steps: tuple[Step, ...] = ()
    """Of a class, in an order in which each comes after those it needs."""

    @cached_property
    def takes_input(self) -> bool:
        """Whether its function wants the input; ctx has it in any case."""
        return positional(self.target, "workflow") > 1

    @cached_property
    def config(self) -> dict[str, Any]:
        """What is stored with each execution of how it was defined."""
        return {
            name: value
            for name, value in (
                ("timeout_ms", self.timeout_ms),
                ("concurrency", self.concurrency),
                ("attempts", self.retry.attempts if self.retry is not ONCE else None),
                ("steps", [step.name for step in self.steps] or None),
                ("archive", self.archive or None),
                ("state_version", None if self.shape is None else self.shape.version),
            )
            if value is not None
        }

    def slot_key(self, input: Any) -> str:
        """Those with the same key share the limit."""
        if self.key is None:
            return ""
        key = self.key(input)
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise InvalidInput(f"the key of workflow {self.name!r} must be text or a number, not {type(key).__name__}")
        return check_name(str(key), "workflow's key")


@lru_cache(maxsize=1024)
def positional(function: Callable[..., Any], what: str) -> int:
    """How many arguments a function takes by position; very many if it takes any number."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise InvalidInput(f"a {what} is a function that tells its arguments; {function!r:.60} does not") from None
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 1_000
    return sum(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters
    )


def check_label(name: str, what: str) -> str:
    """A name of a workflow or step: it stands in keys and in paths, whose marks are `/` and `#`."""
    check_name(name, what)
    if len(name.encode()) > NAME_BYTES_MAX or not name.isprintable() or "/" in name or "#" in name or name[0] == "~":
        raise InvalidInput(
            f"a {what} is printable text of at most {NAME_BYTES_MAX} bytes without '/' and '#', and not '~' first, not {name!r:.60}"
        )
    return name


def step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    after: str | Sequence[str] = (),
    each: str | None = None,
    max_workers: int = MAP_WORKERS,
    when: Callable[..., Any] | None = None,
    timeout: Duration | None = None,
    retry: Retry | int | None = None,
    on_error: Callable[..., Any] | Literal["skip"] | None = None,
    min_success_rate: float = 1.0,
    queue: str | None = None,
    task: bool = False,
) -> Any:
    """Make a method a step of its workflow's class.

    `after` names the steps whose results it gets; `each` the one whose result's items it gets, one task per item, up to
    `max_workers` at a time. `when(ctx)` tells whether it is done at all. `on_error(ctx, error)` gives a result in its stead when all
    attempts failed ("skip": None). Of the tasks of an `each`, the share `min_success_rate` must succeed; the others' results are None.
    With a `queue` it is done by a worker that serves that queue. With `task` it returns a TaskSpec, which is run as a process of its
    own, and whose result is the step's.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        label = check_label(str(name or getattr(function, "__name__", "")), "step's name")
        if not callable(function):
            raise InvalidInput(f"@step is for methods, not for {type(function).__name__}")
        names = (after,) if isinstance(after, str) else tuple(after)
        check_workers(max_workers)
        check_rate(min_success_rate)
        for given, word in ((when, "when"), (on_error, "on_error")):
            if given is not None and not callable(given) and not (word == "on_error" and given == "skip"):
                raise InvalidInput(f"{word} of step {label!r} is a function, not {given!r:.60}")
        made = Step(
            label,
            function,
            names,
            each,
            max_workers,
            when,
            optional_ms(timeout, name=f"timeout of step {label!r}"),
            retry_of(retry),
            skipped if on_error == "skip" else on_error,
            float(min_success_rate),
            None if queue is None else check_queue(queue),
            task,
        )
        if task and (queue is not None or timeout is not None):
            raise InvalidInput(
                f"step {label!r} gives a task: a queue is none of its own, and its timeout is the TaskSpec's"
            )
        if made.takes < 0:
            raise InvalidInput(f"step {label!r} takes self and ctx, and what it gets from other steps")
        setattr(function, STEP, made)
        return function

    return decorate if function is None else decorate(function)


def skipped(*_: Any) -> None:
    """What `on_error="skip"` does."""


def check_workers(max_workers: int) -> int:
    if type(max_workers) is not int or not 1 <= max_workers <= WORKERS_MAX:
        raise InvalidInput(f"max_workers is between 1 and {WORKERS_MAX:,}, not {max_workers!r}")
    return max_workers


def check_rate(rate: float) -> float:
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise InvalidInput(f"min_success_rate is a share between 0 and 1, not {rate!r}")
    return float(rate)


@overload
def workflow(target: T, /) -> T: ...
@overload
def workflow(
    *,
    name: str | None = None,
    version: str = "1",
    timeout: Duration | None = None,
    retry: Retry | int | None = None,
    concurrency: int | None = None,
    key: Callable[[Any], str] | None = None,
    state: type[Any] | None = None,
    state_version: str = FIRST,
    state_migrations: Mapping[str, Migration] | None = None,
    archive: bool | Duration = False,
) -> Callable[[T], T]: ...


def workflow(
    target: Any = None,
    /,
    *,
    name: str | None = None,
    version: str = "1",
    timeout: Duration | None = None,
    retry: Retry | int | None = None,
    concurrency: int | None = None,
    key: Callable[[Any], str] | None = None,
    state: type[Any] | None = None,
    state_version: str = FIRST,
    state_migrations: Mapping[str, Migration] | None = None,
    archive: bool | Duration = False,
) -> Any:
    """Make an async function, or a class with steps, a workflow.

    `timeout` is for the whole execution, from its first step on. `retry` is what steps have that name none of their own. At
    most `concurrency` executions are begun and not ended at a time, of each `key(input)` if that is given.

    `state` is the type of the state, whose fields are its keys: what is written is checked against it. When it changes, it gets a
    higher `state_version`, and `state_migrations` has, by version, the functions from the data of one version to the next.

    With `archive`, each execution is archived when it has ended, and is not removed before that; `archive="365d"` says how long
    archives are kept.
    """

    def decorate(target: Any) -> Any:
        label = check_label(str(name or getattr(target, "__name__", "")), "workflow's name")
        if not isinstance(version, str) or not version:
            raise InvalidInput(f"the version of workflow {label!r} is text, not {version!r}")
        if concurrency is not None and (type(concurrency) is not int or not 1 <= concurrency <= CONCURRENCY_MAX):
            raise InvalidInput(f"concurrency of workflow {label!r} is at least 1, not {concurrency!r}")
        if key is not None and (not callable(key) or concurrency is None):
            raise InvalidInput(f"key of workflow {label!r} is a function of the input, and needs concurrency=")
        if state is None and (state_migrations or state_version != FIRST):
            raise InvalidInput(f"workflow {label!r} has a version of its state, or migrations, and no state=")
        shape = None if state is None else Shape(label, state, state_version, state_migrations or {})
        if inspect.isclass(target):
            steps = in_order(label, [vars(m)[STEP] for m in members(target)], retry)
        elif inspect.iscoroutinefunction(target):
            steps = ()
            if positional(target, "workflow") < 1:
                raise InvalidInput(f"workflow {label!r} takes ctx, and the input if it wants it")
        else:
            raise InvalidInput(f"@workflow is for an async function or a class with steps, not for {target!r:.60}")
        made = Definition(
            label,
            version,
            target,
            optional_ms(timeout, name=f"timeout of workflow {label!r}"),
            retry_of(retry),
            concurrency,
            key,
            shape,
            archive if isinstance(archive, bool) else duration_ms(archive, name=f"archive of workflow {label!r}"),
            steps,
        )
        setattr(target, DEFINITION, made)
        return target

    return decorate if target is None else decorate(target)


def members(target: type[Any]) -> list[Any]:
    """The methods of a class that are steps, those of its parents first, in the order in which they are written."""
    found: dict[str, Any] = {}
    for parent in reversed(target.__mro__):
        for name, member in vars(parent).items():
            if hasattr(member, "__dict__") and STEP in vars(member):
                found[name] = member
            else:
                found.pop(name, None)
    return list(found.values())


def in_order(workflow: str, steps: list[Step], retry: Retry | int | None) -> tuple[Step, ...]:
    """The steps, each after those it needs; among those that could come next, the one that is written first."""
    if not steps:
        raise InvalidInput(f"workflow {workflow!r} has no steps; decorate its methods with @step")
    known: dict[str, Step] = {}
    for each in steps:
        if each.name in known:
            raise InvalidInput(f"workflow {workflow!r} has two steps named {each.name!r}")
        known[each.name] = each
    for each in steps:
        for need in each.needs:
            if need not in known:
                raise InvalidInput(
                    f"step {each.name!r} of workflow {workflow!r} needs {need!r}, and there is no such step"
                )
    ordered: list[Step] = []
    placed: set[str] = set()
    while len(ordered) < len(steps):
        free = [each for each in steps if each.name not in placed and placed.issuperset(each.needs)]
        if not free:
            stuck = sorted(each.name for each in steps if each.name not in placed)
            raise InvalidInput(
                f"the steps of workflow {workflow!r} go round in a circle: {' → '.join((*stuck, stuck[0]))}"
            )
        placed.add(free[0].name)
        ordered.append(free[0])
    if retry is not None:
        given = retry_of(retry)
        ordered = [_with_retry(each, given) if each.retry is ONCE else each for each in ordered]
    return tuple(ordered)


def _with_retry(step: Step, retry: Retry) -> Step:
    return replace(step, retry=retry)


def definition_of(target: Any) -> Definition:
    """The definition of a decorated function or class."""
    made = target if isinstance(target, Definition) else getattr(target, DEFINITION, None)
    if isinstance(made, Definition):
        return made
    raise InvalidInput(f"{target!r:.60} is no workflow; decorate it with @workflow")


def is_older(version: str, than: str) -> bool:
    """Whether one version comes before another: by their numbers, if they have as many; otherwise nobody knows."""
    if version == than:
        return False
    one, other = (tuple(map(int, re.findall(r"\d+", each))) for each in (version, than))
    return len(one) == len(other) and one < other


def registry(targets: Sequence[Any]) -> dict[str, Definition]:
    """Workflows by name."""
    found: dict[str, Definition] = {}
    for target in targets:
        made = definition_of(target)
        if found.setdefault(made.name, made) is not made:
            raise InvalidInput(f"two workflows are named {made.name!r}")
    if not found:
        raise InvalidInput("a worker needs at least one workflow")
    return found
