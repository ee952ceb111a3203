"""trace(): spans against sleeps of known length. Only orders and lower bounds are asserted, since machines stall."""

import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import labkit as lk
from labkit import course
from labkit.simulation.timeline import COPIES

LOAD_S, STEP_S, BATCH = 0.02, 0.05, 2
SLACK_S = 0.001  # clocks of two calls


class Sleepy(Dataset):
    def __len__(self):
        return 2 * 8

    def __getitem__(self, index):
        time.sleep(LOAD_S)
        return torch.full((3,), index)


def step(batch):
    time.sleep(STEP_S)


def traced(num_workers, *, n_batches=5, **options):
    loader = lk.make_loader(course.Stamped(Sleepy()), lk.LoaderConfig(batch_size=BATCH, num_workers=num_workers))
    try:
        return course.trace(loader, step, n_batches=n_batches, **options)
    finally:
        loader.close()


@pytest.fixture(scope="module")
def spans():
    """By number of workers; one worker loads a batch in less time than a step takes."""
    return {num_workers: traced(num_workers) for num_workers in (0, 1)}


def of(spans, kind):
    return spans[spans["kind"] == kind].reset_index(drop=True)


def overlaps(some, others, least_s=SLACK_S):
    """Pairs of spans that share time."""
    pairs = some.merge(others, how="cross")
    shared = pairs[["end_s_x", "end_s_y"]].min(axis=1) - pairs[["start_s_x", "start_s_y"]].max(axis=1)
    return int((shared > least_s).sum())


def test_lanes_and_kinds(spans):
    assert list(spans[1].columns) == ["lane", "kind", "start_s", "end_s", "batch"]
    kinds = {num_workers: set(zip(frame.lane, frame.kind, strict=True)) for num_workers, frame in spans.items()}
    host = {("host", "step")}
    assert kinds[0] == {("host", "load"), *host}
    assert kinds[1] == {("worker 0", "load"), ("host", "wait"), *host}
    assert list(dict.fromkeys(spans[1].lane)) == ["worker 0", "host"]  # from top to bottom


@pytest.mark.parametrize("num_workers", [0, 1])
def test_every_batch_has_its_spans_in_order(spans, num_workers):
    frame = spans[num_workers]
    assert list(of(frame, "step").batch) == list(range(5))
    loaded, stepped = (of(frame, kind).set_index("batch") for kind in ("load", "step"))
    assert set(loaded.index) <= set(range(5))
    assert (loaded.end_s <= stepped.start_s[loaded.index] + SLACK_S).all()
    assert (frame.start_s >= 0).all()
    assert (frame.end_s >= frame.start_s).all()
    own = frame[frame["lane"] == "host"].sort_values("start_s")  # the host does one thing at a time
    assert (own.end_s.to_numpy()[:-1] <= own.start_s.to_numpy()[1:] + SLACK_S).all()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_spans_last_as_long_as_the_work(spans, num_workers):
    lengths = spans[num_workers].assign(seconds=lambda frame: frame.end_s - frame.start_s)
    assert (of(lengths, "step").seconds >= STEP_S - SLACK_S).all()
    loads = of(lengths, "load")
    whole = loads[loads["start_s"] > 0]  # one that began before the first step is cut off
    assert len(whole) >= 3 - num_workers
    assert (whole.seconds >= BATCH * LOAD_S - SLACK_S).all()


def test_a_worker_loads_during_steps_and_the_main_process_cannot(spans):
    assert overlaps(of(spans[0], "load"), of(spans[0], "step")) == 0
    assert overlaps(of(spans[1], "load"), of(spans[1], "step")) > 0


def test_what_came_before_the_first_step_is_left_out(spans):
    begun = time.perf_counter()
    frame = traced(0, n_batches=2)
    assert frame.end_s.max() < time.perf_counter() - begun - 2 * STEP_S  # the steps that warmed up are not in it
    assert frame.start_s.min() < LOAD_S
    assert set(frame.batch) == {0, 1}


def test_the_step_gets_the_batch_without_its_stamps():
    got = []
    stamped = [(torch.full((2,), n), torch.tensor([[-1.0, 0.0, 1.0]] * 2, dtype=torch.float64)) for n in range(4)]
    course.trace(stamped, lambda batch: got.append(int(batch[0])), n_batches=2)
    assert got == [0, 1, 2, 3]


def test_stamps_name_worker_and_time():
    before = time.perf_counter()
    item, stamp = course.Stamped(Sleepy())[3]
    assert item.tolist() == [3, 3, 3]
    worker, start, end = stamp.tolist()
    assert worker == -1
    assert before <= start <= end - LOAD_S <= time.perf_counter() - LOAD_S
    assert len(course.Stamped(Sleepy())) == 16


@pytest.mark.parametrize("copy", COPIES)
def test_all_ways_to_copy_work_on_a_cpu(copy):
    frame = traced(1, n_batches=2, copy=copy)
    assert list(of(frame, "step").batch) == [0, 1]
    assert not {"copy", "GPU"} & {*frame.lane, *frame.kind}  # nothing is copied, and no lane says so


def test_what_cannot_be_traced():
    with pytest.raises(ValueError, match="the loader must give 7 batches after 2 to warm up, got 6"):
        traced(0, n_batches=7)
    with pytest.raises(ValueError, match="copy must be one of blocking, non_blocking, prefetch, got 'telepathy'"):
        course.trace([], step, n_batches=1, copy="telepathy")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_plot_draws_every_span_in_its_lane(spans, num_workers):
    frame = spans[num_workers]
    ax = course.plot_timeline(frame)
    assert [label.get_text() for label in ax.get_yticklabels()] == list(dict.fromkeys(frame.lane))
    boxes = [path.get_extents() for bars in ax.collections for path in bars.get_paths()]
    drawn = sorted((box.x0, box.x1) for box in boxes)
    np.testing.assert_allclose(drawn, sorted(zip(frame.start_s, frame.end_s, strict=True)))
    assert {text.get_text() for text in ax.get_legend().get_texts()} == set(frame.kind)


def traced_on_cuda(copy):
    """Steps of several milliseconds over batches of 16 MiB, which take a part of one to copy."""
    stamps = torch.tensor([[-1.0, 0.0, 0.0]], dtype=torch.float64).pin_memory()
    images = [torch.full((1 << 22,), float(number)).pin_memory() for number in range(8)]

    def compute(batch):
        torch.cuda._sleep(8_000_000)
        return batch.sum()

    return course.trace([(image, stamps) for image in images], compute, n_batches=6, device="cuda", copy=copy)


@pytest.mark.parametrize("copy", COPIES)
def test_on_cuda_only_prefetched_copies_overlap_compute(cuda, copy):
    frame = traced_on_cuda(copy)
    computed, copied = frame[frame["lane"] == "GPU"], frame[frame["lane"] == "copy"]
    assert list(computed.batch) == list(range(6))
    assert set(copied.batch) >= set(range(1, 6))  # the first one may lie before the first step
    assert (computed.end_s > computed.start_s).all()
    assert (overlaps(copied, computed, 1e-4) > 0) == (copy == "prefetch")
    first, then = (of(part, kind).set_index("batch") for part, kind in ((copied, "copy"), (computed, "compute")))
    both = first.index.intersection(then.index)
    assert (first.end_s[both] <= then.start_s[both] + SLACK_S).all()  # no batch is computed on before it is there
    course.plot_timeline(frame)
