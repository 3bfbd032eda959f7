"""The accounting of a step: where each nanosecond of the training thread went, and where one step ends.

Every moment belongs to exactly one phase, the innermost that is open, so that the phases of a step add up to its
duration exactly. Times are integers in nanoseconds of one clock that the caller reads; nothing here knows PyTorch. Each
method takes the time first: it is what the training thread notes, and another thread plays back a moment later.

Time between calls has no name of its own. After a fetch (or after the forward of a DDP module) it is LOOSE: a backward
that follows claims it as forward, for the loss and the model run there; anything else that follows leaves it to OTHER.

A step ends at the last optimizer call before the next fetch, or before the same optimizer steps again for a new
backward. So a GAN's two optimizers make one step, ten updates after one fetch make ten, and accumulated
backwards belong to the update that uses them. As long as a single optimizer is known, its call ends the step at once.
Checkpoints and evaluation after it belong to the next step. Where no optimizer was ever called, from the third fetch on
a step ends where the next fetch begins.

A stretch from one fetch to the next without a backward is evaluation if its loader never fed a backward.
"""

from typing import Any, Callable, Dict, Hashable, List, NamedTuple, Optional, Set

DATA_WAIT, H2D, FORWARD, BACKWARD, OPTIMIZER, COMM, CHECKPOINT, EVAL, BLOCKED, OTHER, LOOSE = range(11)
NAMES = ("data_wait", "h2d", "forward", "backward", "optimizer", "comm", "checkpoint", "eval", "blocked", "other")

FETCHES_WITHOUT_OPTIMIZER = 3
MARKS = 4096  # kept of a step: an inference of a million copies to a device may lie between two updates
EAGER_AFTER = 3  # steps: by then a second optimizer would have shown itself
_INNER = (COMM, H2D, BLOCKED)  # inside a checkpoint or an evaluation these are parts of it


class Sync(NamedTuple):
    """A collective that the host blocked in: bytes, start, end, and the group that met in it."""

    bytes: int
    enter: int
    exit: int
    group: str


class Queue(NamedTuple):
    """A loader's prefetch queue when the step asked: batches ready in order (None: unknown), its capacity, workers."""

    ready: Optional[int]
    size: int
    workers: int


class Part:
    """A stretch of a step: from a fetch, or from an optimizer call, to the next."""

    __slots__ = (
        "backward",
        "compiled",
        "loader",
        "marks",
        "queue",
        "samples",
        "spent",
        "split",
        "stepped",
        "sync",
        "tokens",
    )

    def __init__(self) -> None:
        self.spent = [0] * 11
        self.loader: Optional[Hashable] = None
        self.backward = False
        self.split = True  # whether BACKWARD and COMM are known apart
        self.stepped: Set[Hashable] = set()
        self.samples = 0
        self.tokens = 0
        self.queue: Optional[Queue] = None
        self.sync: Optional[Sync] = None
        self.marks: List[Any] = []
        self.compiled = False

    def join(self, later: "Part") -> None:
        """What follows belongs to the same step: an inference of a million batches is one stretch, not a million."""
        self.spent = [a + b for a, b in zip(self.spent, later.spent)]  # noqa: B905 - Python 3.8 knows no strict
        self.split = self.split and later.split
        self.stepped |= later.stepped
        self.samples += later.samples
        self.tokens += later.tokens
        self.queue = self.queue if self.queue is not None else later.queue
        self.synced(later.sync)
        self.compiled = self.compiled or later.compiled
        for mark in later.marks:
            self.marked(mark)

    def synced(self, sync: Optional[Sync]) -> None:
        """Keep the largest collective of the step; of equals the last, so that all ranks keep the same one."""
        if sync is not None and (self.sync is None or sync.bytes >= self.sync.bytes):
            self.sync = sync

    def marked(self, mark: Any) -> None:
        """Beyond MARKS the last makes room for the next: where the step began and where it ended stay known."""
        if len(self.marks) >= MARKS:
            self.marks.pop()
        self.marks.append(mark)


class Step(NamedTuple):
    """A step that is over. `spent` is indexed by phase and sums to `duration`; `marks` are the caller's."""

    number: int
    end: int
    duration: int
    spent: List[int]
    split: bool
    samples: int
    tokens: int
    queue: Optional[Queue]
    sync: Optional[Sync]
    marks: List[Any]
    compiled: bool


class Steps:
    """`over` receives each step when it is known to be over."""

    def __init__(self, over: Callable[[Step], None]) -> None:
        self.number = 0
        self.phase = OTHER
        self.since = 0  # when the present phase began or was last looked at
        self.entered = 0  # when the innermost call began
        self.used = [False] * 11  # phases that this process has ever been in
        self.compiling = False
        self.explicit = False  # the script says itself where a step ends
        self._over = over
        self._began: Optional[int] = None
        self._stack: List[int] = []
        self._calls: Dict[Hashable, int] = {}  # optimizers in their step, with the length of the stack before it
        self._part = Part()
        self._parts: List[Part] = []
        self._last = 0  # how many of _parts the last optimizer call closes
        self._end = 0  # when that call returned
        self._optimizers: Set[Hashable] = set()
        self._training: Set[Hashable] = set()  # loaders that fed a backward
        self._fetches = 0
        self._backward_seen = False
        self._gradients = False  # there are some that no optimizer has used yet
        self._eager = True

    # --- phases ---------------------------------------------------------------------------------------------------

    def enter(self, t: int, phase: int) -> None:
        """A call begins at `t`; each `enter` is followed by one `leave`."""
        self._part.spent[self.phase] += t - self.since
        self._stack.append(self.phase)
        if phase in _INNER and self.phase in (CHECKPOINT, EVAL):
            phase = self.phase
        self.phase = phase
        self.used[phase] = True
        self.since = self.entered = t

    def leave(self, t: int) -> None:
        self._part.spent[self.phase] += t - self.since
        self.phase = self._stack.pop()
        self.since = self.entered = t

    def _rest(self, phase: int, t: int) -> None:
        """From `t` on, time outside any call counts as `phase`."""
        if self._stack:
            self._stack[0] = phase
            return
        self._part.spent[self.phase] += t - self.since
        self.phase = phase
        self.since = self.entered = t

    def _unwind(self, t: int, depth: int = 0) -> None:
        """Leave what lies deeper: an optimizer that raises never says that it ended."""
        while len(self._stack) > depth:
            self.leave(t)
        self._calls = {caller: before for caller, before in self._calls.items() if before < depth}

    def _start(self, t: int) -> None:
        """The first step begins with the first fetch, forward, backward or update; what was before is none's."""
        if self._began is None:
            self._began = self.since = t
            self._part = Part()

    # --- what a training loop does --------------------------------------------------------------------------------

    def loading_begins(self, t: int) -> None:
        """A loader starts its workers, say. It is waited for like a fetch, and is none; `leave` ends it."""
        self._start(t)
        if self.phase == OPTIMIZER:  # nobody fetches inside one
            self._unwind(t)
        if not self._stack:
            self._rest(OTHER, t)
            self.end_of_pending(t)
            if self._part.loader is not None or self._part.backward or self._part.spent[EVAL]:
                self._seal()
        self.enter(t, DATA_WAIT)

    def fetch_begins(self, t: int, loader: Hashable) -> None:
        if self._last:
            self._fetches = 0
        elif not self._stack and not self.explicit:
            self._end_by_fetch(t)
        self.loading_begins(t)
        if len(self._stack) == 1:
            self._part.loader = loader

    def fetch_ends(self, t: int, samples: int = 0, tokens: int = 0, queue: Optional[Queue] = None) -> None:
        self.leave(t)
        self.add(t, samples, tokens)
        if self._part.queue is None:
            self._part.queue = queue
        if not self._stack:
            self._rest(LOOSE, t)

    def forward_begins(self, t: int) -> None:
        self._start(t)
        if not self._stack:
            self._rest(OTHER, t)
            self._unclaimed(self._part)
        self.enter(t, FORWARD)

    def forward_ends(self, t: int) -> None:
        self.leave(t)
        self._rest(LOOSE, t)

    def backward_begins(self, t: int) -> None:
        self._start(t)
        part = self._part
        if not self._stack:
            self._rest(OTHER, t)
            if part.spent[LOOSE]:
                self.used[FORWARD] = True
        part.spent[FORWARD] += part.spent[LOOSE]
        part.spent[LOOSE] = 0
        part.backward = self._backward_seen = self._gradients = True
        if part.loader is not None:
            self._training.add(part.loader)
        self.enter(t, BACKWARD)

    def backward_ends(self, t: int, sync: Optional[Sync] = None, split: bool = True) -> None:
        """From the begin of `sync` on, this call waited; `split` is False where it is not known since when."""
        spent = self._part.spent
        self.leave(t)
        self._part.split = self._part.split and split
        if sync is not None:
            exposed = max(0, min(t - sync.enter, spent[BACKWARD]))
            spent[BACKWARD] -= exposed
            spent[COMM] += exposed
            self.used[COMM] = True
            self._part.synced(sync)
        if not self._stack and self._part.stepped:  # the optimizer ran inside the backward
            self._updated(t)

    def collective_ends(self, t: int, sync: Optional[Sync]) -> None:
        """What `enter` with COMM began; `sync` is None for one that moved nothing, or was only issued."""
        if self.phase == COMM:  # not a part of a checkpoint or an evaluation
            self._part.synced(sync)
        self.leave(t)

    def optimizer_begins(self, t: int, caller: Hashable) -> None:
        """`caller` is the optimizer, or the scaler that may call it. One that was in its step already had raised."""
        self._start(t)
        if caller in self._calls:
            self._unwind(t, self._calls[caller])
        self._calls[caller] = len(self._stack)
        self.enter(t, OPTIMIZER)

    def optimizer_ends(self, t: int, optimizer: Hashable, caller: Optional[Hashable] = None) -> None:
        depth = self._calls.get(optimizer if caller is None else caller)
        if depth is None:  # it called its parent's step, which was taken for its own next one
            return
        self._unwind(t, depth)
        self._part.stepped.add(optimizer)
        self._optimizers.add(optimizer)
        if not self._stack:
            self._rest(OTHER, t)
            self._updated(t)

    def checkpoint_begins(self, t: int) -> None:
        self.end_of_pending(t)
        self.enter(t, CHECKPOINT)

    def evaluation_begins(self, t: int) -> None:
        """It lasts until the next fetch, forward or backward of training."""
        if not self._stack and self._began is not None:
            self.end_of_pending(t)
            self._rest(EVAL, t)
            self.used[EVAL] = True

    def add(self, _t: int, samples: int, tokens: int) -> None:
        """More that this step processes."""
        self._part.samples += samples
        self._part.tokens += tokens

    def step_begins(self, t: int, number: Optional[int] = None) -> None:
        """The script says so itself: nothing else ends a step from now on."""
        self.explicit = True
        self._start(t)
        if number is not None:
            self.number = number

    def step_ends(self, t: int) -> None:
        self._rest(OTHER, t)
        self._part.spent[self.phase] += t - self.since
        self.since = t
        self._seal()
        self._last, self._end = len(self._parts), t
        self._close()

    def mark(self, _t: int, mark: Any) -> None:
        """Something of the caller's that belongs to this step."""
        self._part.marked(mark)

    def compile_begins(self, t: int) -> None:
        """A graph is compiled, which is a part of the phase that needs it."""
        self._part.compiled = self.compiling = True
        self.entered = t

    def compile_ends(self, t: int) -> None:
        self.compiling = False
        self.entered = t

    def end_of_pending(self, _t: int) -> None:
        """What was the last optimizer call so far is the last of its step."""
        if self._last:
            self._close()

    # --- where a step ends ----------------------------------------------------------------------------------------

    def _end_by_fetch(self, t: int) -> None:
        self._fetches += 1
        if not self._optimizers and self._fetches > FETCHES_WITHOUT_OPTIMIZER and not self._is_evaluation(self._part):
            self._rest(OTHER, t)
            self._seal()
            self._last, self._end = len(self._parts), t
            self._close()

    def _updated(self, t: int) -> None:
        """An optimizer call outside everything has returned at `t`."""
        if self.explicit:
            return
        part = self._part
        fresh, self._gradients = self._gradients or not self._backward_seen, False
        if not fresh:
            self._eager = False  # a second call for one backward: the first was not the last
            if not self._last:  # and its step has been told: this call's time goes to the next
                self._seal()
                return
        elif any(part.stepped & before.stepped for before in self._parts[: self._last]):
            self._close()
        self._seal()
        self._last, self._end = len(self._parts), t
        if self._eager and len(self._optimizers) == 1 and self.number >= EAGER_AFTER:
            self._close()

    def _close(self) -> None:
        parts, self._parts, end = self._parts[: self._last], self._parts[self._last :], self._end
        self._last = 0
        began, self._began = self._began or 0, end
        spent = parts[0].spent if len(parts) == 1 else [sum(p.spent[i] for p in parts) for i in range(LOOSE)]
        step = Step(
            self.number,
            end,
            end - began,
            spent[:LOOSE],
            all(part.split for part in parts),
            sum(part.samples for part in parts),
            sum(part.tokens for part in parts),
            next((part.queue for part in parts if part.queue is not None), None),
            max((p.sync for p in reversed(parts) if p.sync is not None), key=_bytes, default=None),
            [mark for part in parts for mark in part.marks],
            any(part.compiled for part in parts),
        )
        self.number += 1
        self._over(step)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _seal(self) -> None:
        part = self._part
        if self._is_evaluation(part):
            self._make_evaluation(part)
        elif part.loader is not None and part.backward:
            # model.eval() between a training fetch and its backward is generation, a part of the step's work.
            part.spent[OTHER] += part.spent[EVAL]
            part.spent[EVAL] = 0
        self._unclaimed(part)
        if len(self._parts) > self._last:
            self._parts[-1].join(part)
        else:
            self._parts.append(part)
        self._part = Part()

    def _is_evaluation(self, part: Part) -> bool:
        fed = part.backward or part.stepped
        return bool(self._training and part.loader is not None and not fed and part.loader not in self._training)

    def _make_evaluation(self, part: Part) -> None:
        spent = part.spent
        total, kept = sum(spent), spent[CHECKPOINT]
        part.spent = [0] * 11
        part.spent[CHECKPOINT], part.spent[EVAL] = kept, total - kept
        part.samples = part.tokens = 0
        part.queue = part.sync = None
        self.used[EVAL] = True

    @staticmethod
    def _unclaimed(part: Part) -> None:
        part.spent[OTHER] += part.spent[LOOSE]
        part.spent[LOOSE] = 0


def _bytes(sync: Sync) -> int:
    return sync.bytes
