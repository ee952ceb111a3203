"""count_readbacks sees every way to ask a tensor for its value, and nothing else."""

import pytest
import torch

from labkit import course

X = torch.arange(6.0)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: X[0].item(),
        lambda: int(X[1]),
        lambda: X[X > 2],
        lambda: bool((X > 2).any()),
        lambda: torch.equal(X, X),
        lambda: X.nonzero(),
    ],
    ids=["item", "int", "mask", "bool", "equal", "nonzero"],
)
def test_asking_is_counted(ask):
    assert course.count_readbacks(ask)[1] >= 1


def test_each_time_counts():
    assert course.count_readbacks(lambda: [X[0].item(), bool(X[1] > 0), X[X > 2]])[1] == 3


def test_named_arguments_are_passed_on():
    doubles, reads = course.count_readbacks(lambda: torch.full((2,), 3.0, dtype=torch.float64))
    assert (doubles.dtype, reads) == (torch.float64, 0)


def test_arithmetic_is_not():
    result, reads = course.count_readbacks(lambda x, y: torch.where(x > y, x[x.argsort()], y).sum(), X, X.flip(0))
    assert (float(result), reads) == (24.0, 0)
