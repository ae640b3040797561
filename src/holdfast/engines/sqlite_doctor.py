"""What a SQLite store guarantees as it stands, and what is wrong with it: the findings behind `holdfast doctor`."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Final

import apsw

from holdfast.engine import Finding
from holdfast.engines.sqlite_file import REVISION_BITS, REVISION_MAX, SCHEMA_VERSION, VALUE, WAL_BYTES_KEPT

FREE_BYTES_MIN: Final = 512 * 1024 * 1024
NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "afs", "ceph", "glusterfs"}
)
MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs"})


def examine(path: Path) -> list[Finding]:
    """Look at everything that can be seen from outside; changes nothing."""
    findings = [
        Finding("ok", "file", f"{path}: Holdfast schema {SCHEMA_VERSION}, {path.stat().st_size:,} bytes"),
        Finding("ok", "sqlite", f"SQLite {apsw.sqlite_lib_version()}"),
    ]
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        findings += [*_journal(connection), *_integrity(connection), *_usage(connection), *_feed(connection)]
    finally:
        connection.close()
    return [*findings, *_disk(path), *_log(path), *_permissions(path)]


def _journal(connection: apsw.Connection) -> list[Finding]:
    mode = connection.pragma("journal_mode")
    if mode != "wal":
        return [Finding("error", "journal", f"journal mode is {mode!r}, not 'wal'", "run: PRAGMA journal_mode = WAL")]
    return [
        Finding(
            "ok", "durability sync", "every commit is on disk (fsync) before its reply, and before any reader sees it"
        ),
        Finding(
            "ok",
            "durability async",
            "commits survive a crash of the process; a crash of the machine may lose the latest",
        ),
        Finding("ok", "durability volatile", "kept in each process's memory; lost when it ends"),
    ]


def _integrity(connection: apsw.Connection) -> list[Finding]:
    try:
        answer = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])  # type: ignore[index]
    except apsw.CorruptError as exc:
        answer = str(exc)
    if answer != "ok":
        return [Finding("error", "integrity", f"the file is damaged: {answer}", "restore it from a backup")]
    return [Finding("ok", "integrity", "the file is consistent (quick_check)")]


def _usage(connection: apsw.Connection) -> list[Finding]:
    """The kept counts against what is really there."""
    wrong = connection.execute(
        "SELECT count(*) FROM (SELECT space, owner, substr(key, 1, instr(key, '/') - 1) AS subspace, count(*) AS keys, "  # noqa: S608
        f"sum(length(CAST(key AS BLOB)) + length({VALUE})) AS bytes FROM entries "
        "WHERE space NOT IN (SELECT space FROM folds) GROUP BY 1, 2, 3) AS real "
        "LEFT JOIN usage USING (space, owner, subspace) WHERE usage.keys IS NOT real.keys OR usage.bytes IS NOT real.bytes"
    ).fetchone()[0]  # type: ignore[index]
    if wrong:
        return [
            Finding(
                "error", "usage", f"{wrong} counts of keys or bytes are wrong", "export the store and import it anew"
            )
        ]
    return [Finding("ok", "usage", "the counts of keys and bytes are exact")]


def _feed(connection: apsw.Connection) -> list[Finding]:
    """The head of each space against what was committed for certain: no entry is newer than it, and nothing beyond it was forgotten."""
    behind = connection.execute(
        "SELECT name, known, head FROM (SELECT name, max(floor, "
        "coalesce((SELECT max(version) FROM entries WHERE space = spaces.id), 0)) AS known, coalesce((SELECT max(feed.id) FROM feed "
        "WHERE feed.id BETWEEN spaces.id << ?1 AND (spaces.id << ?1) + ?2) - (spaces.id << ?1), 0) AS head FROM spaces) "
        "WHERE known > head ORDER BY name",
        (REVISION_BITS, REVISION_MAX),
    ).fetchall()
    if behind:
        name, known, head = behind[0]
        more = f", and {len(behind) - 1} spaces more" if len(behind) > 1 else ""
        text = f"the feed of space {name!r} ends at version {head:,}, and its entries are at {known:,}{more}: versions would be given again"
        return [Finding("error", "feed", text, "restore it from a backup")]
    return [Finding("ok", "feed", "no entry is newer than its space's feed")]


def _disk(path: Path) -> list[Finding]:
    kind, findings = _file_system(path), []
    if kind in NETWORK_FILE_SYSTEMS:
        findings.append(
            Finding(
                "error",
                "file system",
                f"{kind}: locks and shared memory do not work over a network",
                "use a local disk",
            )
        )
    elif kind in MEMORY_FILE_SYSTEMS:
        findings.append(Finding("warning", "file system", f"{kind}: everything is lost at a reboot", "use a disk"))
    else:
        findings.append(Finding("ok", "file system", kind or "unknown"))
    free = shutil.disk_usage(path.parent).free
    level = "ok" if free >= FREE_BYTES_MIN else "warning"
    findings.append(Finding(level, "free space", f"{free:,} bytes", "" if level == "ok" else "free some space"))  # type: ignore[arg-type]
    return findings


def _file_system(path: Path) -> str | None:
    """The type of the mount that holds the path, where the system tells."""
    try:
        mounts = Path("/proc/self/mounts").read_text()
    except OSError:
        return None
    best, kind = "", None
    for line in mounts.splitlines():
        _, folder, type_, *_ = line.split(" ")
        folder = folder.replace("\\040", " ")
        if len(folder) >= len(best) and path.is_relative_to(folder):
            best, kind = folder, type_
    return kind


def _log(path: Path) -> list[Finding]:
    try:
        size = os.stat(f"{path}-wal").st_size
    except FileNotFoundError:
        size = 0
    if size > 4 * WAL_BYTES_KEPT:
        return [
            Finding("warning", "write-ahead log", f"{size:,} bytes", "a program holds a read transaction open; end it")
        ]
    return [Finding("ok", "write-ahead log", f"{size:,} bytes")]


def _permissions(path: Path) -> list[Finding]:
    mode = path.stat().st_mode
    if mode & stat.S_IWOTH:
        return [Finding("warning", "permissions", f"every user may write {path}", f"chmod o-w {path}")]
    if mode & stat.S_IROTH:
        return [Finding("note", "permissions", f"every user may read {path}", f"chmod o-r {path} if it holds secrets")]
    return [Finding("ok", "permissions", stat.filemode(mode))]
