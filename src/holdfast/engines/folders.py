"""The folder of a store's file, made where it is missing: for its user alone, as what is kept in it may be secret."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MODE: Final = 0o700
OURS: Final = ".holdfast"
"""A folder that nobody but Holdfast uses; version control leaves it alone."""


def make_folder(folder: Path) -> None:
    """Make a folder, and what is missing above it; OSError where that cannot be. One that is there stays as it is."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(MODE)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return  # another process made it, a moment ago
    if folder.name == OURS:
        (folder / ".gitignore").write_text("*\n")
