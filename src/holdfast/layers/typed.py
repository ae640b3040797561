"""What a record's type adds to it: a lifetime (`retention.py`), and a schema where one is registered (`catalogue.py`).

`admitted` is asked before a record is written, `current` after one was read. A record without a type never comes here.
The version under which a record was written is the last part of its tag, `:<type>:<state>:<version>`. A record that was
written before its type had a schema has none, and is given as it is.
"""

from __future__ import annotations

import msgspec

from holdfast.codec import decode, encode
from holdfast.engine import Entry, Put
from holdfast.layers.batch import split_tag, tag_version, type_tag
from holdfast.layers.scope import Scope


async def admitted(scope: Scope, put: Put) -> Put:
    """The write with its type's lifetime and version; SchemaViolation when its type's newest schema refuses the value."""
    type, state = split_tag(put.tag)
    if type is None:
        return put
    tag, ttl_ms = put.tag, put.ttl_ms
    if scope.catalogue is not None:
        known = await scope.catalogue.of(scope.space, type)
        if known.newest is not None:
            known.check(decode(put.value), known.newest, put.key)
            tag = type_tag(type, state, known.newest)
    if ttl_ms is None:
        volatile = await scope.durability() == "volatile"
        ttl_ms = scope.retention.ttl_ms(type, state, volatile=volatile)
    return Put(put.key, put.value, ttl_ms, tag, put.owner)


async def current(scope: Scope, entry: Entry) -> Entry:
    """The entry as its type's newest version wants it; what is stored stays as it is. MigrationFailed when that cannot be done."""
    version = tag_version(entry.tag)
    if version is None or scope.catalogue is None:
        return entry
    type, state = split_tag(entry.tag)
    assert type is not None  # noqa: S101 - a tag with a version has one
    known = await scope.catalogue.of(scope.space, type)
    if not known.knows(version):
        known = await scope.catalogue.reload(scope.space, type)
    if version == known.newest:
        return entry
    value = known.upgraded(decode(entry.value), version, entry.key)
    return msgspec.structs.replace(entry, value=encode(value), tag=type_tag(type, state, known.newest))
