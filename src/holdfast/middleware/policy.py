"""The policy of a keeper: an engine around an engine, for one identity, that does only what the rules allow.

    policy = Policy(engine, clock, rules, denied=callback)
    engine = policy.engine_for(identity)        # one per connection; cheap
    policy.reload(rules)                        # from the next request on; drops none

Checks in this order, each before anything is done: access (`verbs.py`, `grants.py`), rate (`rates.py`), quota
(`quotas.py`). Every condition and operation of a batch is checked and charged, and the rule of ownership goes into the batch
as conditions, so that it holds at the instant of the commit. Who acts is who the credential names: a batch of another actor is
refused. An identity has one space; every other one is refused in the same words, whether it exists or not.

What others read must be readable: a value that is not JSON is InvalidInput. Administrators bring entries as they are.

What it costs: a batch its operations or its conditions, whichever are more; a read its keys; a scan, a watch, and
everything else 1. A part of each burst is kept for renewals (`rates.py`).

How it fails. AccessDenied, RateLimitExceeded (with `retry_after`), QuotaExceeded; nothing was changed then. `denied` is
told of each; an error of its own is logged and changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Final, NoReturn, TypeVar

from msgspec.structs import replace

from holdfast.checking import check_batch, check_keys, check_scan, check_start
from holdfast.clock import Clock
from holdfast.codec import check_all_json, check_json
from holdfast.engine import (
    CONDITIONS_MAX,
    ID_DIGITS,
    SYSTEM_ACTOR,
    Batch,
    ChangeSet,
    Condition,
    Durability,
    Engine,
    Entry,
    Finding,
    Increment,
    Page,
    Push,
    Put,
    Receipt,
    SpaceInfo,
)
from holdfast.errors import AccessDenied, Conflict, Error, InvalidInput, QuotaExceeded, RateLimitExceeded
from holdfast.identity import EVERY_SPACE, Identity
from holdfast.keys import shown
from holdfast.middleware.denials import Denial, why_not_ours
from holdfast.middleware.flights import Flight, Formation
from holdfast.middleware.grants import Grant, grant_of
from holdfast.middleware.messages import Misplaced
from holdfast.middleware.quotas import Book, Quotas, Tally
from holdfast.middleware.rates import Bucket, Rates
from holdfast.middleware.rules import Rules
from holdfast.middleware.verbs import (
    ADMIN,
    ORCHESTRATE,
    claimed,
    claims,
    claims_in_line,
    demands,
    place_in_line,
    readable,
    reading,
    renews,
    territory_of,
    territory_under,
    written_for,
)
from holdfast.offers import Replies, Reply, Submits

E = TypeVar("E", bound=Error)

UNLIMITED: Final = 1 << 63
"""More than any bound, also one that was never read."""

log = logging.getLogger("holdfast.policy")


def _tell_nobody(denial: Denial) -> None:
    pass


class Policy:
    """The rules in force, and what was used under them."""

    def __init__(
        self, engine: Engine, clock: Clock, rules: Rules, *, denied: Callable[[Denial], None] = _tell_nobody
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.rules = rules
        self.rates = Rates()
        self.quotas = Quotas(engine, clock)
        self._denied = denied

    def engine_for(self, identity: Identity) -> PolicedEngine:
        """The engine as this identity may use it."""
        if identity.role != "admin" and identity.space == EVERY_SPACE:
            raise InvalidInput(f"{identity.agent!r} is no administrator and must have one space, not every one")
        if identity.role != "admin" and identity.agent == SYSTEM_ACTOR:
            raise InvalidInput(f"{SYSTEM_ACTOR!r} is how the store names itself; no agent may have this name")
        return PolicedEngine(self, identity)

    def reload(self, rules: Rules) -> None:
        """These rules count from the next request on. What was used before still counts."""
        self.rules = rules

    def tell(self, denial: Denial) -> None:
        try:
            self._denied(denial)
        except Exception:
            log.exception("a denial could not be told")


class PolicedEngine:
    """An engine as one identity may use it. Closing it leaves the engine within open."""

    def __init__(self, policy: Policy, identity: Identity) -> None:
        self.identity = identity
        self._policy = policy
        self._inner = policy.engine
        self._clock = policy.clock
        self._books = policy.quotas.books
        self._quick = policy.engine if isinstance(policy.engine, Submits) else None
        self._agent = identity.agent
        self._home = identity.space
        self._admin = identity.role == "admin"
        self._orchestrator = identity.role == "orchestrator"
        self._apply(policy.rules)

    def _apply(self, rules: Rules) -> None:
        grant = grant_of(rules, self.identity)
        self._rules = rules
        self._grant: Grant = grant
        self._verbs = grant.verbs
        self._bucket: Bucket | None = None
        if grant.rate is not None:
            self._bucket = self._policy.rates.bucket(self._home, self._agent, self.identity.role, grant.rate)
        quota = grant.quota
        self._value_max = UNLIMITED if quota is None else quota.max_value_size
        self._bytes_max = UNLIMITED if quota is None else quota.max_total_size
        self._keys_max = UNLIMITED if quota is None else quota.max_keys_per_agent
        self._sets = "Set" in grant.verbs and not self._admin
        self._gets = "Get" in grant.verbs and not self._admin

    # --- the operations ---

    async def commit(self, space: str, batch: Batch) -> Receipt:
        flight = self._take_off(space, batch)
        if flight is None:
            return await self._commit(space, batch)
        try:
            receipt = await self._inner.commit(space, batch)
        except BaseException as exc:
            flight.fail(exc)
            raise
        flight.land()
        return receipt

    def submit(self, space: str, batch: Batch, reply: Reply) -> bool:
        """`commit` without a coroutine (`offers.Submits`), for what is sent most."""
        quick = self._quick
        if quick is None:
            return False
        flight = self._take_off(space, batch, reply)
        if flight is None:
            flight = self._take_place(space, batch, reply)
            if flight is None:
                return False
        try:
            quick.submit(space, flight.sent, flight)
        except Conflict as conflict:
            flight.set_exception(conflict)
        except BaseException as exc:
            flight.fail(exc)
            raise
        return True

    def submit_all(self, space: str, batches: list[Batch], replies: Replies) -> bool:
        """Puts of records, each as `_take_off` takes it, if there is room for all; otherwise each goes by itself."""
        self._renew()
        quick, tallies = self._quick, self._open_tallies(space)
        if quick is None or tallies is None:
            return False
        amounts = [self._size_of_set(batch) for batch in batches]
        if not all(amounts):
            return False
        book, account = tallies
        amount, keys, bucket = sum(amounts), len(amounts), self._bucket
        if book.base + book.begun + amount > self._bytes_max or account.base + account.begun + keys > self._keys_max:
            return False
        if bucket is not None and not bucket.charge_all(keys, self._clock.now_ms()):
            return False
        formation = Formation(self._policy.quotas, book, account, amount, keys, amounts, replies)
        went = False
        try:
            # Last: who is over its rate or its quota makes nobody read all it has sent.
            check_all_json([batch.operations[0].value for batch in batches])  # type: ignore[union-attr]
            went = quick.submit_all(space, batches, formation)
        except InvalidInput:
            pass  # whose value it is hears of it when each goes by itself
        finally:
            if not went:
                formation.cancel()
                if bucket is not None:
                    bucket.give_back(keys)
        return went

    def _take_place(self, space: str, batch: Batch, reply: Reply) -> Flight | None:
        """What locks are made of (`place_in_line`): checked as any batch is, if nothing has to be waited for.

        None when it is something else, or needs a closer look; then nothing was charged.
        """
        if self._admin or batch.actor != self._agent or space != self._home:
            return None
        operations, book = batch.operations, self._books.get(space)
        if (
            (key := place_in_line(operations)) is None
            or book is None
            or book.gate is not None
            or (account := book.accounts.get(self._agent)) is None
            or account.gate is not None
        ):
            return None
        op, amount, keys = operations[0], 0, 0
        if type(op) is Push:
            if type(op.value) is not bytes or len(op.value) > self._value_max:
                return None
            amount, keys = len(key) + ID_DIGITS + len(op.value), 1
            if (
                book.base + book.begun + amount > self._bytes_max
                or account.base + account.begun + keys > self._keys_max
            ):
                return None
        try:
            plain = claims_in_line(operations, batch.conditions, self._verbs)
            added = self._check(space, batch) if plain is None else plain
            if plain is not None and type(op) is Push:
                check_json(op.value)
        except (AttributeError, TypeError, ValueError):
            return None
        conditions = batch.conditions + added
        if len(conditions) > CONDITIONS_MAX:
            return None
        tokens = max(len(operations), len(batch.conditions))
        if self._bucket is not None and (wait_ms := self._bucket.charge(tokens, self._clock.now_ms())):
            self._refuse_rate(tokens, wait_ms, space, _verb_of(batch), _key_of(batch), batch.request_id)
        sent = replace(batch, conditions=conditions) if added else batch
        explained = lambda conflict: self._explained(conflict, space, batch, added)  # noqa: E731
        return Flight(self._policy.quotas, book, account, amount, keys, sent, reply, explained)

    def _take_off(self, space: str, batch: Batch, reply: Reply | None = None) -> Flight | None:
        """One Put of a record, what is sent most: the same checks as for any batch, without looking anything up.

        None when it is something else, or needs a closer look; then nothing was charged.
        """
        if self._rules is not self._policy.rules:
            self._apply(self._policy.rules)
        amount = self._size_of_set(batch)
        if not amount or (tallies := self._open_tallies(space)) is None:
            return None
        book, account = tallies
        if book.base + book.begun + amount > self._bytes_max or account.base + account.begun >= self._keys_max:
            return None
        put: Put = batch.operations[0]  # type: ignore[assignment]
        if self._bucket is not None and (wait_ms := self._bucket.charge(1, self._clock.now_ms())):
            self._refuse_rate(1, wait_ms, space, "Set", put.key, batch.request_id)
        check_json(put.value)
        return Flight(self._policy.quotas, book, account, amount, 1, batch, reply)

    def _open_tallies(self, space: str) -> tuple[Book, Tally] | None:
        """What this agent's sets in its own space are charged to, if it may set and nobody goes alone there."""
        book = self._books.get(space)
        if (
            book is None
            or (account := book.accounts.get(self._agent)) is None
            or not self._sets
            or space != self._home
            or book.gate is not None
            or account.gate is not None
        ):
            return None
        return book, account

    def _size_of_set(self, batch: Batch) -> int:
        """What a batch adds at most, if it is one Put of a record by this agent, and small enough; 0 if it is not."""
        operations = batch.operations
        if (
            len(operations) != 1
            or type(op := operations[0]) is not Put
            or batch.conditions
            or op.owner is not None
            or type(key := op.key) is not str
            or key[:8] != "records/"
            or not key.isascii()
            or type(op.value) is not bytes
            or batch.actor != self._agent
            or (size := len(op.value)) > self._value_max
        ):
            return 0
        return size + len(key)

    async def _commit(self, space: str, batch: Batch) -> Receipt:
        """Any batch."""
        if space != self._home and self._home != EVERY_SPACE:
            self._enter(space, _verb_of(batch), _key_of(batch), batch.request_id)
        if self._admin:
            return await self._policy.quotas.commit(space, batch, None)
        if batch.actor != self._agent:
            reason = f"the token is of {self._agent!r}, who acts as nobody else"
            self._deny(space, ADMIN, _key_of(batch), reason, batch.request_id)
        try:
            conditions = self._check(space, batch)
        except (AttributeError, TypeError, ValueError):
            check_batch(batch)  # something in it is no operation, or no key: that is InvalidInput, in words
            raise
        if self._bucket is not None:
            tokens = max(len(batch.operations), len(batch.conditions), 1)
            if wait_ms := self._bucket.charge(tokens, self._clock.now_ms(), renewal=renews(batch)):
                self._refuse_rate(tokens, wait_ms, space, _verb_of(batch), _key_of(batch), batch.request_id)
        return await self._within_quota(space, batch, conditions)

    def _check(self, space: str, batch: Batch) -> tuple[Condition, ...]:
        """Every verb of the batch, and whom it writes for; gives what ownership adds to it."""
        verbs, id = self._verbs, batch.request_id
        for verb, key in demands(batch):
            if verb not in verbs:
                self._deny_verb(space, verb, key, id)
        for op in batch.operations:
            if type(op) is Put or type(op) is Push:
                check_json(op.value)
            if type(op) is Put and not written_for(op, self._agent, orchestrator=self._orchestrator):
                self._deny(space, ADMIN, op.key, f"the token is of {self._agent!r}, who writes for nobody else", id)
        try:
            return claims(batch, orchestrator=self._orchestrator)
        except Misplaced as misplaced:
            reason = f"{shown(misplaced.key)} cannot be written: {misplaced}"
            self._deny(space, _verb_of(batch), misplaced.key, reason, id)

    async def _within_quota(self, space: str, batch: Batch, conditions: tuple[Condition, ...]) -> Receipt:
        """Commit it, with the conditions that ownership adds."""
        sent = batch
        if conditions:
            together = batch.conditions + conditions
            if len(together) > CONDITIONS_MAX:
                raise InvalidInput(
                    f"a batch has at most {CONDITIONS_MAX} conditions; this one has {len(batch.conditions)}, and "
                    f"{len(conditions)} more that ownership adds"
                )
            sent = replace(batch, conditions=together)
        try:
            return await self._policy.quotas.commit(space, sent, self._grant.quota)
        except QuotaExceeded as exc:
            self._told(exc, space, _verb_of(batch), _key_of(batch), batch.request_id)
            raise
        except Conflict as conflict:
            explained = self._explained(conflict, space, batch, conditions)
            if explained is conflict:
                raise
            raise explained from conflict
        except InvalidInput:
            if all(territory_of(op.key).read in self._verbs for op in batch.operations if isinstance(op, Increment)):
                raise
            # Its words show what is there, to one who may not read it.
            raise InvalidInput(
                "what is to be incremented is no 64-bit integer, or would be none; or the batch is wrong"
            ) from None

    def _explained(
        self, conflict: Conflict, space: str, batch: Batch, conditions: tuple[Condition, ...]
    ) -> Conflict | AccessDenied:
        """A refusal as its sender hears it: one by a condition that ownership added is a denial, and told."""
        if not claimed(conflict, batch, conditions):
            return conflict
        key = conflict.key or ""
        return self._told(AccessDenied(why_not_ours(conflict, key)), space, _verb_of(batch), key, batch.request_id)

    def read(self, space: str, keys: list[str]) -> list[Entry | None] | None:
        """`get` without a coroutine (`offers.Submits`), for one record."""
        if self._rules is not self._policy.rules:
            self._apply(self._policy.rules)
        if self._quick is None or not self._is_one_record(space, keys):
            return None
        found = self._quick.read(space, keys)
        if found is not None:
            self._charge_read(space, keys[0])
        return found

    def _is_one_record(self, space: str, keys: list[str]) -> bool:
        """What is read most, and may be: the same checks as for any read, without looking anything up."""
        return (
            len(keys) == 1
            and self._gets
            and type(key := keys[0]) is str
            and key[:8] == "records/"
            and space == self._home
        )

    def _charge_read(self, space: str, key: str) -> None:
        if self._bucket is not None and (wait_ms := self._bucket.charge(1, self._clock.now_ms())):
            self._refuse_rate(1, wait_ms, space, "Get", key)

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        if self._rules is not self._policy.rules:
            self._apply(self._policy.rules)
        if self._is_one_record(space, keys):
            self._charge_read(space, keys[0])
            return await self._inner.get(space, keys)
        check_keys(keys)
        self._enter(space, "Get", keys[0] if keys else "")
        for key in keys:
            if (verb := reading(key, self._agent, territory_of(key))) not in self._verbs:
                self._deny_verb(space, verb, key)
        self._charge(max(len(keys), 1), space, "Get", keys[0] if keys else "")
        return await self._inner.get(space, keys)

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        check_scan(prefix, after, limit)
        self._renew()
        self._enter(space, "Get", prefix)
        if (verb := reading(prefix, self._agent, territory_under(prefix))) not in self._verbs:
            self._deny_verb(space, verb, prefix)
        self._charge(1, space, verb, prefix)
        return await self._inner.scan(space, prefix, after=after, limit=limit, reverse=reverse)

    async def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        """Only what may be read. Without a prefix, for those who may read the audit: all subspaces that one may read."""
        for prefix in prefixes:
            check_start(prefix)
        self.require_watch(space, prefixes)
        self._charge(1, space, "Watch", prefixes[0] if prefixes else "")
        seen = prefixes if prefixes or self._admin else readable(self._verbs)
        rules = self._rules
        async for commit in self._inner.watch(space, *seen, cursor=cursor, live=live):
            if rules is not self._policy.rules:
                self.require_watch(space, seen)
                rules = self._rules
            yield commit

    def require_watch(self, space: str, prefixes: tuple[str, ...]) -> None:
        """What `watch` asks when it begins, also for those who tell a watch's place before its first commit."""
        self._renew()
        first = prefixes[0] if prefixes else ""
        self._enter(space, "Watch", first)
        if "Watch" not in self._verbs:
            self._deny_verb(space, "Watch", first)
        if not prefixes and "Audit" not in self._verbs:
            self._deny_verb(space, "Audit", "")
        for prefix in prefixes:
            if (verb := reading(prefix, self._agent, territory_under(prefix))) not in self._verbs:
                self._deny_verb(space, verb, prefix)

    # --- the life of spaces ---

    async def close(self) -> None:
        """The engine within stays open: others use it."""

    async def create(self, space: str, durability: Durability = "sync", *, audit_reads: bool = False) -> SpaceInfo:
        """One's own space, as it is or as spaces are made; how durable it is otherwise, administrators decide."""
        self._renew()
        self._enter(space, "Set", "")
        if not self._admin and "Set" not in self._verbs:
            self._deny_verb(space, "Set", "")
        self._charge(1, space, "Set", "")
        if not self._admin:
            for info in await self._described(space):
                if info.durability == durability and info.audit_reads >= audit_reads:
                    return info
            if durability != "sync" or audit_reads:
                self._deny(
                    space, ADMIN, "", "how durable a space is, and whether its reads are noted, administrators decide"
                )
        return await self._inner.create(space, durability, audit_reads=audit_reads)

    async def spaces(self, name: str | None = None) -> list[SpaceInfo]:
        """One's own, if it exists; every one for administrators of all. Who keeps how much in it is for those who may Get."""
        self._renew()
        if name is None and self._home == EVERY_SPACE:
            return await self._inner.spaces()
        name = self._home if name is None else name
        self._enter(name, "Get", "")
        self._charge(1, name, "Get", "")
        return await self._described(name)

    async def _described(self, space: str) -> list[SpaceInfo]:
        found = await self._inner.spaces(space)
        return found if self._admin or "Get" in self._verbs else [replace(info, usage=[]) for info in found]

    async def drop(self, space: str) -> None:
        self._administer(space)
        await self._inner.drop(space)
        self._policy.quotas.forget(space)

    async def load(self, space: str, entries: list[Entry], revision: int) -> None:
        self._administer(space)
        await self._inner.load(space, entries, revision)
        self._policy.quotas.forget(space)

    async def compact(self, space: str, upto: int) -> None:
        self._administer(space)
        await self._inner.compact(space, upto)

    async def inspect(self) -> list[Finding]:
        self._administer(EVERY_SPACE)
        return await self._inner.inspect()

    # --- refusals ---

    def require(self, space: str, verb: str) -> None:
        """For what is asked for by the name of a verb, whatever is in it: AccessDenied, and told, where that is not allowed."""
        self._renew()
        self._enter(space, verb, "")
        if verb not in self._verbs:
            self._deny_verb(space, verb, "")

    def _renew(self) -> None:
        if self._rules is not self._policy.rules:
            self._apply(self._policy.rules)

    def _enter(self, space: str, verb: str, key: str, request_id: str | None = None) -> None:
        if space != self._home and self._home != EVERY_SPACE:
            reason = f"the token of {self._agent!r} is for space {self._home!r} and no other"
            self._deny(space, verb, key, reason, request_id)

    def _administer(self, space: str) -> None:
        self._renew()
        self._enter(space, ADMIN, "")
        if not self._admin:
            self._deny_verb(space, ADMIN, "")

    def _charge(self, tokens: int, space: str, verb: str, key: str) -> None:
        if self._bucket is not None and (wait_ms := self._bucket.charge(tokens, self._clock.now_ms())):
            self._refuse_rate(tokens, wait_ms, space, verb, key)

    def _refuse_rate(
        self, tokens: int, wait_ms: int, space: str, verb: str, key: str, request_id: str | None = None
    ) -> NoReturn:
        rate, bucket = self._grant.rate, self._bucket
        per_second = 0.0 if rate is None else rate.max_ops_per_second
        if bucket is not None and tokens > bucket.burst:
            text = (
                f"{tokens} operations at once are more than the burst of {bucket.burst} that {self._agent!r} has; "
                "nothing was done. Send them in smaller parts"
            )
        else:
            text = (
                f"{self._agent!r} is over its rate of {per_second:g} operations a second; nothing was done. "
                f"Try again in {wait_ms / 1000:g} s"
            )
        raise self._told(RateLimitExceeded(text, retry_after=wait_ms / 1000), space, verb, key, request_id)

    def _deny_verb(self, space: str, verb: str, key: str, request_id: str | None = None) -> NoReturn:
        where = f" {shown(key)}" if key not in ("", "records/") else ""
        if verb == ADMIN:
            what = f"{where or ' this'} is for administrators, or names no single subspace"
        elif verb == ORCHESTRATE:
            what = f"{where or ' this'} is for orchestrators"
        else:
            what = f" its rules do not allow {verb}{' of' + where if where else ''}"
        reason = f"{self._agent!r} may not do that:{what}. Ask whoever keeps the rules"
        self._deny(space, verb, key, reason, request_id)

    def _deny(self, space: str, verb: str, key: str, reason: str, request_id: str | None = None) -> NoReturn:
        raise self._told(AccessDenied(reason), space, verb, key, request_id)

    def _told(self, error: E, space: str, verb: str, key: str, request_id: str | None = None) -> E:
        """The same error, of which somebody was told. Who raises it has no name for it, so that it is freed with its traceback."""
        self._policy.tell(Denial(self.identity, space, verb, key, error.code, str(error), request_id))
        return error


def _verb_of(batch: Batch) -> str:
    """What a batch is, in one word, for those who are told that it was refused."""
    return "Transaction" if len(batch.operations) > 1 else _last(batch)[0]


def _key_of(batch: Batch) -> str:
    return _last(batch)[1]


def _last(batch: Batch) -> tuple[str, str]:
    """The last verb that the batch needs, and its key."""
    try:
        return (demands(batch) or [("Set", "")])[-1]
    except (AttributeError, TypeError):
        return "Set", ""  # it is no batch, and was refused before that was found out
