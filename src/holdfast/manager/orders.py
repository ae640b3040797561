"""What a task's spec means to the launcher, and what the launcher saw means to the task's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from holdfast.codec import encode
from holdfast.errors import Error, NotRunnable, OutcomeUnknown
from holdfast.layers.task_launch import Launch, TaskOutcome
from holdfast.layers.task_spec import TaskSpec
from holdfast.layers.task_states import TaskError
from holdfast.processes import Ended, Limits, Order

MIB: Final = 1024 * 1024
LOST: Final = "its warden was killed, and its processes with it"


def order_of(launch: Launch, marker: str, env: Mapping[str, str]) -> Order:
    """What to run. The message is the first argument of a function, and what a command reads from its standard input."""
    spec, message = launch.spec, launch.message
    called = spec.function is not None
    limits = spec.limits
    return Order(
        argv=spec.command,
        function=spec.function,
        args=(message, *spec.args) if called and message is not None else spec.args,
        kwargs=spec.kwargs,
        env={**env, **spec.env},
        cwd=spec.working_dir,
        timeout=spec.timeout,
        limits=Limits(memory_mb=limits.memory_mb, cpu_percent=limits.cpu_percent, max_fds=limits.max_fds),
        interactive=spec.interactive or (not called and message is not None),
        name=spec.title,
        marker=marker,
    )


def input_of(launch: Launch) -> bytes:
    """What a command is to read before anything else."""
    if launch.spec.function is not None or launch.message is None:
        return b""
    return encode(launch.message) + b"\n"


def outcome_of(ended: Ended, spec: TaskSpec) -> TaskOutcome:
    """How a task ended, when its processes have."""
    return msgspec.structs.replace(
        _told(ended, spec),
        peak_memory_mb=round(ended.peak_memory / MIB, 3),
        cpu_seconds=round(ended.cpu_seconds, 3),
        max_fds=ended.max_fds,
    )


def _told(ended: Ended, spec: TaskSpec) -> TaskOutcome:
    code = ended.code
    match ended.reason:
        case "timeout":
            return TaskOutcome(
                "timeout", code, reason=f"it ran longer than {(spec.timeout_ms or 0) / 1000:g} s", stop="timeout"
            )
        case "stopped":
            return TaskOutcome("cancelled", code, reason="stop")
        case "killed":
            return TaskOutcome("killed", code, reason="kill")
        case "memory":
            return TaskOutcome(
                "killed", code, reason=f"memory: it used more than {spec.limits.memory_mb:g} MiB", stop="memory"
            )
        case "fds":
            return TaskOutcome("killed", code, reason=f"fds: it had more than {spec.limits.max_fds} open", stop="fds")
        case "lost":
            return TaskOutcome("failed", code, reason=LOST, lost=True)
    if ended.failure is not None:
        error = TaskError(ended.failure.type, ended.failure.message, ended.failure.traceback or None)
        return TaskOutcome("failed", code or 1, error=error)
    if code != 0:
        how = f"it was ended by signal {ended.signal}" if ended.signal is not None else f"it exited with {code}"
        return TaskOutcome("failed", code, reason=how)
    if spec.function is not None:
        return TaskOutcome("completed", code, result=None if ended.value is None else ended.result)
    return TaskOutcome("completed", code)


def refusal_of(exc: Error) -> TaskOutcome:
    """How a task ended that could not be started."""
    if isinstance(exc, OutcomeUnknown):
        return TaskOutcome("failed", reason=str(exc), lost=True)
    code = exc.exit_code if isinstance(exc, NotRunnable) else 126
    return TaskOutcome("failed", code, error=TaskError(type(exc).__name__, str(exc)))
