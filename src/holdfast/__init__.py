"""Holdfast keeps the shared state of multi-agent systems: not lost, not torn, not doubled.

    import holdfast

    async with holdfast.open("team.db") as store:
        space = store.space("contoso", agent="market")
        await space.records.set("regime", "risk-on", ttl="1h")

`holdfast.blocking` has the same without `await`. docs/ARCHITECTURE.md explains how it is built.
"""

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
    Error,
    IncompatibleStore,
    InvalidInput,
    LeaseLost,
    LockAcquisitionError,
    MigrationFailed,
    NotFound,
    OutcomeUnknown,
    QuotaExceeded,
    RateLimitExceeded,
    SchemaViolation,
    StorageFull,
    Unavailable,
    Violation,
)
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
from holdfast.layers.documents import Document, DocumentHead, Documents, DocumentVersion
from holdfast.layers.history import DocumentEvent
from holdfast.layers.locks import Guard, Pool
from holdfast.layers.merging import Fusion, Merged, Priority, Question, WeightedAverage
from holdfast.layers.migration import MigrationFailure, MigrationReport
from holdfast.layers.orchestrator import Orchestrator
from holdfast.layers.patterns import Outcome, Route, Stop, fan_in, fan_out, route, sequence
from holdfast.layers.records import Record, Records, RecordTransaction
from holdfast.layers.redaction import Redaction
from holdfast.layers.resolutions import Case, Judgement, Resolution, Verdict
from holdfast.layers.retention import Retention
from holdfast.layers.schemas import RegisteredSchema, Schemas
from holdfast.layers.session import Session
from holdfast.layers.standings import Locks, LockState, Stand
from holdfast.layers.state_type import StateType
from holdfast.layers.watching import RecordChange, RecordChanges
from holdfast.middleware.cache_options import Cache, CacheStats
from holdfast.space import Space
from holdfast.store import Store, open

__version__ = "0.1.0"

__all__ = [
    "ABSENT",
    "AccessDenied",
    "Audit",
    "AuditRecord",
    "AuthenticationFailed",
    "BlobRef",
    "Blobs",
    "Cache",
    "CacheStats",
    "Case",
    "Clock",
    "Compacted",
    "Conflict",
    "Consistency",
    "Contradiction",
    "Contribution",
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
    "Error",
    "Finding",
    "Fusion",
    "Guard",
    "IncompatibleStore",
    "InvalidInput",
    "Judgement",
    "LeaseLost",
    "LockAcquisitionError",
    "LockState",
    "Locks",
    "ManualClock",
    "Merged",
    "MigrationFailed",
    "MigrationFailure",
    "MigrationReport",
    "NotFound",
    "Orchestrator",
    "Outcome",
    "OutcomeUnknown",
    "Outdated",
    "Pool",
    "Priority",
    "Question",
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
    "Resolution",
    "Retention",
    "Route",
    "SchemaViolation",
    "Schemas",
    "Session",
    "Signalled",
    "Space",
    "SpaceInfo",
    "Stand",
    "StateType",
    "Stop",
    "StorageFull",
    "Store",
    "SystemClock",
    "Unavailable",
    "Verdict",
    "Verification",
    "Violation",
    "WeightedAverage",
    "absent",
    "at_least",
    "blocking",
    "contested",
    "delete_",
    "differing",
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
    "value_is",
    "version_is",
]
