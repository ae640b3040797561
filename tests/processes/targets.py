"""What the tests run: well-behaved functions, and hostile ones."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

NUMBER = 3
shout = lambda text: text.upper()  # noqa: E731


class Sums:
    """A class with a function in it."""

    @staticmethod
    def add(a: int, b: int) -> int:
        return a + b


def echo(*args: Any, **kwargs: Any) -> Any:
    return {"args": list(args), "kwargs": kwargs}


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def talk() -> str:
    print("not the result: é \udc80")
    print("nor this", file=sys.stderr)
    os.write(1, b"\x00\xff raw\n")
    return "result"


def fail(size: int = 0) -> None:
    raise ValueError("wrong number" + "!" * size)


def leave(code: Any) -> None:
    sys.exit(code)


def give_an_object() -> object:
    return object()


def surroundings() -> dict[str, Any]:
    """What a target finds itself in."""
    return {
        "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],
        "sid": os.getsid(0),
        "pgid": os.getpgid(0),
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "threads": threading.active_count(),
        "stdin": sys.stdin.read(),
        "title": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(),
        "umask": os.umask(0o22),
    }


def threads_finish() -> str:
    def late() -> None:
        time.sleep(0.05)
        print("the thread was waited for")

    threading.Thread(target=late).start()
    return "returned"


# --- hostile ---


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def sleep() -> None:
    say(os.getpid())
    time.sleep(600)


def spin() -> None:
    say(os.getpid())
    while True:
        pass


def ignore_term() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork() == 0:
        time.sleep(600)
    say(os.getpid())
    while True:
        time.sleep(600)


def term_with_grace() -> None:
    def note(*_: object) -> None:
        os.write(1, b"cleaned up\n")  # not print: the signal may come while one is under way
        sys.exit(7)

    signal.signal(signal.SIGTERM, note)
    say(os.getpid())
    while True:
        time.sleep(600)


def fork_twice(stay: bool, *, change_session: bool = False, hide: bool = False) -> str:
    """A daemon as the books have it: two forks, and perhaps a session, a clean environment and closed files."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        if change_session:
            os.setsid()
        if os.fork() == 0:
            os.write(writing, str(os.getpid()).encode())
            if hide:
                os.closerange(0, 64)
                os.execve("/bin/sleep", ["sleep", "600"], {})
            time.sleep(600)
        os._exit(0)
    os.wait()
    say(int(os.read(reading, 100)))
    if stay:
        time.sleep(600)
    return "gone"


def exit_while_children_live() -> int:
    child = subprocess.Popen(["sleep", "600"])
    return child.pid


def close_stdout() -> str:
    os.close(1)
    os.close(2)
    time.sleep(0.05)
    return "still here"


def fork_bomb(depth: int, width: int) -> None:
    """Of bounded size: width ** depth processes at most, each forking as fast as it can."""
    say(os.getpid())
    while depth > 0:
        for _ in range(width):
            if os.fork() == 0:
                depth -= 1
                break
        else:
            break
    while True:
        time.sleep(1)


def hydra(generations: int) -> None:
    """Each generation forks the next, in a session of its own, and dies at once."""
    say(os.getpid())
    for _ in range(generations):
        if os.fork():
            os._exit(0)
        os.setsid()
    time.sleep(600)


def fill_the_disk(path: str, size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    with open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(65_536))


def allocate(megabytes: int, processes: int = 1) -> None:
    """Touch so much memory, divided among so many processes."""
    for _ in range(processes - 1):
        if os.fork() == 0:
            break
    kept = []
    for _ in range(megabytes // processes):
        kept.append(bytearray(b"x" * (1024 * 1024)))
        time.sleep(0.0005)
    time.sleep(600)


def share(megabytes: int, processes: int) -> str:
    """Memory that forks share: it is there once."""
    kept = b"x" * (megabytes * 1024 * 1024)
    pids = []
    for _ in range(processes):
        pid = os.fork()
        if pid == 0:
            time.sleep(0.4)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    return f"{len(kept) // 1024 // 1024} MB"


def open_files(count: int, processes: int = 1) -> None:
    for _ in range(processes - 1):
        if os.fork() == 0:
            break
    kept = [socket.socket() for _ in range(count)]
    say(len(kept))
    time.sleep(600)


def burn_in_children(seconds: float, count: int) -> None:
    """CPU used by children that ended, which their parent waited for or not."""
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            end = time.process_time() + seconds
            while time.process_time() < end:
                pass
            os._exit(0)
        if number % 2:
            os.waitpid(pid, 0)
    time.sleep(0.05)


def spin_in_children(count: int, *, sessions: bool = False) -> None:
    for _ in range(count):
        if os.fork() == 0:
            if sessions:
                os.setsid()
            while True:
                pass
    say(os.getpid())
    while True:
        pass


def spawn_for_ever() -> None:
    """A tree whose members change all the time."""
    say(os.getpid())
    while True:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)


def signal_warden(number: int) -> None:
    """Attack whoever watches."""
    say(os.getpid())
    os.kill(os.getppid(), number)
    time.sleep(600)
