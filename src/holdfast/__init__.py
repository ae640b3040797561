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
from holdfast.layers.diffs import Difference
from holdfast.layers.documents import Document, DocumentHead, Documents, DocumentVersion
from holdfast.layers.history import DocumentEvent
from holdfast.layers.locks import Guard, Locks, LockState, Pool, Stand
from holdfast.layers.migration import MigrationFailure, MigrationReport
from holdfast.layers.records import Record, Records, RecordTransaction
from holdfast.layers.redaction import Redaction
from holdfast.layers.resolutions import Case, Judgement, Resolution, Verdict
from holdfast.layers.retention import Retention
from holdfast.layers.schemas import RegisteredSchema, Schemas
from holdfast.layers.session import Session
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
    "Damaged",
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
    "Guard",
    "IncompatibleStore",
    "InvalidInput",
    "Judgement",
    "LeaseLost",
    "LockAcquisitionError",
    "LockState",
    "Locks",
    "ManualClock",
    "MigrationFailed",
    "MigrationFailure",
    "MigrationReport",
    "NotFound",
    "OutcomeUnknown",
    "Outdated",
    "Pool",
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
    "SchemaViolation",
    "Schemas",
    "Session",
    "Space",
    "SpaceInfo",
    "Stand",
    "StateType",
    "StorageFull",
    "Store",
    "SystemClock",
    "Unavailable",
    "Verdict",
    "Verification",
    "Violation",
    "absent",
    "at_least",
    "blocking",
    "contested",
    "delete_",
    "differing",
    "increment",
    "missed",
    "open",
    "opposed",
    "present",
    "set_",
    "value_is",
    "version_is",
]
