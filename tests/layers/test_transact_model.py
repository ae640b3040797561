"""Random transactions on values, counters, lists and sets see, and leave, what a plain dictionary does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import holdfast
from holdfast import InvalidInput, RecordTransaction, Space

REFUSED = "refused"
SEEDS = 600


class Refused(Exception):
    """The commit is."""


def expected(model: dict[str, Any], op: str, key: str, number: int) -> Any:
    """What one operation does to a dictionary of numbers, texts, lists and frozen sets, and what it answers."""
    held = model.get(key)
    if op == "set":
        model[key] = f"text {number}"
    elif op == "set number":
        model[key] = number
    elif op == "delete":
        model.pop(key, None)
    elif op == "increment":
        if not isinstance(held, int | None):
            raise Refused
        model[key] = (held or 0) + number
    elif op == "exists":
        return held is not None
    elif op == "get":
        return REFUSED if isinstance(held, list | frozenset) else held
    elif op == "append":
        if not isinstance(held, list | None):
            return REFUSED
        model[key] = [*(held or ()), number]
    elif not isinstance(held, frozenset | None):
        return REFUSED
    elif op == "add":
        model[key] = (held or frozenset()) | {number}
        return int(number not in (held or ()))
    elif held is not None:
        model[key] = held - {number}
        return int(number in held)
    else:
        return 0
    return None


OPERATIONS: dict[str, Callable[[RecordTransaction, str, int], Any]] = {
    "set": lambda tx, key, number: tx.set(key, f"text {number}"),
    "set number": lambda tx, key, number: tx.set(key, number),
    "delete": lambda tx, key, _: tx.delete(key),
    "increment": lambda tx, key, number: tx.increment(key, number),
    "exists": lambda tx, key, _: tx.exists(key),
    "get": lambda tx, key, _: tx.get(key),
    "append": lambda tx, key, number: tx.append_to_list(key, number),
    "add": lambda tx, key, number: tx.add_to_set(key, number),
    "remove": lambda tx, key, number: tx.remove_from_set(key, number),
}


async def state_of(space: Space) -> dict[str, Any]:
    records, found = space.records, dict[str, Any]()
    async for record in records.scan():
        found[record.key] = record.value
        if record.type == "list":
            found[record.key] = await records.list(record.key)
        elif record.type == "set":
            found[record.key] = frozenset(await records.members(record.key))
    return found


async def test_random_transactions_do_what_a_dictionary_does() -> None:
    async with holdfast.open("memory:", background=False) as store:
        space, model = store.space("contoso"), dict[str, Any]()
        for seed in range(SEEDS):
            chosen = random.Random(seed)
            program = [
                (chosen.choice(list(OPERATIONS)), chosen.choice("ab"), chosen.randrange(3))
                for _ in range(chosen.randrange(1, 7))
            ]

            async def work(tx: RecordTransaction, program: list[tuple[str, str, int]] = program) -> list[Any]:
                answers = []
                for op, key, number in program:
                    try:
                        answer = OPERATIONS[op](tx, key, number)
                        answers.append(answer if answer is None else await answer)
                    except InvalidInput:
                        answers.append(REFUSED)
                return answers

            after = dict(model)
            try:
                wanted: Any = [expected(after, *step) for step in program]
                model = after
            except Refused:
                wanted = REFUSED
            try:
                answered: Any = await space.transact(work)
            except InvalidInput:
                answered = REFUSED
            assert (seed, program, answered) == (seed, program, wanted)
            assert (seed, program, await state_of(space)) == (seed, program, model)
