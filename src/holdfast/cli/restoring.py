"""Restoring a store from a backup.

The backup is copied first, and what its feed has of the audit is sealed in the copy: the backup stays as it is, and the feed
does not come back. A store in a file is replaced by the copy in one step (`engines/sqlite_restore.py`); into a server the
spaces are copied one by one (`layers/transfer.py`). Either way versions go on beyond all that may have been given since.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from holdfast.cli import output
from holdfast.cli.command import Argument, Option, command, topic
from holdfast.cli.moving import mention_blobs, progress, seal
from holdfast.cli.session import Session, file_of, opened
from holdfast.clock import SystemClock
from holdfast.engines.registry import KEEPERS, split_url
from holdfast.engines.sqlite_restore import Place, Reached, advance_all, copy_backup
from holdfast.errors import Conflict, InvalidInput
from holdfast.layers.transfer import Progress, restore_store
from holdfast.store import Store

app = topic()


@command(app)
async def restore(
    session: Session,
    backup: Annotated[str, Argument(metavar="BACKUP", help="A file that backup made.", show_default=False)],
    replace: Annotated[
        bool, Option("--replace", help="Replace what the store holds; a replaced file is kept under another name.")
    ] = False,
) -> None:
    """Make the store what a backup is.

    All spaces, tokens and audit included: values, owners, times, expiries. New versions are higher than any that were given before, and cursors from before are told to read afresh. Nobody may use the store meanwhile: stop its keeper, and restore into the store it keeps. A store that holds something is refused without --replace.

    \b
    Example:
      holdfast restore monday.db
      holdfast restore monday.db --store /var/lib/keeper/store.db --replace
    """
    url = session.url
    if session.given_space is not None:
        raise InvalidInput(
            "restore brings all spaces back; one of them is copied into a store without it by: holdfast copy BACKUP STORE --space NAME"
        )
    if split_url(url)[0] in KEEPERS:
        raise InvalidInput(
            f"{url} is a keeper, and a store that is being served cannot be replaced: stop it, and restore into the store it keeps"
        )
    source, path = Path(backup).absolute(), file_of(url)
    if path is not None and path.resolve() == source.resolve():
        raise InvalidInput(f"{backup} is the store itself")
    with progress(session.json) as show:
        if path is None:
            counts, aside = await _into_server(session, source, replace, show), None
        else:
            session.make_folder()
            counts, aside = await _into_file(session, source, path, replace, show)
    if session.json:
        output.json_line({"spaces": counts, "replaced": None if aside is None else str(aside)})
        return
    output.table(("space", "entries"), [(name, str(count)) for name, count in counts.items()])
    if aside is not None:
        output.note(f"what was there before is kept in {aside}", session.json)


async def _into_file(
    session: Session, backup: Path, path: Path, replace: bool, show: Progress | None
) -> tuple[dict[str, int], Path | None]:
    with Place(path) as place:
        if place.replaced is None and not replace:
            raise Conflict(
                f"{path} is there and cannot be read as a store; add --replace to put the backup in its place"
            )
        if place.replaced is not None and not place.replaced.is_empty and not replace:
            raise Conflict(f"{path} is not empty; add --replace to put the backup in its place")
        with tempfile.TemporaryDirectory(prefix=".restore-", dir=path.parent) as folder:
            made = Path(folder) / path.name
            async with _copied(session, backup, made, show) as (copy, age_ms):
                spaces = await copy.engine.spaces()
            advance_all(made, place.replaced or Reached(), age_ms)
            aside = place.put(made)
    mention_blobs(spaces, session.json)
    return {info.name: sum(usage.keys for usage in info.usage) for info in spaces}, aside


async def _into_server(session: Session, backup: Path, replace: bool, show: Progress | None) -> dict[str, int]:
    with tempfile.TemporaryDirectory(prefix="holdfast-restore-") as folder:
        made = Path(folder) / "copy.db"
        async with _copied(session, backup, made, show) as (copy, age_ms), session.store(create=True) as store:
            counts = await restore_store(copy.engine, store.engine, age_ms=age_ms, replace=replace, progress=show)
            mention_blobs(await store.engine.spaces(), session.json)
    return counts


@asynccontextmanager
async def _copied(
    session: Session, backup: Path, made: Path, show: Progress | None
) -> AsyncIterator[tuple[Store, int]]:
    """A copy of the backup, open, its audit sealed and with a note of who restores it; and the age of the backup."""
    taken_at = copy_backup(backup, made, None if show is None else lambda done, total: show(backup.name, done, total))
    async with opened(str(made)) as store:
        await store.note("restore", f"backups/{backup.name}", session.agent)
        await seal(store, await store.engine.spaces())
        yield store, SystemClock().now_ms() - taken_at
