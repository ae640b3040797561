"""Shared documents: one body that the orchestrator owns, and one section per agent.

    doc = space.document("research/MSFT")
    view = await doc.read()
    await doc.contribute({"outlook": "growth"}, inputs=view.versions, confidence=0.8)
    await doc.update(lambda body: {**body, "round": body.get("round", 0) + 1})

Keys. `documents/bodies/<name>` is the body, its version the etag; `documents/heads/<name>` is what a listing shows, and the
reducers (`reducers.py`); both are written together, by orchestrators. `sections/documents/<name>/<agent>/<instance>` is a
contribution (`sections.py`), written by its agent; `modes/documents/<name>` is the mode in which they are made (`modes.py`). Each
change pushes an event of history (`history.py`) in the same commit.

How it works. A contribution is one commit of two operations and reads nothing, so it costs what it is, however large the
document; those of different agents never conflict. Two instances of one agent: in mode "merge" each has a section; in mode
"reject" they share one, and whoever has not seen the present one gets Conflict. Processes that name no instance are the same one, "1": in
mode "merge" the later contribution replaces the earlier. The first contribution settles the mode. Changes of the body are conditional on the
etag: `update` runs its function again on the fresh body, RETRIES times with random pauses; `merge` needs no luck, because
reducers take any order; `locked` lets one at a time in of those who ask for it, and a holder that lost its lease writes nothing.

Sections are named "agent/instance" wherever they are spoken of: `view.versions`, inputs, parties of a conflict. A contribution
is stale when something it read is at another version now, or gone.

How it fails. Conflict carries both versions: `mine`, what was to be written, and `theirs`, what is there. A body written by an
agent, or a section in another's name, is AccessDenied behind a policy; an embedded store trusts its process.

What it is not: body and sections are not one snapshot. Each page of sections is; what a decision rests on, its writer names.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from holdfast.clock import Duration, optional_ms
from holdfast.codec import decode, encode
from holdfast.engine import (
    OPERATIONS_MAX,
    Absent,
    Condition,
    Delete,
    Entry,
    Operation,
    Page,
    Put,
    Receipt,
    VersionIs,
)
from holdfast.errors import Conflict, InvalidInput
from holdfast.identity import check_agent
from holdfast.keys import check_name
from holdfast.layers.answers import ANSWERS, answer_key, answered, once, remembering
from holdfast.layers.conflicts import Contradiction
from holdfast.layers.consistency import Consistency, read, read_with_prefix
from holdfast.layers.contributions import (
    Contribution,
    DocumentView,
    checked_confidence,
    checked_inputs,
    contribution_of,
)
from holdfast.layers.diffs import Difference, differences
from holdfast.layers.document_heads import StoredHead, stored_head
from holdfast.layers.history import DocumentEvent, History
from holdfast.layers.modes import ContributionMode, Mode
from holdfast.layers.reducers import check_reducers, reduced
from holdfast.layers.resolutions import (
    CONFIDENCE_MIN,
    DOCUMENTS,
    QUORUM,
    Judgement,
    Resolution,
    Resolutions,
)
from holdfast.layers.scope import Scope
from holdfast.layers.sections import PAGE, SOLE, Sections
from holdfast.layers.transact import ATTEMPTS_MAX, Transaction, transact

if TYPE_CHECKING:
    from holdfast.layers.locks import Wanted

RETRIES: Final = 3
"""How often an update runs again when it met another."""
Change: TypeAlias = Callable[[Any], Any] | Callable[[Any], Awaitable[Any]]


class DocumentVersion(msgspec.Struct, frozen=True):
    """A body and its etag; 0 is before the first."""

    etag: int
    body: Any


class Document:
    """One document, seen by one agent. Made by `space.document(name)`."""

    def __init__(
        self,
        scope: Scope,
        name: str,
        mode: Mode,
        lock: Callable[[Duration | None, Duration | None], Wanted],
        judgement: Judgement,
    ) -> None:
        self.name = check_name(name, "document")
        self.mode: Mode = mode
        self._mode = ContributionMode(scope, name, mode)
        self._scope = scope
        self._lock = lock
        self._sections = Sections(scope, "documents", name)
        self._history = History(scope, name)
        self._resolutions = Resolutions(scope, name, self._history, judgement)
        self._body = DOCUMENTS.key("bodies", name)
        self._head = DOCUMENTS.key("heads", name)
        self._seen: dict[str, int] = {}
        """In mode reject: the versions of sections as they were last read or written here."""
        self._passing: dict[str, int] = {}
        """Those of them that were written here, with a ttl."""

    # --- reading ---

    async def read(self, *, consistency: Consistency = "session") -> DocumentView:
        """Body and contributions. A document that nobody wrote to is empty."""
        keys, prefix = [self._body, self._head], self._sections.prefix
        limit = self._sections.first_limit(consistency)
        [body, head], first = await read_with_prefix(self._scope, keys, prefix, consistency, limit=limit)
        found: dict[str, Contribution] = {}
        async for sections in self._sections.pages(first=first):
            for each in map(contribution_of, sections):
                found[each.section] = each
        if self.mode == "reject":
            self._seen = {each.section: each.version for each in found.values()}
        version = _version(body)
        return DocumentView(self.name, version.etag, version.body, found, stored_head(head).reducers)

    async def pages(
        self, *, after: str | None = None, limit: int = PAGE, consistency: Consistency = "session"
    ) -> AsyncIterator[DocumentView]:
        """The document with a page of its contributions at a time, for who must not hold all of them; `after` is a section's name.

        Each view has the body. What it says of stale contributions is true of inputs that are in the same view.
        """
        keys, prefix = [self._body, self._head], self._sections.prefix
        if after is None:
            [body, head], page = await read_with_prefix(self._scope, keys, prefix, consistency, limit=limit)
        else:
            body, head = await read(self._scope, keys, consistency)
            page = await self._scope.engine.scan(self._scope.space, prefix, after=prefix + after, limit=limit)
        version, reducers = _version(body), stored_head(head).reducers
        while True:
            found = [contribution_of(self._sections.section(entry)) for entry in page.entries]
            yield DocumentView(self.name, version.etag, version.body, {each.section: each for each in found}, reducers)
            if not page.more:
                return
            last = page.entries[-1].key
            page = await self._scope.engine.scan(self._scope.space, prefix, after=last, limit=limit)

    async def history(self, *, before: str | None = None, limit: int = 100) -> list[DocumentEvent]:
        """Who wrote what, when, from which inputs; newest first. `before` is the id of the last event already seen."""
        return await self._history.page(before, limit)

    async def diff(self, a: int, b: int | None = None) -> list[Difference]:
        """What changed after version `a` up to version `b`, or up to now; `print(*changes, sep="\\n")` reads well."""
        for point in (a, 0 if b is None else b):
            if type(point) is not int or point < 0:
                raise InvalidInput(f"a version is a whole number, such as an etag or an event's version, not {point!r}")
        if b is not None and b < a:
            raise InvalidInput(f"version {b} is before version {a}; name the earlier one first")
        [entry, mode] = await self._scope.engine.get(self._scope.space, [self._body, self._mode.key])
        version, since = _version(entry), None if mode is None else mode.version
        return await self._history.diff(version.etag, version.body, since, a, b if b is not None else 2**63 - 1)

    # --- contradictions ---

    async def conflicts(self) -> list[Contradiction]:
        """Contributions that contradict each other and are not settled; `escalated` ones wait for a person."""
        return await self._resolutions.open_in(await self.read(consistency="strong"))

    async def resolve(
        self,
        conflict: Contradiction | str,
        *,
        by: str = "priority",
        winner: str | None = None,
        justification: str | None = None,
        approvals: Mapping[str, str] | None = None,
        quorum: str = QUORUM,
        confidence_min: float | None = CONFIDENCE_MIN,
        request_id: str | None = None,
    ) -> Resolution:
        """Settle a contradiction (or its id) by a strategy, or let it wait for a person; `winner` is None then.

        A person settles it with `by="person"`, a winner and a justification. What was decided already, about the same outputs, is
        decided anew only with a justification, and against a person only by a person. Whoever wins must be sure of itself by
        `confidence_min`; None lets anybody win.
        """
        view = await self.read(consistency="strong")
        options = by, winner, justification, approvals or {}, quorum, confidence_min, request_id
        return await self._resolutions.resolve(view, conflict, *options)

    async def resolutions(self) -> list[Resolution]:
        """What was decided."""
        return await self._resolutions.stored("resolutions")

    async def escalations(self) -> list[Resolution]:
        """What waits for a person."""
        return await self._resolutions.stored("escalations")

    # --- contributing ---

    async def contribute(
        self,
        data: Any,
        *,
        inputs: Mapping[str, int] | None = None,
        confidence: float | None = None,
        agent: str | None = None,
        instance: str | None = None,
        ttl: Duration | None = None,
        request_id: str | None = None,
    ) -> int:
        """Write one's own section, and give its version. `inputs` are the versions of what it rests on (`view.versions`).

        What the same instance contributed before is replaced; several processes of an agent need an `instance` each. Orchestrators may contribute for another `agent`. In mode reject, Conflict when another instance was here meanwhile.
        """
        owner = self._scope.actor if agent is None else agent
        element = SOLE if self.mode == "reject" else self._scope.instance if instance is None else instance
        check_agent(owner)
        if element != SOLE:
            check_agent(element, what="an instance")
        section = f"{owner}/{element}"
        given = checked_inputs({} if inputs is None else inputs)
        value = {
            "data": data,
            "inputs": given,
            "confidence": checked_confidence(confidence),
        }
        if element == SOLE:
            value["instance"] = self._scope.instance if instance is None else instance
        put = self._sections.put(value, agent=agent, instance=element, ttl_ms=optional_ms(ttl))
        operations = (put, await self._history.contributed(section, put.value))
        if self.mode == "merge":
            return (await self._commit_in_mode(operations, (self._mode.condition,), request_id)).version
        seen = (self._seen if inputs is None else given).get(section, 0)
        version = await self._contribute_unless_met(put, operations, section, seen, request_id, data)
        if put.ttl_ms is not None:
            self._passing[section] = version
        self._seen[section] = max(version, self._seen.get(section, 0))
        return version

    async def _contribute_unless_met(
        self,
        put: Put,
        operations: tuple[Operation, ...],
        section: str,
        seen: int,
        request_id: str | None,
        data: Any,
    ) -> int:
        """In mode reject: if the section is still what this instance has seen, or was its own and has ended by itself."""
        said = {name: value for name, value in decode(put.value, dict).items() if name != "instance"}
        asked = ["contribute", self.name, section, said, put.ttl_ms]
        while True:
            # What is repeated was seen at another version meanwhile, so it is another batch: the answer is remembered here.
            transaction = Transaction(self._scope)
            before = await answered(transaction, request_id, asked)
            if before is not None:
                return before.version
            if request_id is not None:
                operations = (*operations[:2], remembering(self._scope, request_id, asked, None))
            as_seen = VersionIs(put.key, seen) if seen else Absent(put.key)
            conditions = *transaction.conditions, self._mode.condition, as_seen
            try:
                return (await self._commit_in_mode(operations, conditions, None)).version
            except Conflict as conflict:
                if request_id is not None and conflict.key == answer_key(self._scope, request_id):
                    continue  # the same request, twice at once
                if conflict.key != put.key:
                    raise
                if not seen or conflict.actual is not None or self._passing.get(section) != seen:
                    raise await self._rejected(conflict, put, data) from conflict
                seen = 0

    async def _commit_in_mode(
        self, operations: tuple[Operation, ...], conditions: tuple[Condition, ...], request_id: str | None
    ) -> Receipt:
        """Conditional on the mode; the first contribution of all settles it."""
        try:
            return await self._scope.commit(operations, conditions, request_id)
        except Conflict as conflict:
            if conflict.key != self._mode.key:
                raise
            await self._mode.settle(conflict)
        return await self._scope.commit(operations, conditions, request_id)

    async def _rejected(self, conflict: Conflict, put: Put, data: Any) -> Conflict:
        [entry] = await self._scope.engine.get(self._scope.space, [put.key])
        theirs = None if entry is None else contribution_of(self._sections.section(entry))
        if theirs is None:
            why = "what this instance has seen in this section is there no more"
        elif theirs.instance == decode(put.value, dict)["instance"]:
            why = (
                f"instance {theirs.instance!r} wrote this section at version {theirs.version}, and this is of the same instance but "
                "has not seen that; processes of one agent need an instance= each"
            )
        else:
            wrote = f"instance {theirs.instance!r} wrote this section at version {theirs.version}"
            why = f"{wrote}, and this instance has not seen that"
        return Conflict(
            f"nothing was contributed to {self.name!r}: {why}; read the document and decide again",
            key=put.key,
            condition=conflict.condition,
            actual=entry,
            mine=data,
            theirs=theirs,
        )

    async def withdraw(
        self, *, agent: str | None = None, instance: str | None = None, request_id: str | None = None
    ) -> bool:
        """Take one's section back; tells whether there was one. The history keeps what was said."""
        element = SOLE if self.mode == "reject" else self._scope.instance if instance is None else instance
        section = f"{self._scope.actor if agent is None else agent}/{element}"
        gone = self._sections.delete(agent=agent, instance=element)
        operations = gone, await self._history.told("withdrew", section=section)
        receipt = await self._scope.commit(operations, (), request_id)
        self._seen.pop(section, None)
        if receipt.results[0] is not True:
            await self._mode.check()  # with another mode it would have been another section
        return receipt.results[0] is True

    # --- the body ---

    async def update(
        self, change: Change, *, attempts: int = RETRIES + 1, request_id: str | None = None
    ) -> DocumentVersion:
        """Write what the function makes of the body; it runs again on the fresh one when somebody else was faster.

        Conflict, with both versions, when every attempt met a change.
        """
        return await self._write(change, None, attempts, request_id, ["update", self.name])

    async def replace(self, body: Any, *, etag: int, request_id: str | None = None) -> DocumentVersion:
        """Write the body if it is still at this etag (0: if there is none); otherwise Conflict, with both versions."""
        if type(etag) is not int or etag < 0:
            raise InvalidInput(f"an etag is a version, such as view.etag; 0 when there is none yet; not {etag!r:.60}")
        if body is None:
            raise InvalidInput("a body is not None; delete() removes the document, and {} is one that is empty")
        return await self._write(lambda _: body, etag, 1, request_id, ["replace", self.name, etag, body])

    async def merge(self, change: Mapping[str, Any], *, request_id: str | None = None) -> DocumentVersion:
        """Reduce values into the body by the reducers declared for their paths, again and again until nobody was faster."""
        asked = ["merge", self.name, change]
        return await self._write(None, None, ATTEMPTS_MAX, request_id, asked, change)

    async def declare(self, reducers: Mapping[str, str], *, request_id: str | None = None) -> None:
        """Say how values of these paths meet: sum, max, union, append or last. Replaces what was declared before."""
        declared = check_reducers(reducers)

        async def work(transaction: Transaction) -> Any:
            async def do() -> None:
                [body, head] = await transaction.read(self._body, self._head)
                stored = stored_head(head)
                etag = 0 if body is None else body.version
                transaction.put(Put(self._head, encode(StoredHead(stored.by, stored.bytes, etag, declared))))
                transaction.operations.append(await self._history.told("reducers", declared))

            return await once(transaction, request_id, ["declare", self.name, declared], do)

        await transact(lambda: Transaction(self._scope), work)

    async def delete(self, *, request_id: str | None = None) -> bool:
        """Remove the document, its contributions and what waits for a person in it; tells whether there was one.

        Decisions stay, and its history until its ttl.
        """
        event = await self._history.told("deleted")
        operations = Delete(self._body), Delete(self._head), Delete(self._mode.key), event
        receipt = await self._scope.commit(operations, (), request_id)
        found = True in receipt.results
        for prefix in (self._sections.prefix, DOCUMENTS.prefix("escalations", self.name)):
            found = await self._clear(prefix, receipt.version) or found
        return found

    async def _clear(self, prefix: str, upto: int) -> bool:
        """Remove what was there at that version; what was written since belongs to the document's next life."""
        found, after = False, None
        while True:
            page = await self._under(prefix, after)
            old = [entry for entry in page.entries if entry.version <= upto]
            if old:
                found = True
                conditions = tuple(VersionIs(entry.key, entry.version) for entry in old)
                try:
                    await self._scope.commit(tuple(Delete(entry.key) for entry in old), conditions)
                except Conflict:
                    continue  # one of them is newer now
            if not page.more:
                return found
            after = page.entries[-1].key

    def _under(self, prefix: str, after: str | None = None) -> Awaitable[Page]:
        return self._scope.engine.scan(self._scope.space, prefix, after=after, limit=OPERATIONS_MAX)

    async def _write(
        self,
        change: Change | None,
        etag: int | None,
        attempts: int,
        request_id: str | None,
        asked: list[Any],
        merged: Mapping[str, Any] | None = None,
    ) -> DocumentVersion:
        wanted: list[DocumentVersion] = []
        """What the last attempt wanted to write, and for which etag; empty when the request was answered before."""
        begun: list[Transaction] = []

        def begin() -> Transaction:
            wanted.clear()
            begun.append(Transaction(self._scope))
            return begun[-1]

        async def work(transaction: Transaction) -> Any:
            async def do() -> None:
                [entry, head] = await transaction.read(self._body, self._head)
                present, stored = _version(entry), stored_head(head)
                if change is None:
                    body = reduced(present.body, merged, stored.reducers)
                else:
                    answer = change(_version(entry).body)  # a copy of its own: the function may change it in place
                    body = await answer if inspect.isawaitable(answer) else answer
                    if body is None:
                        raise InvalidInput("the function gave no body; it must return the new one")
                wanted.append(DocumentVersion(present.etag, body))
                if etag is not None and etag != present.etag:
                    raise self._conflict(DocumentVersion(etag, body), present, entry)
                await self._stage(transaction, present, body, stored)

            return await once(transaction, request_id, asked, do)

        try:
            await transact(begin, work, attempts)
        except Conflict as conflict:
            if conflict.theirs is not None or not wanted:
                raise
            [entry] = await self._scope.engine.get(self._scope.space, [self._body])
            raise self._conflict(wanted[0], _version(entry), entry) from conflict
        receipt = begun[-1].receipt
        if wanted and receipt is not None:
            return DocumentVersion(receipt.version, wanted[0].body)
        return await self._answered(request_id or "")

    async def _answered(self, request_id: str) -> DocumentVersion:
        """What a repeated request wrote the first time: its etag, and the body as it is now."""
        keys = [self._body, ANSWERS.key(self._scope.actor, request_id)]
        [entry, answer] = await self._scope.engine.get(self._scope.space, keys)
        return DocumentVersion(0 if answer is None else answer.version, _version(entry).body)

    async def _stage(self, transaction: Transaction, present: DocumentVersion, body: Any, stored: StoredHead) -> None:
        """Body, head and history, in one commit."""
        value = encode(body)
        changes = list(differences(present.body, decode(value)))
        transaction.put(Put(self._body, value))
        transaction.put(Put(self._head, encode(StoredHead(self._scope.actor, len(value), None, stored.reducers))))
        transaction.operations.append(await self._history.changed(present.etag, changes))

    def _conflict(self, mine: DocumentVersion, theirs: DocumentVersion, entry: Entry | None) -> Conflict:
        return Conflict(
            f"{self.name!r} was not written: it is at etag {theirs.etag} and the change was made for {mine.etag}; "
            "read it, decide again, and write with its present etag",
            key=self._body,
            condition="version",
            actual=entry,
            mine=mine,
            theirs=theirs,
        )

    def locked(self, *, ttl: Duration | None = None, wait: Duration | None = 0) -> Locked:
        """One at a time: `async with doc.locked(ttl="30s") as held:`; whatever `held` writes needs the lock.

        `wait` is how long to stand in line: 0 not at all (LockAcquisitionError), None as long as it takes. The lock is for those who
        ask for it: who writes without it is not held up, and `held` meets that as a change by another.
        """
        return Locked(self.name, self.mode, self._lock(ttl, wait))


class Locked:
    """A document under its lock, as long as the block lasts."""

    def __init__(self, name: str, mode: Mode, wanted: Wanted) -> None:
        self._name = name
        self._mode: Mode = mode
        self._wanted = wanted

    async def __aenter__(self) -> Document:
        guard = await self._wanted.__aenter__()
        return guard.space.document(self._name, mode=self._mode)

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        await self._wanted.__aexit__(kind, exc, trace)


def _version(entry: Entry | None) -> DocumentVersion:
    return DocumentVersion(0, {}) if entry is None else DocumentVersion(entry.version, decode(entry.value))
