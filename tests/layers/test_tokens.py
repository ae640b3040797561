"""Who may come in: tokens are made, compared, listed, revoked and end; and the book a server keeps of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from hmac import compare_digest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import AuthenticationFailed, InvalidInput, ManualClock, NotFound, Redaction, Store, Unavailable
from holdfast.codec import encode
from holdfast.engine import Batch, ChangeSet, Engine, Put
from holdfast.identity import Identity, Secret, hidden
from holdfast.layers.audit import Audit
from holdfast.layers.settings import SYSTEM_SPACE
from holdfast.layers.tokens import REFUSAL, Token, TokenBook, Tokens, _Known
from holdfast.middleware.wrapper import Wrapper
from tests.soak import examples

DEADLINE_S = 20.0
FOR_ADMINISTRATORS = True


@pytest.fixture
def tokens(store: Store, clock: ManualClock) -> Tokens:
    return Tokens(store.engine, clock, "boss")


@pytest.fixture
async def book(store: Store, clock: ManualClock) -> AsyncIterator[TokenBook]:
    async with TokenBook(store.engine, clock) as opened:
        yield opened


async def until(happened: Callable[[], bool]) -> None:
    """Wait until the book has heard of something."""
    async with asyncio.timeout(DEADLINE_S):
        while not happened():
            await asyncio.sleep(0.002)


def refused(book: TokenBook, text: str) -> bool:
    with pytest.raises(AuthenticationFailed) as caught:
        book.authenticate(text)
    return str(caught.value) == REFUSAL


# --- making and comparing ---


async def test_a_token_speaks_for_the_agent_it_was_made_for(tokens: Tokens, clock: ManualClock) -> None:
    text, token = await tokens.create("worker-7", "contoso", "agent")
    assert await tokens.authenticate(text) == Identity("worker-7", "agent", "contoso", token.id)
    assert text.startswith(f"hf_{token.id}_")
    assert text.count("_") == 2
    assert (token.created_by, token.created_at, token.expires_at) == ("boss", clock.now_ms(), None)
    admin, _ = await tokens.create("root", None, "admin")
    identity = await tokens.authenticate(admin)
    assert (identity.role, identity.space, identity.may_enter("anything")) == ("admin", "*", True)
    assert not (await tokens.authenticate(text)).may_enter("fabrikam")


async def test_no_two_tokens_are_alike_and_each_has_256_random_bits(tokens: Tokens) -> None:
    made = [await tokens.create("worker-7", "contoso", "agent") for _ in range(20)]
    secrets = {text.split("_")[2] for text, _ in made}
    assert len(secrets) == len({token.id for _, token in made}) == 20
    assert all(len(secret) * 5 >= 256 for secret in secrets)


async def test_the_secret_is_stored_nowhere_and_its_hash_is_not_in_the_audit(store: Store, tokens: Tokens) -> None:
    text, token = await tokens.create("worker-7", "contoso", "agent")
    secret = text.split("_")[2]
    [entry] = await store.engine.get(SYSTEM_SPACE, [f"tokens/{token.id}"])
    assert entry is not None
    await store.tidy()
    everything = (await store.engine.scan(SYSTEM_SPACE, "")).entries
    assert not any(secret.encode() in each.value for each in everything)
    audit = Audit(store._scope(SYSTEM_SPACE, "boss"))
    [record] = [record async for record in audit.records(key="tokens/")]
    assert (record.actor, record.operation, record.value["name"]) == ("boss", "put", "worker-7")
    assert record.value["secret_hash"] == "[redacted]"
    assert secret not in repr(token) + repr(entry) + repr(text)


async def test_every_refusal_says_the_same(tokens: Tokens, clock: ManualClock) -> None:
    text, token = await tokens.create("worker-7", "contoso", "agent", ttl="1h")
    other, _ = await tokens.create("worker-8", "contoso", "agent")
    gone, revoked = await tokens.create("worker-9", "contoso", "agent")
    await tokens.revoke(revoked.id)
    secret = other.split("_")[2]
    wrong = [
        f"hf_{token.id}_{secret}",
        f"hf_{'a' * 16}_{secret}",
        gone,
        text.upper(),
        text + "a",
        text[:-1],
        f" {text}",
    ]
    wrong += ["", "hf_", "hf__", text * 10, "x" * 10_000_000, text.replace("a", "ä") + "ä", text + "\n", "hf_\0_\0"]
    for each in wrong:
        with pytest.raises(AuthenticationFailed) as caught:
            await tokens.authenticate(each)
        assert (str(caught.value), caught.value.__cause__) == (REFUSAL, None), each[:80]
    assert (await tokens.authenticate(text)).agent == "worker-7"
    clock.advance("1h")
    with pytest.raises(AuthenticationFailed, match=REFUSAL[:30]):
        await tokens.authenticate(text)


@pytest.mark.parametrize("text", [None, 7, b"hf_", ["hf_"]])
async def test_what_is_no_text_is_no_token(tokens: Tokens, text: object) -> None:
    with pytest.raises(AuthenticationFailed):
        await tokens.authenticate(text)  # type: ignore[arg-type]


async def test_who_may_have_a_token_where(tokens: Tokens) -> None:
    wrong: list[tuple[str, str | None, str]] = [
        ("not ok", "contoso", "agent"),
        ("holdfast", "contoso", "agent"),
        ("worker", None, "agent"),
        ("worker", "*", "agent"),
        ("worker", "_holdfast", "orchestrator"),
        ("worker", "no/slash", "agent"),
        ("root", "contoso", "admin"),
        ("worker", "contoso", "boss"),
    ]
    for name, space, role in wrong:
        with pytest.raises(InvalidInput):
            await tokens.create(name, space, role)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        await tokens.create("worker", "contoso", "agent", ttl=0)
    assert await tokens.list() == []


# --- listing and revoking ---


async def test_tokens_are_listed_until_they_end(tokens: Tokens, clock: ManualClock) -> None:
    _, long = await tokens.create("b", "contoso", "orchestrator", ttl="2d")
    _, short = await tokens.create("a", "contoso", "agent", ttl="1d")
    _, admin = await tokens.create("root", "*", "admin")
    assert await tokens.list() == [admin, short, long]
    clock.advance("1d")
    assert await tokens.list() == [admin, long]


async def test_a_token_is_revoked_by_its_id_its_text_or_its_agent(tokens: Tokens) -> None:
    _, first = await tokens.create("worker", "contoso", "agent")
    second, _ = await tokens.create("worker", "contoso", "agent")
    _, third = await tokens.create("other", "contoso", "agent")
    assert await tokens.revoke(first.id) == [first]
    assert [token.name for token in await tokens.revoke(second)] == ["worker"]
    _, again = await tokens.create("worker", "contoso", "agent")
    assert await tokens.revoke("worker") == [again]
    assert await tokens.list() == [third]
    for which in ("worker", first.id, "nobody", second):
        with pytest.raises(NotFound) as caught:
            await tokens.revoke(which)
        assert second.split("_")[2] not in str(caught.value)


async def test_a_name_that_two_spaces_have_needs_the_space(tokens: Tokens) -> None:
    _, mine = await tokens.create("worker", "contoso", "agent")
    _, theirs = await tokens.create("worker", "fabrikam", "agent")
    with pytest.raises(InvalidInput, match="contoso, fabrikam"):
        await tokens.revoke("worker")
    assert await tokens.revoke("worker", space="fabrikam") == [theirs]
    assert await tokens.list() == [mine]


async def test_more_tokens_than_a_batch_holds_are_revoked_together(tokens: Tokens) -> None:
    for _ in range(130):
        await tokens.create("worker", "contoso", "agent")
    assert len(await tokens.revoke("worker")) == 130
    assert await tokens.list() == []


async def test_an_entry_that_is_no_token_opens_nothing(
    store: Store, tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    text, token = await tokens.create("worker", "contoso", "agent")
    good = {"name": "worker", "space": "*", "role": "agent", "secret_hash": "0" * 64}
    bad: list[bytes] = [b"1", b"{}", b"not json", encode(good), encode({**good, "space": "s", "secret_hash": "00"})]
    for value in bad:
        await store.engine.commit(SYSTEM_SPACE, Batch("x", (Put(f"tokens/{token.id}", value),)))
        with pytest.raises(AuthenticationFailed):
            await tokens.authenticate(text)
    assert await tokens.list() == []
    assert "is no token" in caplog.text


# --- the book of a server ---


async def test_the_book_knows_what_was_there_and_hears_of_what_comes(
    store: Store, tokens: Tokens, clock: ManualClock
) -> None:
    before, one = await tokens.create("before", "contoso", "agent")
    async with TokenBook(store.engine, clock) as book:
        identity = book.authenticate(before)
        assert identity == one.identity
        assert book.is_valid(identity)
        after, two = await tokens.create("after", "contoso", "orchestrator", ttl="1h")
        await until(lambda: len(book) == 2)
        assert book.authenticate(after) == two.identity
        assert refused(book, f"hf_{two.id}_{before.split('_')[2]}")


async def test_a_revocation_takes_effect_live_and_is_told(book: TokenBook, tokens: Tokens) -> None:
    told: list[str] = []
    text, token = await tokens.create("worker", "contoso", "agent")
    _, other = await tokens.create("other", "contoso", "agent")
    await until(lambda: len(book) == 2)
    identity = book.authenticate(text)
    stop = book.on_revoked(told.append)
    await tokens.revoke("worker")
    await until(lambda: told == [token.id])
    assert refused(book, text)
    assert not book.is_valid(identity)
    assert book.is_valid(other.identity)
    stop()
    stop()
    await tokens.revoke("other")
    await until(lambda: len(book) == 0)
    assert told == [token.id]


async def test_a_token_ends_with_its_time_also_while_it_is_in_use(
    book: TokenBook, tokens: Tokens, clock: ManualClock
) -> None:
    told: list[str] = []
    book.on_revoked(told.append)
    await tokens.create("other", "contoso", "agent", ttl="20m")
    await until(lambda: len(book) == 1)
    text, token = await tokens.create("worker", "contoso", "agent", ttl="10m")
    await until(lambda: len(book) == 2)
    identity = book.authenticate(text)
    clock.advance("9m")
    assert book.is_valid(identity)
    clock.advance("1m")
    assert not book.is_valid(identity)  # at that instant, before anything was swept
    assert refused(book, text)
    await until(lambda: told == [token.id])
    assert len(book) == 1


async def test_a_listener_that_fails_does_not_keep_the_others_from_hearing(
    book: TokenBook, tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    def fails(id: str) -> None:
        raise ZeroDivisionError

    book.on_revoked(fails)
    book.on_revoked(told.append)
    for name in ("a", "b"):
        await tokens.create(name, "contoso", "agent")
        await until(lambda: len(book) == 1)
        await tokens.revoke(name)
        await until(lambda: len(book) == 0)
    assert len(told) == 2
    assert "ZeroDivisionError" in caplog.text


async def test_an_entry_that_is_given_another_role_ends_the_old_identity(
    book: TokenBook, tokens: Tokens, store: Store
) -> None:
    told: list[str] = []
    book.on_revoked(told.append)
    text, token = await tokens.create("worker", "contoso", "agent")
    await until(lambda: len(book) == 1)
    identity = book.authenticate(text)
    [entry] = await store.engine.get(SYSTEM_SPACE, [f"tokens/{token.id}"])
    assert entry is not None
    value = entry.value.replace(b'"agent"', b'"orchestrator"')
    await store.engine.commit(SYSTEM_SPACE, Batch("boss", (Put(entry.key, value),)))
    await until(lambda: told == [token.id])
    assert not book.is_valid(identity)
    assert book.is_valid(book.authenticate(text))


class Held(Wrapper):
    """An engine whose feed stands still while it is held, and fails while it is broken."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.flowing = asyncio.Event()
        self.broken: tuple[bool, ...] = ()
        """Which watches fail: live ones (True), others (False)."""
        self.asked = 0

    async def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        self.asked += 1
        if live:
            await self.flowing.wait()
        if live in self.broken:
            raise Unavailable("the store is gone")
        async for commit in self.inner.watch(space, *prefixes, cursor=cursor, live=live):
            yield commit


async def test_a_book_that_fell_behind_the_feed_reads_everything_afresh(
    store: Store, tokens: Tokens, clock: ManualClock
) -> None:
    text, token = await tokens.create("worker", "contoso", "agent")
    told: list[str] = []
    held = Held(store.engine)
    async with TokenBook(held, clock) as book:
        book.on_revoked(told.append)
        await tokens.revoke(token.id)
        await tokens.create("other", "contoso", "agent")
        await store.engine.compact(SYSTEM_SPACE, (await store.engine.spaces(SYSTEM_SPACE))[0].revision)
        assert book.authenticate(text).agent == "worker"  # not heard yet
        held.flowing.set()
        await until(lambda: told == [token.id])
        assert refused(book, text)
        assert len(book) == 1


@pytest.mark.parametrize("broken", [(True,), (True, False)], ids=["live", "all"])
async def test_a_book_whose_store_is_gone_keeps_what_it_knows_and_catches_up(
    store: Store, tokens: Tokens, clock: ManualClock, caplog: pytest.LogCaptureFixture, broken: tuple[bool, ...]
) -> None:
    text, token = await tokens.create("worker", "contoso", "agent")
    held = Held(store.engine)
    async with TokenBook(held, clock) as book:
        held.broken = broken
        held.flowing.set()
        await until(lambda: "those that are known stay" in caplog.text)
        assert book.authenticate(text).agent == "worker"
        await tokens.revoke(token.id)
        asked = held.asked
        for _ in range(20):
            await asyncio.sleep(0.002)
        assert held.asked == asked  # it waits for the clock, it does not spin
        held.broken = ()
        async with asyncio.timeout(DEADLINE_S):
            while len(book):
                clock.advance("1s")
                await asyncio.sleep(0.002)
        assert refused(book, text)


async def test_wrong_attempts_leave_nothing_behind(book: TokenBook, tokens: Tokens) -> None:
    text, token = await tokens.create("worker", "contoso", "agent")
    await until(lambda: len(book) == 1)
    before = dict(vars(book))
    for number in range(1000):
        assert refused(book, f"hf_{token.id}_{number:052}".replace("0", "a").replace("1", "b"))
        assert refused(book, f"{text}{number}")
    assert dict(vars(book)) == before
    assert len(book) == 1


def test_an_unknown_id_costs_the_same_comparison_as_a_wrong_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, two: bytes) -> bool:
        compared.append((len(one), len(two)))
        return compare_digest(one, two)

    monkeypatch.setattr("hmac.compare_digest", compare)
    book = TokenBook(None, ManualClock())  # type: ignore[arg-type]
    token = Token("a" * 16, "worker", "contoso", "agent", 0, None, "boss")
    book._known[token.id] = _Known(token, bytes(31) + b"x", token.identity)
    for id in (token.id, "b" * 16):
        assert refused(book, f"hf_{id}_{'c' * 52}")
    assert compared == [(32, 32), (32, 32)]


# --- nothing gives a token away ---


async def test_a_token_in_a_record_is_redacted_in_the_audit_and_true_for_readers(store: Store, tokens: Tokens) -> None:
    text, token = await tokens.create("worker", "contoso", "agent")
    space = store.space("contoso", agent="market")
    await space.records.set("note", {"how": [f"use {text} for now"]})
    assert (await space.records.get("note"))["how"] == [f"use {text} for now"]
    [record] = [record async for record in space.audit.records()]
    assert record.value == {"how": [f"use hf_{token.id}_… for now"]}


def test_a_token_shows_its_id_alone() -> None:
    text = f"hf_{'a' * 16}_{'b' * 52}"
    assert repr(Secret(text)) == f"<token hf_{'a' * 16}_…>"
    assert repr(Secret("password")) == "<token …>"
    assert str(Secret(text)) == text
    assert hidden(f"x {text},{text[:40]} y") == f"x hf_{'a' * 16}_…,hf_{'a' * 16}_… y"
    assert hidden("hf_short and half") == "hf_short and half"
    assert Redaction().value("k", text) == f"hf_{'a' * 16}_…"


@given(st.one_of(st.text(), st.from_regex(r"hf_[a-z2-7]{16}_[a-z2-7]{52}"), st.binary(), st.none(), st.integers()))
@settings(max_examples=examples(100), deadline=None)
def test_whatever_is_presented_is_refused_in_one_way(text: object) -> None:
    book = TokenBook(None, ManualClock())  # type: ignore[arg-type]
    assert refused(book, text)  # type: ignore[arg-type]
