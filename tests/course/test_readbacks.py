"""`course.count_readbacks`: how often the host needs a value of a tensor."""

import pytest
import torch

import labkit as lk
from labkit import course

X = torch.arange(6.0)


@pytest.mark.parametrize(
    ("ask", "count"),
    [
        (lambda x: x[0].item(), 1),
        (lambda x: int(x[1]), 1),
        (lambda x: x[x > 2], 1),
        (lambda x: bool((x > 2).any()), 1),
        (lambda x: torch.equal(x, x), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: [x[0].item(), bool(x[1] > 0), x[x > 2]], 3),
    ],
)
def test_asking_a_tensor_for_its_value_is_counted_each_time(ask, count):
    assert course.count_readbacks(ask, X)[1] == count


def test_arithmetic_is_not():
    total, reads = course.count_readbacks(
        lambda x, y: torch.where(x > y, x[x.argsort()], y).sum(dtype=torch.float64), X, X.flip(0)
    )
    assert (float(total), total.dtype, reads) == (24.0, torch.float64, 0)


def test_copies_from_a_device_are_counted_but_none_to_the_device():
    with lk.simulated_cuda():
        x, target = X.cuda(), torch.empty(6)
        asks = {lambda: x.cpu(): 1, lambda: target.copy_(x): 1, lambda: X.to("cuda").add(x): 0}
        for ask, count in asks.items():
            assert course.count_readbacks(ask)[1] == count


def test_reads_of_the_hosts_tensors_count_only_without_a_device():
    ask = lambda x: x * X[1].item()  # noqa: E731
    assert course.count_readbacks(ask, X)[1] == 1
    with lk.simulated_cuda():
        assert course.count_readbacks(ask, X.cuda())[1] == 0
