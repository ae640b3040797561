"""Messages handed to somebody whose life cannot be seen: one lease each, ended from anywhere."""

from __future__ import annotations

import pytest

from holdfast import AccessDenied, Empty, InvalidInput, LeaseLost, ManualClock, NotFound, Requeue, Space, Store
from holdfast.layers.deliveries import deliver, extend, message_text, read_message, settle, settle_id
from tests.layers.conftest import everything


async def test_a_delivery_is_ended_by_its_key_or_its_id_and_only_once(space: Space) -> None:
    q = space.queue("orders/eu")
    ids = await q.put_many([1, 2, 3])
    first, second, third = [await deliver(q) for _ in ids]
    assert [each.id for each in (first, second, third)] == ids
    assert [each.body for each in (first, second, third)] == [1, 2, 3]
    name, key = read_message(message_text(first.key))
    assert (name, key) == ("orders/eu", first.key)
    await (await settle(q, key)).ack()
    with pytest.raises(LeaseLost):
        await settle(q, key)
    await (await settle_id(q, second.id)).complete("shipped", to="done")
    with pytest.raises(NotFound):
        await settle_id(q, second.id)
    stale = await settle(q, third.key)
    await (await settle(q, third.key)).release()
    with pytest.raises(LeaseLost):
        await stale.ack()
    stats = await q.stats()
    assert (stats.ready, stats.reserved, (await space.queue("done").stats()).ready) == (1, 0, 1)
    with pytest.raises(Empty):
        await deliver(space.queue("nothing"))


async def test_a_delivery_comes_back_when_its_own_lease_is_over_although_others_of_the_same_agent_live(
    space: Space, clock: ManualClock
) -> None:
    q = space.queue("orders", on_death=Requeue(backoff="1s", jitter=0))
    await q.put_many(["first", "second"])
    first, second = await deliver(q, lease="10s"), await deliver(q, lease="10s")
    clock.advance("8s")
    assert (await extend(q, second.key, "10s")).timestamp() * 1000 == clock.now_ms() + 10_000
    clock.advance("5s")
    with pytest.raises(Empty):  # a consumer looks, and finds the first one's lease ended
        await deliver(q)
    clock.advance("1s")
    again = await deliver(q)
    assert (again.body, again.attempts) == ("first", 1)
    with pytest.raises(LeaseLost):
        await settle(q, first.key)
    with pytest.raises(LeaseLost):
        await extend(q, first.key, "10s")
    await (await settle(q, second.key)).ack()


async def test_a_failed_delivery_is_a_dead_letter_with_its_reason_or_comes_again(
    space: Space, clock: ManualClock
) -> None:
    q = space.queue("orders")
    await q.put(1)
    again = Requeue(attempts=2, backoff="1s", jitter=0)
    await (await settle(q, (await deliver(q)).key)).fail("busy", policy=again)
    clock.advance("1s")
    delivery = await deliver(q)
    assert delivery.attempts == 1
    await (await settle(q, delivery.key)).fail("broken", policy=again)
    [letter] = await q.dead.list()
    assert [why.reason for why in letter.reasons] == ["busy", "broken"]
    with pytest.raises(InvalidInput):
        await settle(q, letter.key)
    with pytest.raises(NotFound):
        await settle_id(q, letter.id)


async def test_only_the_agent_that_took_a_message_ends_it(store: Store, space: Space, url: str) -> None:
    if url != "policed:":
        pytest.skip("without a policy everybody may do everything")
    q = space.queue("orders")
    await q.put(1)
    delivery = await deliver(q)
    other = store.space("contoso", agent="risk").queue("orders")
    before = await everything(space)
    for end in ("ack", "release"):
        with pytest.raises(AccessDenied):
            await getattr(await settle(other, delivery.key), end)()
    with pytest.raises(AccessDenied):
        await extend(other, delivery.key, "1h")
    assert await everything(space) == before


@pytest.mark.parametrize("text", ["", "hfm_", "hfm_!!", "hfm_cmVjb3Jkcy9h", "guard", "hfm_" + "A" * 99])
def test_what_is_no_delivery_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        read_message(text)


def test_a_dead_letter_is_no_delivery() -> None:
    with pytest.raises(InvalidInput):
        read_message(message_text(f"reserved/orders/-/499/{'1' * 19}"))
