"""Entries that are behind their feed: how they are read all the same, and how they catch up.

The resident engine makes a group durable as one row of the feed, and writes the rows of its entries later, many groups at
once: it *folds*. A row of `folds` names a space whose entries may be behind, and the revision from which on its feed has
to be laid over them. A single row may be newer than that, and then it counts: changes up to its own version are in it.
That makes folding a matter of any number of transactions, and repeating it harmless.

The feed does not tell everything. What it does not (`Group.untold`: a touched expiry, when a moved entry was created, a
value over FEED_VALUE_BYTES_MAX) is in the row from the start.

While an owner lives, others read through `fetch_over` and `select_over`; its signature on the lock file tells them to. After it has died,
whoever writes next folds first (`fold_all`). Only the usage is always up to date.
"""

from __future__ import annotations

from pathlib import Path
from time import sleep
from typing import Final

from holdfast.engine import Entry
from holdfast.engines.sqlite_file import REVISION_MAX, FileLock, connect
from holdfast.engines.sqlite_rows import Execute, Writer, fetch, first_row, read_feed, select_range
from holdfast.errors import Damaged

FOLD_RETRY_S: Final = 0.02


def folded_upto(execute: Execute, space: int) -> int | None:
    """From which revision on the feed has to be laid over the entries; None: they are up to date."""
    row = first_row(execute, "SELECT revision FROM folds WHERE space = ?", (space,))
    return None if row is None else int(row[0])


def newer(execute: Execute, space: int, folded: int) -> dict[str, Entry | None]:
    """The entries that may have changed since they were folded, as they are by now; None is one that is gone."""
    commits = read_feed(execute, space, folded, REVISION_MAX)
    entries: dict[str, Entry | None] = {change.key: None for commit in commits for change in commit.changes}
    row_versions: dict[str, int] = {}
    for row in fetch(execute, space, list(entries)):
        entries[row.key] = row
        row_versions[row.key] = row.version
    sizes: dict[str, int] = {}
    for commit in commits:
        for change in commit.changes:
            key = change.key
            if commit.version <= row_versions.get(key, -1):
                continue  # the row has it
            if not change.exists:
                entries[key] = None
                continue
            old = entries[key]
            created_at = commit.at if old is None else old.created_at
            entries[key] = Entry(
                key, change.value, commit.version, change.owner, created_at, commit.at, change.expires_at, change.tag
            )
            sizes[key] = change.size
    for key, size in sizes.items():
        entry = entries[key]
        if entry is not None and len(entry.value) != size:
            raise Damaged(f"the value of {key!r} is neither in its row nor in the feed; restore the file from a backup")
    return entries


def fold_left(path: Path, lock: FileLock) -> None:
    """When a store is opened: fold what an owner left that is gone. One that lives folds by itself."""
    connection = connect(path)
    try:
        while lock.is_signed or connection.execute("SELECT 1 FROM folds LIMIT 1").fetchall():
            if lock.try_acquire():
                try:
                    connection.execute("BEGIN IMMEDIATE")
                    fold_all(Writer(connection.execute, connection.executemany))
                    connection.execute("COMMIT")
                    lock.unsign()
                finally:
                    lock.release()
            elif lock.is_signed:
                return
            else:
                sleep(FOLD_RETRY_S)  # somebody else has it for a moment
    finally:
        connection.close()


def fold_all(rows: Writer) -> None:
    """Bring the entries of every space up to date. In a transaction, when the owner of the file is gone."""
    for space, folded in rows.execute("SELECT space, revision FROM folds").fetchall():
        rows.fold(space, newer(rows.execute, space, folded))
        rows.folded(space, None)


# --- reading a space that is behind ---


def fetch_over(execute: Execute, space: int, keys: list[str]) -> list[Entry]:
    """What `fetch` gives, whether or not the space is behind."""
    folded = folded_upto(execute, space)
    found = fetch(execute, space, keys)
    if folded is None:
        return found
    entries: dict[str, Entry | None] = {entry.key: entry for entry in found}
    changed = newer(execute, space, folded)
    entries.update((key, changed[key]) for key in keys if key in changed)
    return [entry for entry in entries.values() if entry is not None]


def select_over(
    execute: Execute, space: int, prefix: str, after: str | None, limit: int, *, reverse: bool = False, now: int = -1
) -> list[Entry]:
    """What `select_range` gives, whether or not the space is behind."""
    folded = folded_upto(execute, space)
    if folded is None:
        return select_range(execute, space, prefix, after, limit, reverse=reverse, now=now)
    changed = newer(execute, space, folded)
    rows = select_range(execute, space, prefix, after, limit + len(changed), reverse=reverse, now=now)
    found = [entry for entry in rows if entry.key not in changed]
    for key, entry in changed.items():
        if entry is None or not key.startswith(prefix) or (entry.expires_at is not None and entry.expires_at <= now):
            continue
        if after is None or (key < after if reverse else key > after):
            found.append(entry)
    found.sort(key=lambda entry: entry.key, reverse=reverse)
    return found[:limit]
