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
    NotFound,
    OutcomeUnknown,
    QuotaExceeded,
    RateLimitExceeded,
    StorageFull,
    Unavailable,
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
from holdfast.layers.locks import Guard, Pool
from holdfast.layers.records import Record, Records, RecordTransaction
from holdfast.layers.redaction import Redaction
from holdfast.layers.retention import Retention
from holdfast.layers.standings import Locks, LockState, Stand
from holdfast.layers.watching import RecordChange, RecordChanges
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
    "Clock",
    "Compacted",
    "Conflict",
    "Damaged",
    "DurabilityUnavailable",
    "Error",
    "Finding",
    "Guard",
    "IncompatibleStore",
    "InvalidInput",
    "LeaseLost",
    "LockAcquisitionError",
    "LockState",
    "Locks",
    "ManualClock",
    "NotFound",
    "OutcomeUnknown",
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
    "Retention",
    "Space",
    "SpaceInfo",
    "Stand",
    "StorageFull",
    "Store",
    "SystemClock",
    "Unavailable",
    "Verification",
    "absent",
    "at_least",
    "blocking",
    "delete_",
    "increment",
    "open",
    "present",
    "set_",
    "value_is",
    "version_is",
]
