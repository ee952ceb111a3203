import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from labkit import course
from labkit.course.feeding import WAYS, Feeding, step_seconds

SLOW_COPY = Feeding(step_s=20e-3, load_s=10e-3, num_workers=4, batch_bytes=100_000_000, pcie_bytes_per_s=10e9,
                    staging_bytes_per_s=5e9)  # fmt: skip


@pytest.fixture(scope="module")
def times():
    return course.feeding_times(SLOW_COPY)


def test_what_each_way_takes(times):
    """Reckoned by hand: 20 ms to compute, 10 ms to copy, 20 ms to stage."""
    ms = times.ms_per_step
    assert ms["pageable"] == pytest.approx(20 + 20, rel=0.01)  # staged, and copied meanwhile
    assert ms["pinned"] == ms["pinned, non_blocking"] == pytest.approx(20 + 10, rel=0.01)
    assert ms["prefetched"] == pytest.approx(20, rel=0.01)
    assert times.over_longest["prefetched"] < 1.05
    assert times.simulated.all()


@pytest.mark.parametrize("load_s", [1e-3, 30e-3, 200e-3])
@pytest.mark.parametrize("batch_bytes", [1_000_000, 400_000_000])
@pytest.mark.parametrize("step_s", [2e-3, 50e-3])
def test_prefetched_costs_as_much_as_its_longest_part(load_s, batch_bytes, step_s):
    loop = replace(SLOW_COPY, load_s=load_s, batch_bytes=batch_bytes, step_s=step_s)
    seconds = step_seconds(course.simulate_feeding("prefetched", loop, n_steps=16))
    assert seconds == pytest.approx(max(loop.parts_s.values()), rel=0.05)


BALANCED = Feeding(step_s=46.8e-3, load_s=51.5e-3, num_workers=1)  # loading takes a little longer than the step
RANGES = {
    "step_s": (1e-3, 0.2), "load_s": (1e-3, 0.5), "batch_bytes": (1e6, 2e8), "pcie_bytes_per_s": (1e9, 64e9),
}  # fmt: skip
LOOPS = st.builds(
    lambda num_workers, batch_bytes, **rates: Feeding(num_workers=num_workers, batch_bytes=round(batch_bytes), **rates),
    num_workers=st.integers(0, 16),
    **{name: st.floats(math.log(low), math.log(high)).map(math.exp) for name, (low, high) in RANGES.items()},
)


@given(LOOPS)
@example(replace(SLOW_COPY, load_s=500e-3, num_workers=8))
@example(replace(SLOW_COPY, load_s=500e-3, num_workers=16))
@example(BALANCED)
@settings(max_examples=10, deadline=None)
def test_no_way_is_faster_than_the_longest_part_and_prefetched_is_as_fast(loop):
    """Copies, steps and each worker's loading are one after another."""
    over = course.feeding_times(loop).over_longest
    assert over.min() > 1 - 1e-5
    assert over["prefetched"] < 1.02  # kernels of a millisecond: launching them counts


def seconds_of(work, n=20):
    """Of one call among many, by events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    torch.cuda.synchronize()
    start.record()
    for _ in range(n):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / n


@pytest.mark.cuda
def test_a_real_device_takes_as_long_as_the_simulated_one():
    """Given the real one's rates. Pageable copies are left out: how a driver stages them differs."""
    pinned = torch.zeros(64 << 20, dtype=torch.uint8).pin_memory()
    stamps = torch.tensor([[-1.0, 0.0, 0.0]], dtype=torch.float64).pin_memory()
    copy_s = seconds_of(lambda: pinned.to("cuda", non_blocking=True))
    n_cycles = 20_000_000
    loop = Feeding(
        step_s=seconds_of(lambda: torch.cuda._sleep(n_cycles)), load_s=1e-6, num_workers=1,
        batch_bytes=pinned.nbytes, pcie_bytes_per_s=pinned.nbytes / copy_s,
    )  # fmt: skip
    for way, (is_pinned, copy) in WAYS.items():
        if is_pinned:
            spans = course.trace(
                [(pinned, stamps)] * 18,
                lambda batch: torch.cuda._sleep(n_cycles),
                n_batches=16,
                device="cuda",
                copy=copy,
            )
            simulated_s = step_seconds(course.simulate_feeding(way, loop, n_steps=16))
            assert step_seconds(spans) == pytest.approx(simulated_s, rel=0.15), way


def test_without_workers_the_loop_loads():
    loop = replace(SLOW_COPY, num_workers=0)
    assert step_seconds(course.simulate_feeding("pinned", loop)) == pytest.approx(
        30e-3, rel=0.01
    )  # loading beside computing, then copying
    assert loop.parts_s["load"] == loop.load_s


def test_the_timeline_says_that_it_is_simulated():
    frame = course.simulate_feeding("prefetched", replace(SLOW_COPY, load_s=60e-3))
    assert frame.simulated.all()
    assert {"host", "copy", "GPU", "worker 0"} <= set(frame.lane)
    ax = course.plot_timeline(frame)
    assert ax.get_title(loc="right") == "simulated"


def test_published_rates_name_their_source():
    for one in course.PUBLISHED_TRAINING.values():
        assert one.source
        assert one.step_s(64) == 64 / one.images_per_s


def test_loops_that_cannot_be():
    with pytest.raises(ValueError, match=r"way must be one of pageable, pinned, .*, got 'telepathy'"):
        course.simulate_feeding("telepathy", SLOW_COPY)
    with pytest.raises(ValueError, match="step_s must be a number > 0, got 0"):
        Feeding(step_s=0, load_s=1)
    with pytest.raises(ValueError, match="num_workers must be an integer >= 0, got -1"):
        Feeding(step_s=1, load_s=1, num_workers=-1)
