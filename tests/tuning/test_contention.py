"""How long a batch takes where workers and the step share the cores."""

import pytest

from labkit.watching.advice import expected_s, worst_s
from labkit.watching.timings import Making


@pytest.mark.parametrize(
    ("num_workers", "making", "step_s", "step_cpu_s", "best", "worst"),
    [
        (0, Making(2.0, 0.0), 1.0, 2.0, 3.0, 3.0),  # one after the other
        (2, Making(2.0, 0.0), 1.0, 1.0, 1.5, 1.95),  # a step of one thread has no barriers: cores slow one another
        (3, Making(2.0, 0.0), 2.0, 1.0, 2.0, 2.0),  # unless some of them have nothing to do
        (2, Making(2.0, 0.0), 1.0, 2.0, 2.0, 3.6),  # 4 s of computing, and 2 s of spinning
        (2, Making(2.0, 0.75), 1.0, 2.0, 1.25, 1.875),  # workers that mostly wait leave the cores to the step
        (2, Making(0.2, 0.0), 3.0, 0.0, 3.0, 3.0),  # a GPU's step needs no core
    ],
)
def test_cores_are_shared(num_workers, making, step_s, step_cpu_s, best, worst):
    assert expected_s(num_workers, making, step_s, step_cpu_s, 2) == pytest.approx(best)
    assert worst_s(num_workers, making, step_s, step_cpu_s, 2) == pytest.approx(worst)
