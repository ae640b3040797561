"""The zygote: a small process without threads, store or connections, that forks a warden for every launch.

A new interpreter takes tens of milliseconds; a fork of one that has imported what is needed takes one or two. The zygote is
started once by a launcher (`python -m holdfast.processes.zygote FD MODULE …`), imports the modules it is told to, and then
waits: a byte with the descriptors of a launch makes it fork. There is nothing to connect to: its socket is one half of a pair.

It is a subreaper below the launcher. When a warden is killed, what is left of its tree becomes the zygote's children, and since
all other children of the zygote are wardens, it knows whom to kill (`Settled`). A warden that somebody stopped is
continued. When the launcher is gone the wardens know by themselves; the zygote stays until they are done. When the zygote is
killed, wardens and targets go on, and the launcher starts another.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
from typing import Final

from holdfast.clock import elapsed_ms
from holdfast.processes import tree
from holdfast.processes.kernel import Slot, become_subreaper, send
from holdfast.processes.messages import Ready, Settled, say
from holdfast.processes.orders import MARKER_CHARACTERS_MAX, MARKER_VARIABLE
from holdfast.processes.titles import show
from holdfast.processes.warden import Streams, guard, hang_bell, quieten

SLOT_BYTES: Final = len(MARKER_VARIABLE) + 2 + MARKER_CHARACTERS_MAX
"""Room for a marker in the environment."""
SETTLING_PASSES_MAX: Final = 400
SETTLING_MS: Final = 5
"""Between two passes over what a dead warden left."""
LEAVING_MS_MAX: Final = 5_000
"""What wardens get to end their trees when the launcher is gone, before they are killed."""


class Zygote:
    """The process's state: who its wardens are."""

    def __init__(self, link: socket.socket, slot: Slot) -> None:
        self._link = link
        self._wardens: set[int] = set()
        self._slot = slot
        self._bell = hang_bell()

    def run(self) -> None:
        """Fork on request until the launcher is gone."""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        say(self._link, Ready())
        while True:
            for fd, _ in poll.poll():
                if fd == self._bell:
                    self._look_after_wardens()
                elif not self._launch():
                    self._leave()
                    return

    def _launch(self) -> bool:
        """Fork a warden; False when the launcher is gone."""
        try:
            word, fds, _, _ = socket.recv_fds(self._link, 1, len(Streams._fields))
        except OSError:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)  # recv_fds has flags for it, and ignores them
        if not word:
            return False
        if len(fds) == len(Streams._fields):
            try:
                pid = os.fork()
            except OSError:
                pid = -1  # the launcher sees its end of the link close
            if pid == 0:
                self._be_warden(Streams(*fds))
            if pid > 0:
                self._wardens.add(pid)
        for fd in fds:
            os.close(fd)
        return True

    def _be_warden(self, streams: Streams) -> None:
        code = 1
        try:
            self._link.close()
            os.close(self._bell)
            guard(streams, self._slot)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def _look_after_wardens(self) -> None:
        quieten(self._bell)
        died = []
        while (found := _wait()) is not None:
            pid, status = found
            if os.WIFSTOPPED(status):
                os.kill(pid, signal.SIGCONT)
            elif pid in self._wardens:
                self._wardens.discard(pid)
                if status != 0:
                    died.append(pid)
        if died:
            self._settle()
        for pid in died:
            say(self._link, Settled(pid))

    def _settle(self) -> None:
        """Kill what dead wardens left: every child that is no warden."""
        me = os.getpid()
        for _ in range(SETTLING_PASSES_MAX):
            strangers = [pid for pid in tree.children(me) if pid not in self._wardens]
            for pid in strangers:
                member = tree.look(pid)
                if member is not None and not member.is_dead:
                    send(pid, member.started, signal.SIGSTOP)
                    tree.kill_all(pid)
                    send(pid, member.started, signal.SIGKILL)
                _wait(pid)
            if not strangers:
                return
            select.select([], [], [], SETTLING_MS / 1000)

    def _leave(self) -> None:
        """Stay until every tree is ended; the wardens have seen for themselves that the launcher is gone."""
        deadline = elapsed_ms() + LEAVING_MS_MAX
        while self._wardens and elapsed_ms() < deadline:
            select.select([self._bell], [], [], 0.1)
            self._look_after_wardens()
        for pid in self._wardens:
            os.kill(pid, signal.SIGKILL)
        self._wardens.clear()
        self._settle()


def _wait(pid: int = -1) -> tuple[int, int] | None:
    """A child that died or was stopped, if there is one."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
    except ChildProcessError:
        return None
    return (found, status) if found else None


def main(fd: int, modules: list[str]) -> None:
    """Be a zygote."""
    link = socket.socket(fileno=fd)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the launcher, which ends what it started
    become_subreaper()
    slot = Slot(SLOT_BYTES)  # before the first title, which wipes out the memory that it looks in
    show("zygote", "ready")
    assert asyncio.run is not None  # noqa: S101 - imported here, so that no target has to
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as exc:
        say(link, Ready(f"the module {module!r} could not be imported: {exc!r}"))
        return
    if threading.active_count() > 1:
        say(
            link,
            Ready("a module that should be imported beforehand started a thread; a process with threads cannot fork"),
        )
        return
    gc.collect()
    gc.disable()
    gc.freeze()
    Zygote(link, slot).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
