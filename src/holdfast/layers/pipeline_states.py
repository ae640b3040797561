"""What a pipeline is, and where it stands: one entry, `tasks/pipelines/<id>`, that changes by compare-and-set.

    {"name": "nightly", "stages": [
        {"name": "fetch", "spec": {"function": "jobs:fetch"}},
        {"name": "parse", "spec": {"function": "jobs:parse"}, "each": "fetch", "retries": 2},
        {"name": "report", "spec": {"function": "jobs:report"}}]}

A stage is one task, or with `each` one task per item of another stage's result. It begins when the stages it comes `after` are complete:
the one before it, unless it names others. Its message is their result, or its item; of several stages, an object with each by name. The result of a
stage with `each` is the list of its tasks' results, in the order of the items. A task that did not complete is submitted again, up to `retries` times.

`tasks/pipelines_open/<id>` lists those that go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

import msgspec

from holdfast.codec import decode, encode, mistake
from holdfast.engine import Entry
from holdfast.errors import InvalidInput
from holdfast.keys import check_name
from holdfast.layers.batch import type_tag
from holdfast.layers.task_spec import TaskSpec, refuse_unknown
from holdfast.layers.task_states import TaskStatus

PIPELINES: Final = "tasks/pipelines/"
OPEN: Final = "tasks/pipelines_open/"
STAGES_MAX: Final = 100
ITEMS_MAX: Final = 10_000
"""Of one stage."""
RETRIES_MAX: Final = 100
WORKERS: Final = 16
WORKERS_MAX: Final = 1000
PIPELINE_BYTES_MAX: Final = 1024 * 1024

PipelineStatus: TypeAlias = Literal["running", "completed", "failed", "cancelled"]
StageStatus: TypeAlias = Literal["waiting", "running", "completed", "failed"]


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One stage, as it is written down."""

    name: str
    spec: dict[str, Any]
    after: str | tuple[str, ...] | None = None
    each: str | None = None
    retries: int = 0
    max_workers: int = WORKERS

    @property
    def comes_after(self) -> tuple[str, ...]:
        """The stages it waits for, as far as it names them."""
        named = (self.after,) if isinstance(self.after, str) else self.after or ()
        return tuple(dict.fromkeys((*named, *((self.each,) if self.each else ()))))


class PipelineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A pipeline, as it is written down; checked when it is made."""

    name: str
    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> PipelineSpec:
        """From JSON; what it says wrongly is told by name."""
        if not isinstance(fields, Mapping):
            raise InvalidInput(f"a pipeline is an object with name and stages, not {type(fields).__name__}")
        refuse_unknown(fields, cls.__struct_fields__, "a pipeline")
        for name in cls.__struct_fields__:
            if name not in fields:
                raise InvalidInput(f"the pipeline has no {name}; it needs a name and stages")
        return cls(**fields)

    def __post_init__(self) -> None:
        check_name(self.name, "pipeline's name")
        if not isinstance(self.stages, list | tuple):
            raise InvalidInput(f"a pipeline's stages are a list, not {type(self.stages).__name__}")
        stages = tuple(_stage(number, each) for number, each in enumerate(self.stages, 1))
        msgspec.structs.force_setattr(self, "stages", stages)
        if not 0 < len(self.stages) <= STAGES_MAX:
            raise InvalidInput(f"a pipeline has between 1 and {STAGES_MAX} stages, not {len(self.stages)}")
        before: set[str] = set()
        for stage in self.stages:
            check_name(stage.name, "stage's name")
            if stage.name in before:
                raise InvalidInput(f"there are two stages {stage.name!r}")
            for name in stage.comes_after:
                if name not in before:
                    raise InvalidInput(f"stage {stage.name!r} comes after {name!r}, which is no stage before it")
            if not 0 <= stage.retries <= RETRIES_MAX or not 0 < stage.max_workers <= WORKERS_MAX:
                raise InvalidInput(
                    f"stage {stage.name!r}: retries are up to {RETRIES_MAX}, max_workers between 1 and {WORKERS_MAX}"
                )
            try:
                TaskSpec.of(stage.spec)
            except InvalidInput as exc:
                raise InvalidInput(f"stage {stage.name!r}: {exc}") from None
            before.add(stage.name)

    def before(self, number: int) -> tuple[str, ...]:
        """The stages whose results a stage gets."""
        named = self.stages[number].comes_after
        return named if named or number == 0 else (self.stages[number - 1].name,)


def _stage(number: int, given: Stage | Mapping[str, Any]) -> Stage:
    """A stage, as it was written or made in Python; what is wrong with it is told by name."""
    if not isinstance(given, Stage | Mapping):
        raise InvalidInput(f"stage {number} must be an object with its fields, not {type(given).__name__}")
    fields = msgspec.structs.asdict(given) if isinstance(given, Stage) else dict(given)
    refuse_unknown(fields, Stage.__struct_fields__, f"stage {fields.get('name', number)!r:.60}")
    try:
        return msgspec.convert(fields, Stage)
    except msgspec.ValidationError as exc:
        raise InvalidInput(f"stage {fields.get('name', number)!r:.60}: {mistake(exc)}") from None


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One item of a stage: its task, which try that is, and how it stands."""

    tid: str
    try_: int = 1
    status: TaskStatus = "created"


class StageState(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a stage stands."""

    status: StageStatus = "waiting"
    items: int | None = None
    """How many tasks it has in the end; known when it begins."""
    parts: tuple[Part, ...] = ()
    """Of those submitted so far, by item."""


class PipelineState(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Where a pipeline stands."""

    id: str
    owner: str
    status: PipelineStatus
    created_at: datetime
    spec: PipelineSpec
    stages: dict[str, StageState]
    input: Any = None
    completed_at: datetime | None = None
    reason: str | None = None

    @property
    def ended(self) -> bool:
        return self.status != "running"


def pipeline_tag(status: PipelineStatus) -> str:
    return type_tag("pipeline", status)


def pipeline_of(entry: Entry) -> PipelineState:
    return decode(entry.value, PipelineState)


def encoded(state: PipelineState) -> bytes:
    """As it is stored; a pipeline that has grown beyond all bounds is refused."""
    value = encode(state)
    if len(value) > PIPELINE_BYTES_MAX:
        raise InvalidInput(f"pipeline {state.id} would have {len(value):,} bytes; the limit is {PIPELINE_BYTES_MAX:,}")
    return value
