"""The conformance suite: what every engine does, proved on the engine at hand.

An engine's test file is one fixture and one import::

    import pytest
    from holdfast.engines.sqlite import SqliteEngine
    from holdfast.testing.conformance import *
    from holdfast.testing.conformance import Capabilities, EngineFactory

    @pytest.fixture
    def engine_factory(tmp_path):
        numbers = itertools.count()

        def new_storage():
            path = tmp_path / f"{next(numbers)}.db"
            return lambda clock: SqliteEngine.open(path, clock=clock)

        return EngineFactory(new_storage, Capabilities(shared=True, survives_reopen=True))

There is a class per guarantee of `holdfast.engine`, under the guarantee's name, and one for each part of the contract
the guarantees rest on. What engines may differ in is declared as `Capabilities`: a test that needs one the engine does
not declare is skipped. No test asks which engine it has.

How a test works. It takes a `Subject`: the engine under test with its clock (a ManualClock: no test sleeps to see a ttl
pass), and the way to open it again or a second time. A refusal is expected with `subject.refused(...)`, which compares
everything every space holds before and after: entries, revision, usage, feed. Whoever waits for a watcher does so with a
deadline that only a failure reaches.

`TestOneEvaluator` drives random histories into the memory engine and the engine under test and compares everything.
HOLDFAST_SOAK=1 in the environment makes it try many more.

pytest-asyncio must be in auto mode (`asyncio_mode = "auto"`).
"""

from holdfast.testing.conformance.durability import TestDurability
from holdfast.testing.conformance.empty import TestEmpty
from holdfast.testing.conformance.feed import TestFeed, TestWatching
from holdfast.testing.conformance.limits import TestLimits
from holdfast.testing.conformance.machine import TestOneEvaluator
from holdfast.testing.conformance.operations import TestNumbers, TestOperations, TestValues
from holdfast.testing.conformance.order import TestConditions, TestOwnership, TestTotalOrder
from holdfast.testing.conformance.outcome import TestOutcome
from holdfast.testing.conformance.ranges import TestPush, TestTake
from holdfast.testing.conformance.reading import TestReading
from holdfast.testing.conformance.requests import TestRequests
from holdfast.testing.conformance.spaces import TestSpaces
from holdfast.testing.conformance.subject import Capabilities, EngineFactory, Subject, subject
from holdfast.testing.conformance.time import TestExpiry, TestTime, TestTouch
from holdfast.testing.conformance.usage import TestUsage
from holdfast.testing.conformance.versions import TestVersions

__all__ = [
    "Capabilities",
    "EngineFactory",
    "Subject",
    "TestConditions",
    "TestDurability",
    "TestEmpty",
    "TestExpiry",
    "TestFeed",
    "TestLimits",
    "TestNumbers",
    "TestOneEvaluator",
    "TestOperations",
    "TestOutcome",
    "TestOwnership",
    "TestPush",
    "TestReading",
    "TestRequests",
    "TestSpaces",
    "TestTake",
    "TestTime",
    "TestTotalOrder",
    "TestTouch",
    "TestUsage",
    "TestValues",
    "TestVersions",
    "TestWatching",
    "subject",
]
