"""Commits under way that nobody awaits: the policy's short way through a server (`offers.Submits`).

A flight stands between the engine and whoever is to be answered. When it is made it is charged to the books of `quotas.py`, and
when it is answered it is taken off them: what was refused is given back, and what nobody knows of counts as kept for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from holdfast.engine import Batch, Receipt
from holdfast.errors import Conflict, Error
from holdfast.middleware.quotas import Book, Quotas, Tally, landed
from holdfast.offers import Replies, Reply

Explaining: TypeAlias = Callable[[Conflict], Error]


class Charged(msgspec.Struct, eq=False):
    """What is under way in a space, for one agent, and was charged to both."""

    quotas: Quotas
    book: Book
    account: Tally
    amount: int
    keys: int

    def __post_init__(self) -> None:
        book, account, amount, keys = self.book, self.account, self.amount, self.keys
        book.begun += amount
        book.pending += amount
        book.flying += 1
        account.begun += keys
        account.pending += keys
        account.flying += 1

    def land(self) -> None:
        book, account = self.book, self.account
        book.pending -= self.amount
        book.flying -= 1
        account.pending -= self.keys
        account.flying -= 1
        if book.drained is not None or account.drained is not None:
            landed(book)
            landed(account)


class Flight(Charged, eq=False):
    """A commit under way: what it was charged with, and whom to answer when it lands."""

    sent: Batch
    reply: Reply | None = None
    """None: somebody awaits the commit, and lands it."""
    explained: Explaining | None = None
    """For one in a line, with conditions that ownership added: who sent it hears of those in words of its own."""

    def set_result(self, receipt: Receipt) -> None:
        self.land()
        self.reply.set_result(receipt)  # type: ignore[union-attr]

    def set_exception(self, error: BaseException) -> None:
        if self.explained is not None and isinstance(error, Conflict):
            error = self.explained(error)
        self.fail(error)
        self.reply.set_exception(error)  # type: ignore[union-attr]

    def fail(self, error: BaseException) -> None:
        self.quotas.failed(error, [(self.book, self.amount), (self.account, self.keys)])
        self.land()


class Formation(Charged, eq=False):
    """Sets of one agent that go together, and land together; `amounts` are what each was charged with."""

    amounts: list[int]
    replies: Replies

    def set_results(self, outcomes: list[Receipt | BaseException]) -> None:
        for outcome, amount in zip(outcomes, self.amounts, strict=True):
            if not isinstance(outcome, Receipt):
                self.quotas.failed(outcome, [(self.book, amount), (self.account, 1)])
        self.land()
        self.replies.set_results(outcomes)

    def cancel(self) -> None:
        """Nothing was begun."""
        self.book.begun -= self.amount
        self.account.begun -= self.keys
        self.land()
