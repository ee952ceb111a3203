"""epoch_time(): what an epoch takes, against a loader that is added up batch by batch."""

import numpy as np
import pytest

import labkit as lk
from tests.measure.test_steady import Clock, Loader


def seconds_of_epoch(wait, n_batches, start, end) -> float:
    return start + sum(wait(number) for number in range(n_batches)) + end


def wait(number):
    return 5.0 if number == 0 else 0.25 if number < 3 else 1.0


@pytest.mark.parametrize("n_batches", [1, 2, 3, 4, 100, 5004])
def test_an_epoch_of_any_length_is_the_sum_of_its_parts(n_batches):
    clock = Clock()
    make = lambda: Loader(clock, wait, in_flight=2, start=3.0, end=7.0)  # noqa: E731
    frame = lk.compare({"a": make, "b": lambda: Loader(clock, wait)}, baseline="a", clock=clock, rounds=3)
    table = lk.epoch_time(frame, n_batches)
    row = table.loc["a"]
    expected_s = seconds_of_epoch(wait, n_batches, 3.0, 7.0)
    assert row.epoch_s == pytest.approx(expected_s)
    assert row[["startup_s", "first_batch_s", "batches_s", "shutdown_s"]].sum() == pytest.approx(row.epoch_s)
    assert row.overhead == pytest.approx(1 - n_batches / expected_s)
    assert list(table.index) == ["a", "b"]


def test_medians_and_quartiles_are_over_runs():
    clock, factors = Clock(), iter([1, 1, 2, 3, 4, 5])
    make = lambda: (lambda factor: Loader(clock, lambda number: factor * 1.0))(next(factors))  # noqa: E731
    row = lk.epoch_time(lk.compare({"a": make}, baseline="a", clock=clock, rounds=5), 10).loc["a"]
    assert (row.epoch_s_low, row.epoch_s, row.epoch_s_high) == pytest.approx((20.0, 30.0, 40.0))


def test_a_run_of_one_batch_takes_as_long_for_each():
    clock = Clock()

    def whole():
        clock.now += 4.0
        yield 8

    assert lk.epoch_time(lk.compare({"a": whole}, baseline="a", clock=clock, rounds=1), 3).loc["a", "epoch_s"] == 12.0


def test_bad_arguments():
    frame = lk.compare({"a": lambda: [1]}, baseline="a", rounds=1)
    with pytest.raises(ValueError, match="n_batches must be an integer >= 1, got 0"):
        lk.epoch_time(frame, 0)
    with pytest.raises(ValueError, match=r"^no run of the frame has a start-up and an end: pass a frame from labkit"):
        lk.epoch_time(frame.assign(shutdown_s=np.nan), 3)
