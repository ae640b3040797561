"""What is known of workflows where their code is not: so that a command line, a schedule or another language can start one by its name.

    journal/known/<name>     version, limit, configuration; written by a worker that serves it

A worker says what it serves when it begins, unless that is known already or somebody has said it of newer code. Whether anybody serves
a workflow now, the leases of its queue's consumers tell.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from holdfast.codec import decode, encode
from holdfast.engine import Absent, Put, VersionIs
from holdfast.errors import Conflict
from holdfast.layers.queue_entries import CONSUMERS
from holdfast.layers.scope import Scope
from holdfast.layers.workflows.definitions import Definition, check_label, is_older
from holdfast.layers.workflows.entries import JOURNAL, queue_name

KNOWN: Final = JOURNAL.prefix("known")


class Known(msgspec.Struct, frozen=True, omit_defaults=True):
    """A workflow, as its workers described it."""

    name: str
    version: str
    config: dict[str, Any] = {}
    concurrency: int | None = None
    keyed: bool = False
    """Whether its limit is one of each key; the key is made by code."""


def described(definition: Definition) -> Known:
    return Known(
        definition.name,
        definition.version,
        definition.config,
        definition.concurrency,
        definition.key is not None,
    )


async def make_known(scope: Scope, definitions: list[Definition]) -> None:
    """Say what is served."""
    keys = [KNOWN + definition.name for definition in definitions]
    entries = await scope.engine.get(scope.space, keys)
    for definition, key, entry in zip(definitions, keys, entries, strict=True):
        told = described(definition)
        if entry is not None:
            before = decode(entry.value, Known)
            if before == told or is_older(told.version, before.version):
                continue
        try:
            condition = Absent(key) if entry is None else VersionIs(key, entry.version)
            await scope.commit((Put(key, encode(told)),), (condition,))
        except Conflict:
            continue  # another worker says so in this moment


async def known(scope: Scope, name: str) -> Known | None:
    """What workers said of it; None if none ever did."""
    [entry] = await scope.engine.get(scope.space, [KNOWN + check_label(name, "workflow's name")])
    return None if entry is None else decode(entry.value, Known)


async def is_served(scope: Scope, name: str) -> bool:
    """Whether a worker that knows it lives."""
    page = await scope.engine.scan(scope.space, CONSUMERS.prefix(queue_name(name)), limit=1)
    return bool(page.entries)
