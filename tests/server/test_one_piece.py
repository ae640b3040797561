"""Whether frames come in one piece or one by one: the same answers, the same store, the same books."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.clock import ManualClock
from holdfast.engine import Absent, Batch, Delete, Durability, Increment, Present, Push, Put
from holdfast.engines.resident import ResidentEngine
from holdfast.identity import Identity, Role
from holdfast.ids import new_id
from holdfast.middleware.denials import Denial
from holdfast.middleware.policy import Policy
from holdfast.middleware.rules import AccessRule, Quota, RateLimit, Rules
from holdfast.offers import Replies
from holdfast.server import connection
from holdfast.server.binary import Limits
from holdfast.wire import (
    LENGTH,
    PROTOCOL,
    Commit,
    Committed,
    Done,
    Entries,
    Failed,
    Get,
    Hello,
    Ping,
    Receipts,
    Welcome,
    frame,
)
from tests.server.conftest import AGENT, Running, Serve
from tests.server.test_binary import SPACE, Raw, connected

SEEDS = 8
ROUNDS = 3


class Obstinate(ResidentEngine):
    """Takes nothing that comes together, if it is told so."""

    singly = False

    def submit_all(self, space: str, batches: list[Batch], replies: Replies) -> bool:
        return not self.singly and super().submit_all(space, batches, replies)


@dataclass
class Side:
    """One of two keepers that are told the same."""

    clock: ManualClock
    engine: Obstinate
    policy: Policy
    running: Running
    denied: list[Denial]
    began: str = ""
    answers: dict[int, object] = field(default_factory=dict)

    async def hear(self, raw: Raw, count: int) -> None:
        while count:
            reply = await raw.hear()
            ids, said = (reply.ids, reply.receipts) if isinstance(reply, Receipts) else ([reply.id], [told(reply)])
            for id, each in zip(ids, said, strict=True):
                assert id not in self.answers, "answered once"
                self.answers[id] = each
            count -= len(ids)

    async def kept(self) -> object:
        entries = [
            entry for start in ("records/", "locks/") for entry in (await self.engine.scan(SPACE, start)).entries
        ]
        feed = self.engine.watch(SPACE, cursor=self.began, live=False)
        return entries, [commit async for commit in feed], await self.engine.spaces()

    def books(self) -> object:
        book, bucket = self.policy.quotas.book(SPACE), self.policy.rates._known.get((SPACE, "market"))
        tallies = {"": book, **book.accounts}
        used = {
            name: (each.base + each.begun, each.pending, each.doubtful, each.flying) for name, each in tallies.items()
        }
        return used, None if bucket is None else bucket._owed

    def told(self) -> Counter[object]:
        return Counter((each.verb, each.key, each.code) for each in self.denied)


def told(reply: object) -> object:
    """What can be compared: a read may be answered before what was sent before it."""
    if isinstance(reply, Committed):
        return reply.receipt
    if isinstance(reply, Failed):
        return reply.code
    assert isinstance(reply, Entries | Done)
    return type(reply)


def a_batch(chance: random.Random, ids: list[str], odd: float) -> Batch:
    """Mostly a set as it is sent most."""
    key = f"records/{chance.choice('abcdefgh')}"
    value = b"%d" % chance.randrange(10 ** chance.randint(1, 9))
    id, put = new_id(), Put(key, value)
    ids.append(id)
    if chance.random() >= odd:
        return Batch("market", (put,), (), id, True)
    return chance.choice(
        (
            lambda: Batch("market", (put,), (), chance.choice(ids), False),
            lambda: Batch("market", (put,), (), chance.choice(ids), True),
            lambda: Batch("market", (put,), (), chance.choice(("mine", "yours")), chance.random() < 0.5),
            lambda: Batch("market", (put,), (), None, chance.random() < 0.5),
            lambda: Batch("risk", (put,), (), id, True),
            lambda: Batch("market", (Put(key, value, owner="risk"),), (), id, True),
            lambda: Batch("market", (Put(key, value, chance.choice((1, 900, 0, -1, 1 << 62))),), (), id, True),
            lambda: Batch("market", (Put(key, b"{no json"),), (), id, True),
            lambda: Batch("market", (Put(key, b'"%s"' % (b"x" * 300)),), (), id, True),
            lambda: Batch(
                "market", (Put(chance.choice(("records/é", "records/\0", "nothing", "system/x")), b"1"),), (), id, True
            ),
            lambda: Batch("market", (put,), (chance.choice((Absent, Present))(key),), id, True),
            lambda: Batch("market", (put, Increment("records/n", 1)), (), id, True),
            lambda: Batch("market", (Increment(chance.choice(("records/n", key)), 1),), (), id, True),
            lambda: Batch("market", (Delete(key),), (), id, True),
            lambda: Batch("market", (Push("locks/lock/l/", b"1"),), (), id, True),
            lambda: Batch("market", (), (), id, True),
        )
    )()  # type: ignore[no-untyped-call]


def a_frame(chance: random.Random, id: int, ids: list[str], odd: float, *, reads: bool) -> bytes:
    kind = chance.random() if chance.random() < odd else 0.5
    if kind < 0.1 and reads:
        return frame(Get(id, SPACE, ["records/a", "records/b"][: chance.randint(1, 2)]))
    if kind < 0.15:
        return frame(Ping(id))
    if kind < 0.2:
        body = b"\x93\x02\xcd" + id.to_bytes(2, "big") + b"\xa1s"
        return LENGTH.pack(len(body)) + body
    space = SPACE if kind < 0.9 else "elsewhere"
    return frame(Commit(id, space, a_batch(chance, ids, odd)))


def some_rules(chance: random.Random, *, quotas: bool) -> Rules:
    rates = (RateLimit("*", chance.choice((0.5, 3, 50)), chance.choice((5, 40, 80, 400))),)
    access = (AccessRule("*", allow=("Get",)),)
    quota = Quota(
        "*", chance.choice((4, 9, 30, 1000)), chance.choice((6, 1000, 1000)), chance.choice((120, 700, 10_000))
    )
    return Rules(
        rate_limits=rates if chance.random() < 0.5 else (),
        access_control=access if chance.random() < 0.1 else None,
        quotas=(quota,) if quotas else (),
    )


@pytest.fixture
async def sides(serve: Serve, tmp_path: Path) -> AsyncIterator[list[Side]]:
    found = []
    for name in ("one", "piece"):
        clock, denied = ManualClock(), list[Denial]()
        engine = await Obstinate.open(tmp_path / f"{name}.db", clock=clock)
        assert isinstance(engine, Obstinate)
        engine._commits._commit_s = 0.0  # no COMMIT goes to the thread, however slow the disk
        policy = Policy(engine, clock, Rules(rate_limits=(), quotas=(Quota("*"),)), denied=denied.append)
        running = await serve(engine)
        running.keeper.engine_for = policy.engine_for  # type: ignore[method-assign, assignment]
        found.append(Side(clock, engine, policy, running, denied))
    yield found
    for side in found:
        await side.running.port.stop("the test is over", 1.0)
        await side.engine.close()


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("quotas", [False, True])
async def test_frames_in_one_piece_are_answered_as_each_by_itself(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch, seed: int, quotas: bool
) -> None:
    """Under a quota those that may not fit wait for others, so there both have one piece, and one takes it apart."""
    monkeypatch.setattr(connection, "PENALTY_S_MAX", 0.0)
    chance = random.Random(seed)
    role: Role = chance.choice(("agent", "agent", "orchestrator"))
    durability: Durability = chance.choice(("sync", "sync", "async", "volatile"))
    in_flight, sole, together = chance.choice((2, 7, 40, 1000, 1000)), chance.random() < 0.9, chance.random() < 0.5
    for side in sides:
        side.running.keeper.tokens[AGENT] = Identity("market", role, SPACE, "2")
        side.running.port.sole_owner = sole
        side.running.port.limits = Limits(in_flight=in_flight)
        side.began = f"r{(await side.engine.create(SPACE, durability)).revision}"
        await side.engine.create("elsewhere")
    one, piece = sides
    one.engine.singly = True
    id, ids = 0, list[str]()
    async with connected(one.running, None) as singly, connected(piece.running, None) as at_once:
        for raw in (singly, at_once):
            raw.say(Hello(PROTOCOL, AGENT, "c1", together))
            assert isinstance(await raw.hear(), Welcome)
            raw.say(Commit(65535, SPACE, Batch("market", (Put("records/a", b"1"),))))
            assert isinstance(await raw.hear(), Committed), "from now on its usage is known"
        for _ in range(ROUNDS):
            rules, pause = some_rules(chance, quotas=quotas), chance.choice((1, 400, 5000))
            odd, reads, count = chance.choice((0.0, 0.02, 0.2)), not rules.rate_limits, chance.randint(1, 90)
            frames = [a_frame(chance, id + n, ids, odd, reads=reads) for n in range(1, count + 1)]
            id += len(frames)
            for side in sides:
                side.policy.reload(rules)
                side.clock.advance(pause / 1000)
            for part in [b"".join(frames)] if quotas else frames:
                singly.writer.write(part)
                await one.hear(singly, len(frames) if quotas else 1)
            at_once.writer.write(b"".join(frames))
            await piece.hear(at_once, len(frames))
            assert piece.answers == one.answers
            assert piece.told() == one.told()
            assert await piece.kept() == await one.kept()
            assert piece.books() == one.books()
            assert Counter(piece.running.observed) == Counter(one.running.observed)
