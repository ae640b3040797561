"""How a hot tier is asked for, and what it tells of itself: `open(cache=Cache(…))` and `store.cache.stats`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from holdfast.clock import Duration, duration_ms
from holdfast.errors import InvalidInput

MEMORY: Final = "memory"
ENTRIES: Final = 1000
TTL_S: Final = 60
SHARED_TTL_S: Final = 300
ENTRIES_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Cache:
    """A hot tier: "memory", or the URL of a Redis server that processes share, with this process's memory in front of it.

    `entries` is how much the memory holds (0: nothing, with Redis) and `ttl` for how long; `shared_ttl` is Redis's. An
    eventual read is never older than the longer of them.
    """

    url: str = MEMORY
    entries: int = ENTRIES
    ttl: Duration = TTL_S
    shared_ttl: Duration = SHARED_TTL_S

    def __post_init__(self) -> None:
        duration_ms(self.ttl, name="ttl")
        duration_ms(self.shared_ttl, name="shared_ttl")
        if type(self.entries) is not int or not 0 <= self.entries <= ENTRIES_MAX:
            raise InvalidInput(f"a cache holds between 0 and {ENTRIES_MAX:,} entries, not {self.entries!r:.40}")
        if self.url == MEMORY and not self.entries:
            raise InvalidInput("a cache in memory that holds 0 entries is none; leave cache= out")

    @property
    def ttl_ms(self) -> int:
        return duration_ms(self.ttl)

    @property
    def shared_ttl_ms(self) -> int:
        return duration_ms(self.shared_ttl)


@dataclass(slots=True)
class CacheStats:
    """What a hot tier has done since it was opened."""

    hits: int = 0
    """Answered from memory."""
    shared_hits: int = 0
    """Answered from Redis."""
    negative_hits: int = 0
    """Of the hits, those that said that there is nothing."""
    misses: int = 0
    """Answered by the durable engine, which was asked once for all who wanted the same."""
    fills: int = 0
    fills_refused: int = 0
    """What was read had changed, or something newer was there already."""
    flushes: int = 0
    """How often all of a space was forgotten, because its feed had a gap."""
    shared_errors: int = 0
    """Redis did not answer, or not with what was put there; the durable engine was asked."""
    spaces: int = 0
    """How many are followed now."""
    behind: int = 0
    """By how many revisions the feed is behind what has been heard of, in the space where it is most."""
    lag_ms: int = 0
    """How long the latest commit took to arrive through the feed, in the slowest space."""
    proof_age_ms: int = 0
    """How long ago it was last proved that the feed has told everything, in the space where that is longest.

    Only of spaces where readers were answered since: while anybody reads, and the feed is sound, it is about a second at most.
    """
    feeds_cut: int = 0
    """Of how many spaces the feed failed, or stands still, or nobody answers: what they show may be as old as that."""

    @property
    def hit_rate(self) -> float:
        """The share of reads that did not ask the durable engine; 0 when there was none."""
        found = self.hits + self.shared_hits
        return found / (found + self.misses) if found else 0.0
