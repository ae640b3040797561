"""One agent's section of something shared."""

from __future__ import annotations

import pytest

from holdfast import AccessDenied, Space, Store
from holdfast.engine import Delete, Put, Touch
from holdfast.layers import sections
from holdfast.layers.sections import Section, Sections
from tests.layers.conftest import everything


def of(space: Space, name: str = "research/MSFT", group: str = "documents") -> Sections:
    return Sections(space._scope, group, name)


@pytest.fixture
def risk(store: Store) -> Space:
    return store.space("contoso", agent="risk")


async def test_every_agent_and_instance_has_a_section_of_its_own(store: Store, space: Space, risk: Space) -> None:
    second = store.space("contoso", agent="market", instance="2")
    for each, value in ((space, {"a": 1}), (second, [2]), (risk, None), (space, {"a": 3})):
        await each._scope.commit((of(each).put(value),))
    found = await of(space).read()
    assert [(each.agent, each.instance, each.value, each.owner) for each in found] == [
        ("market", "1", {"a": 3}, "market"),
        ("market", "2", [2], "market"),
        ("risk", "1", None, "risk"),
    ]
    assert found[0].version > found[2].version > found[1].version


async def test_names_and_groups_do_not_reach_into_each_other(space: Space) -> None:
    names = ["a", "a/market", "a/market/1", "a%2Fmarket", "b"]
    for group in ("documents", "correlations"):
        for name in names:
            await space._scope.commit((of(space, name, group).put([group, name]),))
    for group in ("documents", "correlations"):
        for name in names:
            assert [each.value for each in await of(space, name, group).read()] == [[group, name]]


async def test_sections_are_read_to_the_end(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "PAGE", 3)
    for number in range(7):
        await space._scope.commit((of(space).put(number, instance=f"{number}"),))
    assert [each.value for each in await of(space).read()] == [0, 1, 2, 3, 4, 5, 6]


async def test_a_section_ends_with_its_ttl_or_when_it_is_deleted(space: Space, clock: object) -> None:
    await space._scope.commit((of(space).put(1, ttl_ms=1000), of(space).put(2, instance="2")))
    clock.advance("1s")  # type: ignore[attr-defined]
    assert [each.value for each in await of(space).read()] == [2]
    await space._scope.commit((of(space).delete(instance="2"),))
    assert await of(space).read() == []


async def test_what_an_orchestrator_writes_for_an_agent_is_the_agent_s(store: Store, space: Space) -> None:
    boss = store.space("contoso", agent="orchestrator")
    await boss._scope.commit((of(boss).put({"a": 1}, agent="market"),))
    [found] = await of(space).read()
    assert found == Section("market", "1", {"a": 1}, found.version, "market", found.updated_at)
    await space._scope.commit((of(space).put({"a": 2}),))
    assert [each.value for each in await of(space).read()] == [{"a": 2}]


async def test_an_agent_behind_a_policy_writes_in_its_own_name_only(
    store: Store, space: Space, risk: Space, url: str
) -> None:
    if url != "policed:":
        pytest.skip("an embedded store trusts its agents")
    await risk._scope.commit((of(risk).put(1),))
    before = await everything(space)
    mine, other = of(space), of(space).key("risk")
    for operation in (mine.put(2, agent="risk"), Put(other, b"2"), Delete(other), Touch(other, 1000)):
        with pytest.raises(AccessDenied):
            await space._scope.commit((mine.put(1), operation))
    assert await everything(space) == before
