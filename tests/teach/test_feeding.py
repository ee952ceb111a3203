import math
from dataclasses import replace

import matplotlib.colors
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from labkit import course
from labkit.course.feeding import _SLIDERS, WAYS, WIDGET_VIEW, Feeding, plot_feeding, step_seconds

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
LOOPS = st.builds(
    Feeding,
    **{
        field: st.integers(0, 16) if field == "num_workers" else st.floats(math.log(low * unit), math.log(high * unit))
        .map(lambda power, is_whole=field == "batch_bytes": round(math.exp(power)) if is_whole else math.exp(power))
        for field, (_, low, high, unit) in _SLIDERS.items()
    },
)  # fmt: skip


@given(LOOPS)
@example(replace(SLOW_COPY, load_s=500e-3, num_workers=8))
@example(replace(SLOW_COPY, load_s=500e-3, num_workers=16))
@example(BALANCED)
@settings(max_examples=10, deadline=None)
def test_no_way_is_faster_than_the_longest_part_and_prefetched_is_as_fast(loop):
    """Whatever the sliders say: copies, steps and each worker's loading are one after another."""
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


def test_the_plot_has_every_way_and_the_word():
    ax = plot_feeding(SLOW_COPY)
    assert [label.get_text() for label in ax.get_yticklabels()] == list(WAYS)
    assert [bar.get_width() for bar in ax.patches] == pytest.approx(list(course.feeding_times(SLOW_COPY).ms_per_step))
    assert ax.get_title(loc="right") == "simulated"
    assert matplotlib.colors.to_hex(ax.get_facecolor()) != "#ffffff"


@pytest.mark.parametrize(
    ("num_workers", "name"), [(0, "load alone"), (1, "load alone"), (4, "load alone, by 4 workers")]
)
def test_the_plot_says_that_loading_is_divided_by_the_workers(num_workers, name):
    ax = plot_feeding(replace(SLOW_COPY, num_workers=num_workers))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [name, "copy alone", "compute alone"]


def test_sliders_change_the_picture():
    explorer = course.FeedingExplorer(SLOW_COPY)
    before = explorer._picture.value
    explorer.sliders["num_workers"].value = 0
    explorer.sliders["step_s"].value = 100
    assert (explorer.feeding.num_workers, explorer.feeding.step_s) == (0, pytest.approx(0.1))
    assert explorer._picture.value != before
    bundle = explorer._repr_mimebundle_()
    assert {"image/png", "text/plain", WIDGET_VIEW} == set(bundle)


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
