"""A document as it is read: its body, what each agent contributed, and what that rests on.

A contribution is stored in its agent's section as {data, inputs, confidence}; version and time are the section's own. Its agent
may have written it by hand, so it is read with care: what is missing or odd counts as not said.

Sections are named "agent/instance" wherever they are spoken of: in `versions`, in inputs, as parties of a conflict; the body
is "body", which has no slash. A contribution is stale when something it read is at another version now, or gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from holdfast.clock import as_datetime
from holdfast.errors import InvalidInput
from holdfast.layers.reducers import reduced
from holdfast.layers.sections import SOLE, Section

INPUTS_MAX: Final = 10_000
"""Versions that one contribution names."""
BODY: Final = "body"
"""How the body is called among versions."""


class Contribution(msgspec.Struct, frozen=True):
    """What one instance of an agent contributed, when, and from which versions of what it had read."""

    section: str
    """Its name in `versions` and inputs: "agent/instance", or "agent/-" where an agent has one section."""
    agent: str
    instance: str
    data: Any
    version: int
    timestamp: datetime
    inputs: dict[str, int]
    confidence: float | None


class Outdated(msgspec.Struct, frozen=True):
    """A contribution that rests on an input that has changed: which, as it was read, and as it is (None: gone)."""

    section: str
    input: str
    read: int
    present: int | None


class DocumentView(msgspec.Struct, frozen=True):
    """A document as it was read."""

    name: str
    etag: int
    """The version of the body; 0 when there is none yet."""
    body: Any
    """An empty object when there is none yet."""
    sections: dict[str, Contribution]
    """Every contribution, by "agent/instance"."""
    reducers: dict[str, str]

    @property
    def contributions(self) -> dict[str, Contribution]:
        """The newest contribution of each agent."""
        newest: dict[str, Contribution] = {}
        for each in self.sections.values():
            if each.agent not in newest or newest[each.agent].version < each.version:
                newest[each.agent] = each
        return newest

    @property
    def versions(self) -> dict[str, int]:
        """What was read, as `contribute(inputs=…)` takes it."""
        return {BODY: self.etag, **{name: each.version for name, each in self.sections.items()}}

    @property
    def stale(self) -> list[Outdated]:
        """Contributions that rest on outdated inputs, one for each such input."""
        present = self.versions
        return [
            Outdated(name, input, read, present.get(input))
            for name, each in self.sections.items()
            for input, read in each.inputs.items()
            if input != name and present.get(input) != read
        ]

    @property
    def merged(self) -> Any:
        """The body with every contribution's declared fields reduced into it, in the order of their versions."""
        body = self.body
        for each in sorted(self.sections.values(), key=lambda each: each.version):
            body = reduced(body, each.data, self.reducers, strict=False)
        return body


def contribution_of(section: Section) -> Contribution:
    """A section, read with care: its agent may have written it by hand."""
    value = section.value if isinstance(section.value, dict) else {"data": section.value}
    inputs, confidence = value.get("inputs"), value.get("confidence")
    instance = value.get("instance") if section.instance == SOLE else section.instance
    return Contribution(
        f"{section.agent}/{section.instance}",
        section.agent,
        instance if isinstance(instance, str) else section.instance,
        value.get("data"),
        section.version,
        as_datetime(section.updated_at),
        {name: read for name, read in inputs.items() if type(read) is int} if isinstance(inputs, dict) else {},
        confidence if _is_confidence(confidence) else None,
    )


def _is_confidence(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def checked_confidence(value: float | None) -> float | None:
    if value is not None and not _is_confidence(value):
        raise InvalidInput(f"confidence is between 0 and 1, or None when nobody knows; not {value!r:.60}")
    return value


def checked_inputs(inputs: Mapping[str, int]) -> dict[str, int]:
    if len(inputs) > INPUTS_MAX:
        raise InvalidInput(f"a contribution names at most {INPUTS_MAX:,} inputs, not {len(inputs):,}")
    for name, version in inputs.items():
        if not isinstance(name, str) or type(version) is not int or version < 0:
            raise InvalidInput(
                f"inputs are names and versions, such as view.versions; not {name!r:.60}: {version!r:.60}"
            )
    return dict(inputs)
