"""How much: no sequence of requests, however concurrent, makes an agent or a space keep more than its quota.

A `Book` per space knows an upper bound of the bytes there, and one of the keys of each agent that writes: what was read of
the store once, and what every batch begun since may have added at worst. A batch that fits under its limits with that just
goes: no read, no waiting. Only one that does not takes the long way:

 1. Read the usage again. What was in flight when the reading began is added to it, since it may or may not be in it.
 2. Read the entries that the batch replaces: that tells what it adds in truth. If it does not fit although nobody else were
    there, it is refused. Who is over a quota and tries again and again therefore delays nobody.
 3. Otherwise it goes alone among its agent's batches, which is enough where it is about keys: nobody else adds to those. If it
    is about bytes, it goes alone in the space. What is in flight lands first, the others wait. Then steps 1 and 2 again, and
    the commit.

Expired entries count until they are swept, so what is due is swept before anybody is refused. A batch that adds nothing
in sum always passes, over the quota or not: it is how one gets below it again. A request that was answered before gets its
answer, also when it would not fit once more.

A commit whose caller went away, or whose outcome is unknown, may still happen: it counts as kept for DOUBT_MS.

The bound is of this process. What other processes write into the same store is seen when the usage is read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Literal

from holdfast.checking import check_batch
from holdfast.clock import Clock
from holdfast.engine import SYSTEM_ACTOR, Batch, Engine, Present, Receipt
from holdfast.errors import Conflict, Error, InvalidInput, OutcomeUnknown, QuotaExceeded
from holdfast.middleware.growth import Growth, at_worst, in_truth, keys_named, totals
from holdfast.middleware.rules import Quota

UNREAD: Final = 1 << 62
"""The base of a bound before the first reading: nothing fits."""
IDLE_MAX: Final = 4096
"""Accounts of a space, and books, kept before those that nobody uses are forgotten."""
SWEEPS_MAX: Final = 32
"""Empty commits made to sweep what is due before a batch is refused."""
DOUBT_MS: Final = 60_000
"""How long a commit may still happen after nobody waits for it any more."""
NOTHING_WRITTEN: Final = ". Nothing was written; reads and deletes still work. Delete something, or ask for more"
NEVER: Final = "system/never"
"""A key that is never written."""


MayGo = Literal["nothing", "what expires", "anything"]


class Tally:
    """An upper bound of something: what was read, and what was begun since."""

    __slots__ = ("base", "begun", "doubtful", "drained", "flying", "gate", "pending", "users")

    def __init__(self) -> None:
        self.base = UNREAD
        self.begun = 0
        """All that was ever begun; what was refused is taken off again."""
        self.pending = 0
        """The part of it that is in flight."""
        self.doubtful = 0
        """The part of it that may or may not have happened."""
        self.flying = 0
        self.gate: asyncio.Event | None = None
        """Closed while somebody goes alone."""
        self.drained: asyncio.Event | None = None
        self.users = 0
        """Batches on the long way."""

    @property
    def idle(self) -> bool:
        return not (self.flying or self.users or self.doubtful or self.gate)


class Book(Tally):
    """One space: its bytes, and the keys of each agent."""

    __slots__ = ("accounts",)

    def __init__(self) -> None:
        super().__init__()
        self.accounts: dict[str, Tally] = {}

    def account(self, agent: str) -> Tally:
        found = self.accounts.get(agent)
        if found is None:
            if len(self.accounts) > IDLE_MAX:
                for name in [name for name, each in self.accounts.items() if each.idle]:
                    del self.accounts[name]
            found = self.accounts[agent] = Tally()
        return found


def landed(tally: Tally) -> None:
    """Something that was in flight in it has landed."""
    if not tally.flying and tally.drained is not None:
        tally.drained.set()


class Quotas:
    """The books of all spaces; commits what fits."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self.books: dict[str, Book] = {}
        self._doubts: deque[tuple[int, list[tuple[Tally, int]]]] = deque()

    def book(self, space: str) -> Book:
        found = self.books.get(space)
        if found is None:
            if len(self.books) > IDLE_MAX:
                for name in [name for name, each in self.books.items() if each.idle]:
                    del self.books[name]
            found = self.books[space] = Book()
        return found

    def forget(self, space: str) -> None:
        """Something changed the space beside its commits: read it before the next one."""
        if space in self.books:
            book = self.books[space]
            for tally in (book, *book.accounts.values()):
                tally.base = UNREAD

    async def commit(self, space: str, batch: Batch, quota: Quota | None) -> Receipt:
        """Commit the batch if it fits; without a quota it fits, and is noted for those who have one."""
        try:
            growth = at_worst(batch)
        except (AttributeError, TypeError, ValueError):
            check_batch(batch)  # something in it is no operation, no key or no value: InvalidInput, in words
            raise
        if not batch.operations:
            return await self._engine.commit(space, batch)
        if quota is not None and growth.value > quota.max_value_size:
            return await self._refuse(
                space,
                batch,
                f"a value of {growth.value:,} bytes is over the quota of {quota.max_value_size:,} bytes a value; "
                "nothing was written. Keep large data as a blob, or ask for more",
            )
        while True:
            book = self.books.get(space) or self.book(space)
            accounts = [(book.account(owner), count) for owner, count in growth.keys.items()]
            if (closed := _closed(book, accounts)) is None:
                break
            await closed.wait()
        if quota is None or not (growth.bytes or accounts) or _fits(book, accounts, growth, quota):
            return await self._fly(space, batch, growth, book, accounts)
        tallies = (book, *(account for account, _ in accounts))
        for tally in tallies:
            tally.users += 1
        try:
            return await self._long_way(space, batch, growth, book, accounts, quota)
        finally:
            for tally in tallies:
                tally.users -= 1

    async def _fly(
        self, space: str, batch: Batch, growth: Growth, book: Book, accounts: list[tuple[Tally, int]]
    ) -> Receipt:
        parts: list[tuple[Tally, int]] = [(book, growth.bytes), *accounts]
        for tally, amount in parts:
            tally.begun += amount
            tally.pending += amount
            tally.flying += 1
        try:
            return await self._engine.commit(space, batch)
        except BaseException as exc:
            self.failed(exc, parts)
            raise
        finally:
            for tally, amount in parts:
                tally.pending -= amount
                tally.flying -= 1
                if tally.drained is not None:
                    landed(tally)

    def failed(self, exc: BaseException, parts: list[tuple[Tally, int]]) -> None:
        """Something that was in flight came to nothing, or to nobody knows what."""
        if isinstance(exc, Error) and not isinstance(exc, OutcomeUnknown):
            for tally, amount in parts:
                tally.begun -= amount
        else:
            for tally, amount in parts:
                tally.doubtful += amount
            self._doubts.append((self._clock.now_ms() + DOUBT_MS, parts))

    async def _long_way(
        self,
        space: str,
        batch: Batch,
        growth: Growth,
        book: Book,
        accounts: list[tuple[Tally, int]],
        quota: Quota,
    ) -> Receipt:
        used = await self._read(space, batch.actor, book)
        if _closed(book, accounts) is None and _fits(book, accounts, growth, quota):
            return await self._fly(space, batch, growth, book, accounts)
        if (excess := await self._excess(space, batch, used, quota, "nothing")) is not None:
            return await self._refuse(space, batch, excess)
        account = book.account(batch.actor)
        async with _alone(account):
            # What others delete meanwhile matters to increments only. Where that could be too much, they wait as well.
            used = await self._read(space, batch.actor, book)
            if (
                await self._excess(space, batch, used, quota, "anything") is None
                and book.gate is None
                and book.base + book.begun + growth.bytes <= quota.max_total_size
            ):
                return await self._fly(space, batch, growth, book, accounts)
            async with _alone(book):
                used = await self._read(space, batch.actor, book)
                if (excess := await self._excess(space, batch, used, quota, "what expires")) is not None:
                    return await self._refuse(space, batch, excess)
                return await self._fly(space, batch, growth, book, accounts)

    async def _read(self, space: str, agent: str, book: Book) -> tuple[int, int]:
        """Read the usage: it is the base from now on. What is in flight meanwhile may or may not be in it."""
        while self._doubts and self._doubts[0][0] <= self._clock.now_ms():
            for tally, amount in self._doubts.popleft()[1]:
                tally.doubtful -= amount
        tallies = (book, book.account(agent))
        marks = [tally.pending - tally.begun for tally in tallies]
        doubtful = [tally.doubtful for tally in tallies]
        found = await self._engine.spaces(space)
        for _ in range(SWEEPS_MAX):
            if not found or found[0].next_expiry is None or found[0].next_expiry > self._clock.now_ms():
                break
            before = found[0].revision
            await self._engine.commit(space, Batch(SYSTEM_ACTOR))
            found = await self._engine.spaces(space)
            if found and found[0].revision == before:
                break  # by the store's own clock it is not due yet
        size, keys = totals(found[0].usage if found else (), agent)
        used = (size + doubtful[0], keys + doubtful[1])
        for tally, amount, since in zip(tallies, used, marks, strict=True):
            tally.base = amount + since
        return used

    async def _excess(self, space: str, batch: Batch, used: tuple[int, int], quota: Quota, may_go: MayGo) -> str | None:
        """What the batch would exceed although nobody else were writing; None when it would fit.

        What is used was read before the entries are: what others take from the agent in between is counted, not missed.
        `may_go` says which of those entries may be gone when the batch is committed.
        """
        size, keys = used
        named = keys_named(batch)
        entries = dict(zip(named, await self._engine.get(space, named), strict=True)) if named else {}
        unsure = {
            key
            for key, entry in entries.items()
            if may_go == "anything" or (may_go == "what expires" and entry is not None and entry.expires_at is not None)
        }
        growth = in_truth(batch, entries, unsure)
        more_keys = growth.keys.get(batch.actor, 0)
        if more_keys > 0 and keys + more_keys > quota.max_keys_per_agent:
            return (
                f"{batch.actor!r} keeps {keys:,} keys and this would add {more_keys:,}; its quota is "
                f"{quota.max_keys_per_agent:,} keys{NOTHING_WRITTEN}"
            )
        if growth.bytes > 0 and size + growth.bytes > quota.max_total_size:
            return (
                f"the space keeps {size:,} bytes and this would add {growth.bytes:,}; the quota is "
                f"{quota.max_total_size:,} bytes in all{NOTHING_WRITTEN}"
            )
        return None

    async def _refuse(self, space: str, batch: Batch, refusal: str) -> Receipt:
        """Refuse it; unless it was done before, and is only asked for once more."""
        if batch.request_id is not None and not batch.fresh:
            # The same id with other content is InvalidInput if it was used, and refused by its condition if not.
            try:
                await self._engine.commit(space, Batch(batch.actor, (), (Present(NEVER),), batch.request_id))
            except InvalidInput:
                return await self._engine.commit(space, batch)
            except Conflict:
                pass
        raise QuotaExceeded(refusal)


def _closed(book: Book, accounts: list[tuple[Tally, int]]) -> asyncio.Event | None:
    if book.gate is not None:
        return book.gate
    for account, _ in accounts:
        if account.gate is not None:
            return account.gate
    return None


def _fits(book: Book, accounts: list[tuple[Tally, int]], growth: Growth, quota: Quota) -> bool:
    for account, count in accounts:
        if account.base + account.begun + count > quota.max_keys_per_agent:
            return False
    return book.base + book.begun + growth.bytes <= quota.max_total_size


@asynccontextmanager
async def _alone(tally: Tally) -> AsyncIterator[None]:
    """As long as this lasts nothing else is in flight in it."""
    while tally.gate is not None:
        await tally.gate.wait()
    gate = tally.gate = asyncio.Event()
    try:
        while tally.flying:
            tally.drained = asyncio.Event()
            await tally.drained.wait()
        yield
    finally:
        tally.drained = tally.gate = None
        gate.set()
