"""A commit as the feed keeps it, and how a repeated request is recognised."""

from __future__ import annotations

import hashlib

import msgspec

from holdfast.engine import Batch, ChangeSet, Put, Receipt, Result

_pack = msgspec.msgpack.Encoder().encode


class Stored(ChangeSet, frozen=True, array_like=True, gc=False):
    """A commit as the feed keeps it: with what is needed to answer a repeated request."""

    digest: str = ""
    """Of the batch, if it had a request id; empty if the batch was one Put, which the change tells as well."""
    results: list[Result] = []  # noqa: RUF012 - msgspec copies it

    def receipt(self) -> Receipt:
        return Receipt(self.version, self.at, copied(self.results) if self.digest else [None])

    def answers(self, batch: Batch) -> bool:
        """Whether this is the commit of that batch, given that both have the same request id."""
        if self.digest:
            return self.digest == digest_of(batch)
        if len(batch.operations) != 1 or batch.conditions or type(op := batch.operations[0]) is not Put:
            return False
        owner = batch.actor if op.owner is None else op.owner
        expires_at = None if op.ttl_ms is None else self.at + op.ttl_ms
        told = [(change.key, change.value, change.owner, change.tag, change.expires_at) for change in self.changes]
        return told == [(op.key, op.value, owner, op.tag, expires_at)]


def digest_of(batch: Batch) -> str:
    """What tells two batches apart that carry the same request id."""
    return hashlib.blake2b(_pack((batch.operations, batch.conditions)), digest_size=12).hexdigest()


def copied(results: list[Result]) -> list[Result]:
    """Results that their reader may change without changing what is stored."""
    return [list(result) if type(result) is list else result for result in results]
