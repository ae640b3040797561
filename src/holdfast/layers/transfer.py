"""Moving spaces between stores, exactly: values, versions, owners, times and expiries.

A copy reads pages from one engine and loads them into the other as they are, and raises the target's revision to the
source's, so versions held outside (ETags, fencing tokens, session tokens) stay true. The feed and request ids do not
travel. `copy_spaces` ends by comparing both sides entry by entry; a difference raises Damaged. A copy that was interrupted
is simply run again, and goes on where it stopped: what the target holds must be the source's, entry by entry, and anything
else is refused before the first write.

An export is the same as text, one JSON object a line; instants are milliseconds since 1970, as engines keep them:

    {"kind": "space", "format": 1, "space": "contoso", "durability": "sync", "revision": 7, "audit_reads": false}
    {"kind": "entry", "key": "records/regime", "value": "risk-on", "version": 7, "owner": "market", "created_at": …, …}
    {"kind": "end", "space": "contoso", "entries": 1}

Entries stand in the order of their keys, and the end line counts them, so a file that was cut off, reordered or doubled
is recognised. An import reads its lines three times: `survey` checks every one of them before anything is written,
`import_lines` loads them, and compares what the target holds with them. Neither direction keeps more than a page.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Final, TypeAlias

import msgspec

from holdfast.checking import check_label
from holdfast.clock import TIME_MS_MAX
from holdfast.codec import INT64_MAX, decode, encode
from holdfast.engine import NAME_BYTES_MAX, TAG_BYTES_MAX, VALUE_BYTES_MAX, Durability, Engine, Entry, SpaceInfo, beyond
from holdfast.errors import Conflict, Damaged, Error, IncompatibleStore, InvalidInput, NotFound
from holdfast.keys import check_key

PAGE: Final = 2_000
PAGE_BYTES: Final = 16 * 1024 * 1024
"""What a page should hold; after a page with larger values the next one has fewer entries."""
PAGE_FIRST: Final = 50

FORMAT: Final = 1
LINE_BYTES_MAX: Final = VALUE_BYTES_MAX + 64 * 1024

Progress = Callable[[str, int, int], None]
"""Called with the space, the entries done, and the entries in all."""


# --- from engine to engine ---


async def copy_store(source: Engine, target: Engine, progress: Progress | None = None) -> dict[str, int]:
    """Copy every space; gives the number of entries of each."""
    return await copy_spaces(source, target, await source.spaces(), progress)


async def copy_spaces(
    source: Engine, target: Engine, spaces: list[SpaceInfo], progress: Progress | None = None
) -> dict[str, int]:
    """Copy spaces into a target that does not have them, or has what an interrupted copy left: it goes on from there.

    A space of the target that holds anything else is refused with Conflict before anything is written. Both sides are compared at the
    end. Gives the number of entries of each space.
    """
    for info in spaces:
        for held in await target.spaces(info.name):
            await _check_is_copy(source, target, info, held)
    return {info.name: await _copy_space(source, target, info, progress) for info in spaces}


async def copy_space(source: Engine, target: Engine, info: SpaceInfo, progress: Progress | None = None) -> int:
    """Copy one space, as `copy_spaces` does; gives the number of its entries."""
    return (await copy_spaces(source, target, [info], progress))[info.name]


async def _check_is_copy(source: Engine, target: Engine, info: SpaceInfo, held: SpaceInfo) -> None:
    """A space that the target has must hold nothing that a copy of this source did not bring; Conflict otherwise.

    A copy leaves no feed, so one that is there tells of commits which the target would lose, though all they wrote is gone.
    """
    instead = (
        "nothing was copied. Copy into a store without this space, drop it there first (holdfast spaces drop), or copy other "
        "spaces, each by --space"
    )
    if held.durability != info.durability:
        raise InvalidInput(
            f"space {info.name!r} exists in the target with durability {held.durability!r}; the source's is {info.durability!r}"
        )
    if held.revision > info.revision:
        raise Conflict(f"space {info.name!r} exists in the target and is further than the source; {instead}")
    if held.revision > held.feed_floor:
        raise Conflict(f"space {info.name!r} exists in the target and was written to there; {instead}")
    there = entries_of(source, info.name)
    mine = await anext(there, None)
    async for entry in entries_of(target, info.name):
        while mine is not None and mine.key.encode() < entry.key.encode():
            mine = await anext(there, None)
        if mine != entry:
            raise Conflict(
                f"space {info.name!r} exists in the target, and its entry {entry.key!r} is not the source's; {instead}"
            )


async def _copy_space(source: Engine, target: Engine, info: SpaceInfo, progress: Progress | None) -> int:
    """Go on behind the last entry that is there; if the source has new ones before it, begin anew."""
    await target.create(info.name, info.durability, audit_reads=info.audit_reads)
    reached = await target.scan(info.name, "", limit=1, reverse=True)
    if reached.entries:
        with contextlib.suppress(Damaged):
            return await _copy_after(reached.entries[-1].key, source, target, info, progress)
    return await _copy_after(None, source, target, info, progress)


async def _copy_after(
    reached: str | None, source: Engine, target: Engine, info: SpaceInfo, progress: Progress | None
) -> int:
    """Copy the entries beyond a key, and compare everything."""
    total = sum(usage.keys for usage in info.usage)
    held = await target.spaces(info.name) if reached is not None else []
    done = sum(usage.keys for space in held for usage in space.usage)
    async for entries, revision in pages(source, info.name, reached):
        await target.load(info.name, entries, revision)
        done += len(entries)
        if progress is not None:
            progress(info.name, done, max(total, done))
    await target.load(info.name, [], info.revision)
    return await compare(source, target, info.name)


async def restore_store(
    source: Engine, target: Engine, *, age_ms: int, replace: bool = False, progress: Progress | None = None
) -> dict[str, int]:
    """Make the target what a backup is that was made so long ago; gives the number of entries of each space.

    What the target holds is dropped, if `replace` allows it, and Conflict otherwise. Every space goes on beyond all that may have
    been given since the backup was made, so no version is given twice, and cursors from before are Compacted. One that was
    interrupted is run again. Nobody may use the target meanwhile.
    """
    held = await target.spaces()
    if not replace and any(not info.name.startswith("_") for info in held):
        names = ", ".join(info.name for info in held if not info.name.startswith("_"))
        raise Conflict(
            f"the store is not empty ({names:.200}); add --replace to put the backup in the place of all it holds"
        )
    for info in held:
        await target.drop(info.name)
    counts: dict[str, int] = {}
    for info in await source.spaces():
        counts[info.name] = await copy_space(source, target, info, progress)
        [made] = await target.spaces(info.name)
        await target.load(info.name, [], beyond(made.revision, age_ms))
    return counts


async def pages(
    engine: Engine, space: str, after: str | None = None, *, prefix: str = ""
) -> AsyncIterator[tuple[list[Entry], int]]:
    """All entries of a space beyond a key, page by page, with the revision each page was read at."""
    limit = PAGE_FIRST
    while True:
        page = await engine.scan(space, prefix, after=after, limit=limit)
        if page.entries:
            yield page.entries, page.revision
            after = page.entries[-1].key
            mean = sum(len(entry.value) for entry in page.entries) // len(page.entries)
            limit = max(1, min(2 * limit, PAGE, PAGE_BYTES // (mean + 1)))
        if not page.more:
            return


async def entries_of(engine: Engine, space: str) -> AsyncIterator[Entry]:
    """All entries of a space in the order of their keys."""
    async for entries, _ in pages(engine, space):
        for entry in entries:
            yield entry


async def compare(source: Engine, target: Engine, space: str) -> int:
    """Make sure that both hold the same entries, and count them; Damaged, naming the first that differs, otherwise.

    An entry that expires may be gone from one of them at any moment.
    """
    if not await target.spaces(space):
        raise NotFound(f"the target has no space {space!r}")
    there = entries_of(target, space)
    theirs = await anext(there, None)
    count = 0
    async for mine in entries_of(source, space):
        while theirs is not None and theirs.expires_at is not None and theirs.key.encode() < mine.key.encode():
            theirs = await anext(there, None)
        count += 1
        if mine == theirs:
            theirs = await anext(there, None)
        elif mine.expires_at is None or (theirs is not None and theirs.key.encode() <= mine.key.encode()):
            raise Damaged(f"the copy of space {space!r} differs at {mine.key!r}: was the source written to meanwhile?")
    while theirs is not None:
        if theirs.expires_at is None:
            raise Damaged(f"the copy of space {space!r} has entries that the source has not: {theirs.key!r}")
        theirs = await anext(there, None)
    return count


# --- as text ---


class SpaceLine(msgspec.Struct, frozen=True, tag_field="kind", tag="space", forbid_unknown_fields=True):
    """Begins a space."""

    format: int
    space: str
    durability: Durability
    revision: int
    audit_reads: bool = False


class EntryLine(
    msgspec.Struct, frozen=True, tag_field="kind", tag="entry", forbid_unknown_fields=True, omit_defaults=True
):
    """One entry of the space begun before."""

    key: str
    value: msgspec.Raw
    version: int
    owner: str
    created_at: int
    updated_at: int
    expires_at: int | None = None
    tag: str = ""


class EndLine(msgspec.Struct, frozen=True, tag_field="kind", tag="end", forbid_unknown_fields=True):
    """Ends a space, and says how many entries it had."""

    space: str
    entries: int


Lines: TypeAlias = Callable[[], Iterable[bytes]]
"""Gives the lines of an export from the first on, each time it is called."""

_encode_line = msgspec.json.Encoder().encode
_decoder: msgspec.json.Decoder[SpaceLine | EntryLine | EndLine] = msgspec.json.Decoder(SpaceLine | EntryLine | EndLine)


async def export_lines(engine: Engine, space: str) -> AsyncIterator[bytes]:
    """A space as lines of text. Give it an engine that nobody writes to, such as one on a backup."""
    found = await engine.spaces(space)
    if not found:
        raise NotFound(f"there is no space {space!r} to export")
    [info] = found
    yield _encode_line(SpaceLine(FORMAT, space, info.durability, info.revision, info.audit_reads)) + b"\n"
    count = 0
    async for entries, revision in pages(engine, space):
        if revision != info.revision:
            raise Conflict(
                f"space {space!r} was written to while it was exported; the export is incomplete. Export from a backup"
            )
        for entry in entries:
            decode(entry.value)  # what is not JSON would spoil the file; it is Damaged, and said here
            yield _encode_line(_line_of(entry)) + b"\n"
        count += len(entries)
    yield _encode_line(EndLine(space, count)) + b"\n"


def _line_of(entry: Entry) -> EntryLine:
    value = msgspec.Raw(entry.value)
    times = (entry.created_at, entry.updated_at, entry.expires_at)
    return EntryLine(entry.key, value, entry.version, entry.owner, *times, entry.tag)


def read_lines(lines: Iterable[bytes]) -> Iterator[SpaceLine | Entry | EndLine]:
    """What the lines of an export say, each checked; InvalidInput names the line that is wrong."""
    begun: SpaceLine | None = None
    seen: set[str] = set()
    last, count, number = "", 0, 0
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        try:
            item = _decode(line)
            if isinstance(item, SpaceLine):
                _check_space(item, begun, seen)
                begun, last, count = item, "", 0
                yield item
            elif begun is None:
                raise InvalidInput('a line of kind "space" must come first')
            elif isinstance(item, EntryLine):
                entry = _entry(item, begun)
                if entry.key.encode() <= last.encode():
                    raise InvalidInput(f"key {entry.key!r} is not in order: {last!r} came before it")
                last, count = entry.key, count + 1
                yield entry
            else:
                if (item.space, item.entries) != (begun.space, count):
                    raise InvalidInput(
                        f"{item.entries:,} entries of space {item.space!r} should have come, and {count:,} of {begun.space!r} did"
                    )
                begun = None
                yield item
        except Error as exc:
            raise type(exc)(f"line {number:,}: {exc}") from exc
    if begun is not None:
        raise InvalidInput(f"line {number:,}: the export ends in the middle of space {begun.space!r}: it was cut off")
    if not seen:
        raise InvalidInput("this is no export: it has no line")


def _decode(line: bytes) -> SpaceLine | EntryLine | EndLine:
    if len(line) > LINE_BYTES_MAX:
        raise InvalidInput(f"the line has more than {LINE_BYTES_MAX:,} bytes, which no entry needs")
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidInput(f"this is no line of an export: {exc}") from exc


def _check_space(item: SpaceLine, begun: SpaceLine | None, seen: set[str]) -> None:
    if item.format > FORMAT:
        raise IncompatibleStore(
            f"the export has format {item.format} and this holdfast reads {FORMAT}; upgrade holdfast"
        )
    if begun is not None:
        raise InvalidInput(f"space {item.space!r} begins before space {begun.space!r} has ended")
    if item.space in seen:
        raise InvalidInput(f"space {item.space!r} comes twice")
    check_label(item.space, "a space's name", NAME_BYTES_MAX)
    _check_numbers(revision=item.revision)
    seen.add(item.space)


def _entry(item: EntryLine, begun: SpaceLine) -> Entry:
    """The entry of a line, if an engine can keep it; its value in the canonical form all engines compare by."""
    check_key(item.key)
    try:
        value = encode(decode(item.value), known=True)  # an older store may have deeper ones
    except Damaged as exc:
        raise InvalidInput(f"the value of {item.key!r:.60} is not JSON: {exc.__cause__}") from exc
    if len(value) > VALUE_BYTES_MAX:
        raise InvalidInput(f"the value of {item.key!r:.60} is {len(value):,} bytes; the limit is {VALUE_BYTES_MAX:,}")
    check_label(item.owner, "an owner", NAME_BYTES_MAX)
    if item.tag:
        check_label(item.tag, "a tag", TAG_BYTES_MAX)
    _check_numbers(version=item.version)
    for name, at in (("created_at", item.created_at), ("updated_at", item.updated_at), ("expires_at", item.expires_at)):
        if at is not None and not 0 <= at <= TIME_MS_MAX:
            raise InvalidInput(f"{name} must be an instant between 1970 and 9999, in milliseconds, not {at}")
    if item.version > begun.revision:
        raise InvalidInput(f"version {item.version} is beyond the space's revision {begun.revision}")
    times = (item.created_at, item.updated_at, item.expires_at)
    return Entry(item.key, value, item.version, item.owner, *times, item.tag)


def _check_numbers(**numbers: int) -> None:
    for name, number in numbers.items():
        if not 0 <= number <= INT64_MAX:
            raise InvalidInput(f"{name} must be between 0 and 2^63 - 1, not {number}")


def survey(lines: Lines, only: str | None = None) -> list[SpaceLine]:
    """Check every line of an export; gives the spaces in it, or the space `only`. Nothing is written yet."""
    spaces = [item for item in read_lines(lines()) if isinstance(item, SpaceLine)]
    chosen = [item for item in spaces if only is None or item.space == only]
    if not chosen:
        raise NotFound(f"the export has no space {only!r}; it has {', '.join(item.space for item in spaces)}")
    return chosen


async def import_lines(engine: Engine, lines: Lines, spaces: list[SpaceLine]) -> dict[str, int]:
    """Load spaces of an export that `survey` has checked; gives the number of entries of each.

    A space that exists is refused with Conflict, before anything is written, when it is further than the export or holds
    an entry that is not the export's. An import that was interrupted is simply run again.
    """
    present = False
    for item in spaces:
        for info in await engine.spaces(item.space):
            present = True
            if info.revision > item.revision:
                raise Conflict(
                    f"space {item.space!r} exists, and is further (revision {info.revision}) than the export "
                    f"({item.revision}); import into a store without it"
                )
            if info.durability != item.durability:
                raise InvalidInput(
                    f"space {item.space!r} exists with durability {info.durability!r}; the export says {item.durability!r}"
                )
    names = {item.space for item in spaces}
    if present:
        await _compare_with_lines(engine, lines, names, complete=False)
    counts = await _load(engine, lines, names)
    await _compare_with_lines(engine, lines, names, complete=True)
    return counts


def _chosen(lines: Lines, spaces: set[str]) -> Iterator[SpaceLine | Entry | EndLine]:
    wanted = True
    for item in read_lines(lines()):
        if isinstance(item, SpaceLine):
            wanted = item.space in spaces
        if wanted:
            yield item


async def _load(engine: Engine, lines: Lines, spaces: set[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    begun: SpaceLine | None = None
    page: list[Entry] = []
    size = 0
    for item in _chosen(lines, spaces):
        if isinstance(item, Entry):
            page.append(item)
            size += len(item.value)
        elif isinstance(item, SpaceLine):
            begun = item
            await engine.create(item.space, item.durability, audit_reads=item.audit_reads)
        else:
            counts[item.space] = item.entries
        if begun is not None and (len(page) >= PAGE or size >= PAGE_BYTES or isinstance(item, EndLine)):
            await engine.load(begun.space, page, begun.revision)
            page, size = [], 0
    return counts


async def _compare_with_lines(engine: Engine, lines: Lines, spaces: set[str], *, complete: bool) -> None:
    """What the target holds must be in the export; when complete, also the other way round. Both are in order.

    Entries that expire may be gone from the target at any moment, so they may always be missing there.
    """
    there: AsyncIterator[Entry] | None = None
    held: Entry | None = None
    space = ""
    for item in _chosen(lines, spaces):
        if isinstance(item, SpaceLine):
            space, there = item.space, entries_of(engine, item.space)
            held = await anext(there, None)
        elif isinstance(item, Entry) and there is not None:
            if held == item:
                held = await anext(there, None)
            elif held is not None and held.key.encode() <= item.key.encode():
                _refuse(space, held.key, complete)
            elif complete and item.expires_at is None:
                _refuse(space, item.key, complete)
        elif held is not None:
            _refuse(space, held.key, complete)


def _refuse(space: str, key: str, complete: bool) -> None:
    if complete:
        raise Damaged(f"space {space!r} differs from the export at {key!r}: was it written to meanwhile?")
    raise Conflict(
        f"space {space!r} exists, and its entry {key!r} is not the export's; import into a store without this space"
    )
