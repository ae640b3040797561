"""What is wrong with a workflow is said when it is defined, or when the call is made; nothing half runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast import Context, ExecutionFailed, InvalidInput, Retry, step, workflow
from holdfast.layers.workflows.definitions import definition_of, is_older, registry


def steps(**specs: dict[str, Any]) -> type[Any]:
    """A class with these steps."""

    members: dict[str, Any] = {}
    for name, spec in specs.items():

        async def made(self: Any, ctx: Context, *results: Any) -> None: ...

        members[name] = step(**{"name": name, **spec})(made)
    return type("Made", (), members)


def test_steps_come_in_an_order_in_which_each_follows_those_it_needs() -> None:
    made = workflow(steps(d={"after": ("b", "c")}, c={"after": "a"}, b={"each": "a"}, a={}))
    assert [each.name for each in definition_of(made).steps] == ["a", "c", "b", "d"]


@pytest.mark.parametrize(
    ("define", "words"),
    [
        (lambda: workflow(steps(a={"after": "b"}, b={"after": "a"})), "go round in a circle: a → b → a"),
        (lambda: workflow(steps(a={"after": "a"})), "circle"),
        (lambda: workflow(steps(a={}, b={"name": "a"})), "two steps named 'a'"),
        (lambda: workflow(steps(a={"after": "gone"})), "needs 'gone'"),
        (lambda: workflow(steps(a={"each": "gone"})), "needs 'gone'"),
        (lambda: workflow(steps()), "no steps"),
        (lambda: steps(a={"timeout": -1}), "timeout of step 'a'"),
        (lambda: steps(a={"timeout": 0}), "more than zero"),
        (lambda: steps(a={"retry": 0}), "between 1 and 1,000 times"),
        (lambda: steps(a={"retry": "often"}), "a number of attempts"),
        (lambda: steps(a={"max_workers": 0}), "max_workers"),
        (lambda: steps(a={"min_success_rate": 1.5}), "between 0 and 1"),
        (lambda: steps(a={"when": "yes"}), "when of step 'a'"),
        (lambda: steps(a={"on_error": "ignore"}), "on_error of step 'a'"),
        (lambda: steps(a={"name": "a/b"}), "without '/'"),
        (lambda: Retry(3, backoff="sometimes"), "exponential"),  # type: ignore[arg-type]
        (lambda: Retry(3, initial=-1), "initial"),
        (lambda: Retry(3, jitter=2), "jitter"),
        (lambda: workflow(timeout="-1h")(plain), "timeout of workflow"),
        (lambda: workflow(concurrency=0)(plain), "at least 1"),
        (lambda: workflow(key=str)(plain), "needs concurrency"),
        (lambda: workflow(version="")(plain), "version"),
        (lambda: workflow(lambda ctx: 1), "async function or a class"),
        (lambda: workflow(name="~x")(plain), "workflow's name"),
        (lambda: definition_of(plain), "decorate it with @workflow"),
        (lambda: registry([]), "at least one"),
        (
            lambda: registry([workflow(name="same")(other) for other in (plain, copied())]),
            "two workflows are named 'same'",
        ),
    ],
)
def test_what_is_wrong_is_said_when_it_is_defined(define: Callable[[], Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        define()


async def plain(ctx: Context) -> None: ...


def copied() -> Any:
    async def other(ctx: Context) -> None: ...

    return other


def test_versions_are_compared_by_their_numbers() -> None:
    assert is_older("1.9", "1.10")
    assert not is_older("2", "1")
    assert not is_older("1", "1")
    assert not is_older("1.0", "2"), "what cannot be compared is not older"


def test_pauses_between_attempts_grow_up_to_a_limit() -> None:
    def pauses(**how: Any) -> list[int]:
        retry = Retry(9, initial="1s", longest="5s", jitter=0, **how)
        return [retry.pause_ms(failures) for failures in (1, 2, 3, 4, 900)]

    assert pauses() == [1000, 2000, 4000, 5000, 5000]
    assert pauses(backoff="linear") == [1000, 2000, 3000, 4000, 5000]
    assert pauses(backoff="constant") == [1000] * 5
    assert all(900 <= Retry(2, initial="1s").pause_ms(1) <= 1100 for _ in range(50))


# --- calls ---


async def nothing(*_: Any) -> None: ...


WRONG: dict[str, Callable[[Context], Any]] = {
    "sleep .* more than zero": lambda ctx: ctx.sleep(-1),
    "sleep .* more than": lambda ctx: ctx.sleep(0),
    "wants a function": lambda ctx: ctx.step("a", 3),  # type: ignore[arg-type]
    "not a coroutine": lambda ctx: ctx.step("a", nothing()),  # type: ignore[arg-type]
    "step's name": lambda ctx: ctx.step("a/b", nothing),
    "max_workers is": lambda ctx: ctx.map("a", nothing, [1], max_workers=0),
    "min_success_rate": lambda ctx: ctx.map("a", nothing, [1], min_success_rate=2),
    "signal's name": lambda ctx: ctx.wait_for("~cancel"),
    "no workflow 'unknown'": lambda ctx: ctx.child("unknown"),
    "decorate it with @workflow": lambda ctx: ctx.child(nothing),
    "no 64-bit integer": lambda ctx: ctx.state.increment("text"),
    "is no list": lambda ctx: ctx.state.append_to_list("text", 1),
    "a key of the state": lambda ctx: ctx.state.get("x" * 300),
    "cannot be stored": lambda ctx: ctx.state.set("object", object()),
    "Use await ctx.gather": lambda ctx: asyncio.gather(*[asyncio.create_task(own(ctx)) for _ in range(2)]),
    "at most 40 keys": lambda ctx: ctx.state.update({f"k{n}": n for n in range(41)}),
}


async def own(ctx: Context) -> None:
    await ctx.step("mine", nothing)


@workflow
async def wrong(ctx: Context, words: str) -> None:
    ctx.state["text"] = "text"
    answer = WRONG[words](ctx)
    if answer is not None:
        await answer


@pytest.fixture
async def workflows() -> Any:
    async with holdfast.open("memory:", background=False) as store:
        space = store.space("s")
        async with space.workflows.worker([wrong, Branchy]):
            yield space.workflows


@pytest.mark.parametrize("words", WRONG)
async def test_a_wrong_call_fails_the_execution_with_words(words: str, workflows: Any) -> None:
    with pytest.raises(ExecutionFailed, match=words) as failure:
        await (await workflows.start(wrong, words)).result("20s")
    assert failure.value.kind == "InvalidInput"


def test_ctx_cannot_be_used_outside_of_its_workflow() -> None:
    context = Context.__new__(Context)
    with pytest.raises(InvalidInput, match="while it runs"):
        context.attempt  # noqa: B018


# --- classes ---


@workflow
class Branchy:
    """What steps of a class can say of themselves."""

    @step
    async def items(self, ctx: Context) -> list[int]:
        return list(ctx.input)

    @step(each="items", min_success_rate=0.5, retry=Retry(2, initial="1ms"))
    async def halves(self, ctx: Context, item: int) -> float:
        await ctx.state.increment("tries")
        if item == 0:
            raise ValueError("zero")
        return 1 / item

    @step(after="items", when=lambda ctx, items: len(items) > 10)
    async def many(self, ctx: Context, items: list[int]) -> str:
        return "many"

    @step(after="items", on_error=lambda ctx, error: f"handled {type(error).__name__}")
    async def breaks(self, ctx: Context, items: list[int]) -> str:
        raise KeyError("x")

    @step(after="items", on_error="skip")
    def passes(self, ctx: Context) -> None:
        raise KeyError("y")

    @step(after=("halves", "many", "breaks", "passes"))
    def together(self, ctx: Context, *results: Any) -> list[Any]:
        return list(results)


async def test_steps_of_a_class_are_skipped_handled_and_done_for_each(workflows: Any) -> None:
    handle = await workflows.start(Branchy, [1, 0, 2])
    assert await handle.result("20s") == [[1.0, None, 0.5], None, "handled KeyError", None]
    assert (await handle.steps())["many#0"]["status"] == "skipped"
    assert await handle.state() == {"tries": 2}


async def test_too_few_successes_fail_the_step(workflows: Any) -> None:
    with pytest.raises(ExecutionFailed, match="2 of 3 items of 'halves#0' failed"):
        await (await workflows.start(Branchy, [0, 0, 2])).result("20s")


async def test_a_worker_is_given_a_list() -> None:
    @workflow
    async def alone(ctx: Context) -> None: ...

    async with holdfast.open("memory:") as store:
        with pytest.raises(InvalidInput, match=r"worker\(\[alone\]\)"):
            store.space("s").workflows.worker(alone)  # type: ignore[arg-type]
