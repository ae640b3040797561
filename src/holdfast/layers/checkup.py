"""What a store guarantees with the spaces it has, and what is wrong with what they keep: the layers' part of a doctor.

An engine tells of its server, file and disk (`Engine.inspect`). Here its words about durability are put together with the
spaces that have it, and two things are looked at that layers keep: the chain of every space's audit, and the blobs that are
referenced. All of it goes through the contract, so it is the same on every engine, and nothing is changed.

A look must not take long. Unless it is `full`, it takes the newest segments of a chain, so many blobs, and the content of so many
bytes of them, and says so. A finding that is an error is something that was lost or changed behind the store's back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Final

import msgspec

from holdfast.codec import integer
from holdfast.engine import Durability, Engine, Finding, SpaceInfo
from holdfast.errors import Error
from holdfast.layers.audit import Audit, Verification
from holdfast.layers.blobs import BLOBS, BlobRef, Blobs, is_blob

SEGMENTS_MAX: Final = 100
"""Segments of an audit, from its end, that a look takes which is not full."""
SPACES_MAX: Final = 200
"""Spaces whose audit it looks at."""
UNSEALED_MAX: Final = 1_000
"""With so many records of a space not sealed nobody seems to look after it."""
BLOBS_MAX: Final = 1_000
"""Referenced blobs of a space whose files it looks for."""
HASHED_BYTES_MAX: Final = 256 * 1024 * 1024
"""Bytes of blobs whose content it reads."""
PAGE: Final = 1_000
NAMED_MAX: Final = 5

_SUBJECT: Final = "durability "
_LESS: Final[dict[Durability, str]] = {
    "async": "a crash may lose the latest commits, although they were acknowledged",
    "volatile": "may be lost in any crash, and leaves no audit",
}


class Checkup:
    """One look at a store. `blobs_of` is None where nobody said which folder the blobs are in."""

    def __init__(
        self, engine: Engine, audit_of: Callable[[str], Audit], blobs_of: Callable[[str], Blobs] | None, *, full: bool
    ) -> None:
        self._engine = engine
        self._audit_of = audit_of
        self._blobs_of = blobs_of
        self._full = full
        self._hashed = 0

    async def findings(self) -> list[Finding]:
        """Everything there is to say."""
        found, infos = await self._engine.inspect(), await self._engine.spaces()
        return [*with_spaces(found, infos), *await self._audits(infos), *await self._blobs(infos)]

    # --- the audit ---

    async def _audits(self, infos: Sequence[SpaceInfo]) -> list[Finding]:
        kept = [info.name for info in infos if info.durability != "volatile"]
        looked = kept if self._full else kept[:SPACES_MAX]
        found: list[Finding] = []
        sound = segments = unsealed = 0
        for space in looked:
            try:
                checked = await self._audit_of(space).verify(newest=None if self._full else SEGMENTS_MAX)
            except Error as exc:
                found.append(_unsound(space, str(exc)))
                continue
            if checked.problems:
                found.append(_unsound(space, _first(checked.problems)))
            if checked.unsealed >= UNSEALED_MAX:
                found.append(self._unsealed(space, checked))
            sound, segments, unsealed = sound + checked.sound, segments + checked.segments, unsealed + checked.unsealed
        if not looked or not sound:
            return found
        words = (
            f"sound in {sound} of {len(kept)} space(s): {segments} segment(s), and {unsealed} record(s) not sealed yet"
        )
        limits = "" if self._full else f"; the newest {SEGMENTS_MAX} segments of a space at most, --full looks at all"
        return [*found, Finding("ok", "audit", words + limits)]

    def _unsealed(self, space: str, checked: Verification) -> Finding:
        least = "" if self._full else "at least "
        return Finding(
            "warning",
            f"audit of {space}",
            f"{least}{checked.unsealed:,} records are not sealed: no hash covers them, and the feed is kept for their sake",
            "run: holdfast tidy, and do so now and then where no program has the store open for long",
        )

    # --- blobs ---

    async def _blobs(self, infos: Sequence[SpaceInfo]) -> list[Finding]:
        keeping = [info.name for info in infos if any(each.subspace == BLOBS.name and each.keys for each in info.usage)]
        found: list[Finding] = []
        for space in keeping:
            refs = [ref async for ref in self._referenced(space)]
            if not refs:
                continue
            if self._blobs_of is None:
                what = f"{len(refs):,} blob(s) are referenced, and where they are is not known here, so they were not looked at"
                found.append(Finding("note", f"blobs of {space}", what, "name their folder: --blobs FOLDER, or blobs="))
            else:
                found.append(await self._looked_for(space, self._blobs_of(space), refs))
        return found

    async def _looked_for(self, space: str, blobs: Blobs, refs: list[BlobRef]) -> Finding:
        subject, wrong, read = f"blobs of {space}", [], 0
        if not blobs.root.is_dir():
            return Finding(
                "error",
                subject,
                f"the folder {blobs.root} is not there, and {len(refs):,} blob(s) in it are referenced",
                "bring the folder back; backups and copies of a store leave it out, so copy it to them too",
            )
        for ref in refs:
            is_read = self._full or self._hashed + ref.size <= HASHED_BYTES_MAX
            try:
                await blobs.check(ref, content=is_read)
            except Error as exc:
                if await self._is_referenced(space, ref):  # or it was let go of, and swept, in this moment
                    wrong.append(str(exc))
            else:
                self._hashed, read = self._hashed + is_read * ref.size, read + is_read
        if wrong:
            advice = "restore the files from a copy of the folder, or put the same content again"
            return Finding(
                "error", subject, f"{len(wrong)} of {len(refs):,} that are referenced: {_first(wrong)}", advice
            )
        limits = (
            "" if self._full else f"; at most {BLOBS_MAX:,} blobs and {HASHED_BYTES_MAX >> 20} MiB, --full looks at all"
        )
        return Finding(
            "ok", subject, f"{len(refs):,} that are referenced are there, {read:,} were read and are right{limits}"
        )

    async def _referenced(self, space: str) -> AsyncIterator[BlobRef]:
        """The blobs that somebody references, each once."""
        after, count, last = None, 0, ""
        while True:
            page = await self._engine.scan(space, BLOBS.root, after=after, limit=PAGE)
            for entry in page.entries:
                sha256, _, holder = entry.key[len(BLOBS.root) :].partition("/")
                size = integer(entry.value)
                if holder and sha256 != last and size is not None and is_blob(sha256, size):
                    yield BlobRef(sha256, size)
                    count, last = count + 1, sha256
                    if count >= BLOBS_MAX and not self._full:
                        return
            if not page.more:
                return
            after = page.entries[-1].key
            if last and after.startswith(BLOBS.prefix(last)):
                after = BLOBS.key(last + "0")  # what follows a slash: one reference is enough, however many there are

    async def _is_referenced(self, space: str, ref: BlobRef) -> bool:
        return bool((await self._engine.scan(space, BLOBS.prefix(ref.sha256), limit=1)).entries)


def with_spaces(findings: Iterable[Finding], infos: Iterable[SpaceInfo]) -> list[Finding]:
    """What an engine says of its durabilities, of those that spaces have and with their names; sync is what new ones have."""
    names: dict[str, list[str]] = {kind: [] for kind in ("sync", *_LESS)}
    for info in infos:
        if not info.name.startswith("_"):
            names[info.durability].append(info.name)
    told, said = [], set()
    for finding in findings:
        kind = finding.subject.removeprefix(_SUBJECT)
        if finding.subject.startswith(_SUBJECT) and kind in names:
            said.add(kind)
            if not names[kind] and kind != "sync" and finding.level == "ok":
                continue
            finding = _named(finding, kind, names[kind])
        told.append(finding)
    for less, meaning in _LESS.items():
        if names[less] and less not in said:
            told.append(_named(Finding("ok", _SUBJECT + less, meaning), less, names[less]))
    return told


def _named(finding: Finding, kind: str, names: list[str]) -> Finding:
    if not names:
        return finding
    more = f" and {len(names) - NAMED_MAX:,} more" if len(names) > NAMED_MAX else ""
    level = "note" if finding.level == "ok" and kind != "sync" else finding.level
    words = f"{finding.message}: {'space' if len(names) == 1 else 'spaces'} {', '.join(names[:NAMED_MAX])}{more}"
    return msgspec.structs.replace(finding, level=level, message=words)


def _unsound(space: str, what: str) -> Finding:
    return Finding(
        "error",
        f"audit of {space}",
        what,
        f"holdfast audit verify --space {space} tells all; find out who can write to this store, and compare with a backup",
    )


def _first(problems: Sequence[str]) -> str:
    return problems[0] if len(problems) == 1 else f"{problems[0]}, and {len(problems) - 1} more"
