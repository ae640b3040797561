"""The Redis engine: strictly consistent spaces on a Redis server, a primary under Sentinel, or a cluster.

What it keeps. A space is a constant number of keys under one hash tag, `holdfast:{space}:…`: `entries` (hash), `keys` (their
order), `expiry`, `feed` (stream), `usage`, `requests:0` and `requests:1`, `meta`; and `holdfast:spaces` has the names of all
(docs/keyspace.md). Nothing is ever given a ttl in Redis: an entry that expired is told of first, and removed by that.

A commit. What arrives while one group of a space is under way is the next group (`committing.py`), and a group is one call
of one script, which evaluates the batches on an overlay as `evaluation.py` does and writes the post-images once. The
server's clock is the clock of all, unless the store was opened with one of its own. Redis fsyncs (appendfsync always)
before any reply leaves, those of readers and watchers too, so what is shown is durable.

How it fails. Every request id is remembered, also a fresh one: a message that was delayed may come after its retry. When
the connection ends during a commit the old one is ended on the server too, and the group is sent again: batches with an
id get their recorded answer, a batch without one gets OutcomeUnknown. What was certainly not sent is Unavailable.

Restart and failover. The meta names the server (its run id) that committed last. A commit through another one lets the
revision jump by 2^32 and closes the gap for cursors, because acknowledged commits may be missing there and their versions
must not come again. There is no jump where nothing can be missing: the server fsyncs every write, is no promoted replica,
and the space was never on a server with replicas. For the same reason versions begin at 0 only there; elsewhere they
begin at the clock's microseconds, since the space itself may get lost.

Durability is the server's: `redis_doctor.py` says what it can give, and what it cannot is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeVar, cast

import msgspec
from redis.exceptions import OutOfMemoryError, RedisError

from holdfast.checking import check_batch, check_durability, check_keys, check_scan
from holdfast.clock import Clock, SystemClock
from holdfast.engine import Batch, ChangeSet, Durability, Entry, Finding, Page, Receipt, SpaceInfo, Usage
from holdfast.engines import redis_doctor
from holdfast.engines.committing import Committer, Over
from holdfast.engines.feed import follow
from holdfast.engines.grouping import Waiting
from holdfast.engines.redis_feed import Bell, RedisFeed
from holdfast.engines.redis_link import Facts, Link, Lost
from holdfast.engines.redis_packing import Argument, arguments_of, entry_of, outcome_of, raw_of
from holdfast.engines.redis_scripts import COMMIT, COMPACT, CREATE, DESCRIBE, DROP, GET, LOAD, PROBE, SCAN, Script
from holdfast.engines.redis_servers import Servers, left_no_trace
from holdfast.engines.redis_url import RedisUrl, parse
from holdfast.errors import Error, IncompatibleStore, InvalidInput, OutcomeUnknown, Unavailable

T = TypeVar("T")

LAYOUT: Final = "1"
LOAD_ENTRIES: Final = 1000
LOAD_BYTES: Final = 4 * 1024 * 1024
"""How much is loaded by one script, so that others are served in between."""
ARGUMENTS_MAX: Final = 20_000
"""Of one script, so that the server is not busy with it for long; it refuses a million."""
REVISION_MAX: Final = 2**53 - 1


class SpaceKeys(msgspec.Struct, frozen=True):
    """The names of a space's keys."""

    tag: str
    entries: str
    keys: str
    expiry: str
    feed: str
    usage: str
    meta: str
    requests: tuple[str, str]
    bell: str
    probe: str

    @property
    def all_but_meta(self) -> list[str]:
        return [self.entries, self.keys, self.expiry, self.feed, self.usage, *self.requests]


def space_keys(prefix: str, space: str) -> SpaceKeys:
    """The keys of a space. Its name is the hash tag, in which braces are escaped; no name is a tag of its own."""
    tag = space.replace("%", "%25").replace("{", "%7B").replace("}", "%7D") or "%"
    root = f"{prefix}:{{{tag}}}:"
    return SpaceKeys(
        tag=tag,
        entries=f"{root}entries",
        keys=f"{root}keys",
        expiry=f"{root}expiry",
        feed=f"{root}feed",
        usage=f"{root}usage",
        meta=f"{root}meta",
        requests=(f"{root}requests:0", f"{root}requests:1"),
        bell=f"{root}bell",
        probe=f"{root}probe",
    )


_ENGINES: Final[weakref.WeakSet[RedisEngine]] = weakref.WeakSet()


def _disown() -> None:
    """In a child after a fork: the connections belong to the parent."""
    for engine in _ENGINES:
        engine._disowned = True


os.register_at_fork(after_in_child=_disown)


class RedisEngine:
    """Spaces in Redis. Use `await RedisEngine.open(url)`; it belongs to the event loop that opened it."""

    @classmethod
    async def open(cls, url: str, *, clock: Clock | None = None) -> RedisEngine:
        """Connect to the store; a server that cannot be one is refused."""
        scheme, _, rest = url.partition(":")
        engine = cls(parse(scheme, rest), clock or SystemClock())
        try:
            await engine._servers.open(engine._spaces_key)
        except BaseException:
            await engine.close()
            raise
        return engine

    def __init__(self, url: RedisUrl, clock: Clock) -> None:
        self._url = url
        self._clock = clock
        self._servers_time = isinstance(clock, SystemClock)
        self._servers = Servers(url)
        self._committer = Committer(self._begin_group)
        self._keys: dict[str, SpaceKeys] = {}
        self._spaces_key = f"{url.prefix}:spaces"
        self._prepared: set[str] = set()
        self._prepared_through = 0
        self._administering: set[asyncio.Future[Any]] = set()
        self._closed = False
        self._disowned = False
        self.bell = Bell(self._servers, lambda space: RedisFeed(self, space), lambda space: self.keys(space).bell)
        _ENGINES.add(self)

    def keys(self, space: str) -> SpaceKeys:
        keys = self._keys.get(space)
        if keys is None:
            keys = self._keys[space] = space_keys(self._url.prefix, space)
        return keys

    async def script(self, space: str, script: Script, keys: list[str], arguments: list[Argument]) -> Any:
        """Run a script that only reads on the server that keeps the space."""
        self._check_open()

        async def work(link: Link, asking: bool) -> Any:
            return (await link.run(script, keys, arguments, asking=asking))[0]

        return await self._servers.run(self.keys(space).tag, "reads", work)

    # --- commits ---

    async def commit(self, space: str, batch: Batch) -> Receipt:
        size = check_batch(batch)
        self._check_open()
        return await self._committer.commit(space, "", batch, size)

    def _begin_group(self, space: str, items: list[Waiting], over: Over) -> None:
        over(self._write_group(space, items))

    async def _write_group(self, space: str, items: list[Waiting]) -> None:
        group = _Group(self, space, items)
        try:
            await self._prepare(space)
            await self._servers.run(self.keys(space).tag, "commits", group.send)
        except Error as exc:
            group.give_up(exc)

    def _now(self) -> Argument:
        """The caller's time for a script; the server's clock is the clock of all, unless this engine was given one."""
        return "" if self._servers_time else self._clock.now_ms()

    def _trust(self, link: Link, facts: Facts) -> list[Argument]:
        """What a script must know of the server: who it is, whether a restart loses nothing, whether it has replicas."""
        replicated = facts.replicas > 0 or self._servers.finder.has_replicas(link.address)
        trusted = facts.syncs and not facts.promoted and not replicated
        return [facts.run_id, int(trusted), int(replicated)]

    async def _prepare(self, space: str) -> None:
        """Once per space and connection: have its name in the list of all, and the right to do all that scripts do."""
        if self._prepared_through != self._servers.connections:
            self._prepared.clear()
        if space not in self._prepared:
            keys = self.keys(space)

            async def list_name(link: Link, asking: bool) -> None:
                # Without memory nothing new is made, and what exists has its name there.
                with contextlib.suppress(OutOfMemoryError):
                    await self._plain(link, asking, "SADD", self._spaces_key, space)

            async def probe(link: Link, asking: bool) -> None:
                await link.run(PROBE, [keys.probe], [], asking=asking)

            await self._servers.run(keys.tag, "commits", probe)
            await self._servers.run(self._spaces_key, "commits", list_name)
            self._prepared.add(space)
            self._prepared_through = self._servers.connections

    async def _plain(self, link: Link, asking: bool, *command: Argument) -> Any:
        """A command that is no script."""
        answers = await link.call_all(*([("ASKING",)] if asking else []), command)
        if isinstance(answers[-1], RedisError):
            raise answers[-1]
        return answers[-1]

    async def _administer(self, space: str, work: Callable[[Link, bool], Awaitable[T]], *, prepare: bool = False) -> T:
        """Work on the connection of the commits; whoever asked for it may go, and does not break it off halfway."""
        self._check_open()

        async def job() -> T:
            if prepare:
                await self._prepare(space)
            return await self._servers.run(self.keys(space).tag, "commits", work)

        running = asyncio.ensure_future(job())
        self._administering.add(running)
        running.add_done_callback(self._administered)
        return await asyncio.shield(running)

    def _administered(self, done: asyncio.Future[Any]) -> None:
        self._administering.discard(done)
        if not done.cancelled():
            done.exception()  # whoever asked for it may be gone

    # --- reads ---

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        check_keys(keys)
        names = self.keys(space)
        found = await self.script(space, GET, [names.entries, names.meta], [self._now(), *keys])
        if not found:
            return [None] * len(keys)
        return [None if raw is None else entry_of(key, raw) for key, raw in zip(keys, found, strict=True)]

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        check_scan(prefix, after, limit)
        names = self.keys(space)
        low, high = _range(prefix.encode(), None if after is None else after.encode(), reverse)
        revision, more, *found = await self.script(
            space, SCAN, [names.entries, names.keys, names.meta], [self._now(), low, high, limit, int(reverse)]
        )
        pairs = zip(found[::2], found[1::2], strict=True)
        return Page([entry_of(key.decode(), raw) for key, raw in pairs], bool(more), int(revision))

    def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        return self._follow(space, prefixes, cursor, live)

    async def _follow(
        self, space: str, prefixes: tuple[str, ...], cursor: str | None, live: bool
    ) -> AsyncIterator[ChangeSet]:
        with self.bell.tails.watching(space, prefixes) as feed:
            await self.bell.listen_to(space)
            async for commit in follow(feed, prefixes, cursor, live):
                yield commit

    # --- the life of spaces ---

    async def require(self, durability: Durability) -> None:
        """Refuse with DurabilityUnavailable if this server cannot give that durability."""

        async def work(link: Link, asking: bool) -> None:
            redis_doctor.check_durability(await link.fresh_facts(), durability)

        await self._servers.run(self._spaces_key, "commits", work)

    async def create(self, space: str, durability: Durability = "sync", *, audit_reads: bool = False) -> SpaceInfo:
        check_durability(durability)
        keys = self.keys(space)

        async def work(link: Link, asking: bool) -> bytes:
            facts = await link.fresh_facts()
            redis_doctor.check_durability(facts, durability)
            arguments = [self._now(), *self._trust(link, facts), durability, int(audit_reads)]
            answer: bytes = (await link.run(CREATE, [keys.meta], arguments, asking=asking))[0]
            return answer

        has = (await self._administer(space, work, prepare=True)).decode()
        if has != durability:
            raise InvalidInput(f"space {space!r} exists with durability {has!r}; it cannot be opened as {durability!r}")
        found = await self.spaces(space)
        return found[0] if found else await self.create(space, durability, audit_reads=audit_reads)

    async def spaces(self, name: str | None = None) -> list[SpaceInfo]:
        self._check_open()
        if name is not None:
            names = [name]
        else:
            found: list[bytes] = await self._servers.run(self._spaces_key, "reads", self._names)
            names = sorted(each.decode() for each in found)
        infos = await asyncio.gather(*(self._describe(each) for each in names))
        return [info for info in infos if info is not None]

    async def _names(self, link: Link, asking: bool) -> list[bytes]:
        return list(await self._plain(link, asking, "SMEMBERS", self._spaces_key))

    async def _describe(self, space: str) -> SpaceInfo | None:
        keys = self.keys(space)
        facts, used, first = await self.script(space, DESCRIBE, [keys.meta, keys.usage, keys.expiry], [])
        meta = {name.decode(): value.decode() for name, value in zip(facts[::2], facts[1::2], strict=True)}
        if not meta or meta.get("dropped") == "1":
            return None
        if meta["layout"] != LAYOUT:
            raise IncompatibleStore(
                f"space {space!r} has layout {meta['layout']}; this version of Holdfast knows {LAYOUT}"
            )
        usage = []
        for where, amount in zip(used[::2], used[1::2], strict=True):
            subspace, _, owner = where.decode().partition("/")
            held, size = map(int, amount.split())
            if held:
                usage.append(Usage(owner, subspace, held, size))
        return SpaceInfo(
            name=space,
            durability=cast(Durability, meta["durability"]),
            revision=int(meta["revision"]),
            created_at=int(meta["created_at"]),
            audit_reads=meta["audit_reads"] == "1",
            feed_floor=int(meta["floor"]),
            next_expiry=int(float(first)) if first else None,
            usage=sorted(usage, key=lambda each: (each.owner, each.subspace)),
        )

    async def drop(self, space: str) -> None:
        self._check_open()
        known, keys = await self._describe(space), self.keys(space)
        if known is None:
            return

        async def work(link: Link, asking: bool) -> None:
            await link.run(DROP, [*keys.all_but_meta, keys.meta], [keys.bell, known.created_at], asking=asking)

        await self._administer(space, work)

    async def load(self, space: str, entries: list[Entry], revision: int) -> None:
        if revision > REVISION_MAX:
            raise InvalidInput(f"revision {revision} is beyond what a Redis store can count to ({REVISION_MAX})")
        keys = self.keys(space)
        for part in _parts(entries):

            async def work(link: Link, asking: bool, part: list[Argument] = part) -> None:
                facts = await link.fresh_facts()
                arguments = [self._now(), *self._trust(link, facts), _given(facts), revision, *part]
                with redis_doctor.explaining(facts):
                    await link.run(LOAD, [*keys.all_but_meta, keys.meta], arguments, asking=asking)

            await self._administer(space, work, prepare=True)

    async def compact(self, space: str, upto: int) -> None:
        keys = self.keys(space)

        async def work(link: Link, asking: bool) -> None:
            await link.run(COMPACT, [keys.feed, keys.meta], [upto], asking=asking)

        await self._administer(space, work)

    # --- the store as a whole ---

    async def inspect(self) -> list[Finding]:
        self._check_open()
        return await redis_doctor.examine(self._servers)

    async def close(self) -> None:
        if not self._closed:
            await self._committer.close()
            self._closed = True
            if self._administering:
                await asyncio.wait(self._administering)
            await self.bell.close()
            await self._servers.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the store is closed")
        if self._disowned:
            raise Unavailable("this store was opened before a fork; open it again in the child process")


class _Group:
    """Batches of one space on their way: who has his outcome, and whether what was sent is in doubt."""

    def __init__(self, engine: RedisEngine, space: str, items: list[Waiting]) -> None:
        self._engine = engine
        self._names = engine.keys(space)
        self._waiting = [(item, arguments_of(item.batch)) for item in items]
        self._doubt: str | None = None

    async def send(self, link: Link, asking: bool) -> None:
        """One attempt. After one that was lost only those batches are left that may be sent again."""
        facts = await link.fresh_facts()
        while self._waiting:
            part = self._part()
            try:
                with redis_doctor.explaining(facts):
                    replies, *acknowledged = await self._run(link, facts, part, asking)
            except Lost as exc:
                self._lost(str(exc))
                raise
            except RedisError as exc:
                if not left_no_trace(exc):
                    self._doubt = str(exc)
                raise
            outcomes = [_outcome(item, reply) for (item, _), reply in zip(part, replies, strict=True)]
            if acknowledged:
                outcomes = self._replicated(part, outcomes, acknowledged[0])
            for (item, _), outcome in zip(part, outcomes, strict=True):
                item.outcome = outcome
            del self._waiting[: len(part)]

    def _part(self) -> list[tuple[Waiting, list[Argument]]]:
        """As many of the batches as one script takes; almost always all of them."""
        count = 0
        for size, (_, packed) in enumerate(self._waiting):
            count += len(packed)
            if size and count > ARGUMENTS_MAX:
                return self._waiting[:size]
        return self._waiting[:]

    async def _run(
        self, link: Link, facts: Facts, part: list[tuple[Waiting, list[Argument]]], asking: bool
    ) -> list[Any]:
        """The script's replies, and how many replicas have them if the URL asks for that."""
        engine, names, url = self._engine, self._names, self._engine._url
        arguments: list[Argument] = [
            engine._now(), *engine._trust(link, facts), _given(facts), names.bell, int(url.wait > 0)
        ]  # fmt: skip
        for _, packed in part:
            arguments += packed
        keys = [names.entries, names.keys, names.expiry, names.feed, names.usage, names.meta, *names.requests]
        if not url.wait:
            return await link.run(COMMIT, keys, arguments, asking=asking)
        return await link.run(COMMIT, keys, arguments, ("WAIT", url.wait, url.wait_timeout_ms), asking=asking)

    def _replicated(
        self, part: list[tuple[Waiting, list[Argument]]], outcomes: list[Receipt | Error], acknowledged: Any
    ) -> list[Receipt | Error]:
        """The outcomes, unless fewer replicas have them than the URL asks for: then they may be lost in a failover."""
        wanted = self._engine._url.wait
        if not isinstance(acknowledged, RedisError) and acknowledged >= wanted:
            return outcomes
        self._doubt = f"{acknowledged} of {wanted} replicas have it"
        refused = Unavailable(f"{self._doubt}, and the answer rests on what they lack; nothing was changed")
        return [
            self._unknown(item) if isinstance(outcome, Receipt) else refused
            for (item, _), outcome in zip(part, outcomes, strict=True)
        ]

    def _lost(self, reason: str) -> None:
        """No answer came. What has a request id, or does nothing, is sent again; nobody can tell about the rest."""
        self._doubt = reason
        kept = []
        for item, packed in self._waiting:
            if item.batch.request_id is None and item.batch.operations:
                item.outcome = self._unknown(item)
            else:
                kept.append((item, packed))
        self._waiting = kept

    def give_up(self, error: Error) -> None:
        """Tell whoever has no outcome yet: the error, or, if they were sent, that nobody knows."""
        for item, _ in self._waiting:
            item.outcome = error if self._doubt is None else self._unknown(item)
        self._waiting = []

    def _unknown(self, item: Waiting) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"the commit was sent to Redis and may or may not have happened: {self._doubt}",
            request_id=item.batch.request_id,
        )


def _outcome(item: Waiting, reply: bytes) -> Receipt | Error:
    try:
        return outcome_of(item.batch, reply)
    except Error as exc:  # what it shows is damaged; that is for this caller alone
        return exc


def _given(facts: Facts) -> str:
    """The durabilities a server can give, as the scripts look for them."""
    return f",{','.join(facts.durabilities)},"


def _range(prefix: bytes, after: bytes | None, reverse: bool) -> tuple[bytes, bytes]:
    """The bounds of a scan as ZRANGEBYLEX takes them; no byte of UTF-8 is 255, so the last one has a next."""
    low = b"[" + prefix if prefix else b"-"
    high = b"(" + prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else b"+"
    if after is not None and reverse and (high == b"+" or after < high[1:]):
        high = b"(" + after
    elif after is not None and not reverse and after >= prefix:
        low = b"(" + after
    return low, high


def _parts(entries: list[Entry]) -> list[list[Argument]]:
    """Entries as the load script takes them, in parts; one part even if there are none."""
    parts: list[list[Argument]] = [[]]
    count = size = 0
    for entry in {entry.key: entry for entry in entries}.values():
        raw = raw_of(entry)
        if count >= LOAD_ENTRIES or size + len(raw) > LOAD_BYTES:
            parts.append([])
            count = size = 0
        parts[-1] += (entry.key, "" if entry.expires_at is None else entry.expires_at, raw)
        count += 1
        size += len(raw)
    return parts
