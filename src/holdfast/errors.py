"""Everything that can go wrong, ordered by what the caller does next.

    Error
    ├── Conflict                 re-read, decide again, retry
    │   └── LockAcquisitionError wait, or do something else
    ├── LeaseLost                stop: somebody else may own it now
    ├── NotFound                 it is not there
    ├── Empty                    nothing came: wait again, or do something else
    ├── TaskFailed               the task did not complete: its state says why
    ├── TaskPending              it goes on: wait longer, or ask again
    ├── Compacted                read the state afresh, then watch from now
    ├── InvalidInput             fix the call
    │   ├── IncompatibleStore    open another file, or upgrade
    │   ├── NotRunnable          give the command or function another form
    │   │   └── TargetMissing    install it, or correct its name
    │   └── SchemaViolation      make the value what its type's schema says
    ├── MigrationFailed          bring the step to this process, or mend it
    ├── AuthenticationFailed     present a valid token
    ├── AccessDenied             ask for the right
    ├── RateLimitExceeded        wait `retry_after` seconds
    ├── QuotaExceeded            delete something, or ask for more
    ├── Unavailable              nothing was changed: retry later
    │   └── StorageFull          free some space, then retry
    ├── DurabilityUnavailable    change the server's setting, or ask for less
    ├── OutcomeUnknown           look first: retry with the same request id
    ├── Damaged                  restore from a backup
    ├── NonDeterminism           run the code that ran before, or mend it
    ├── StepFailed               handle it in the workflow, or let it fail
    ├── TimedOut                 wait longer, or do something else
    └── ExecutionFailed          look at its steps, mend the cause, retry it

A refusal always raises; no call answers with a boolean that can be overlooked. `code` is the name on the wire,
`http_status` the status over HTTP, `exit_code` what the command line ends with; docs/errors.md lists them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

if TYPE_CHECKING:
    from holdfast.engine import Entry


class Error(Exception):
    """The root of every error this library raises."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1


class Conflict(Error):
    """A condition of the batch did not hold; nothing was changed.

    `key` is the entry whose condition failed, `condition` says which one, `actual` is the entry as it is
    (None when it is absent). Where two versions of a document met, `mine` is the one that was to be written and `theirs`
    the one that is there.
    """

    code = "conflict"
    http_status = 409
    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        condition: str | None = None,
        actual: Entry | None = None,
        mine: Any = None,
        theirs: Any = None,
    ) -> None:
        super().__init__(message)
        self.key = key
        self.condition = condition
        self.actual = actual
        self.mine = mine
        self.theirs = theirs


class LockAcquisitionError(Conflict):
    """The lock is held by somebody else and the time to wait is over."""

    code = "already_locked"
    http_status = 423
    exit_code = 6


class LeaseLost(Error):
    """The lease behind this work has ended; writes guarded by it are refused."""

    code = "lease_lost"
    http_status = 409
    exit_code = 7


class NotFound(Error):
    """What was named does not exist."""

    code = "not_found"
    http_status = 404
    exit_code = 4


class Empty(Error):
    """No message came to the queue while one waited."""

    code = "empty"
    http_status = 404
    exit_code = 24


class TaskFailed(Error):
    """The task ended, and did not complete. `state` is how it ended, with its reason and its return code."""

    code = "task_failed"
    http_status = 409
    exit_code = 25

    def __init__(self, message: str, *, state: Any = None) -> None:
        super().__init__(message)
        self.state = state


class TaskPending(Error):
    """What was waited for has not happened in that time. The task, or the pipeline, goes on; `state` is how it stands."""

    code = "task_pending"
    http_status = 504
    exit_code = 26

    def __init__(self, message: str, *, state: Any = None) -> None:
        super().__init__(message)
        self.state = state


class Compacted(Error):
    """The feed no longer reaches back to this cursor. Read the state afresh and watch from now."""

    code = "compacted"
    http_status = 410
    exit_code = 8


class InvalidInput(Error):
    """The call itself is wrong; repeating it cannot help."""

    code = "invalid_request"
    http_status = 400
    exit_code = 2


class IncompatibleStore(InvalidInput):
    """The file or server is not a Holdfast store, or one of a newer version."""

    code = "incompatible_store"
    http_status = 400
    exit_code = 9


class NotRunnable(InvalidInput):
    """What should run is there and cannot be run: no permission, no program, no callable, no such working directory.

    Nothing was started. The exit code is the one shells have for it.
    """

    code = "not_runnable"
    http_status = 400
    exit_code = 126


class TargetMissing(NotRunnable):
    """There is no command or function of this name; nothing was started."""

    code = "target_missing"
    http_status = 400
    exit_code = 127


class Violation(NamedTuple):
    """One thing in a value that is not as its schema wants it."""

    path: str
    """Where in the value, as a JSON pointer; "" is the value itself."""
    keyword: str
    """The schema's word that it violates: type, required, enum, …"""
    text: str
    """What was expected."""


class SchemaViolation(InvalidInput):
    """A value is not as the schema of its type wants it; nothing was written.

    `path` is where (a JSON pointer, "" is the value itself), `keyword` the schema's word that it violates. `violations` are
    all that were found, at most ten, each with `path`, `keyword` and `text`.
    """

    code = "schema_violation"
    http_status = 400
    exit_code = 22

    def __init__(
        self,
        message: str,
        *,
        type: str | None = None,
        version: str | None = None,
        path: str = "",
        keyword: str | None = None,
        violations: tuple[Violation, ...] = (),
    ) -> None:
        super().__init__(message)
        self.type = type
        self.version = version
        self.path = path
        self.keyword = keyword
        self.violations = violations


MigrationReason = Literal["unknown_version", "missing_step", "step_raised", "invalid_result"]


class MigrationFailed(Error):
    """Stored data of an older version could not be brought to its type's newest one; it stays as it is."""

    code = "migration_failed"
    http_status = 409
    exit_code = 23

    def __init__(
        self,
        message: str,
        *,
        reason: MigrationReason = "missing_step",
        type: str | None = None,
        from_version: str | None = None,
        to_version: str | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.type = type
        self.from_version = from_version
        self.to_version = to_version
        self.key = key


class AuthenticationFailed(Error):
    """The credential is missing, unknown, expired or revoked."""

    code = "authentication_failed"
    http_status = 401
    exit_code = 10


class AccessDenied(Error):
    """The credential is valid, and this operation is not allowed to it."""

    code = "access_denied"
    http_status = 403
    exit_code = 11


class RateLimitExceeded(Error):
    """Too many operations; wait `retry_after` seconds."""

    code = "rate_limit_exceeded"
    http_status = 429
    exit_code = 12

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaExceeded(Error):
    """The write would exceed what this agent or space may keep. Reads and deletes still work."""

    code = "quota_exceeded"
    http_status = 507
    exit_code = 13


class Unavailable(Error):
    """The store cannot serve this now. Nothing was changed; it is safe to retry."""

    code = "unavailable"
    http_status = 503
    exit_code = 14


class StorageFull(Unavailable):
    """The disk is full. Nothing was changed; writes work again as soon as there is space."""

    code = "storage_full"
    http_status = 507
    exit_code = 15


class DurabilityUnavailable(Error):
    """The store cannot give the durability this space asks for."""

    code = "durability_unavailable"
    http_status = 503
    exit_code = 16


class OutcomeUnknown(Error):
    """The commit may or may not have happened. Repeat it with the same request id to find out."""

    code = "outcome_unknown"
    http_status = 504
    exit_code = 17

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class Damaged(Error):
    """Stored data does not match its checksum or its chain; it is not served."""

    code = "damaged"
    http_status = 500
    exit_code = 18


class NonDeterminism(Error):
    """A workflow's code, run again, did not call what it had called before. `recorded` and `called` are the two."""

    code = "non_determinism"
    http_status = 409
    exit_code = 27

    def __init__(self, message: str, *, recorded: str = "", called: str = "") -> None:
        super().__init__(message)
        self.recorded = recorded
        self.called = called


class StepFailed(Error):
    """A step of a workflow failed in all its attempts. `step`, `kind` and `reason` say which, with what, and why."""

    code = "step_failed"
    http_status = 500
    exit_code = 28

    def __init__(self, message: str, *, step: str = "", kind: str = "", reason: str = "", attempts: int = 1) -> None:
        super().__init__(message)
        self.step = step
        self.kind = kind
        self.reason = reason
        self.attempts = attempts


class TimedOut(Error):
    """The time that was given for something is over: a step, a whole execution, or what one waited for; `step` says where in a workflow."""

    code = "timed_out"
    http_status = 504
    exit_code = 29

    def __init__(self, message: str, *, step: str = "") -> None:
        super().__init__(message)
        self.step = step


class ExecutionFailed(Error):
    """A workflow's execution has ended without a result. `status` is failed or cancelled, `kind` and `reason` say why."""

    code = "execution_failed"
    http_status = 500
    exit_code = 30

    def __init__(
        self, message: str, *, id: str = "", status: str = "failed", kind: str = "", reason: str = "", step: str = ""
    ) -> None:
        super().__init__(message)
        self.id = id
        self.status = status
        self.kind = kind
        self.reason = reason
        self.step = step
