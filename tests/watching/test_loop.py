"""Which loop trains and how long it waits, by loops of every form whose times a clock of the test's own tells."""

import inspect
import os
import sys
import time
import traceback

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import labkit as lk
from labkit.watching.loop import LoopWatch
from tests.watching.trained import optimizer

N_BATCHES, MAKING_S, FORWARD_S, UPDATE_S = 8, 3.0, 2.0, 1.0


class Training:
    """Every second of it is looked at."""

    def __init__(self):
        self.now_s, self.left = 0.0, N_BATCHES
        self.watch = LoopWatch(lambda: self.now_s)

    def spend(self, seconds):
        self.now_s += seconds
        frames = traceback.walk_stack(sys._getframe(1))
        self.watch.look([(frame.f_code, frame.f_lasti) for frame, _ in frames], seconds)

    def batches(self, n_batches=N_BATCHES):
        for _ in range(n_batches):
            self.spend(MAKING_S)
            yield torch.zeros(2, 4)

    def get_batch(self, split):
        return next(self.batches())

    def get(self):
        self.left -= 1
        return None if self.left < 0 else self.get_batch("train")

    def step(self, batch):
        self.spend(FORWARD_S)
        self.watch.stepped()  # as `backward` is called
        self.spend(UPDATE_S)
        self.watch.stepped(is_step=True)

    def advance(self, batches):
        batch = next(batches)  # by_next_in_a_function
        self.step(batch)


def plain(training):
    for batch in training.batches():  # plain
        training.step(batch)


def zipped(training):
    for _, (batch, _) in enumerate(zip(training.batches(), range(N_BATCHES), strict=True)):  # zipped
        training.step(batch)


def with_a_bar(training):
    with open(os.devnull, "w") as file:
        for batch in tqdm(training.batches(), file=file):  # with_a_bar
            training.step(batch)


def by_next(training):
    batches = training.batches()
    for _ in range(N_BATCHES):
        training.step(next(batches))  # by_next


def by_next_in_a_function(training):
    batches = training.batches()
    for _ in range(N_BATCHES):
        training.advance(batches)


def by_a_function(training):
    n_steps = 0
    while True:
        batch = training.get_batch("train")  # by_a_function
        training.step(batch)
        n_steps += 1
        if n_steps == N_BATCHES:
            break


def from_a_queue(training):
    while (batch := training.get()) is not None:  # from_a_queue
        training.step(batch)


def skipping_some(training):
    batches, n_steps = training.batches(), 0
    while n_steps < N_BATCHES:
        if training.left % 2:
            training.left += 1
            continue
        batch = next(batches)  # skipping_some
        training.step(batch)
        training.left += 1
        n_steps += 1


def beginning_again(training):
    batches = iter(())
    for _ in range(N_BATCHES):
        try:
            batch = next(batches)  # beginning_again
        except StopIteration:
            batches = training.batches(2)
            batch = next(batches)
        training.step(batch)


def with_validations(training):
    for _ in range(2):
        for batch in training.batches(N_BATCHES // 2):  # with_validations
            training.step(batch)
        for _ in training.batches(5):
            training.spend(50.0)


LOOPS = [
    plain,
    zipped,
    with_a_bar,
    by_next,
    by_next_in_a_function,
    by_a_function,
    from_a_queue,
    with_validations,
    skipping_some,
    beginning_again,
]


def line_with(comment):
    [number] = [
        n
        for n, line in enumerate(inspect.getsource(sys.modules[__name__]).splitlines(), 1)
        if line.endswith(f"# {comment}")
    ]
    return number


def waits_and_steps(loader):
    """Seconds of each batch but the first: of waiting for it, and from then on until the next one is asked for."""
    for epoch in loader.epochs:
        asked = [batch.asked_s for batch in epoch.batches[1:]] + [epoch.ended_s]
        for batch, until_s in zip(epoch.batches, asked, strict=True):
            yield batch.received_s - batch.asked_s, until_s - batch.received_s


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_waits_where_it_asks_and_steps_everywhere_else(loop):
    training = Training()
    loop(training)
    loader = training.watch.loader(0)
    assert loader.kind.endswith(f"{os.path.basename(__file__)}:{line_with(loop.__name__)}")
    assert loader.trains
    seen = list(waits_and_steps(loader))
    assert len(seen) == N_BATCHES - 1
    assert {waited for waited, _ in seen[1:]} == {MAKING_S}, "the first was begun before the loop was known"
    assert {stepped for _, stepped in seen} == {FORWARD_S + UPDATE_S}


class SeldomSeen(Training):
    """It is looked at every 25 s, in which it goes through four batches."""

    def spend(self, seconds):
        for _ in range(int(seconds)):
            self.now_s += 1
            if self.now_s % 25 == 0:
                frames = traceback.walk_stack(sys._getframe(1))
                self.watch.look([(frame.f_code, frame.f_lasti) for frame, _ in frames], 25.0)


def test_batches_that_are_made_between_two_looks_are_waited_for_as_well():
    training = SeldomSeen()
    for batch in training.batches(200):
        training.step(batch)
    seen = list(waits_and_steps(training.watch.loader(0)))
    waited = sum(waited for waited, _ in seen)
    assert len(seen) == 199
    assert waited / sum(map(sum, seen)) == pytest.approx(MAKING_S / (MAKING_S + FORWARD_S + UPDATE_S), abs=0.03)


def test_parts_of_a_batch_are_trained_on_without_waiting():
    training = Training()
    for batch in training.batches():
        for _part in batch.split(1):
            training.step(_part)
    loader = training.watch.loader(0)
    seen = list(waits_and_steps(loader))
    assert len(seen) == 2 * N_BATCHES - 1
    assert sum(waited for waited, _ in seen) == MAKING_S * (N_BATCHES - 1)
    assert {stepped for _, stepped in seen} == {FORWARD_S + UPDATE_S}


def by_a_name_that_is_not_known(training):
    for _ in range(N_BATCHES):
        training.step(training.load())


def test_a_loop_that_asks_by_a_name_that_is_not_known_is_told_nothing_of():
    """And no report says that it does not wait."""
    training = Training()
    training.load = training.get
    by_a_name_that_is_not_known(training)
    assert training.watch.loader(0) is None
    assert training.watch.name.startswith("the loop at ")


def test_steps_of_several_optimizers_are_one_batch():
    training = Training()
    for batch in training.batches():
        training.step(batch)
        for _optimizer in "abc":
            training.watch.stepped(is_step=True)
    assert len(list(waits_and_steps(training.watch.loader(0)))) == N_BATCHES - 1


def test_an_epoch_goes_on_while_its_loop_does():
    training, epochs = Training(), []
    for _ in range(2):
        for batch in training.batches():
            training.step(batch)
            epochs.append(training.watch.loader(0).epochs[-1].ended_s if len(epochs) else 0)
        training.spend(1.0)
        assert training.watch.loader(0).epochs[-1].ended_s is not None
    assert set(epochs) == {0, None}


def test_steps_outside_of_any_loop_are_no_training():
    training = Training()
    training.step(None)
    training.step(None)
    assert training.watch.loader(0) is None


def own_step(model, batch):
    """Without any optimizer of torch."""
    model(batch).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def test_watch_reports_on_a_loop_over_a_generator():
    model, _ = optimizer()
    with lk.watch() as watched:
        for batch in (torch.zeros(2, 4) for _ in range(30)):  # a generator
            own_step(model, batch)
    report = watched.report()
    assert report.n_batches >= 20
    [note] = [note for note in report.notes if "is not known to labkit" in note]
    assert f"{os.path.basename(__file__)}:{line_with('a generator')} is not known" in note


def slow_batches(n_batches):
    for _ in range(n_batches):
        time.sleep(0.01)
        yield torch.zeros(2, 4)


def test_a_loop_over_what_is_not_known_has_figures_of_epochs_for_a_logger():
    model, _ = optimizer()
    with lk.watch() as watched:
        for number in range(3):
            for batch in slow_batches(20):
                own_step(model, batch)
            with torch.no_grad():
                for batch in slow_batches(8):
                    model(batch)
            assert len(watched.epochs) == number + 1
    assert [epoch["n_batches"] for epoch in watched.epochs] == [19, 20, 20]
    assert watched.report().n_batches >= 40


def test_a_validation_that_computes_gradients_is_no_training():
    """As where forces are gradients of an energy."""
    model, steps = optimizer()
    training, validation = (DataLoader(TensorDataset(torch.zeros(n_samples, 4))) for n_samples in (30, 90))
    with lk.watch() as watched:
        for (batch,) in training:
            own_step(model, batch)
            steps.step()
        for (batch,) in validation:
            model(batch).sum().backward()
    assert [row["role"] for row in watched.report().to_dict()["loaders"]] == ["training", "other"]


def test_one_optimizer_step_an_epoch_is_not_the_loop_over_epochs():
    model, steps = optimizer()
    loader = DataLoader(TensorDataset(torch.zeros(30, 4)), 1)
    with lk.watch() as watched:
        for _ in range(3):
            for (batch,) in loader:
                model(batch).mean().backward()
            steps.step()
    assert [row["n_batches"] for row in watched.report().to_dict()["loaders"]] == [90]


def test_a_training_goes_on_where_nothing_can_be_observed(monkeypatch):
    model, _ = optimizer()
    monkeypatch.setattr(LoopWatch, "stepped", lambda self, **how: 1 / 0)
    with lk.watch():
        own_step(model, torch.zeros(2, 4))
    assert model.weight.grad is not None


def test_watch_reports_on_a_known_loader_whatever_steps():
    """Not on the validation's, where gradients are computed, too, nor on the loop."""
    model, _ = optimizer()
    training, validation = (DataLoader(TensorDataset(torch.zeros(n_samples, 4))) for n_samples in (30, 90))
    with lk.watch() as watched:
        for (batch,) in training:
            own_step(model, batch)
        for (batch,) in validation:
            model(batch)
    report = watched.report()
    assert [row["role"] for row in report.to_dict()["loaders"]] == ["training", "other"]
    assert report.n_batches <= 30
