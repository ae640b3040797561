"""The Lua scripts: package files in `lua/`, each with `common.lua` in front, named to the server by their SHA-1."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final

import msgspec


class Script(msgspec.Struct, frozen=True):
    """A script and the name under which a server that has seen it knows it."""

    name: str
    text: str
    sha: str


def _load(*names: str) -> Script:
    folder = files("holdfast.engines") / "lua"
    text = "".join((folder / f"{name}.lua").read_text(encoding="utf-8") for name in ("common", *names))
    name = names[-1]
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


COMMIT: Final = _load("operations", "commit")
GET: Final = _load("get")
SCAN: Final = _load("scan")
FEED: Final = _load("feed")
CREATE: Final = _load("create")
DROP: Final = _load("drop")
COMPACT: Final = _load("compact")
LOAD: Final = _load("load")
DESCRIBE: Final = _load("describe")
PROBE: Final = _load("probe")
