"""Where benchmarks put their files: on a disk. In memory an fsync costs nothing and every ratio would be wrong."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Final

IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
MOUNTS: Final = Path("/proc/self/mounts")


def real_disk(wanted: Path | None = None) -> Path:
    """The wanted folder, or the first of the usual ones, that is not in memory."""
    candidates = [wanted] if wanted is not None else [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]
    for folder in candidates:
        if folder.is_dir() and os.access(folder, os.W_OK) and file_system(folder) not in IN_MEMORY:
            return folder.resolve()
    tried = ", ".join(str(folder) for folder in candidates)
    raise OSError(errno.EINVAL, f"none of these is a writable folder on a disk: {tried}; name one with --folder")


def file_system(folder: Path) -> str:
    """The type of the file system a folder is on; "unknown" where the kernel does not tell."""
    try:
        mounts = MOUNTS.read_text().splitlines()
    except OSError:
        return "unknown"
    path, best, kind = folder.resolve(), Path("/"), "unknown"
    for line in mounts:
        point, fs = line.split()[1:3]
        mounted = Path(point.replace("\\040", " "))
        if path.is_relative_to(mounted) and len(mounted.parts) >= len(best.parts):
            best, kind = mounted, fs
    return kind
