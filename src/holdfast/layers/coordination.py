"""What all who hold and wait in one store share: leases, lines and watches, each once per process."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

from holdfast.engine import Engine
from holdfast.layers.awaiting import Awaiting
from holdfast.layers.leases import Leases
from holdfast.layers.lines import Lines
from holdfast.layers.scope import Scope


class Closed(Protocol):
    """Something that ends with its store."""

    async def close(self) -> None: ...


S = TypeVar("S", bound=Closed)


class Coordination:
    """What the coordination of a store shares: the leases it keeps alive, the lines it stands in, the entries it waits for.

    Those are followed through `engine`, if it is given, and not through that of whoever happens to wait first.
    """

    def __init__(self, leases: Leases, engine: Engine | None = None) -> None:
        self.leases = leases
        self._engine = engine
        self.sizes: dict[str, tuple[int, int]] = {}
        """Sizes that were compared with what is stored, and the version of that, by space and key."""
        self.receivers: dict[Hashable, object] = {}
        """Who takes messages here, by engine, space, agent and queue: what is put here can be handed over in the same commit."""
        self._lines: dict[str, Lines] = {}
        self._shared: dict[Hashable, Any] = {}
        self._awaited: dict[tuple[str, str], Awaiting] = {}

    def lines(self, scope: Scope) -> Lines:
        if scope.space not in self._lines:
            self._lines[scope.space] = Lines(self._engine or scope.engine, scope.space, scope.clock)
        return self._lines[scope.space]

    def awaiting(self, scope: Scope, prefix: str) -> Awaiting:
        """Those who wait for entries under a prefix to change."""
        name = scope.space, prefix
        if name not in self._awaited:
            self._awaited[name] = Awaiting(self._engine or scope.engine, scope.space, prefix, scope.clock)
        return self._awaited[name]

    def shared(self, name: Hashable, make: Callable[[], S]) -> S:
        """What all of this store have in common under a name; closed with it, what was made last first."""
        if name not in self._shared:
            self._shared[name] = make()
        found: S = self._shared[name]
        return found

    def forget(self, name: Hashable) -> None:
        """Nobody needs it any more."""
        gone = self._shared.pop(name, None)
        self.receivers = {each: receiver for each, receiver in self.receivers.items() if receiver is not gone}

    async def close(self) -> None:
        try:
            for part in reversed(list(self._shared.values())):
                await part.close()
        finally:
            for awaited in self._awaited.values():
                awaited.close()
            for lines in self._lines.values():
                lines.close()
            await self.leases.close()
