"""What an engine may offer besides the contract (`engine.py`), for who can use it: asked for by `isinstance`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from holdfast.engine import Batch, Entry, Page, Receipt


class Reply(Protocol):
    """Whom to tell what became of a batch, once and on the event loop. It cannot be taken back; a Future is one."""

    def set_result(self, receipt: Receipt, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...


class Replies(Protocol):
    """The same for batches that go together: told once, of all in their order, when the last is known."""

    def set_results(self, outcomes: list[Receipt | BaseException], /) -> None: ...


@runtime_checkable
class Submits(Protocol):
    """What an engine may offer to a server besides: `commit` and `get` without a coroutine, for very many in flight."""

    def submit(self, space: str, batch: Batch, reply: Reply) -> bool:
        """Check the batch and queue it, at once; the reply has the receipt, or the refusal, when it was committed.

        What no engine may accept raises here. False: this batch needs `commit`, and nothing was done.
        """
        ...

    def submit_all(self, space: str, batches: list[Batch], replies: Replies) -> bool:
        """`submit` of several, in this order. False: one of them must go by itself, and nothing was done."""
        ...

    def read(self, space: str, keys: list[str]) -> list[Entry | None] | None:
        """`get`, at once. None: these keys need `get`."""
        ...


@runtime_checkable
class Caches(Protocol):
    """What an engine with a hot tier offers besides: answers that may be older than the newest, not older than asked.

    `seen` is the revision that an answer must show at least; 0 asks for whatever the tier's bound allows. An answer comes
    with the revision a reader has seen by it: who asks for that one next time never sees anything older than this.
    """

    async def get_seen(self, space: str, keys: list[str], seen: int) -> tuple[list[Entry | None], int]:
        """`get`, from one snapshot at `seen` or later."""
        ...

    async def scan_seen(self, space: str, prefix: str, seen: int, *, limit: int = 1000) -> Page:
        """The first page of `scan`, from one snapshot at `seen` or later."""
        ...

    async def read_seen(
        self, space: str, keys: list[str], prefix: str, seen: int, *, limit: int = 1000
    ) -> tuple[list[Entry | None], Page, int]:
        """Entries and a page in as few round trips as it takes: each of a snapshot of its own, at `seen` or later."""
        ...
