"""A warden: the process above one target, which answers for its whole tree.

It is a subreaper: whatever the target starts, with whatever session, belongs to the warden in the end and cannot leave. So a
warden without a child is the proof that the whole tree is dead, and it tells the launcher nothing before (Over). It alone
decides why a tree ended: the first reason to arrive, from the launcher or from a limit, is final.

    manager gone (its socket ends)       kill the tree, go
    the target ended, its children live  they get LINGER_MS to write what they have, then they are killed
    timeout, stop                        TERM to all, KILL to all after the grace
    memory or fds above the limit        kill the tree
    cpu above the limit                  stop and continue the tree, so that the average is the limit
    the warden itself is killed          its target dies with it, and the zygote, a subreaper too, kills the rest

It sleeps in `poll` and wakes for a message, a dead child, or the next thing that is due: soon after the start a sample every
few milliseconds, later more seldom, unless a limit must be watched. Output does not pass through here: the target's pipes
lead to the launcher.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
from typing import Final, NamedTuple

from holdfast.clock import elapsed_ms
from holdfast.processes import tree
from holdfast.processes.kernel import Slot, become_subreaper, started_ticks
from holdfast.processes.messages import (
    Answer,
    Hello,
    Measure,
    Over,
    Pause,
    Reason,
    Refused,
    Resume,
    Started,
    Stop,
    Work,
    hear,
    refusals,
    requests,
    say,
)
from holdfast.processes.orders import MARKER_VARIABLE
from holdfast.processes.target import become
from holdfast.processes.titles import show

LINGER_MS: Final = 100
"""What children of an ended target get to finish, such as the `tee` of a shell's pipe."""
TIMEOUT_GRACE_MS: Final = 400
"""Between TERM and KILL when the time is over."""
FIRST_SAMPLES_MS: Final = 20
"""The pace of samples in a tree's first half second."""
YOUNG_MS: Final = 500
LIMITED_SAMPLES_MS: Final = 50
"""The pace afterwards, where a limit must be watched."""
FREE_SAMPLES_MS: Final = 1_000
FREE_SAMPLES_MS_MAX: Final = 10_000
"""The pace afterwards where there is none: ever more seldom, as the tree grows older. Usage is measured when it is asked for."""
THROTTLE_MS: Final = 20
"""The pace at which the CPU of a limited tree is looked at while it runs."""
THROTTLE_BURST_MS: Final = 100
"""How much of its share a tree that was idle can use at once."""
HELD_MS_MAX: Final = 1_000
"""The longest that a tree is held back at once."""
PAUSING_ROUNDS: Final = 400
"""Walks before a pause is called done; on a busy machine a member stands still only when it gets its turn."""
STILL_MS: Final = 250
"""How often a paused tree is looked at, in case somebody continued one of its members."""
COPY_BYTES: Final = 4 * 1024 * 1024
"""A target that never needed this much more than its warden has no peak of its own in the kernel's record."""
FELLING_MS: Final = 5
"""Between two passes over a tree that is being killed."""
GROUPS_AFTER: Final = 3
"""After so many passes, whole process groups are killed."""


class Streams(NamedTuple):
    """The descriptors of a launch, in the order in which they are sent."""

    link: int
    stdin: int
    stdout: int
    stderr: int
    outcome: int


class Warden:
    """One target's."""

    def __init__(self, link: socket.socket, work: Work, target: int, trouble: int, bell: int) -> None:
        self._link = link
        self._work = work
        self._target = target
        self._trouble = trouble
        self._bell = bell
        self._self = os.getpid()
        self._began = elapsed_ms()
        self._reason: Reason | None = None
        self._status: int | None = None
        self._refused: Refused | None = None
        self._alone = False
        """The manager is gone; nobody is told anything."""
        self._felling = 0
        """Passes of killing so far."""
        self._due: dict[str, int] = {}
        """What happens when, in elapsed milliseconds."""
        self._paused = False
        self._time_left_ms: int | None = None
        """Of the timeout, while the tree is paused."""
        self._held = False
        self._peak_memory = self._max_fds = 0
        self._own_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._spent = 0.0
        self._counted_at = self._began
        self._balance_ms = 0.0

    # --- the loop ---

    def run(self) -> None:
        """Return when the tree is dead."""
        if self._work.timeout_ms is not None:
            self._schedule("timeout", self._work.timeout_ms)
        if self._work.cpu_percent is not None:
            self._schedule("throttle", THROTTLE_MS)
        poll = select.poll()
        for fd in (self._link.fileno(), self._bell, self._trouble):
            poll.register(fd, select.POLLIN)
        while self._reap():
            for fd, _ in poll.poll(self._patience()):
                if fd == self._bell:
                    quieten(fd)
                elif fd == self._trouble:
                    poll.unregister(fd)
                    self._hear_of_trouble()
                elif not self._hear():
                    poll.unregister(fd)
                    self._alone = True
                    self._fell("killed")
            self._do_what_is_due()
        self._tell_the_end()

    def _schedule(self, what: str, in_ms: float) -> None:
        self._due[what] = elapsed_ms() + max(1, round(in_ms))

    def _patience(self) -> int | None:
        return max(0, min(self._due.values()) - elapsed_ms()) if self._due else None

    def _do_what_is_due(self) -> None:
        now = elapsed_ms()
        for what in [what for what, at in self._due.items() if at <= now]:
            if self._due.pop(what, None) is None:
                continue  # what was done before it made it needless
            match what:
                case "sample":
                    self._sample()
                case "throttle":
                    self._throttle()
                case "timeout":
                    self._stop("timeout", TIMEOUT_GRACE_MS)
                case "still":
                    tree.freeze(self._self)
                    self._schedule("still", STILL_MS)
                case _:  # "grace", "linger", "fell"
                    self._fell(self._reason)

    def _reap(self) -> bool:
        """Wait for whoever is dead; tells whether anybody is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._target:
                self._status = status
                if self._reason is None:
                    self._reason = "exited"
                self._due.pop("timeout", None)
                if not self._felling:
                    self._schedule("linger", LINGER_MS)

    # --- what it is told ---

    def _hear(self) -> bool:
        """Do what the launcher asks; False when it is gone."""
        body = hear(self._link)
        if body is None:
            return False
        match requests.decode(body):
            case Stop(reason, grace_ms):
                self._stop(reason, grace_ms)
                say(self._link, Answer())
            case Pause():
                self._pause()
                say(self._link, Answer())
            case Resume():
                self._resume()
                say(self._link, Answer())
            case Measure():
                say(self._link, self._measure())
            case Work():
                return False  # there is one at the beginning, and no other
        return True

    def _hear_of_trouble(self) -> None:
        """The target was executed and the pipe closed; or it says why not."""
        said = b""
        while part := os.read(self._trouble, 65_536):
            said += part
        os.close(self._trouble)
        self._trouble = -1
        if said:
            self._refused = refusals.decode(said)
        else:
            say(self._link, Started(self._target, started_ticks(self._target) or 0))
            self._sample()  # not before: until then the target is a copy of this process

    def _stop(self, reason: Reason, grace_ms: int) -> None:
        if self._felling:
            return
        if self._reason is None:
            self._reason = reason
            self._show("stopping")
        if grace_ms <= 0:
            self._fell(reason)
            return
        # Who is asked a second time may be given less time, never more.
        self._due["grace"] = min(self._due.get("grace", 1 << 62), elapsed_ms() + grace_ms)
        self._due.pop("timeout", None)
        self._due.pop("throttle", None)
        self._due.pop("still", None)
        tree.signal_all(self._self, signal.SIGTERM)
        self._paused = self._held = False
        tree.signal_all(self._self, signal.SIGCONT)

    def _fell(self, reason: Reason | None) -> None:
        """Kill the tree; again and again, until there is nobody to wait for."""
        if self._reason is None:
            self._reason = reason
        self._due.clear()
        tree.kill_all(self._self, groups=self._felling >= GROUPS_AFTER)
        self._felling += 1
        self._schedule("fell", FELLING_MS * min(self._felling, 20))

    def _pause(self) -> None:
        if self._felling or self._reason is not None:
            return
        if not self._paused:
            self._paused = True
            at = self._due.pop("timeout", None)
            self._time_left_ms = None if at is None else max(1, at - elapsed_ms())
            self._show("paused")
        tree.freeze(self._self, PAUSING_ROUNDS)
        self._schedule("still", STILL_MS)

    def _resume(self) -> None:
        if not self._paused:
            return
        self._paused = False
        if self._time_left_ms is not None:
            self._schedule("timeout", self._time_left_ms)
        self._due.pop("still", None)
        self._counted_at = elapsed_ms()
        self._show("running")
        if not self._held:
            tree.signal_all(self._self, signal.SIGCONT)

    # --- limits ---

    def _sample(self) -> None:
        """Look at what the tree uses, and end it where that is too much."""
        work = self._work
        use = tree.measure(self._self, memory_limit=work.memory_bytes)
        self._peak_memory = max(self._peak_memory, use.memory)
        self._max_fds = max(self._max_fds, use.fds)
        if work.memory_bytes is not None and use.memory > work.memory_bytes:
            self._fell("memory")
        elif work.max_fds is not None and use.fds > work.max_fds:
            self._fell("fds")
        else:
            self._schedule("sample", self._pace())

    def _pace(self) -> float:
        age = elapsed_ms() - self._began
        if age < YOUNG_MS:
            return FIRST_SAMPLES_MS
        if self._work.memory_bytes is not None or self._work.max_fds is not None:
            return LIMITED_SAMPLES_MS
        return min(max(FREE_SAMPLES_MS, age), FREE_SAMPLES_MS_MAX)

    def _throttle(self) -> None:
        """Stop a tree that used more than its share, until the share has caught up."""
        assert self._work.cpu_percent is not None  # noqa: S101 - it is only scheduled with one
        share = self._work.cpu_percent / 100
        now, spent = elapsed_ms(), self._cpu_seconds()
        if not self._paused:
            self._balance_ms += (now - self._counted_at) * share - (spent - self._spent) * 1000
            self._balance_ms = min(self._balance_ms, THROTTLE_BURST_MS * share)
        self._counted_at, self._spent = now, spent
        if self._balance_ms < 0:
            tree.freeze(self._self)  # again while it is held: somebody may have continued a member
            self._held = True
            self._schedule("throttle", min(-self._balance_ms / share, HELD_MS_MAX))
        else:
            if self._held and not self._paused:
                tree.signal_all(self._self, signal.SIGCONT)
            self._held = False
            self._schedule("throttle", THROTTLE_MS)

    def _cpu_seconds(self) -> float:
        """Of the whole tree: who was waited for here, and who is there with whom they waited for."""
        return _reaped_seconds() + sum(member.cpu_seconds for member in tree.members(self._self))

    def _measure(self) -> Answer:
        use = tree.measure(self._self, memory_limit=self._work.memory_bytes)
        self._peak_memory = max(self._peak_memory, use.memory)
        self._max_fds = max(self._max_fds, use.fds)
        spent = _reaped_seconds() + use.cpu_seconds
        return Answer(use.memory, self._peak_memory, spent, use.fds, self._max_fds, use.processes)

    # --- what it tells ---

    def _show(self, state: str) -> None:
        name = self._work.name or self._work.function or (self._work.argv or [""])[0].rpartition("/")[2]
        show(self._work.short, state, name)

    def _tell_the_end(self) -> None:
        if self._alone:
            return
        if self._trouble >= 0:
            self._hear_of_trouble()
        if self._refused is not None:
            say(self._link, self._refused)
            return
        # A tree that was over before its first sample, or grew between two, is told by the kernel's own record. It also
        # counts the moment before the command was executed, when the target was a copy of this process.
        recorded = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        if recorded > self._own_peak + COPY_BYTES or self._peak_memory == 0:
            self._peak_memory = max(self._peak_memory, recorded)
        status = self._status or 0
        say(
            self._link,
            Over(
                reason=self._reason or "exited",
                code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                peak_memory=self._peak_memory,
                cpu_seconds=_reaped_seconds(),
                max_fds=self._max_fds,
                duration_ms=elapsed_ms() - self._began,
            ),
        )


def guard(streams: Streams, slot: Slot) -> None:
    """Be a warden: take the work, fork the target, stay until its tree is dead."""
    become_subreaper()
    os.setsid()
    link = socket.socket(fileno=streams.link)
    link.setblocking(True)
    pid = os.getpid()
    say(link, Hello(pid, started_ticks(pid) or 0))
    body = hear(link)
    work = None if body is None else requests.decode(body)
    if not isinstance(work, Work):
        return
    slot.write(f"{MARKER_VARIABLE}={work.marker}")
    bell = hang_bell()
    hearing, telling = os.pipe()
    target = os.fork()
    if target == 0:
        os.close(hearing)
        become(work, streams[1:4], streams.outcome, telling, pid, slot)
    for fd in (telling, *streams[1:]):
        os.close(fd)
    gc.freeze()
    warden = Warden(link, work, target, hearing, bell)
    warden._show("running")
    warden.run()


def _reaped_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def hang_bell() -> int:
    """A descriptor that becomes readable when a child dies."""
    hearing, ringing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(ringing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return hearing


def quieten(bell: int) -> None:
    """Take note that it rang."""
    try:
        while os.read(bell, 4096):
            pass
    except BlockingIOError:
        return
