"""Values: typed in, typed out; what cannot be stored is refused with a sentence."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest

from holdfast import Damaged, InvalidInput, Space
from holdfast.codec import decode, encode, integer
from tests.layers.conftest import everything


@dataclass
class Leg:
    symbol: str
    size: int


@dataclass
class Order:
    id: int
    legs: list[Leg]
    at: datetime


class Position(TypedDict):
    symbol: str
    size: float


class Signal(msgspec.Struct):
    agent: str
    strength: float | None = None


class Portfolio(pydantic.BaseModel):
    owner: str
    cash: Decimal
    id: UUID


@dataclass
class Mixed:
    portfolio: Portfolio
    signal: Signal


@dataclass
class Portfolios:
    by_number: dict[int, Portfolio]


class Feed(pydantic.BaseModel):
    url: str = pydantic.Field(alias="sourceUrl")
    every: int = pydantic.Field(validation_alias="interval", serialization_alias="intervalSeconds")


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    at: datetime
    id: UUID


class Picky(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    net: int
    raw: pydantic.Json[list[int]]

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def gross(self) -> int:
        return self.net + 1


class Level(Enum):
    UNKNOWN = math.nan


class Login(pydantic.BaseModel):
    user: str
    password: pydantic.SecretStr


class Shown(Login):
    @pydantic.field_serializer("password")
    def _reveal(self, password: pydantic.SecretStr) -> str:
        return password.get_secret_value()


ORDER = Order(1, [Leg("MSFT", 5)], datetime(2026, 1, 2, tzinfo=UTC))
PORTFOLIO = Portfolio(owner="x", cash=Decimal("10.50"), id=UUID(int=7))


@pytest.mark.parametrize(
    ("value", "as_type"),
    [
        (ORDER, Order),
        ({"symbol": "MSFT", "size": 1.5}, Position),
        (Signal("risk", 0.5), Signal),
        (PORTFOLIO, Portfolio),
        (Mixed(PORTFOLIO, Signal("risk")), Mixed),
        ([ORDER, ORDER], list[Order]),
        (Feed(sourceUrl="a", interval=5), Feed),
        ([Feed(sourceUrl="a", interval=5)], list[Feed]),
        ([Strict(at=datetime(2026, 1, 2), id=UUID(int=7))], list[Strict]),
        (Shown(user="x", password=pydantic.SecretStr("p")), Shown),
        (Picky(net=1, raw="[1, 2]"), Picky),
        (Portfolios({7: PORTFOLIO, 10: PORTFOLIO}), Portfolios),
        (b"bytes", bytes),
        (datetime(2026, 1, 2, tzinfo=UTC), datetime),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_a_typed_value_is_read_back_as_its_type(space: Space, value: Any, as_type: type[Any]) -> None:
    await space.records.set("k", value)
    assert await space.records.get("k", as_type=as_type) == value
    entry = await space.records.entry("k", as_type=as_type)
    assert entry is not None
    assert entry.value == value
    await space.records.append_to_list("l", value, value)
    assert await space.records.list("l", as_type=as_type) == [value, value]


async def test_a_value_of_another_type_is_refused_when_read(space: Space) -> None:
    await space.records.set("k", {"symbol": 5})
    for as_type in (Order, Position, Signal, Portfolio):
        with pytest.raises(InvalidInput, match=f"not a {as_type.__name__}"):
            await space.records.get("k", as_type=as_type)


class Stranger:
    pass


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (math.nan, "JSON has no such number"),
        (math.inf, "JSON has no such number"),
        ({"a": [1, None, {"b": -math.inf}]}, "JSON has no such number"),
        ([None, Signal("x", math.nan)], "JSON has no such number"),
        (object(), "cannot be stored"),
        ({"a": Stranger()}, "cannot be stored"),
        (print, "cannot be stored"),
        (msgspec.Raw(b"garbage"), "without being looked at"),
        ("\ud800", "lone surrogate"),
        ({"\udfff": 1}, "lone surrogate"),
        ({1: "integer keys"}, "1 is no key for an object, whose keys are text"),
        ({"a": [{"b": {(1, 2): 3}}]}, r"\(1, 2\) is no key for an object"),
        ([Portfolios({7: PORTFOLIO}), Portfolios({})], "7 is no key for an object"),
        (nested(100_000), "nested more than|must be JSON nested at most"),
        ([Level.UNKNOWN], "JSON has no such number"),
        ({"logins": [Login(user="x", password=pydantic.SecretStr("p"))]}, "Login has a secret"),
    ],
    ids=[
        "nan",
        "inf",
        "nested-inf",
        "struct-nan",
        "object",
        "class",
        "function",
        "raw",
        "surrogate",
        "key",
        "int-key",
        "tuple-key",
        "dataclass-key",
        "deep",
        "enum-nan",
        "masked",
    ],
)
async def test_what_json_cannot_say_is_refused_and_nothing_changes(space: Space, value: Any, why: str) -> None:
    await space.records.set("k", 1)
    before = await everything(space)
    for write in (space.records.set, space.records.append_to_list, space.records.add_to_set):
        with pytest.raises(InvalidInput, match=why):
            await write("k2", value)
    assert await everything(space) == before


def test_a_model_that_was_written_by_its_aliases_is_read_too() -> None:
    assert decode(b'{"sourceUrl":"a","interval":5}', Feed) == Feed(sourceUrl="a", interval=5)


async def test_a_value_that_contains_itself_is_refused(space: Space) -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(InvalidInput, match="contains itself"):
        await space.records.set("k", value)


async def test_models_that_look_alike_are_all_searched_for_nan(space: Space) -> None:
    class Reading(pydantic.BaseModel):
        at: float | None

    with pytest.raises(InvalidInput, match="JSON has no such number"):
        await space.records.set("k", [*(Reading(at=1.0) for _ in range(100)), Reading(at=math.nan), Reading(at=None)])


def test_what_is_of_another_type_is_told_in_words() -> None:
    with pytest.raises(InvalidInput, match=r"not a Order: legs\[0\].size must be a whole number, not text"):
        decode(b'{"id":1,"legs":[{"symbol":"MSFT","size":"5"}],"at":"2026-01-02T00:00:00Z"}', Order)
    with pytest.raises(InvalidInput, match=r"not a Order: legs\[0\].size is missing"):
        decode(b'{"id":1,"legs":[{"symbol":"MSFT"}],"at":"2026-01-02T00:00:00Z"}', Order)


async def test_a_value_over_the_limit_is_refused_and_the_limit_itself_is_not(space: Space) -> None:
    limit = 10 * 1024 * 1024
    await space.records.set("fits", "x" * (limit - 2))
    before = await space.records.keys()
    with pytest.raises(InvalidInput, match="Keep large data as a blob"):
        await space.records.set("k", "x" * (limit - 1))
    assert await space.records.keys() == before


def test_the_encoding_is_canonical() -> None:
    assert encode({"b": 1, "a": [1.0, "ä", None, True]}) == '{"a":[1.0,"ä",null,true],"b":1}'.encode()
    assert encode(1) != encode(1.0)


@pytest.mark.parametrize(
    "data",
    [
        b"01",
        b"-0",
        b"1.0",
        b"1e3",
        b"+1",
        b" 1",
        b"",
        b'"1"',
        b"9223372036854775808",
        b"-9223372036854775809",
        "\N{ARABIC-INDIC DIGIT ONE}".encode(),
    ],
)
def test_only_canonical_64_bit_decimals_are_numbers(data: bytes) -> None:
    assert integer(data) is None


@pytest.mark.parametrize("number", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_every_64_bit_integer_is_a_number(number: int) -> None:
    assert integer(encode(number)) == number


def test_bytes_that_are_no_json_are_damage() -> None:
    with pytest.raises(Damaged):
        decode(b"{")


class Tagged(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)

    tags: frozenset[str]


class Sets(pydantic.BaseModel):
    names: set[str]
    nested: dict[str, list[frozenset[int]]]
    models: set[Tagged]
    anything: Any
    rooted: pydantic.RootModel[set[str]]

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def count(self) -> int:
        return len(self.names)


ENCODE_SETS = """
from holdfast.codec import encode
from tests.layers.test_values import Sets, Tagged
words = [f"word-{n}" for n in range(20)]
value = Sets(
    names=set(words), nested={"a": [frozenset(range(0, 4000, 100))]}, anything={"x": set(words)}, rooted=set(words),
    models={Tagged(tags=frozenset(words)), Tagged(tags=frozenset(words[:7]))},
)
print(encode(value).decode())
"""


def test_sets_in_a_pydantic_model_have_the_same_bytes_in_every_process() -> None:
    def encoded(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", ENCODE_SETS]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    told = encoded("1")
    assert told == encoded("2") == encoded("3")
    assert '"count":20' in told
