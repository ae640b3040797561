"""Holdfast keeps the shared state of multi-agent systems: not lost, not torn, not doubled.

    import holdfast

    async with holdfast.open("team.db") as store:
        space = store.space("contoso", agent="market")
        await space.records.set("regime", "risk-on", ttl="1h")

`holdfast.blocking` has the same without `await`. docs/ARCHITECTURE.md explains how it is built.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from holdfast import blocking
    from holdfast.clock import Clock, ManualClock, SystemClock
    from holdfast.engine import Finding, Receipt, SpaceInfo
    from holdfast.errors import (
        AccessDenied,
        AuthenticationFailed,
        Compacted,
        Conflict,
        Damaged,
        DurabilityUnavailable,
        Empty,
        Error,
        ExecutionFailed,
        IncompatibleStore,
        InvalidInput,
        LeaseLost,
        LockAcquisitionError,
        MigrationFailed,
        NonDeterminism,
        NotFound,
        NotRunnable,
        OutcomeUnknown,
        QuotaExceeded,
        RateLimitExceeded,
        SchemaViolation,
        StepFailed,
        StorageFull,
        TargetMissing,
        TaskFailed,
        TaskPending,
        TimedOut,
        Unavailable,
        Violation,
    )
    from holdfast.layers.alerts import Alert, AlertRule
    from holdfast.layers.audit import Audit, AuditRecord, Verification
    from holdfast.layers.batch import (
        ABSENT,
        absent,
        at_least,
        delete_,
        increment,
        present,
        set_,
        value_is,
        version_is,
    )
    from holdfast.layers.blobs import BlobRef, Blobs
    from holdfast.layers.conflicts import Contradiction, contested, differing, missed, opposed
    from holdfast.layers.consistency import Consistency
    from holdfast.layers.contributions import Contribution, DocumentView, Outdated
    from holdfast.layers.correlation_entries import Decision
    from holdfast.layers.correlations import Correlation, Correlations, CorrelationView, Signalled
    from holdfast.layers.diffs import Difference
    from holdfast.layers.document_heads import DocumentHead, Documents
    from holdfast.layers.documents import Document, DocumentVersion
    from holdfast.layers.guards import Guard
    from holdfast.layers.history import DocumentEvent
    from holdfast.layers.merging import Fusion, Merged, Priority, Question, WeightedAverage
    from holdfast.layers.messages import Message
    from holdfast.layers.migration import MigrationFailure, MigrationReport
    from holdfast.layers.observers import TaskOverview
    from holdfast.layers.orchestrator import Orchestrator
    from holdfast.layers.patterns import Outcome, Route, Stop, fan_in, fan_out, route, sequence
    from holdfast.layers.pipeline_states import PipelineSpec, PipelineState
    from holdfast.layers.pipelines import PipelineHandle, Pipelines
    from holdfast.layers.pools import Pool
    from holdfast.layers.queue_entries import Failure, Peeked, Requeue
    from holdfast.layers.queue_watching import MessageChange, QueueCommit
    from holdfast.layers.queues import Queue, Queues, QueueStats
    from holdfast.layers.records import Record, Records, RecordTransaction
    from holdfast.layers.redaction import Redaction
    from holdfast.layers.resolutions import Case, Judgement, Resolution, Verdict
    from holdfast.layers.retention import Retention
    from holdfast.layers.schemas import RegisteredSchema, Schemas
    from holdfast.layers.session import Session
    from holdfast.layers.standings import Locks, LockState, Stand
    from holdfast.layers.state_type import StateType
    from holdfast.layers.task_control import ControlAnswer
    from holdfast.layers.task_handle import OutputChunk, TaskHandle
    from holdfast.layers.task_launch import Launch, ManagerInfo, TaskOutcome
    from holdfast.layers.task_ledger import TaskLedger
    from holdfast.layers.task_spec import Limits, TaskRetry, TaskSpec
    from holdfast.layers.task_states import TaskError, TaskEvent, TaskState
    from holdfast.layers.tasks import Tasks
    from holdfast.layers.watching import RecordChange, RecordChanges
    from holdfast.layers.workflows.archiving import Archive, Cleanup
    from holdfast.layers.workflows.context import Context
    from holdfast.layers.workflows.definitions import Retry, step, workflow
    from holdfast.layers.workflows.entries import LogEvent
    from holdfast.layers.workflows.handles import ExecutionHandle, ExecutionView, Workflows
    from holdfast.layers.workflows.history import HistoryPoint
    from holdfast.layers.workflows.schedules import Schedules, ScheduleView
    from holdfast.layers.workflows.worker import Worker
    from holdfast.manager.options import ManagerOptions
    from holdfast.manager.serving import Manager
    from holdfast.manager.starting import ensure_manager
    from holdfast.middleware.cache_options import Cache, CacheStats
    from holdfast.space import Space
    from holdfast.store import Store, open

__version__ = "0.1.0"

__all__ = [
    "ABSENT",
    "AccessDenied",
    "Alert",
    "AlertRule",
    "Archive",
    "Audit",
    "AuditRecord",
    "AuthenticationFailed",
    "BlobRef",
    "Blobs",
    "Cache",
    "CacheStats",
    "Case",
    "Cleanup",
    "Clock",
    "Compacted",
    "Conflict",
    "Consistency",
    "Context",
    "Contradiction",
    "Contribution",
    "ControlAnswer",
    "Correlation",
    "CorrelationView",
    "Correlations",
    "Damaged",
    "Decision",
    "Difference",
    "Document",
    "DocumentEvent",
    "DocumentHead",
    "DocumentVersion",
    "DocumentView",
    "Documents",
    "DurabilityUnavailable",
    "Empty",
    "Error",
    "ExecutionFailed",
    "ExecutionHandle",
    "ExecutionView",
    "Failure",
    "Finding",
    "Fusion",
    "Guard",
    "HistoryPoint",
    "IncompatibleStore",
    "InvalidInput",
    "Judgement",
    "Launch",
    "LeaseLost",
    "Limits",
    "LockAcquisitionError",
    "LockState",
    "Locks",
    "LogEvent",
    "Manager",
    "ManagerInfo",
    "ManagerOptions",
    "ManualClock",
    "Merged",
    "Message",
    "MessageChange",
    "MigrationFailed",
    "MigrationFailure",
    "MigrationReport",
    "NonDeterminism",
    "NotFound",
    "NotRunnable",
    "Orchestrator",
    "Outcome",
    "OutcomeUnknown",
    "Outdated",
    "OutputChunk",
    "Peeked",
    "PipelineHandle",
    "PipelineSpec",
    "PipelineState",
    "Pipelines",
    "Pool",
    "Priority",
    "Question",
    "Queue",
    "QueueCommit",
    "QueueStats",
    "Queues",
    "QuotaExceeded",
    "RateLimitExceeded",
    "Receipt",
    "Record",
    "RecordChange",
    "RecordChanges",
    "RecordTransaction",
    "Records",
    "Redaction",
    "RegisteredSchema",
    "Requeue",
    "Resolution",
    "Retention",
    "Retry",
    "Route",
    "ScheduleView",
    "Schedules",
    "SchemaViolation",
    "Schemas",
    "Session",
    "Signalled",
    "Space",
    "SpaceInfo",
    "Stand",
    "StateType",
    "StepFailed",
    "Stop",
    "StorageFull",
    "Store",
    "SystemClock",
    "TargetMissing",
    "TaskError",
    "TaskEvent",
    "TaskFailed",
    "TaskHandle",
    "TaskLedger",
    "TaskOutcome",
    "TaskOverview",
    "TaskPending",
    "TaskRetry",
    "TaskSpec",
    "TaskState",
    "Tasks",
    "TimedOut",
    "Unavailable",
    "Verdict",
    "Verification",
    "Violation",
    "WeightedAverage",
    "Worker",
    "Workflows",
    "absent",
    "at_least",
    "blocking",
    "contested",
    "delete_",
    "differing",
    "ensure_manager",
    "fan_in",
    "fan_out",
    "increment",
    "missed",
    "open",
    "opposed",
    "present",
    "route",
    "sequence",
    "set_",
    "step",
    "value_is",
    "version_is",
    "workflow",
]

_MODULES: Final = {
    "holdfast.clock": (
        "Clock",
        "ManualClock",
        "SystemClock",
    ),
    "holdfast.engine": (
        "Finding",
        "Receipt",
        "SpaceInfo",
    ),
    "holdfast.errors": (
        "AccessDenied",
        "AuthenticationFailed",
        "Compacted",
        "Conflict",
        "Damaged",
        "DurabilityUnavailable",
        "Empty",
        "Error",
        "ExecutionFailed",
        "IncompatibleStore",
        "InvalidInput",
        "LeaseLost",
        "LockAcquisitionError",
        "MigrationFailed",
        "NonDeterminism",
        "NotFound",
        "NotRunnable",
        "OutcomeUnknown",
        "QuotaExceeded",
        "RateLimitExceeded",
        "SchemaViolation",
        "StepFailed",
        "StorageFull",
        "TargetMissing",
        "TaskFailed",
        "TaskPending",
        "TimedOut",
        "Unavailable",
        "Violation",
    ),
    "holdfast.layers.audit": (
        "Audit",
        "AuditRecord",
        "Verification",
    ),
    "holdfast.layers.batch": (
        "ABSENT",
        "absent",
        "at_least",
        "delete_",
        "increment",
        "present",
        "set_",
        "value_is",
        "version_is",
    ),
    "holdfast.layers.blobs": (
        "BlobRef",
        "Blobs",
    ),
    "holdfast.layers.conflicts": (
        "Contradiction",
        "contested",
        "differing",
        "missed",
        "opposed",
    ),
    "holdfast.layers.consistency": ("Consistency",),
    "holdfast.layers.contributions": (
        "Contribution",
        "DocumentView",
        "Outdated",
    ),
    "holdfast.layers.correlation_entries": ("Decision",),
    "holdfast.layers.correlations": (
        "Correlation",
        "Correlations",
        "CorrelationView",
        "Signalled",
    ),
    "holdfast.layers.diffs": ("Difference",),
    "holdfast.layers.document_heads": (
        "DocumentHead",
        "Documents",
    ),
    "holdfast.layers.documents": (
        "Document",
        "DocumentVersion",
    ),
    "holdfast.layers.history": ("DocumentEvent",),
    "holdfast.layers.guards": ("Guard",),
    "holdfast.layers.merging": (
        "Fusion",
        "Merged",
        "Priority",
        "Question",
        "WeightedAverage",
    ),
    "holdfast.layers.messages": ("Message",),
    "holdfast.layers.migration": (
        "MigrationFailure",
        "MigrationReport",
    ),
    "holdfast.layers.orchestrator": ("Orchestrator",),
    "holdfast.layers.patterns": (
        "Outcome",
        "Route",
        "Stop",
        "fan_in",
        "fan_out",
        "route",
        "sequence",
    ),
    "holdfast.layers.pools": ("Pool",),
    "holdfast.layers.queue_entries": (
        "Failure",
        "Peeked",
        "Requeue",
    ),
    "holdfast.layers.queue_watching": (
        "MessageChange",
        "QueueCommit",
    ),
    "holdfast.layers.queues": (
        "Queue",
        "QueueStats",
        "Queues",
    ),
    "holdfast.layers.records": (
        "Record",
        "Records",
        "RecordTransaction",
    ),
    "holdfast.layers.redaction": ("Redaction",),
    "holdfast.layers.resolutions": (
        "Case",
        "Judgement",
        "Resolution",
        "Verdict",
    ),
    "holdfast.layers.retention": ("Retention",),
    "holdfast.layers.schemas": (
        "RegisteredSchema",
        "Schemas",
    ),
    "holdfast.layers.session": ("Session",),
    "holdfast.layers.standings": (
        "Locks",
        "LockState",
        "Stand",
    ),
    "holdfast.layers.state_type": ("StateType",),
    "holdfast.layers.alerts": (
        "Alert",
        "AlertRule",
    ),
    "holdfast.layers.observers": ("TaskOverview",),
    "holdfast.layers.pipeline_states": (
        "PipelineSpec",
        "PipelineState",
    ),
    "holdfast.layers.pipelines": (
        "PipelineHandle",
        "Pipelines",
    ),
    "holdfast.layers.task_control": ("ControlAnswer",),
    "holdfast.layers.task_handle": (
        "OutputChunk",
        "TaskHandle",
    ),
    "holdfast.layers.task_launch": (
        "Launch",
        "ManagerInfo",
        "TaskOutcome",
    ),
    "holdfast.layers.task_ledger": ("TaskLedger",),
    "holdfast.layers.task_spec": (
        "Limits",
        "TaskRetry",
        "TaskSpec",
    ),
    "holdfast.layers.task_states": (
        "TaskError",
        "TaskEvent",
        "TaskState",
    ),
    "holdfast.layers.tasks": ("Tasks",),
    "holdfast.layers.watching": (
        "RecordChange",
        "RecordChanges",
    ),
    "holdfast.manager.options": ("ManagerOptions",),
    "holdfast.manager.serving": ("Manager",),
    "holdfast.manager.starting": ("ensure_manager",),
    "holdfast.layers.workflows.context": ("Context",),
    "holdfast.layers.workflows.definitions": (
        "Retry",
        "step",
        "workflow",
    ),
    "holdfast.layers.workflows.entries": ("LogEvent",),
    "holdfast.layers.workflows.handles": (
        "ExecutionHandle",
        "ExecutionView",
        "Workflows",
    ),
    "holdfast.layers.workflows.archiving": (
        "Archive",
        "Cleanup",
    ),
    "holdfast.layers.workflows.history": ("HistoryPoint",),
    "holdfast.layers.workflows.schedules": (
        "ScheduleView",
        "Schedules",
    ),
    "holdfast.layers.workflows.worker": ("Worker",),
    "holdfast.middleware.cache_options": (
        "Cache",
        "CacheStats",
    ),
    "holdfast.space": ("Space",),
    "holdfast.store": (
        "Store",
        "open",
    ),
}
"""Where the names above come from. A module is loaded when the first of its names is used, so that whoever needs little of
Holdfast, such as a command that reads one value, starts quickly."""
_HOMES: Final = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is not None:
        value = getattr(import_module(home), name)
    elif name == "blocking":
        value = import_module("holdfast.blocking")
    else:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
