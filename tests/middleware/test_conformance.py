"""An administrator's engine does what the engine within does: it passes the conformance suite, whose subspaces are its own."""

import pytest

from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.engines.memory import MemoryEngine
from holdfast.identity import Identity
from holdfast.middleware.policy import PolicedEngine, Policy
from holdfast.middleware.rules import Rules
from holdfast.testing.conformance import *  # noqa: F403
from holdfast.testing.conformance import Capabilities, EngineFactory


class Alone(PolicedEngine):
    """The only connection: the engine within is closed with it."""

    async def close(self) -> None:
        await self._inner.close()


async def open_policed(clock: Clock) -> Engine:
    policy = Policy(MemoryEngine(clock=clock), clock, Rules(access_control=()))
    return Alone(policy, Identity("root", "admin", "*"))


@pytest.fixture
def engine_factory() -> EngineFactory:
    return EngineFactory(lambda: open_policed, Capabilities(shared=False, survives_reopen=False))
