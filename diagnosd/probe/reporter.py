"""The one reporter of this process: who it is, whether it may speak, and what it says of each step.

The training thread only takes notes: a method of `Steps`, a time and a few words. The watching thread plays them back:
it does the accounting, encodes and sends. That is 7, 6 and 3 us a step in a loop, and three times as much between two
steps' arithmetic, where the code is cold.

Nothing here may harm the job: one fault of ours switches the probe off for good. It says so once, on stderr and to the
agent.
"""

import atexit
import functools
import json
import os
import sys
import threading
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Mapping, Optional, Sequence, Tuple

from diagnosd.probe import identity
from diagnosd.probe.message import DEFAULT_SOCKET, Hello, Value, encode
from diagnosd.probe.sender import Sender
from diagnosd.probe.steps import BACKWARD, COMM, DATA_WAIT, FORWARD, NAMES, OPTIMIZER, Step, Steps

# Of a step's time, what the probe may take from the training thread: 200 us of 50 ms. Judged over 100 steps by what a
# step usually costs: on a busy machine the thread loses its core for milliseconds, and in some steps while it is in our
# code. (A clock of the thread's own CPU time would not count that, but is a system call: 600 ns against 90.)
OWN_SHARE = 0.004
OWN_STEPS = 100
OWN_SPARED = 5  # durations, of the longest steps: a checkpoint hides no cost
NOTES = 200_000  # entries, of some 32 a step: six seconds of steps of 1 ms in which the watching thread did not run
COLD = 3  # times what a note takes in a loop, it takes between two steps' arithmetic: 17 us for 6 were seen

_TOLD_AS_ZERO = (DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER, COMM)  # once the process has been in them
_HOST_ONLY = ("data_wait", "checkpoint", "eval", "blocked")  # all that the host's clock may say beside a device's
_NOT_SPLIT = ("backward", "comm", "other")  # unknown where a backward is not known apart from its communication
_ENVIRONMENT = ("NCCL_", "TORCH_", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")  # beginnings of names

clock = time.perf_counter_ns
thread_id = threading.get_ident

# A note is four entries in a row: a method of Steps, the ns that finding its arguments out took, its time, its other
# arguments. In a row, because what is kept in tuples is memory that the next notes find cold.
NOTE = 4
Told = Callable[[Mapping[str, float], int], bytes]  # a step's message, from its device times and its number


class Reporter:
    """Of this process. Registers with the agent when training shows, never before.

    `look_on` starts what watches it from then on; the thread that trains calls it.
    """

    def __init__(self, environ: Mapping[str, str], look_on: "Callable[[Reporter], None]") -> None:
        self.on = not identity.is_off(environ)
        self.registered = False
        self.thread = threading.main_thread().ident if self.on else 0  # the one whose time is accounted; 0 for none
        self.notes: Deque[Any] = deque(maxlen=NOTES)
        self.points: Deque[Callable[[int], bytes]] = deque()  # messages on their way to the watching thread
        self.steps = Steps(self._step_over)
        self.own_share: Optional[float] = OWN_SHARE
        self.step_ns = 0  # a typical step, once 100 are over
        self.device = ""  # the kind of device that runs the model on its own clock, "" for the host
        self.loader = "none"
        self.workers: Dict[int, Tuple[int, ...]] = {}  # pids of the workers, by the id of what iterates
        self.collective: Tuple[str, int] = ("", 0)  # group and count of the last one entered
        self.tell: Callable[[Told, Step], None] = self._tell
        self.overdue: Callable[[], None] = lambda: None
        self.facts: Dict[str, Value] = {}  # more fields of diagnosd_rank
        self.groups: Dict[str, Dict[str, Value]] = {}  # fields of each diagnosd_group
        self.rank = identity.rank_of(environ)
        self.sender = Sender(environ.get("DIAGNOSD_SOCKET") or DEFAULT_SOCKET, self._hello)
        self.at_register: List[Callable[[], None]] = []
        self.at_off: List[Callable[[], None]] = []  # what was patched is put back
        self.at_exit: List[Callable[[], None]] = []
        self.costs: List[int] = []  # of the last steps, ns of the training thread
        self._timed: List[bool] = []  # whether DDP took stock in these, which is dear and not done in every step
        self._cost = 0
        self._note_ns = 0
        self._durations: List[int] = []
        self._environ = environ
        self._look_on = look_on
        self._job = ""
        self._pid = 0
        self.training = 0  # the same, once a call that only training makes has been seen
        self._playing = threading.Lock()
        os.register_at_fork(after_in_child=self._forked)

    # --- presence -------------------------------------------------------------------------------------------------

    def trains(self) -> bool:
        """Whether the calling thread, which makes a call that only training makes, is the one that is accounted.

        The first such call decides which thread that is, and makes this process known.
        """
        if not self.training and self.on:
            if self.thread != thread_id():
                self.notes.clear()
            self.thread = self.training = thread_id()
            self.register()
        return self.training == thread_id()

    def register(self) -> None:
        """Training shows in this process: from now on the agent knows it. Called by the thread that trains."""
        if self.registered or not self.on:
            return
        self.registered, self._pid = True, os.getpid()
        try:
            self._introduce()
        except Exception as error:  # no thread left, say: this is called in the middle of the script's own backward()
            self.fault("registering", error)
            self.last_words()

    def _introduce(self) -> None:
        self.identify()
        atexit.register(self._finish)
        if "multiprocessing.util" in sys.modules:  # its children end without atexit
            sys.modules["multiprocessing.util"].Finalize(None, self._finish, exitpriority=10)
        self.sender.flush()
        self._look_on(self)

    def identify(self) -> None:
        """Find out who this process is: late, because launchers and scripts set the environment up as they go."""
        if len(self.notes) == NOTES:
            self.notes.clear()  # there was nobody to take them: a process that loaded or saved a lot before it trained
        self.rank = identity.rank_of(self._environ)
        self._job = identity.job_name(self._environ, identity.launcher_pid(self._environ, _spawner()))
        self.facts["versions"] = "python=%d.%d.%d" % sys.version_info[:3]
        self.facts["env"] = _environment(self._environ)
        self._note_ns = COLD * _note_ns()
        for act in self.at_register:
            act()

    def off(self, reason: str) -> None:
        """No more steps from this process. Its place among the ranks stays: it is not dead."""
        if not self.on:
            return
        self.on, self.thread, self.training = False, 0, 0
        say("the probe in process %d switched itself off: %s" % (os.getpid(), reason))
        for put_back in self.at_off:
            try:
                put_back()
            except Exception as error:
                say("%r was not put back: %r" % (put_back, error))
        self.notes.clear()
        if self.registered:
            self.event("telemetry_gap", "probe off: " + reason)

    def fault(self, where: str, error: BaseException) -> None:
        self.off("%s: %s: %s" % (where, type(error).__name__, error))

    def _finish(self) -> None:
        """At exit: the last step, whose end nothing followed, and what still waits."""
        if os.getpid() != self._pid:  # inherited by a fork
            return
        try:
            for end in self.at_exit:
                end()
            self.notes.extend((Steps.end_of_pending, 0, clock(), ()))
            self.play()
            self.on, self.thread, self.training = False, 0, 0
            self.overdue()
        except Exception as error:
            self.fault("at exit", error)
        self.last_words()
        self.sender.close()

    def last_words(self) -> None:
        """Where nobody comes later to send them."""
        try:
            self.play()
            self.sender.flush()
        except Exception as error:
            say("the agent was not told: %r" % (error,))

    def _forked(self) -> None:
        """The child of a rank is none. The child of a launcher that forks its ranks may become one."""
        self.sender.close()
        self.sender = Sender(self.sender.path, self._hello)
        self.notes.clear()
        self.points.clear()
        self.groups.clear()
        self.steps = Steps(self._step_over)
        self.on = self.on and not self.registered
        self.thread = thread_id() if self.on else 0
        self.training = 0
        self._playing = threading.Lock()

    # --- steps ----------------------------------------------------------------------------------------------------

    def play(self) -> None:
        """Account for what was noted so far. By the watching thread, and at exit."""
        with self._playing:
            if len(self.notes) == NOTES:
                self.off("its thread was kept from running for %d notes" % (NOTES // NOTE))
            try:
                take = self.notes.popleft
                while self.notes and self.on:
                    method, cost, t, arguments = take(), take(), take(), take()
                    self._cost += cost + self._note_ns
                    method(self.steps, t, *arguments)
            except Exception as error:
                self.fault("accounting", error)
            while self.points:
                self.sender.send(self.points.popleft())

    def _step_over(self, step: Step) -> None:
        self.tell(functools.partial(self._step_message, step), step)
        self.costs.append(self._cost)
        self._timed.append(step.split)
        self._durations.append(step.duration)
        self._cost = 0
        if len(self._durations) == OWN_STEPS:
            self._judge_cost()

    def _tell(self, told: Told, _step: Step) -> None:
        self.points.append(functools.partial(told, {}))

    def _step_message(self, step: Step, device: Mapping[str, float], number: int) -> bytes:
        fields = step_fields(step, self.steps.used, bool(self.device))
        fields["kind"] = ("compile" if step.compiled else "train") if step.number else "warmup"
        fields.update(device)
        if step.sync is not None and step.split and not self.device:  # else a larger one may have gone untimed
            bytes_, enter, exit_, group = step.sync
            fields.update(sync_bytes=bytes_, sync_enter=wall(enter), sync_exit=wall(exit_), sync_group=group)
        if self.rank.attempt is not None:
            fields["attempt"] = self.rank.attempt
        return encode(number, "diagnosd_step", fields, wall(step.end), {"source": "probe"})

    def _judge_cost(self) -> None:
        durations = sorted(self._durations)
        self.step_ns = durations[len(durations) // 2]
        share = usual_cost(self.costs, self._timed) / max(1, sum(durations[:-OWN_SPARED]) / (OWN_STEPS - OWN_SPARED))
        self.costs, self._durations, self._timed = [], [], []
        if self.own_share is not None and share > self.own_share:
            told = (100 * share, 100 * self.own_share, self.step_ns * 1e-6)
            self.off("it took %.1f %% of the time, more than %.1f %%, of steps of %.2f ms" % told)

    # --- messages -------------------------------------------------------------------------------------------------

    def _hello(self, number: int) -> Hello:
        self.tell_groups()  # an agent that is new knows none
        rank, world, local_rank, attempt = self.rank
        fields = dict(self.facts, loader=self.loader)
        return Hello(number, self._job, rank, world, local_rank, attempt, os.getpid(), fields, time.time_ns())

    def point(self, measurement: str, fields: Mapping[str, Value], tags: Optional[Mapping[str, str]] = None) -> None:
        """A point of now. From any thread."""
        self.points.append(functools.partial(_encoded, measurement, fields, time.time_ns(), tags))

    def group(self, name: str, fields: Dict[str, Value]) -> None:
        """A process group that this rank is in has been met."""
        self.groups[name] = fields
        self.point("diagnosd_group", fields, {"group": name})

    def tell_groups(self) -> None:
        for name, fields in list(self.groups.items()):
            self.point("diagnosd_group", fields, {"group": name})

    def event(self, kind: str, text: str) -> None:
        tags = {"kind": kind, "subject": "rank:%d" % self.rank.rank}
        self.point("diagnosd_event", {"text": " ".join(text.split())[:1000]}, tags)


def say(text: str) -> None:
    """To whoever watches the job's output. Scripts close stderr, and some have none."""
    try:
        sys.stderr.write("diagnosd: %s\n" % text)
    except Exception:  # there is nobody left to tell
        return


def wall(t: int) -> int:
    """The wall clock, in ns, at `t` of our own: intervals are measured by the latter, which nobody sets."""
    return time.time_ns() - (clock() - t)


def step_fields(step: Step, used: List[bool], asynchronous: bool) -> Dict[str, Value]:
    """Fields of `diagnosd_step`; seconds to the nanosecond.

    Where a device runs on its own clock (`asynchronous`), the host's says nothing of the phases that it only enqueues.
    """
    fields: Dict[str, Value] = {"step": step.number, "duration": seconds(step.duration)}
    fields["clock"] = "device" if asynchronous else "host"
    for phase, name in enumerate(NAMES):
        told = used[phase] if phase in _TOLD_AS_ZERO else step.spent[phase] > 0
        if told and (name in _HOST_ONLY if asynchronous else step.split or name not in _NOT_SPLIT):
            fields[name] = seconds(step.spent[phase])
    fields.update((name, count) for name, count in (("samples", step.samples), ("tokens", step.tokens)) if count)
    if step.queue is not None:
        fields.update(queue_size=step.queue.size, workers=step.queue.workers)
        if step.queue.ready is not None:
            fields["queue"] = step.queue.ready
    return fields


def usual_cost(costs: Sequence[int], timed: Sequence[bool]) -> float:
    """A step's, in ns: of each of the two kinds of steps the median, by how many there are."""
    total = 0
    for kind in (False, True):
        ours = sorted(cost for cost, of_kind in zip(costs, timed) if of_kind == kind)  # noqa: B905 - Python 3.8
        total += len(ours) * ours[len(ours) // 2] if ours else 0
    return total / max(1, len(costs))


def seconds(ns: int) -> float:
    return round(ns * 1e-9, 9)


def _encoded(
    measurement: str, fields: Mapping[str, Value], time_ns: int, tags: Optional[Mapping[str, str]], number: int
) -> bytes:
    return encode(number, measurement, fields, time_ns, tags)


def _note_ns() -> int:
    """What a note takes in a loop: the fastest of five, for the others may have lost the core."""
    notes: Deque[Any] = deque()
    thread, taken = thread_id(), []
    for _ in range(5):
        began = clock()
        for _ in range(40):
            if thread == thread_id():
                notes.extend((Steps.leave, 0, clock(), ()))
        taken.append((clock() - began) // 40)
    return min(taken)


def _environment(environ: Mapping[str, str]) -> str:
    """What steers communication, as JSON. Not what may be a path: those are nobody's business by default."""
    told = {
        key: value[:200]
        for key, value in sorted(environ.items())
        if key.startswith(_ENVIRONMENT) and "/" not in value and not value.startswith("~")
    }
    while len(json.dumps(told)) > 4000:
        told.popitem()
    return json.dumps(told)


def _spawner() -> Optional[int]:
    """The pid of the process that started this one by multiprocessing, if one did."""
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    parent = multiprocessing.parent_process() if multiprocessing else None
    return parent.pid if parent else None
