"""Workers and the step on the same cores: how long a batch takes in training, from what its parts take alone."""

from typing import TYPE_CHECKING

from labkit.measure.cores import SLOWED

if TYPE_CHECKING:
    from labkit.tuning.io_wait import Making

_THREADED = 1.2  # processor seconds a second: above, the step has several threads that wait for each other


def expected_s(num_workers: int, making: "Making", step_s: float, step_cpu_s: float, cores: int) -> float:
    """Seconds per batch of training: workers share the making, and no core rests while there is work.

    Args:
        making: What a batch costs one process, on its own.
        step_s, step_cpu_s: Wall and processor seconds of the step, on its own.
    """
    return _shared_s(num_workers, making, step_s, step_cpu_s, cores, spun_s=0.0)


def worst_s(num_workers: int, making: "Making", step_s: float, step_cpu_s: float, cores: int) -> float:
    """The same at worst: busy cores slow one another, and threads that wait for one another keep theirs meanwhile.

    Processes on all cores share caches, memory and the kernel: with two workers beside the step, eleven trainings of
    public repositories took up to 1.28 times as long as the sum of their parts (`notebooks/guide/records.md`).

    The threads of an operator end it together. While one of them has no core, as a worker has it, the others wait at
    the barrier, and OpenMP's threads wait by spinning. So the step takes up a core for as long as workers compute
    beside it; at worst as much again as it computes.

    Source: GCC's manual of libgomp, GOMP_SPINCOUNT and OMP_WAIT_POLICY
    """
    threaded = step_cpu_s > _THREADED * step_s
    spun_s = min(_computing_s(making), step_cpu_s) if threaded else 0.0
    return _shared_s(num_workers, making, step_s, step_cpu_s, cores, spun_s, SLOWED)


def _shared_s(
    num_workers: int, making: "Making", step_s: float, step_cpu_s: float, cores: int, spun_s: float, slowed: float = 1.0
) -> float:
    if not num_workers:
        return making.known_s + step_s
    computing_s = slowed * (_computing_s(making) + step_cpu_s) + spun_s
    return max(step_s, making.known_s / num_workers, computing_s / cores)


def _computing_s(making: "Making") -> float:
    return making.known_s * (1 - making.waiting)
