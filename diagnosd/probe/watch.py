"""The thread that looks on: it plays back what the training thread noted, and tells how the rank fares, also in a hang.

Every ROUND it accounts and sends; every 2 to 5 s it reads what only this process may read of itself. It never holds a
lock that the training thread waits for.
"""

import threading
import time
from typing import Any, Callable, Dict, List, Set

from diagnosd.probe import process
from diagnosd.probe.message import Value
from diagnosd.probe.reporter import Reporter, clock, seconds
from diagnosd.probe.sockets import Peers
from diagnosd.probe.steps import COMM, NAMES, OTHER

ROUND_SECONDS = 0.1
OBSERVE_SECONDS = (2.0, 5.0)
OBSERVE_SHARE = 0.001  # of one core, for what is read; a dearer look is taken less often, up to the 5 s
STATE_SECONDS = 60.0  # the contract's, for what changes seldom
HANG_SECONDS = 60.0  # a phase that lasts longer than this, and than HANG_STEPS steps, shows its stack
HANG_STEPS = 10
END_SECONDS = 1.0  # a look takes milliseconds; one that the kernel holds up does not hold up the job's exit


class Watch(threading.Thread):
    """Of one reporter; ends before the process does.

    Python tears down a thread that it finds running at its own end wherever that thread then is: in PyTorch's C++ too,
    where it frees what a garbage collection found in our thread, and that is SIGABRT.
    """

    def __init__(self, reporter: Reporter, *, main: int, hang_seconds: float = HANG_SECONDS) -> None:
        """`main` is the native id of the thread that trains."""
        super().__init__(name="diagnosd", daemon=True)
        self._reporter, self._main, self._hang_seconds = reporter, main, hang_seconds
        self._thread = reporter.thread or 0
        self._collections = process.Collections()
        self._peers = Peers()
        self._usage = process.Usage(main=main)
        self._every = OBSERVE_SECONDS[0]
        self._over = threading.Event()
        self._shown = 0  # when the phase began whose stack was shown
        self._told = self._tells()
        self._unread: Set[str] = set()  # sources that failed, told once

    def end(self) -> None:
        self._over.set()
        self.join(END_SECONDS)

    def run(self) -> None:
        try:
            self._go_on()
        except Exception as error:  # a thread of ours must not die with a traceback on the job's terminal
            self._reporter.fault("watching thread", error)
            self._reporter.last_words()

    def _go_on(self) -> None:
        reporter, next_look, next_state = self._reporter, 0.0, time.monotonic() + STATE_SECONDS
        while not self._over.is_set():
            reporter.overdue()
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + self._every
            reporter.play()
            tells = self._tells()
            if tells != self._told:  # a loader, an address or a layout was found after the hello
                self._told = tells
                reporter.sender.introduce()
            if time.monotonic() >= next_state:
                next_state = time.monotonic() + STATE_SECONDS
                reporter.tell_groups()
            reporter.sender.flush()
            self._over.wait(ROUND_SECONDS)

    def _tells(self) -> object:
        """What a hello says, as far as it changes."""
        return self._reporter.loader, self._reporter.rank, dict(self._reporter.facts)

    def _look(self) -> None:
        began = time.thread_time()
        fields = {**self._read("the process", self._resources), **self._read("the phase", self._whereabouts)}
        if fields:
            self._reporter.point("diagnosd_process", fields)
        for peer, counters in self._read("the connections", self._peers.read).items():
            self._reporter.point("diagnosd_socket", counters, {"peer": peer})
        if self._peers.addresses:
            self._reporter.facts["addresses"] = ",".join(sorted(self._peers.addresses))
        wanted = (time.thread_time() - began) / OBSERVE_SHARE
        self._every = min(max(wanted, OBSERVE_SECONDS[0]), OBSERVE_SECONDS[1])

    def _read(self, what: str, source: Callable[[], Dict[str, Any]]) -> Dict[str, Any]:
        """Nothing where it fails: one odd file never takes the other sources with it, least of all the steps."""
        try:
            return source()
        except Exception as error:
            if what not in self._unread:
                self._unread.add(what)
                self._reporter.event("telemetry_gap", "%s cannot be read: %r" % (what, error))
            return {}

    def _resources(self) -> Dict[str, Value]:
        fields, self._usage = process.rank_process("/proc", self._main, self._worker_pids(), self._usage)
        return {**fields, "gc_seconds": round(self._collections.seconds, 6)}

    def _worker_pids(self) -> List[int]:
        return [pid for pids in list(self._reporter.workers.values()) for pid in pids]

    def _whereabouts(self) -> Dict[str, Value]:
        """Phase, step, last collective, and once the stack of a phase that lasts beyond all measure."""
        reporter = self._reporter
        steps = reporter.steps
        if not reporter.on or not steps.entered:
            return {}
        lasts = clock() - steps.entered
        fields: Dict[str, Value] = {
            "phase": "compile" if steps.compiling else name_of(steps.phase),
            "phase_seconds": seconds(lasts),
            "step": steps.number,
        }
        group, count = reporter.collective
        if group:
            fields.update(group=group, seq=count)
        if self.hangs(lasts * 1e-9, reporter.step_ns * 1e-9) and self._shown != steps.entered:
            self._shown = steps.entered
            fields["stack"] = process.stack(self._thread)
        return fields

    def hangs(self, phase_seconds: float, step_seconds: float) -> bool:
        return phase_seconds > max(self._hang_seconds, HANG_STEPS * step_seconds)


def name_of(phase: int) -> str:
    """Of a phase as `diagnosd_process` tells it. After a fetch the model runs, whether or not a backward follows."""
    if phase == COMM:
        return "collective"
    return NAMES[phase] if phase <= OTHER else "forward"
