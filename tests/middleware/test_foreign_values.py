"""Values that somebody else encoded: what could not be read again is refused, and what slipped in stops nobody's care."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import ManualClock
from holdfast.codec import LOOKED_AT_BYTES_MAX, STORED_NESTING_MAX, WHOLE_BYTES_MAX, check_json, decode, is_deeper
from holdfast.engine import Batch, Delete, Push, Put
from holdfast.errors import Damaged, Error, InvalidInput
from holdfast.layers.caretaker import PRUNE_MS
from tests.middleware.keeper import SPACE, Keeper, batch

NOT_JSON = [
    b"",
    b"\xff",
    b'"\xff"',
    b'"\xed\xa0\x80"',
    b'"\\ud800"',
    b"NaN",
    b"{",
    b"1 2",
    b"[1,]",
    b"'x'",
    b"1e400",
    b"9" * 5000,
    b"[" * 100_000,
]
names = [value[:12].decode(errors="replace") + f" {len(value)}" for value in NOT_JSON]


@pytest.mark.parametrize("value", NOT_JSON, ids=names)
async def test_a_value_that_is_not_json_is_refused_from_everybody_but_administrators(value: bytes) -> None:
    keeper = Keeper()
    agent, lead = keeper.engine_of("a"), keeper.engine_of("lead", "orchestrator")
    for engine, name in ((agent, "a"), (lead, "lead")):
        for operation in (
            Put("records/k", value),
            Push("locks/lock/l/", value, 1000),
            Put("sections/documents/d/a/1", value),
        ):
            with pytest.raises(InvalidInput, match="JSON"):
                await engine.commit(SPACE, batch(name, operation))
            with pytest.raises(InvalidInput, match="JSON"):
                await engine.commit(SPACE, batch(name, Put("records/other", b"1"), operation))
    assert await keeper.entries() == {}
    assert keeper.denials == []
    await keeper.admin.commit(SPACE, batch("root", Put("records/k", value)))
    with pytest.raises(Damaged):
        decode((await keeper.entries())["records/k"].value)


@given(
    st.one_of(
        st.binary(max_size=40),
        st.text(alphabet='0123456789eE+-.[]{},:" \\udtrflasn\u00e9\ud7ff', max_size=40).map(str.encode),
        st.lists(st.sampled_from([b"1", b"e", b"999", b"0" * 250, b".", b"-", b"+", b"5" * 90]), max_size=8).map(
            b"".join
        ),
    ),
    st.booleans(),
)
def test_what_is_accepted_is_what_can_be_read(value: bytes, large: bool) -> None:
    """Also where the value is too large to be read first."""
    if large:
        value = b'["' + b"x" * WHOLE_BYTES_MAX + b'",' + value + b"]"
    try:
        decode(value)
    except Damaged:
        with pytest.raises(InvalidInput):
            check_json(value)
    else:
        check_json(value)


@pytest.mark.parametrize("text", ["e123 ", '\\" e999', "\\\\", '\\\\\\" 1e999 '])
def test_text_of_a_large_value_may_look_like_any_number(text: str) -> None:
    filling = text.encode() * (LOOKED_AT_BYTES_MAX // len(text) + 1)
    check_json(b'["' + filling + b'", 1]')
    for far in (b"1e999", b"-1E+400", b"9" * 400):
        with pytest.raises(InvalidInput, match="beyond any range"):
            check_json(b'["' + filling + b'", ' + far + b"]")
        with pytest.raises(InvalidInput, match="beyond any range"):
            check_json(b'{"a": ' + far + b', "b": "' + filling + b'"}')


HOSTILE = [
    Put("records/l", b"5", tag="list"),
    Put("records/l", b'{"a":[]}', tag="set"),
    Put("records/" + "a/" * 500, b'"1"', tag="list"),
    Put("lists/x", b"1"),
    Put("lists/a%2Fb", b"1"),
    Put("lists/a%41b", b"1"),
    Put("sets/a%2Fb/%zz/", b"1"),
]


@pytest.mark.parametrize("operation", HOSTILE, ids=[f"{op.key:.20} {op.value!r}" for op in HOSTILE])
@pytest.mark.parametrize("forgotten", [False, True])
async def test_entries_that_no_library_writes_stop_neither_sealing_nor_collecting(
    operation: Put, forgotten: bool
) -> None:
    clock = ManualClock()
    async with holdfast.open("memory:", clock=clock, background=False) as store:
        space = store.space("contoso", agent="mallory")
        await space.records.append_to_list("honest", 1, 2)
        for batch in (Batch("mallory", (operation,)), Batch("mallory", (operation,))):
            await store.engine.commit("contoso", batch)
        await store.engine.commit("contoso", Batch("mallory", (Delete("records/honest"),)))
        if forgotten:
            clock.advance(PRUNE_MS / 1000)
            [info] = await store.engine.spaces("contoso")
            await store.engine.compact("contoso", info.revision)
        await store.tidy()
        assert (await store.engine.scan("contoso", "lists/honest/")).entries == []
        assert await space.audit.sealed_upto() > 0


async def test_a_fault_in_the_care_of_one_space_leaves_the_others_cared_for(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    async with holdfast.open("memory:", clock=clock, background=False) as store:
        await store.space("a").records.set("k", 1)
        await store.space("b").records.set("k", 1)
        before = store._caretaker.round
        cared: list[str] = []

        async def round(space: str) -> None:
            cared.append(space)
            if space == "a":
                raise RuntimeError("a fault of ours")
            await before(space)

        store._caretaker.round = round  # type: ignore[method-assign]
        store._caretaker.look_after("a")
        store._caretaker.look_after("b")
        store._caretaker.start()
        for _ in range(100):
            clock.advance(1)
            await asyncio.sleep(0.001)
        assert cared.count("b") > 1
        assert "failed unexpectedly" in caplog.text


def test_a_stored_value_that_cannot_be_read_is_always_told_as_such() -> None:
    for value in NOT_JSON:
        with pytest.raises(Error):
            decode(value)
        with pytest.raises(Error):
            decode(value, dict)


def deep(levels: int) -> bytes:
    return b'{"a":[' * (levels // 2) + b"[" * (levels % 2) + b"]" * (levels % 2) + b"]}" * (levels // 2)


@pytest.mark.parametrize("filling", [0, WHOLE_BYTES_MAX], ids=["small", "large"])
async def test_a_value_nested_deeper_than_is_stored_is_refused_however_it_comes(filling: int) -> None:
    keeper = Keeper()
    agent, text = keeper.engine_of("a"), b'"' + b"[" * filling + b'"'
    fits, too_deep = (
        b"[" + text + b"," + deep(levels - 1) + b"]" for levels in (STORED_NESTING_MAX, STORED_NESTING_MAX + 1)
    )
    await agent.commit(SPACE, batch("a", Put("records/k", fits)))
    for operations in ((Put("records/k", too_deep),), (Put("records/o", b"1"), Push("lists/l/1/", too_deep))):
        with pytest.raises(InvalidInput, match="nested at most 128 levels deep"):
            await agent.commit(SPACE, batch("a", *operations))
    assert {key: entry.value for key, entry in (await keeper.entries()).items()} == {"records/k": fits}


def test_how_deep_a_value_may_be_does_not_depend_on_how_deep_in_calls_it_is_checked() -> None:
    def within(calls: int, value: bytes) -> None:
        within(calls - 1, value) if calls else check_json(value)

    for calls in (0, 300):
        within(calls, deep(STORED_NESTING_MAX))
        with pytest.raises(InvalidInput):
            within(calls, deep(STORED_NESTING_MAX + 1))


texts = st.sampled_from(["", '"', "\\", "[", '{"', '\\"', '\\\\"[[', "a]]", "\n[", "é[", "\\n{{"])


@given(
    st.recursive(
        texts | st.integers() | st.none(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    ),
    st.booleans(),
)
def test_how_deep_a_value_is_its_brackets_tell_whatever_its_texts_are(value: object, ascii: bool) -> None:
    def depth(value: object) -> int:
        if not isinstance(value, dict | list):
            return 0
        return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)

    data = json.dumps(value, ensure_ascii=ascii).encode()
    for levels in range(8):
        assert is_deeper(data, levels) == (depth(value) > levels)


def test_a_value_full_of_brackets_is_refused_before_it_takes_long() -> None:
    chains = b",".join([b"[" * 100 + b"]" * 100] * 10_000)
    assert is_deeper(b"[" + chains + b"]", STORED_NESTING_MAX)
    assert not is_deeper(b"[" + b"[]," * 1_000_000 + b"[]]", STORED_NESTING_MAX)
