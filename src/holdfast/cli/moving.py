"""Moving state: export, import, copy, backup.

An export is taken from a private copy of the store, so it is one moment's state while others go on writing. What was not
yet sealed of the audit is sealed first: the feed does not travel, and the audit does. Blobs are files beside the store;
where a space has some, the user is told that they stay behind.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Annotated

from holdfast.cli import output
from holdfast.cli.audit import audit_of
from holdfast.cli.command import Argument, Option, command, topic
from holdfast.cli.files import STDIO, file_to_write, lines_to_read
from holdfast.cli.session import Session, check_admin, file_of, opened
from holdfast.engine import Engine, SpaceInfo
from holdfast.errors import InvalidInput, NotFound
from holdfast.layers.blobs import BLOBS
from holdfast.layers.settings import SYSTEM_SPACE
from holdfast.layers.transfer import Progress, copy_spaces, export_lines, import_lines, survey
from holdfast.space import check_space
from holdfast.store import Store

app = topic()


@command(app)
async def export(
    session: Session,
    file: Annotated[str, Argument(help="Where to; '-' is stdout.", metavar="FILE", show_default=False)] = STDIO,
    all_spaces: Annotated[bool, Option("--all", help="Every space, not only the one --space names.")] = False,
    force: Annotated[bool, Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a space as lines of JSON.

    Exactly: values, versions, owners, times. It is one moment's state, taken from a private copy; others may go on writing. A file appears whole or not at all.

    \b
    Example:
      holdfast export > contoso.jsonl
      holdfast export --all everything.jsonl
      holdfast export | holdfast --store other.db import
    """
    if all_spaces and session.given_space is not None:
        raise InvalidInput("give one of --all and --space")
    async with session.store() as store:
        check_admin(store, "export")
        spaces = await _selected(store, None if all_spaces else session.space_name)
        await seal(store, spaces)
        async with _snapshot(store) as engine:
            with file_to_write(file, force) as target:
                counts = {info.name: await _write(engine, info.name, target) for info in spaces}
    mention_blobs(spaces, session.json)
    if file != STDIO:
        _tell(counts, session.json)


@command(app, name="import")
async def import_(
    session: Session,
    file: Annotated[str, Argument(help="An export; '-' is stdin.", metavar="FILE", show_default=False)] = STDIO,
) -> None:
    """Load an export.

    Exactly: values, versions, owners, times. Every line is checked before anything is written. A space that exists and is further than the export, or holds
    something else, is refused. With --space only that one is loaded. An interrupted import is simply run again.

    \b
    Example:
      holdfast import contoso.jsonl
      holdfast --store other.db import < contoso.jsonl
    """
    with lines_to_read(file) as lines:
        spaces = survey(lines, session.given_space)
        for item in spaces:
            if item.space != SYSTEM_SPACE:
                check_space(item.space)
        async with session.store(create=True) as store:
            counts = await import_lines(store.engine, lines, spaces)
    _tell(counts, session.json)


@command(app)
async def copy(
    session: Session,
    source: Annotated[str, Argument(metavar="SRC", help="The store to copy from.", show_default=False)],
    target: Annotated[str, Argument(metavar="DST", help="The store to copy into.", show_default=False)],
) -> None:
    """Copy spaces into another store, and compare.

    All of them, or the one --space names; what was copied is compared with the source at the end. A target that has such a space with anything else in it is refused, and nothing is copied; an interrupted copy is simply run again. Nobody should write to the source meanwhile; to copy a store in use, copy a backup of it.

    \b
    Example:
      holdfast copy team.db archive.db
      holdfast copy team.db contoso.db --space contoso
    """
    here, there = file_of(source), file_of(target)
    if here is not None and there is not None and here.resolve() == there.resolve():
        raise InvalidInput(f"{source} and {target} are the same store")
    async with opened(source, json=session.json, token=session.token_for(source)) as old:
        check_admin(old, "copy")
        spaces = await _selected(old, session.given_space)
        await seal(old, spaces)
        spaces = await _selected(old, session.given_space)
        async with opened(target, create=True, json=session.json, token=session.token_for(target)) as new:
            with progress(session.json) as show:
                counts = await copy_spaces(old.engine, new.engine, spaces, show)
    mention_blobs(spaces, session.json)
    _tell(counts, session.json)


@command(app)
async def backup(
    session: Session,
    file: Annotated[str, Argument(metavar="FILE", help="A file that does not exist yet.", show_default=False)],
) -> None:
    """Write a consistent copy of the whole store into a new file.

    Others may go on writing meanwhile.

    \b
    Example:
      holdfast backup monday.db
      holdfast doctor monday.db
    """
    async with session.store() as store:
        await store.backup(file)
        spaces = await store.engine.spaces()
    mention_blobs(spaces, session.json)
    size = Path(file).stat().st_size
    output.value({"file": file, "bytes": size} if session.json else f"{file}: {size:,} bytes", session.json)


# --- the spaces ---


async def _selected(store: Store, name: str | None) -> list[SpaceInfo]:
    """One space, or all, the store's own included."""
    if name is not None:
        check_space(name)
    found = await store.engine.spaces(name)
    if name is not None and not found:
        raise NotFound(f"there is no space {name!r}")
    return found


async def seal(store: Store, spaces: Iterable[SpaceInfo]) -> None:
    """Take over into the audit what only the feed has: the feed does not travel."""
    for info in spaces:
        if info.durability != "volatile":
            await audit_of(store, info.name).seal()


@asynccontextmanager
async def _snapshot(store: Store) -> AsyncIterator[Engine]:
    """The store as it is at this moment, in a temporary file of our own."""
    with tempfile.TemporaryDirectory(prefix="holdfast-export-") as folder:
        path = Path(folder) / "snapshot.db"
        await store.backup(path)
        async with opened(str(path)) as copy:
            yield copy.engine


def mention_blobs(spaces: Iterable[SpaceInfo], json: bool) -> None:
    """Say which spaces have large data that is not in the store's file."""
    held = [info.name for info in spaces if any(usage.subspace == BLOBS.name for usage in info.usage)]
    if held:
        output.note(f"the blobs of {', '.join(held)} are files beside the store; copy that folder too", json)


def _tell(counts: dict[str, int], json: bool) -> None:
    if json:
        output.json_line({"spaces": counts})
    else:
        output.table(("space", "entries"), [(name, str(count)) for name, count in counts.items()])


@contextmanager
def progress(json: bool) -> Iterator[Progress | None]:
    """A bar on the terminal, where there is one."""
    if json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def show(space: str, done: int, total: int) -> None:
            if space not in tasks:
                tasks[space] = bars.add_task(space, total=total)
            bars.update(tasks[space], completed=done, total=total)

        yield show


async def _write(engine: Engine, space: str, target: IO[bytes]) -> int:
    count = -2  # the lines that begin and end the space
    async for line in export_lines(engine, space):
        target.write(line)
        count += 1
    return count
