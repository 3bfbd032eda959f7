"""Where a step ends, and where its time went, for loops of every kind: notes with their times, played back."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosd.probe.steps import (
    BACKWARD,
    CHECKPOINT,
    COMM,
    DATA_WAIT,
    EVAL,
    FORWARD,
    MARKS,
    OPTIMIZER,
    OTHER,
    Queue,
    Step,
    Steps,
    Sync,
)


class Loop:
    """A training thread: each call takes the time it is given, and `spend` passes time outside of all calls."""

    def __init__(self, *, ddp: bool = False) -> None:
        self.now = 1_000
        self.over: list[Step] = []
        self.steps = Steps(self.over.append)
        self.ddp = ddp

    def spend(self, ns: int) -> int:
        self.now += ns
        return self.now

    def fetch(self, ns: int = 10, loader: str = "train", samples: int = 8, queue: Queue | None = None) -> None:
        self.steps.fetch_begins(self.now, loader)
        self.steps.fetch_ends(self.spend(ns), samples, 0, queue)

    def end_of(self, loader: str) -> None:
        """StopIteration."""
        self.steps.fetch_begins(self.now, loader)
        self.steps.leave(self.spend(1))

    def forward(self, ns: int = 20) -> None:
        if self.ddp:
            self.steps.forward_begins(self.now)
            self.steps.forward_ends(self.spend(ns))
        else:
            self.spend(ns)

    def backward(self, ns: int = 30, inside: Callable[[], None] = lambda: None) -> None:
        self.steps.backward_begins(self.now)
        inside()
        self.steps.backward_ends(self.spend(ns))

    def update(self, optimizer: str = "sgd", ns: int = 5, inside: Callable[[], None] = lambda: None) -> None:
        self.steps.optimizer_begins(self.now, optimizer)
        inside()
        self.steps.optimizer_ends(self.spend(ns), optimizer)

    def train(self, optimizer: str = "sgd") -> None:
        self.fetch()
        self.forward()
        self.backward()
        self.update(optimizer)

    def done(self) -> list[Step]:
        """The process exits."""
        self.steps.end_of_pending(self.now)
        return self.over


@pytest.fixture(params=[False, True], ids=["plain", "ddp"])
def loop(request: pytest.FixtureRequest) -> Loop:
    return Loop(ddp=request.param)


def test_a_step_lasts_from_the_end_of_the_last_update_to_the_end_of_its_own(loop: Loop) -> None:
    for _ in range(6):
        loop.train()
        loop.spend(7)
    first, second, *_ = loop.done()
    assert (first.duration, second.duration) == (65, 72)
    assert [step.number for step in loop.over] == list(range(6))


def test_the_time_of_each_call_is_that_of_its_phase(loop: Loop) -> None:
    for _ in range(2):
        loop.train()
        loop.spend(7)
    spent = loop.done()[1].spent
    expected = {DATA_WAIT: 10, FORWARD: 20, BACKWARD: 30, OPTIMIZER: 5, OTHER: 7}
    assert {phase: ns for phase, ns in enumerate(spent) if ns} == expected


def test_between_a_fetch_and_the_forward_of_a_ddp_module_the_time_is_nobodys() -> None:
    loop = Loop(ddp=True)
    for _ in range(2):
        loop.fetch()
        loop.spend(3)
        loop.forward()
        loop.spend(4)  # the loss
        loop.backward()
        loop.update()
    spent = loop.done()[1].spent
    assert (spent[OTHER], spent[FORWARD]) == (3, 24)


def test_with_one_optimizer_a_step_is_told_when_its_call_returns(loop: Loop) -> None:
    for _ in range(6):
        loop.train()
    assert len(loop.over) == 6


def test_accumulated_backwards_belong_to_the_update_that_uses_them(loop: Loop) -> None:
    for _ in range(8):
        for _ in range(5):
            loop.fetch()
            loop.forward()
            loop.backward()
        loop.update()
    steps = loop.done()
    assert [step.samples for step in steps][-7:] == [40] * 7
    assert [step.spent[BACKWARD] for step in steps][-7:] == [150] * 7


def test_an_update_after_the_end_of_an_epoch_uses_what_the_epoch_accumulated(loop: Loop) -> None:
    for _ in range(6):
        for _ in range(3):
            loop.fetch()
            loop.forward()
            loop.backward()
        loop.end_of("train")
        loop.update()
    assert [step.samples for step in loop.done()][-4:] == [24] * 4


def test_two_optimizers_that_update_one_after_the_other_make_one_step(loop: Loop) -> None:
    for _ in range(6):
        loop.fetch()
        loop.forward()
        loop.backward()
        loop.update("muon")
        loop.update("adamw")
    assert [step.spent[OPTIMIZER] for step in loop.done()] == [10] * 6


def test_a_gan_makes_one_step_of_its_two_updates(loop: Loop) -> None:
    for _ in range(6):
        loop.fetch()
        for optimizer in ("discriminator", "generator"):
            loop.forward()
            loop.backward()
            loop.update(optimizer)
    assert [step.spent[BACKWARD] for step in loop.done()] == [60] * 6


def test_many_updates_after_one_fetch_are_as_many_steps(loop: Loop) -> None:
    for _ in range(3):
        loop.fetch()
        loop.spend(100)  # generation
        for _ in range(4):
            for optimizer in ("actor", "critic"):
                loop.forward()
                loop.backward()
                loop.update(optimizer)
    assert [step.spent[OPTIMIZER] for step in loop.done()] == [10] * 12


def test_a_loop_without_a_loader_ends_its_steps_by_its_updates(loop: Loop) -> None:
    for _ in range(6):
        loop.forward()
        loop.backward()
        loop.update()
    assert [step.spent[BACKWARD] for step in loop.done()] == [30] * 6


def test_an_update_inside_the_backward_ends_the_step_with_the_backward(loop: Loop) -> None:
    for _ in range(6):
        loop.fetch()
        loop.forward()
        loop.backward(inside=lambda: [loop.update(f"parameter {i}") for i in range(3)] and None)
    steps = loop.done()
    assert [(step.spent[BACKWARD], step.spent[OPTIMIZER]) for step in steps] == [(30, 15)] * 6


def test_an_optimizer_that_calls_backward_itself_makes_one_step_a_call(loop: Loop) -> None:
    def closure() -> None:
        for _ in range(3):
            loop.forward()
            loop.backward()

    for _ in range(6):
        loop.fetch()
        loop.update("lbfgs", inside=closure)
    assert [step.spent[BACKWARD] for step in loop.done()] == [90] * 6


def test_a_second_call_of_an_optimizer_for_the_same_backward_makes_no_step_of_its_own(loop: Loop) -> None:
    for _ in range(3):
        loop.train()
    for _ in range(6):
        loop.train()
        loop.update()
    steps = loop.done()
    assert len(steps) == 9
    assert [step.spent[OPTIMIZER] for step in steps] == [5] * 4 + [15] + [10] * 4


def test_without_any_optimizer_the_next_fetch_ends_a_step_from_the_third_on(loop: Loop) -> None:
    for _ in range(8):
        loop.fetch()
        loop.forward()
        loop.backward()
    assert [step.samples for step in loop.done()] == [24, 8, 8, 8, 8]


def test_a_checkpoint_after_the_update_belongs_to_the_next_step(loop: Loop) -> None:
    for number in range(5):
        loop.train()
        if number == 3:
            loop.steps.checkpoint_begins(loop.now)
            loop.steps.leave(loop.spend(1000))
    assert [step.spent[CHECKPOINT] for step in loop.done()] == [0, 0, 0, 0, 1000]


def test_an_update_is_told_before_the_checkpoint_that_follows_it() -> None:
    loop = Loop()
    loop.fetch()
    loop.backward()
    loop.update("a")
    loop.update("b")
    loop.steps.checkpoint_begins(loop.now)
    assert len(loop.over) == 1


def test_an_evaluation_by_its_loader_is_one_and_leaves_the_next_step_whole(loop: Loop) -> None:
    for number in range(6):
        loop.train()
        if number == 3:
            for _ in range(4):
                loop.fetch(loader="validation", ns=50)
                loop.spend(20)
            loop.end_of("validation")
    steps = loop.done()
    assert [step.spent[EVAL] for step in steps] == [0, 0, 0, 0, 4 * 70 + 1, 0]
    assert [step.samples for step in steps] == [8] * 6
    assert [step.spent[DATA_WAIT] for step in steps] == [10] * 6


@pytest.mark.parametrize("loader", ["validation", "train"])
def test_a_long_inference_after_training_takes_no_more_memory_than_a_short_one(loop: Loop, loader: str) -> None:
    for _ in range(5):
        loop.train()
    told = len(loop.over)
    for _ in range(20_000):
        loop.fetch(loader=loader)
        loop.steps.mark(loop.now, "copy")
        loop.spend(7)
    assert len(loop.steps._parts) <= 1
    assert sum(len(part.marks) for part in [*loop.steps._parts, loop.steps._part]) <= 2 * MARKS
    loop.train()
    step = loop.done()[told]
    assert sum(step.spent) == step.duration >= 20_000 * 17
    assert step.spent[EVAL] == (20_000 * 17 if loader == "validation" else 0)


def test_the_end_of_an_epoch_is_a_wait_and_no_evaluation(loop: Loop) -> None:
    for _ in range(4):
        loop.train()
    loop.end_of("train")
    loop.train()
    assert loop.done()[-1].spent[DATA_WAIT] == 11
    assert loop.over[-1].spent[EVAL] == 0


def test_eval_mode_after_an_update_is_evaluation_until_training_goes_on(loop: Loop) -> None:
    for number in range(6):
        loop.train()
        if number == 3:
            loop.steps.evaluation_begins(loop.now)
            loop.spend(500)
    assert [step.spent[EVAL] for step in loop.done()] == [0, 0, 0, 0, 500, 0]


def test_eval_mode_between_a_fetch_and_its_backward_is_the_steps_own_work(loop: Loop) -> None:
    for _ in range(3):
        loop.fetch()
        loop.steps.evaluation_begins(loop.now)
        loop.spend(500)
        loop.forward()
        loop.backward()
        loop.update()
    assert [step.spent[EVAL] for step in loop.done()] == [0, 0, 0]
    assert [step.spent[OTHER] + step.spent[FORWARD] for step in loop.over] == [520, 520, 520]


def test_waiting_in_a_backward_is_communication_from_the_begin_of_the_reduction() -> None:
    loop = Loop(ddp=True)
    loop.fetch()
    loop.forward()
    loop.steps.backward_begins(loop.now)
    sync = Sync(bytes=100, enter=loop.spend(30), exit=loop.spend(50), group="world:0")
    loop.steps.backward_ends(loop.spend(2), sync)
    loop.update()
    (step,) = loop.done()
    assert (step.spent[BACKWARD], step.spent[COMM], step.sync) == (30, 52, sync)


def test_a_collective_takes_its_time_out_of_the_phase_around_it(loop: Loop) -> None:
    def gather() -> None:
        loop.steps.enter(loop.now, COMM)
        loop.steps.collective_ends(loop.spend(40), Sync(8, loop.now - 40, loop.now, "world:0"))

    loop.fetch()
    loop.forward()
    loop.backward(inside=gather)
    loop.update()
    (step,) = loop.done()
    assert (step.spent[BACKWARD], step.spent[COMM]) == (30, 40)


def test_of_equally_large_collectives_the_last_is_kept_and_of_unequal_ones_the_largest() -> None:
    loop = Loop()
    loop.fetch()
    for name, size in (("small", 1), ("large", 9), ("as large", 9), ("tiny", 0)):
        loop.steps.enter(loop.now, COMM)
        loop.steps.collective_ends(loop.spend(1), Sync(size, loop.now, loop.now, name))
    loop.backward()
    loop.update()
    (step,) = loop.done()
    assert step.sync is not None
    assert step.sync.group == "as large"


def test_what_a_checkpoint_waits_for_in_collectives_is_checkpoint(loop: Loop) -> None:
    for _ in range(2):
        loop.train()
        loop.steps.checkpoint_begins(loop.now)
        loop.steps.enter(loop.spend(5), COMM)
        loop.steps.collective_ends(loop.spend(6), Sync(9, loop.now - 6, loop.now, "world:0"))
        loop.steps.leave(loop.spend(7))
    step = loop.done()[1]
    assert (step.spent[CHECKPOINT], step.spent[COMM], step.sync) == (18, 0, None)


def test_the_queue_of_a_step_is_that_of_its_first_fetch(loop: Loop) -> None:
    loop.fetch(queue=Queue(3, 4, 2))
    loop.backward()
    loop.fetch(queue=Queue(0, 4, 2))
    loop.backward()
    loop.update()
    (step,) = loop.done()
    assert step.queue == Queue(3, 4, 2)


def test_an_optimizer_that_raised_does_not_stop_the_accounting(loop: Loop) -> None:
    for _ in range(4):
        loop.train()
    loop.steps.optimizer_begins(loop.spend(3), "sgd")  # and never ends
    for _ in range(3):
        loop.train()
    assert len(loop.done()) == 7


@pytest.mark.parametrize("times", [1, 2])
def test_an_optimizer_that_raised_in_a_loop_without_a_loader_costs_one_step_its_end(loop: Loop, times: int) -> None:
    for number in range(8):
        loop.forward()
        loop.backward()
        if number == 4:
            for _ in range(times):
                loop.steps.optimizer_begins(loop.spend(3), "sgd")
        else:
            loop.update()
    steps = loop.done()
    assert [step.spent[BACKWARD] for step in steps] == [30] * 4 + [60] + [30] * 2
    assert all(sum(step.spent) == step.duration for step in steps)


def test_an_optimizer_that_raises_inside_a_scaler_ends_its_step_all_the_same(loop: Loop) -> None:
    for _ in range(6):
        loop.forward()
        loop.backward()
        loop.steps.optimizer_begins(loop.now, "scaler")
        loop.steps.optimizer_begins(loop.now, "sgd")
        loop.steps.optimizer_ends(loop.spend(5), "sgd", "scaler")
    assert [(step.spent[BACKWARD], step.spent[OPTIMIZER]) for step in loop.done()] == [(30, 5)] * 6


def test_an_optimizer_that_raises_inside_a_backward_does_not_stop_the_accounting(loop: Loop) -> None:
    for number in range(6):
        loop.forward()
        if number == 2:
            loop.backward(inside=lambda: loop.steps.optimizer_begins(loop.spend(3), "sgd"))
        else:
            loop.backward(inside=loop.update)
    assert len(loop.done()) == 5


def test_a_step_of_an_optimizer_that_calls_its_parents_step_is_one(loop: Loop) -> None:
    for _ in range(6):
        loop.forward()
        loop.backward()
        loop.update(inside=loop.update)
    assert [step.spent[BACKWARD] for step in loop.done()] == [30] * 6


def test_a_script_that_names_its_steps_decides_alone_where_they_end(loop: Loop) -> None:
    for number in (100, 101):
        loop.steps.step_begins(loop.now, number)
        loop.train()
        loop.train()
        loop.spend(1)
        loop.steps.step_ends(loop.now)
        loop.spend(9)
    steps = loop.done()
    assert [(step.number, step.duration) for step in steps] == [(100, 131), (101, 140)]


CALLS = st.sampled_from(
    [
        "fetch",
        "other loader",
        "end",
        "forward",
        "backward",
        "update",
        "update b",
        "raise",
        "save",
        "eval",
        "spend",
        "reduce",
    ]
)


@given(st.lists(CALLS, max_size=60), st.booleans())
def test_whatever_a_loop_does_the_phases_of_a_step_add_up_to_its_duration(calls: list[str], ddp: bool) -> None:
    loop = Loop(ddp=ddp)
    began = loop.now
    does: dict[str, Callable[[], object]] = {
        "fetch": loop.fetch,
        "other loader": lambda: loop.fetch(3, "validation"),
        "end": lambda: loop.end_of("validation"),
        "forward": loop.forward,
        "backward": loop.backward,
        "update": loop.update,
        "update b": lambda: loop.update("b"),
        "raise": lambda: loop.steps.optimizer_begins(loop.now, "sgd"),
        "save": lambda: (loop.steps.checkpoint_begins(loop.now), loop.steps.leave(loop.spend(70))),
        "eval": lambda: loop.steps.evaluation_begins(loop.now),
        "spend": lambda: loop.spend(11),
        "reduce": lambda: (loop.steps.enter(loop.now, COMM), loop.steps.collective_ends(loop.spend(4), None)),
    }
    for call in calls:
        does[call]()
    steps = loop.done()
    for step in steps:
        assert sum(step.spent) == step.duration
        assert min(step.spent) >= 0
    assert [step.number for step in steps] == list(range(len(steps)))
    assert sum(step.duration for step in steps) <= loop.now - began
    for one, next_ in itertools.pairwise(steps):
        assert next_.end - next_.duration == one.end
