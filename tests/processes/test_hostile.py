"""Programs that do not want to be ended, measured or kept: each by its name, and the machine is clean afterwards."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from holdfast.processes import Launcher, Limits
from tests.processes.conftest import MakeOrder, below, first_line, is_alive, printed, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

HERE = "tests.processes.targets"
SOAK = os.environ.get("HOLDFAST_SOAK") == "1"


async def start(launcher: Launcher, order: MakeOrder, function: str, *args: object, **options: object):
    kwargs = options.pop("kwargs", {})
    return await launcher.start(order(function=f"{HERE}:{function}", args=args, kwargs=kwargs, **options))


async def test_ignores_term(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "ignore_term")
    await first_line(child)
    began = time.monotonic()
    ended = await child.stop()
    assert (ended.reason, ended.signal) == ("stopped", signal.SIGKILL)
    assert 0.5 < time.monotonic() - began < 5  # a second, on a machine that has nothing else to do


async def test_ignores_term_and_has_a_timeout(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "ignore_term", timeout="200ms")
    ended = await child.wait()
    assert (ended.reason, ended.code) == ("timeout", 124)
    assert ended.duration < 1.2


@pytest.mark.parametrize("change_session", [False, True], ids=["forks_twice", "changes_its_session"])
async def test_forks_twice(launcher: Launcher, order: MakeOrder, change_session: bool) -> None:
    child = await start(launcher, order, "fork_twice", True, kwargs={"change_session": change_session})
    daemon = int(await first_line(child))
    assert is_alive(daemon)
    assert (await child.usage()).processes == 2
    await child.kill()
    assert not is_alive(daemon)


async def test_forks_twice_changes_its_session_hides_and_exits(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "fork_twice", False, kwargs={"change_session": True, "hide": True})
    daemon = int(await first_line(child))
    ended = await child.wait()
    assert (ended.reason, ended.code, ended.result) == ("exited", 0, "gone")
    assert not is_alive(daemon)


async def test_exits_while_its_children_live(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "exit_while_children_live")
    ended = await child.wait()
    assert ended.reason == "exited"
    assert not is_alive(ended.result)


async def test_children_of_an_ended_target_may_finish_what_they_write(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order("sh", "-c", "(sleep 0.02; echo late) & echo early"))
    assert (await printed(child))["stdout"] == b"early\nlate\n"


async def test_closes_its_stdout(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "close_stdout")
    assert await printed(child) == {"stdout": b"", "stderr": b""}
    assert (await child.wait()).result == "still here"


async def test_fills_the_disk(launcher: Launcher, order: MakeOrder, tmp_path: Path) -> None:
    child = await start(launcher, order, "fill_the_disk", str(tmp_path / "full"), 1_000_000)
    ended = await child.wait()
    assert ended.failure is not None
    assert "too large" in ended.failure.message
    child = await launcher.start(order("sh", "-c", "cat /dev/zero > /dev/full"))
    texts = await printed(child)
    assert b"No space left" in texts["stderr"]
    assert (await child.wait()).code == 1


async def test_prints_without_end(launcher: Launcher, order: MakeOrder) -> None:
    """1 GB in the soak; memory on this side stays what it was."""
    size = 1 << (30 if SOAK else 26)
    child = await launcher.start(order("head", "-c", str(size), "/dev/zero"))
    before, total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    async for _, data in child.output():
        total += len(data)
    assert total == size
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024
    child = await launcher.start(order("yes"))
    async for _, _ in child.output():
        break
    assert (await child.kill()).reason == "killed"


async def test_a_fork_bomb(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "fork_bomb", 2, 16)
    await first_line(child)
    await asyncio.sleep(0.02)
    began = time.monotonic()
    await child.kill()
    assert time.monotonic() - began < 5
    assert await until(lambda: not below(launcher.zygote_pid or 0))


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.3])
async def test_a_hydra_that_changes_its_session_with_every_head(
    launcher: Launcher, order: MakeOrder, delay: float
) -> None:
    child = await start(launcher, order, "hydra", 400)
    await first_line(child)
    await asyncio.sleep(delay)
    await child.kill()
    assert await until(lambda: not below(launcher.zygote_pid or 0))


async def test_a_tree_that_changes_all_the_time_is_killed(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "spawn_for_ever")
    await first_line(child)
    assert (await child.kill()).reason == "killed"


async def test_stops_its_warden(launcher: Launcher, order: MakeOrder) -> None:
    """The zygote continues it, so a timeout is enforced all the same."""
    child = await start(launcher, order, "signal_warden", int(signal.SIGSTOP), timeout="200ms")
    await first_line(child)
    ended = await child.wait()
    assert ended.reason == "timeout"


async def test_kills_its_warden(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "signal_warden", int(signal.SIGKILL))
    ended = await child.wait()
    assert (ended.reason, ended.code) == ("lost", 137)
    assert not is_alive(child.pid)


async def test_tells_its_warden_to_terminate(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "signal_warden", int(signal.SIGTERM))
    await first_line(child)
    await asyncio.sleep(0.05)
    assert not child.has_ended
    assert (await child.kill()).reason == "killed"


async def test_an_end_that_falls_together_with_a_sample_is_told_as_it_was(launcher: Launcher, order: MakeOrder) -> None:
    """Trees that are killed while a sample, the timeout and the grace are due in the same moment."""

    async def one() -> str:
        wanted = order("sh", "-c", "sleep 60 & exit 3", timeout="100ms", limits=Limits(memory_mb=500, cpu_percent=50))
        return (await (await launcher.start(wanted)).wait()).reason

    assert set(await asyncio.gather(*(one() for _ in range(24)))) <= {"exited", "timeout"}


async def test_writes_nonsense_to_the_pipe_of_its_outcome(launcher: Launcher, order: MakeOrder, tmp_path: Path) -> None:
    (tmp_path / "forger.py").write_text(
        "import os\ndef forge():\n    fd = max(int(n) for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}'))\n"
        "    os.write(fd, b'\\xc1 nonsense')\n    os._exit(0)\n"
    )
    child = await launcher.start(order(function="forger:forge", cwd=tmp_path))
    ended = await child.wait()
    assert ended.value is None
    assert ended.failure is not None
    assert ended.failure.type == "Damaged"


# --- limits ---


async def test_allocates_600_mb_under_a_limit_of_200(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "allocate", 600, limits=Limits(memory_mb=200))
    ended = await child.wait()
    assert (ended.reason, ended.code) == ("memory", 137)
    assert 200 < ended.peak_memory / 1024 / 1024 < 560


async def test_a_fork_does_not_escape_the_memory_limit(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "allocate", 600, 6, limits=Limits(memory_mb=200))
    ended = await child.wait()
    assert (ended.reason, ended.code) == ("memory", 137)


async def test_memory_that_forks_share_is_counted_once(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "share", 100, 4, limits=Limits(memory_mb=200))
    ended = await child.wait()
    assert (ended.reason, ended.value) == ("exited", b'"100 MB"')


async def test_opens_too_many_files(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "open_files", 100, limits=Limits(max_fds=64))
    ended = await child.wait()
    assert ended.reason == "fds"
    assert ended.max_fds > 64


async def test_files_are_counted_over_the_tree(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "open_files", 20, 4, limits=Limits(max_fds=64))
    assert (await child.wait()).reason == "fds"


@pytest.mark.parametrize("percent", [20, 120])
async def test_cpu_is_held_at_its_share(launcher: Launcher, order: MakeOrder, percent: int) -> None:
    child = await start(launcher, order, "spin_in_children", 2, limits=Limits(cpu_percent=percent))
    await first_line(child)
    await asyncio.sleep(1.5)
    ended = await child.kill()
    assert ended.reason == "killed"
    used = ended.cpu_seconds / ended.duration * 100
    # Others use the machine too, so it may get less than its share; it never gets much more.
    assert percent / 4 < used < percent * 1.4 + 10


async def test_pause_stops_the_cpu_of_the_whole_tree(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "spin_in_children", 2, kwargs={"sessions": True})
    await first_line(child)
    await child.pause()
    before = (await child.usage()).cpu_seconds
    await asyncio.sleep(0.4)
    assert (await child.usage()).cpu_seconds == before
    await child.resume()
    await asyncio.sleep(0.3)
    assert (await child.usage()).cpu_seconds > before
    await child.kill()


async def test_pause_stops_a_tree_that_forks_meanwhile(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "spawn_for_ever")
    await first_line(child)
    for _ in range(5):
        await child.pause()
        before = (await child.usage()).cpu_seconds
        await asyncio.sleep(0.05)
        assert (await child.usage()).cpu_seconds == before
        await child.resume()
    await child.kill()


async def test_pause_stops_a_fork_that_is_under_way(launcher: Launcher, order: MakeOrder) -> None:
    """SIGSTOP lets it finish, and the new process runs unless it is looked for again."""

    async def one(delay: float) -> None:
        child = await start(launcher, order, "spin_in_children", 12)
        await asyncio.sleep(delay)
        await child.pause()
        before = (await child.usage()).cpu_seconds
        await asyncio.sleep(0.1)
        assert (await child.usage()).cpu_seconds == before
        await child.kill()

    for number in range(10):
        await one(number * 0.003)


async def test_a_member_that_is_continued_by_others_is_stopped_again(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "spin")
    pid = int(await first_line(child))
    await child.pause()
    os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(0.6)
    before = (await child.usage()).cpu_seconds
    await asyncio.sleep(0.3)
    assert (await child.usage()).cpu_seconds == before
    await child.kill()


async def test_a_paused_tree_can_be_stopped(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "term_with_grace")
    await first_line(child)
    await child.pause()
    assert (await child.stop(grace="10s")).code == 7


async def test_time_in_which_a_child_is_paused_does_not_count(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "sleep", timeout="400ms")
    await child.pause()
    await asyncio.sleep(0.6)
    assert not child.has_ended
    await child.resume()
    assert (await child.wait()).reason == "timeout"


async def test_a_limited_tree_that_is_paused_stays_paused(launcher: Launcher, order: MakeOrder) -> None:
    child = await start(launcher, order, "spin_in_children", 1, limits=Limits(cpu_percent=30))
    await first_line(child)
    await child.pause()
    before = (await child.usage()).cpu_seconds
    await asyncio.sleep(0.4)
    assert (await child.usage()).cpu_seconds == before
    await child.resume()
    await asyncio.sleep(0.4)
    assert (await child.usage()).cpu_seconds > before
    await child.kill()
