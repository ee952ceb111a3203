import pytest
import torch

import labkit as lk
from labkit.simulation.context import SimulatedLoader


def taken_at(num_workers, host_s=0.0):
    with lk.simulated_cuda() as simulation:
        loader = SimulatedLoader(lambda n: n, 6, load_s=3.0, num_workers=num_workers)
        times = []
        for number, item in enumerate(loader):
            assert item[0] == number
            times.append(simulation.now_s)
            simulation.work(host_s)
        return times, simulation.timeline()


@pytest.mark.parametrize(
    ("num_workers", "host_s", "expected"),
    [
        (0, 1.0, [3, 7, 11, 15, 19, 23]),  # loading, then working
        (1, 1.0, [3, 6, 9, 12, 15, 18]),  # the worker is the slower one
        (2, 1.0, [3, 4, 6, 7, 9, 10]),
        (1, 5.0, [3, 8, 13, 18, 23, 28]),  # the host is
    ],
)
def test_batches_come_when_workers_have_them(num_workers, host_s, expected):
    assert taken_at(num_workers, host_s)[0] == expected


def test_a_queue_of_two_batches_a_worker_holds_workers_up():
    times, frame = taken_at(1, 10.0)
    assert times == [3, 13, 23, 33, 43, 53]
    assert list(frame[frame.lane == "worker 0"].start_s) == [0, 3, 6, 13, 23, 33]  # asked for when the host took one


def test_stamps_and_length():
    with lk.simulated_cuda():
        loader = SimulatedLoader(lambda n: torch.zeros(n), 2, load_s=1.0, num_workers=2)
        assert len(loader) == 2
        assert [stamps.tolist() for _, stamps in loader] == [[[0, 0, 1]], [[1, 0, 1]]]
        alone = SimulatedLoader(int, 1, load_s=1, num_workers=0)
        assert [int(stamps[0, 0]) for _, stamps in alone] == [-1]


def test_only_in_a_simulation():
    with pytest.raises(RuntimeError, match="no simulated device is active"):
        list(SimulatedLoader(int, 1, load_s=1.0))
    with pytest.raises(ValueError, match="n_batches must be an integer >= 1, got 0"):
        SimulatedLoader(int, 0, load_s=1.0)
