"""Commits under way that nobody awaits: the policy's short way through a server (`engine.Submits`).

A flight stands between the engine and whoever is to be answered. When it is made it is charged to the books of `quotas.py`, and
when it is answered it is taken off them: what was refused is given back, and what nobody knows of counts as kept for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from holdfast.engine import Batch, Receipt, Reply
from holdfast.errors import Conflict, Error
from holdfast.middleware.quotas import Book, Quotas, Tally, landed

Explaining: TypeAlias = Callable[[Conflict], Error]


class Flight:
    """A commit under way: what it was charged with, and whom to answer when it lands."""

    __slots__ = ("_account", "_amount", "_book", "_keys", "_quotas", "reply")

    def __init__(self, quotas: Quotas, book: Book, account: Tally, amount: int, keys: int = 1) -> None:
        self._quotas = quotas
        self._book = book
        self._account = account
        self._amount = amount
        self._keys = keys
        self.reply: Reply
        book.begun += amount
        book.pending += amount
        book.flying += 1
        account.begun += keys
        account.pending += keys
        account.flying += 1

    def done(self) -> bool:
        return self.reply.done()

    def cancelled(self) -> bool:
        return self.reply.cancelled()

    def set_result(self, receipt: Receipt) -> None:
        self.land()
        self.reply.set_result(receipt)

    def set_exception(self, error: BaseException) -> None:
        self.fail(error)
        self.reply.set_exception(error)

    def fail(self, error: BaseException) -> None:
        self._quotas.failed(error, [(self._book, self._amount), (self._account, self._keys)])
        self.land()

    def land(self) -> None:
        book, account = self._book, self._account
        book.pending -= self._amount
        book.flying -= 1
        account.pending -= self._keys
        account.flying -= 1
        if book.drained is not None or account.drained is not None:
            landed(book)
            landed(account)


class PlaceFlight(Flight):
    """One in a line, with the conditions that ownership added; who sent it hears of those in words of its own."""

    __slots__ = ("_explained", "sent")

    def __init__(
        self, quotas: Quotas, book: Book, account: Tally, grown: tuple[int, int], sent: Batch, explained: Explaining
    ) -> None:
        super().__init__(quotas, book, account, *grown)
        self.sent = sent
        self._explained = explained

    def set_exception(self, error: BaseException) -> None:
        super().set_exception(self._explained(error) if isinstance(error, Conflict) else error)
