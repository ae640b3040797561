"""A process that serves any number of stores, each on a port of its own, for tests that need many keepers and little time.

It is told what to do in lines of JSON: `{"open": url, "clock": path}` is answered with `{"port": number}`, `{"close":
port}` with `{}`. It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.engines.registry import open_engine
from holdfast.errors import AuthenticationFailed, Error
from holdfast.identity import EVERY_SPACE, Identity
from holdfast.middleware.denials import Denial
from holdfast.middleware.policy import Policy
from holdfast.middleware.rules import Rules
from holdfast.server.binary import BinaryPort, Limits
from holdfast.server.refusals import PortName
from holdfast.space import Space
from holdfast.testing.shared_clock import SharedClock

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_test_admin"


class Everything:
    """A keeper's ports see the whole store, as an administrator: through the policy, as everybody does."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.clock = clock
        self._policy = Policy(engine, clock, Rules())

    def authenticate(self, token: str) -> Identity:
        if token != TOKEN:
            raise AuthenticationFailed("the token is not valid")
        return Identity("admin", "admin", EVERY_SPACE, "t")

    def is_valid(self, identity: Identity) -> bool:
        return True

    def engine_for(self, identity: Identity) -> Engine:
        return self._policy.engine_for(identity)

    def space_for(self, identity: Identity, name: str) -> Space:
        raise NotImplementedError

    def denied(self, denial: Denial, seconds: float) -> None:
        pass

    def turned_away(self, port: PortName, error: Error, peer: str) -> None:
        pass

    def require(self, identity: Identity, space: str, verb: str) -> None:
        raise NotImplementedError

    def look_at_rate(self, identity: Identity) -> None:
        raise NotImplementedError

    def charge(self, identity: Identity) -> None:
        raise NotImplementedError

    def require_watch(self, identity: Identity, space: str, prefixes: tuple[str, ...]) -> None:
        pass

    def ready(self) -> str | None:
        return None


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    open_ports: dict[int, tuple[BinaryPort, Engine]] = {}
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked: dict[str, Any] = json.loads(line)
        if "open" in asked:
            clock = SharedClock(Path(asked["clock"]))
            engine = await open_engine(asked["open"], clock)
            port = BinaryPort(Everything(engine, clock), Limits(), lambda *_: None, sole_owner=asked["sole"])
            number = await port.listen("127.0.0.1", 0)
            open_ports[number] = port, engine
            answer = {"port": number}
        else:
            port, engine = open_ports.pop(asked["close"])
            await port.stop("the test is over", 5)
            await engine.close()
            answer = {}
        print(json.dumps(answer), flush=True)
    for port, engine in open_ports.values():
        await port.stop("the tests are over", 5)
        await engine.close()


class Host:
    """The process, as a test holds it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def open(self, url: str, clock: Path, *, sole: bool) -> int:
        return int(self._ask({"open": url, "clock": str(clock), "sole": sole})["port"])

    def close(self, port: int) -> None:
        self._ask({"close": port})


@contextmanager
def host() -> Iterator[Host]:
    command = [sys.executable, "-m", "tests.server.host"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Host(process)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


if __name__ == "__main__":
    asyncio.run(_serve())
