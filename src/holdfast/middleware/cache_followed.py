"""What is known of a space's changes: enough to tell at which revisions something that was read is still true.

`applied` is the revision up to which every change is known, from the feed and from this process's own commits. For each key
that changed lately, and for each prefix above it, `changed` has the last revision that did. So what was read at revision
`at` holds at `applied` too, if its name has not changed since `at`. That is the whole of invalidation: nothing has to be
found and removed, and a copy that others share is judged in the same way as one's own.

`changed` is bounded. What falls out of it raises `floor`: of what was read below it one cannot tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

CHANGED_MAX: Final = 20_000
"""Keys and prefixes."""


class Followed:
    """A space whose feed is followed."""

    def __init__(self, space: str, revision: int, identity: str) -> None:
        self.space = space
        self.passing = False
        """Nothing of it is cached: every read goes to the durable engine."""
        self.prefixes: tuple[str, ...] = ()
        """What is followed; everything, if there are none."""
        self.shared_since_ms = 0
        """Shared copies that were read before this instant are not trusted."""
        self.lag_ms = 0
        self.proved_ms = 0
        """At this instant everything there was had been heard of."""
        self.asked = False
        """Whether anybody has been answered since somebody last looked whether the feed has told everything."""
        self.cut = False
        """The feed has failed, or has not told what is there, or nobody could find out."""
        self.begin(revision, identity)

    def begin(self, revision: int, identity: str) -> None:
        """Nothing is known of what was before this revision."""
        self.applied = revision
        self.floor = revision
        self.known = revision
        """The highest revision heard of."""
        self.awaited = revision
        """What the last look found; the feed should have told it by the next."""
        self.identity = identity
        """Names the space among all that share a cache; another one when it was dropped and came back."""
        self.changed: dict[str, int] = {}

    def covers(self, name: str) -> bool:
        return not self.prefixes or name.startswith(self.prefixes)

    def note(self, revision: int, keys: Iterable[str]) -> None:
        """All of this commit's changes, which come after everything noted before."""
        changed = self.changed
        for key in keys:
            slash = 0
            while slash := key.find("/", slash) + 1:
                prefix = key[:slash]
                changed.pop(prefix, None)
                changed[prefix] = revision
            changed.pop(key, None)
            changed[key] = revision
        if len(changed) > CHANGED_MAX:
            self._shorten()
        self.applied = revision
        self.known = max(self.known, revision)

    def _shorten(self) -> None:
        """Forget the quarter that changed longest ago: they are in the order of their revisions."""
        for name in list(self.changed)[: CHANGED_MAX // 4]:
            self.floor = max(self.floor, self.changed.pop(name))

    @property
    def behind(self) -> int:
        return max(self.known - self.applied, 0)
