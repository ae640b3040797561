"""Who wrote what, from which inputs, and what differs between two points."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import AccessDenied, InvalidInput, ManualClock, NotFound, Space, Store
from holdfast.codec import decode, encode
from holdfast.engine import Delete, Push
from holdfast.layers import history
from holdfast.layers.diffs import differences, undone
from tests.soak import examples

NAME = "research/MSFT"


@pytest.fixture
def boss(store: Store) -> Space:
    return store.space("contoso", agent="orchestrator")


async def test_the_history_tells_who_wrote_what_from_which_inputs(
    space: Space, boss: Space, store: Store, clock: ManualClock
) -> None:
    doc = space.document(NAME)
    first = await doc.contribute({"a": 1}, confidence=0.5)
    clock.advance("1s")
    body = await boss.document(NAME).update(lambda body: {"round": 1})
    risk = store.space("contoso", agent="risk").document(NAME)
    await risk.contribute(2, inputs=(await risk.read()).versions)
    await boss.document(NAME).declare({"n": "sum"})
    await doc.withdraw()
    events = await doc.history()
    assert [(each.kind, each.by, each.section) for each in events] == [
        ("withdrew", "market", "market/1"),
        ("reducers", "orchestrator", None),
        ("contributed", "risk", "risk/1"),
        ("body", "orchestrator", None),
        ("contributed", "market", "market/1"),
    ]
    assert events[2].inputs == {"body": body.etag, "market/1": first}
    assert (events[4].version, events[4].data["data"], events[4].data["confidence"]) == (first, {"a": 1}, 0.5)
    assert ([str(each) for each in events[3].changes], events[3].before) == (["+ round: 1"], 0)
    assert (events[3].at - events[4].at).total_seconds() == 1
    assert [each.version for each in events] == sorted((each.version for each in events), reverse=True)


async def test_the_history_is_read_page_by_page(space: Space) -> None:
    doc = space.document(NAME)
    for number in range(7):
        await doc.contribute(number)
    seen, before = [], None
    while page := await doc.history(before=before, limit=3):
        seen += [each.data["data"] for each in page]
        before = page[-1].id
    assert seen == [6, 5, 4, 3, 2, 1, 0]
    for wrong in ({"limit": 0}, {"limit": 10**9}, {"before": "x"}, {"before": "1/2"}):
        with pytest.raises(InvalidInput):
            await doc.history(**wrong)


async def test_a_diff_shows_body_and_contributions_between_two_points(space: Space, boss: Space) -> None:
    doc, body = space.document(NAME), boss.document(NAME)
    a = (await body.replace({"round": 1, "list": [1, 2, 3], "gone": True}, etag=0)).etag
    await doc.contribute({"outlook": "growth", "target": 400})
    b = (await body.replace({"round": 2, "list": [1, 9], "new.name": {}}, etag=a)).etag
    await doc.contribute({"outlook": "growth", "target": 420})
    c = await store_risk(space, 0.7)
    assert list(map(str, await doc.diff(a, b))) == [
        "- body.gone: true",
        "~ body.list[1]: 2 → 9",
        "- body.list[2]: 3",
        '+ body."new.name": {}',
        "~ body.round: 1 → 2",
        '+ contributions.market/1: {"outlook":"growth","target":400}',
    ]
    assert list(map(str, await doc.diff(b, c))) == [
        "~ contributions.market/1.target: 400 → 420",
        "+ contributions.market/2: 0.7",
    ]
    assert await doc.diff(c) == []
    await doc.withdraw()
    assert list(map(str, await doc.diff(c))) == ['- contributions.market/1: {"outlook":"growth","target":420}']
    assert [each.op for each in await doc.diff(0, a)] == ["+", "+", "+"]
    for wrong in ((b, a), (-1, 2), ("1", 2)):
        with pytest.raises(InvalidInput):
            await doc.diff(*wrong)  # type: ignore[arg-type]


async def test_a_diff_across_a_deletion_is_refused(space: Space, boss: Space) -> None:
    doc, body = space.document(NAME), boss.document(NAME)
    a = (await body.replace({"x": 1}, etag=0)).etag
    b = (await body.replace({"x": 2}, etag=a)).etag
    await doc.contribute(1)
    assert await body.delete()
    again = (await body.replace({"x": 3}, etag=0)).etag
    for versions in ((a, b), (b,), (a, again)):
        with pytest.raises(NotFound, match="deleted at version"):
            await doc.diff(*versions)
    await body.replace({"x": 4}, etag=again)
    assert list(map(str, await doc.diff(again))) == ["~ body.x: 3 → 4"]


async def store_risk(space: Space, data: Any) -> int:
    return await space.document(NAME).contribute(data, instance="2")


async def test_history_ends_after_its_retention_and_a_diff_beyond_it_is_refused(
    boss: Space, clock: ManualClock
) -> None:
    doc = boss.document(NAME)
    a = (await doc.replace({"n": 1}, etag=0)).etag
    clock.advance("6d")
    b = (await doc.replace({"n": 2}, etag=a)).etag
    c = (await doc.replace({"n": 3}, etag=b)).etag
    clock.advance("25h")
    assert [each.version for each in await doc.history()] == [c, b]
    assert list(map(str, await doc.diff(b, c))) == ["~ body.n: 2 → 3"]
    assert list(map(str, await doc.diff(a, c))) == ["~ body.n: 1 → 3"]
    with pytest.raises(NotFound, match="reaches back"):
        await doc.diff(a - 1, c) if a > 1 else await doc.diff(0, c)


async def test_what_is_too_large_for_the_history_is_left_out_and_told(
    boss: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "EVENT_BYTES_MAX", 1000)
    doc = boss.document(NAME)
    await doc.contribute("x" * 2000)
    a = (await doc.replace({"text": "y" * 2000}, etag=0)).etag
    b = (await doc.update(lambda body: {**body, "n": 1})).etag
    small, large, contributed = await doc.history()
    assert (small.omitted, large.changes, contributed.data) == (0, [], None)
    assert large.omitted > 2000
    assert contributed.omitted > 2000
    assert list(map(str, await doc.diff(a, b))) == ["+ body.n: 1"]
    with pytest.raises(NotFound, match="does not keep"):
        await doc.diff(0, b)


async def appended(writer: Space, *values: Any) -> None:
    """Events made by hand."""
    for value in values:
        await writer._scope.commit((Push(f"history/documents/{NAME.replace('/', '%2F')}/", encode(value), 60_000),))


async def test_what_was_made_up_in_the_history_changes_no_diff(space: Space, boss: Space) -> None:
    doc = boss.document(NAME)
    a = (await doc.replace({"n": 1}, etag=0)).etag
    forged = {"kind": "body", "before": a, "changes": [{"op": "+", "steps": ["n"], "new": 99}]}
    await appended(boss, forged, 7, {"kind": "odd"}, {"kind": "deleted"}, {"kind": "contributed", "section": "risk/1"})
    b = (await doc.replace({"n": 2}, etag=a)).etag
    assert [str(each) for each in await doc.diff(a, b) if each.steps[0] == "body"] == ["~ body.n: 1 → 2"]


async def test_a_deletion_that_did_not_happen_ends_no_diff_of_contributions(space: Space, boss: Space) -> None:
    a = await space.document(NAME).contribute({"n": 1})
    await appended(boss, {"kind": "deleted"})
    b = await space.document(NAME).contribute({"n": 2})
    assert list(map(str, await boss.document(NAME).diff(a, b))) == ["~ contributions.market/1.n: 1 → 2"]
    await boss.document(NAME).delete()
    with pytest.raises(NotFound, match="deleted at version"):
        await boss.document(NAME).diff(a, b)


async def test_what_is_no_event_hides_none_that_is_older(space: Space, boss: Space) -> None:
    await space.document(NAME).contribute(1)
    await appended(boss, *range(5))
    [event] = await space.document(NAME).history(limit=2)
    assert (event.kind, event.section) == ("contributed", "market/1")
    assert await space.document(NAME).history(before=event.id, limit=2) == []


async def test_behind_a_policy_nobody_takes_an_event_back(space: Space, url: str) -> None:
    if url != "policed:":
        pytest.skip("an embedded store trusts its agents")
    await space.document(NAME).contribute(1)
    page = await space._scope.engine.scan("contoso", "history/")
    with pytest.raises(AccessDenied):
        await space._scope.commit((Delete(page.entries[0].key),))


# --- differences ---

values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(60), deadline=None)
@given(values, values)
def test_differences_undone_give_back_the_earlier_value(old: Any, new: Any) -> None:
    found = list(differences(old, new))
    assert undone(new, found) == old
    assert encode(undone(new, found)) == encode(old)
    assert (found == []) == (encode(old) == encode(new))
    assert undone(new, decode(encode(found), list[type(found[0])] if found else list)) == old


def test_paths_are_not_ambiguous() -> None:
    old: Any = {"a": {"b": 1}, "c": [1]}
    new: Any = {"a": {"b": 2}, "a.b": 1, "c": [2], "c[0]": 1, "": 1}
    paths = [each.path for each in differences(old, new)]
    assert sorted(paths) == sorted(["a.b", '"a.b"', "c[0]", '"c[0]"', '""'])


@pytest.mark.parametrize(("old", "new"), [(1, 1.0), (1, True), (0, False), ([1], [True]), ({"a": 0}, {"a": None})])
def test_values_that_only_look_alike_differ(old: Any, new: Any) -> None:
    found = list(differences(old, new))
    assert [each.op for each in found] == ["~"]
    assert encode(undone(new, found)) == encode(old)
