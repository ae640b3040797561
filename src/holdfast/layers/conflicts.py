"""Contradictions: contributions that were written without a conflict and do not agree.

A detector is a function from a DocumentView to the contradictions in it, under a name:

    space.judgement.detectors["too-far-apart"] = differing("target_price", tolerance=10.0)

Shipped, and looked for unless others are named:

    opposite-recommendation   output-inconsistency   one says increase (UP), another reduce (DOWN), of the same symbol:
                                                     {"symbol": "MSFT", "recommendation": "recommends increasing position size"}
    contested-resource        resource-contention    more is claimed than there is: {"claims": {"capital": 700}} and, in the
                                                     body, {"capacity": {"capital": 1000}}; without a capacity one may claim it
    missed-deadline           deadline               one is ready after the deadline of another, or of the body:
                                                     {"ready_at": "2026-03-01T12:00:00Z"}, {"deadline": "2026-03-01T09:00:00Z"}

A recommendation is read word by word (`opposed`). That is no understanding of language: what is negated ("do not increase"), or says both and does not
begin with either, says nothing. Agents that say {"recommendation": "increase"} are understood best.

`opposed`, `differing` and `contested` make detectors for other fields. Detectors only look: nothing is stored here. What
agents wrote in another shape is no contradiction. A contradiction's id depends on rule, subject and parties, so the same one
is found again under the same id; `versions` say which outputs it was about.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import combinations
from typing import Any, Final, Literal, TypeAlias

import msgspec

from holdfast.codec import encode
from holdfast.layers.contributions import Contribution, DocumentView
from holdfast.layers.merging import is_number

Kind: TypeAlias = Literal["resource-contention", "output-inconsistency", "deadline"]
CONTRADICTIONS_MAX: Final = 1_000
"""Found in one document; more tell nothing new."""
ID_CHARS: Final = 16
POSITION_CHARS: Final = 200
"""Of a text that stands for a position."""

TEXT_CHARS: Final = 2_000
"""Of a text that is looked through for words."""

UP: Final = (
    "increas*", "rais*", "add", "adds", "adding", "buy", "buys", "buying", "long", "overweight", "upgrad*", "accumulat*",
)  # fmt: skip
DOWN: Final = (
    "reduc*", "decreas*", "cut", "cuts", "cutting", "sell", "sells", "selling", "short", "shorting", "underweight",
    "downgrad*", "trim", "trims", "trimming", "divest*",
)  # fmt: skip
_NEGATIONS: Final = frozenset((
    "not", "no", "never", "nor", "neither", "cannot", "without", "avoid", "avoids", "avoiding", "against", "than",
))  # fmt: skip
_NEGATED: Final = 3
"""Words behind a negation that it may be about: not recommend an increase."""
_WORD: Final = re.compile(r"(?:long|short)(?:er)?[ -](?:term|run)|\w+(?:[-']\w+)*")
"""A compound is a word of its own (sell-off, long-term), and so is a horizon without its hyphen."""


class Contradiction(msgspec.Struct, frozen=True):
    """Outputs that do not agree: which rule says so, whose they are, and what each says."""

    kind: Kind
    rule: str
    subject: str
    """What it is about, such as a symbol or a resource."""
    parties: tuple[str, ...]
    """Sections, "agent/instance"."""
    values: dict[str, Any]
    """What each party says about it."""
    positions: dict[str, str] = {}
    """For whom parties stand together: the same text is the same position. Without one, what each says is its position, and of
    those who contend for a resource each has its own."""
    versions: dict[str, int] = {}
    """Of the parties' sections."""
    escalated: bool = False
    """It waits for a person."""

    @property
    def id(self) -> str:
        """Stable as long as rule, subject and parties are."""
        told = encode([self.rule, self.subject, sorted(self.parties)])
        return hashlib.sha256(told).hexdigest()[:ID_CHARS]


Detector: TypeAlias = Callable[[DocumentView], Iterable[Contradiction]]


def found_in(view: DocumentView, detectors: Mapping[str, Detector]) -> list[Contradiction]:
    """What the detectors find, each once, with the versions of what it is about."""
    found: dict[str, Contradiction] = {}
    for name, detect in detectors.items():
        for each in detect(view):
            versions = {party: view.versions[party] for party in each.parties if party in view.versions}
            named = msgspec.structs.replace(each, rule=name, versions=versions)
            found.setdefault(named.id, named)
            if len(found) >= CONTRADICTIONS_MAX:
                return list(found.values())
    return list(found.values())


# --- rules on fields ---


def opposed(
    field: str, one: Iterable[str], other: Iterable[str], *, per: str | None = None, kind: Kind = "output-inconsistency"
) -> Detector:
    """Contributions whose text in `field` has a word of `one`, against those with a word of `other`.

    Words are whole, in any case and anywhere in the text; `increas*` stands for all that begin so. A text that has words of both
    is on the side of the word it begins with, or on none; one that has a negated word is on none.

    `per` names the field that says what it is about, in any case; only what is about the same is compared. Where all that name it
    name the same, who names nothing means that.
    """
    sides = {"one": _words(one), "other": _words(other)}

    def detect(view: DocumentView) -> Iterator[Contradiction]:
        names = _names(view, per)
        subjects: dict[str, dict[str, list[Contribution]]] = {}
        for each in view.sections.values():
            side = _side(_field(each.data, field), sides)
            if side is not None:
                subjects.setdefault(names[each.section], {"one": [], "other": []})[side].append(each)
        for about, said_by in subjects.items():
            if said_by["one"] and said_by["other"]:
                values, positions = {}, {}
                for together in said_by.values():
                    for each in together:
                        values[each.section] = _field(each.data, field)
                        positions[each.section] = values[together[0].section][:POSITION_CHARS]
                yield Contradiction(kind, "", about, tuple(values), values, positions)

    return detect


def differing(field: str, *, tolerance: float, per: str | None = None) -> Detector:
    """Two contributions whose numbers in `field` are further apart than `tolerance`; `per` as in `opposed`."""

    def detect(view: DocumentView) -> Iterator[Contradiction]:
        names = _names(view, per)
        numbers = [
            (each.section, value, names[each.section])
            for each in view.sections.values()
            if is_number(value := _field(each.data, field))
        ]
        for (a, low, about), (b, high, same) in combinations(numbers, 2):
            if about == same and abs(low - high) > tolerance:
                yield Contradiction("output-inconsistency", "", about, (a, b), {a: low, b: high})

    return detect


def contested(field: str, capacity: str) -> Detector:
    """More claimed in `field` ({resource: amount}) than the body has in `capacity`; without one, more than one claimant."""

    def detect(view: DocumentView) -> Iterator[Contradiction]:
        claims: dict[str, dict[str, Any]] = {}
        for each in view.sections.values():
            wanted = _field(each.data, field)
            for resource, amount in wanted.items() if isinstance(wanted, dict) else ():
                if is_number(amount) and amount > 0:
                    claims.setdefault(resource, {})[each.section] = amount
        there = _field(view.body, capacity)
        for resource, values in claims.items():
            limit = there.get(resource) if isinstance(there, dict) else None
            over = sum(values.values()) > limit if is_number(limit) else len(values) > 1
            if over:
                yield Contradiction("resource-contention", "", resource, tuple(values), values)

    return detect


def missed(ready: str, deadline: str) -> Detector:
    """A contribution whose instant in `ready` is after another's, or the body's, in `deadline`."""

    def detect(view: DocumentView) -> Iterator[Contradiction]:
        due = {each.section: at for each in view.sections.values() if (at := _instant(each.data, deadline))}
        of_body = _instant(view.body, deadline)
        for each in view.sections.values():
            at = _instant(each.data, ready)
            if at is None:
                continue
            late = [section for section, limit in due.items() if section != each.section and limit < at]
            for section in late:
                values = {each.section: at.isoformat(), section: due[section].isoformat()}
                theirs, mine = _instant(view.sections[section].data, ready), due.get(each.section)
                both = theirs is not None and mine is not None and mine < theirs
                about = f"{ready} of {each.section}" if both else ready  # of two that are late for each other, two
                yield Contradiction("deadline", "", about, (each.section, section), values)
            if of_body is not None and of_body < at:
                values = {each.section: at.isoformat(), "body": of_body.isoformat()}
                yield Contradiction("deadline", "", deadline, (each.section, "body"), values)

    return detect


def _field(data: Any, path: str) -> Any:
    for name in path.split("."):
        if not isinstance(data, dict):
            return None
        data = data.get(name)
    return data


def _names(view: DocumentView, per: str | None) -> dict[str, str]:
    """What each section is about, by the field `per`: of several spellings the first by the alphabet; "" is the document."""
    told = {name: "" if per is None else _subject(_field(each.data, per)) for name, each in view.sections.items()}
    spelled: dict[str, str] = {}
    for text in told.values():
        if text:
            spelled[text.casefold()] = min(text, spelled.get(text.casefold(), text))
    unsaid = next(iter(spelled.values())) if len(spelled) == 1 else ""
    return {name: spelled[text.casefold()] if text else unsaid for name, text in told.items()}


def _subject(about: Any) -> str:
    """What it is about, as text; what says nothing is about the document."""
    return "" if about is None else about.strip() if isinstance(about, str) else encode(about).decode()


def _words(listed: Iterable[str]) -> re.Pattern[str]:
    found = [re.escape(word.removesuffix("*").lower()) + (r"\w*" if word.endswith("*") else "") for word in listed]
    return re.compile("|".join(found))


def _side(said: Any, sides: Mapping[str, re.Pattern[str]]) -> str | None:
    """Which side a text is on; None when it is on none, or nobody can tell."""
    words = _WORD.findall(said[:TEXT_CHARS].lower().replace("\u2019", "'")) if isinstance(said, str) else []
    found: dict[int, str] = {}
    for place, word in enumerate(words):
        side = next((name for name, pattern in sides.items() if pattern.fullmatch(word)), None)
        if side is not None:
            if any(_negates(before) for before in words[max(0, place - _NEGATED) : place]):
                return None
            found[place] = side
    return found.get(0) or (next(iter(found.values())) if len(set(found.values())) == 1 else None)


def _negates(word: str) -> bool:
    return word in _NEGATIONS or word.endswith("n't")


def _instant(data: Any, field: str) -> datetime | None:
    try:
        at = datetime.fromisoformat(_field(data, field))
    except (TypeError, ValueError):
        return None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


DETECTORS: Final[Mapping[str, Detector]] = {
    "opposite-recommendation": opposed("recommendation", UP, DOWN, per="symbol"),
    "contested-resource": contested("claims", "capacity"),
    "missed-deadline": missed("ready_at", "deadline"),
}
