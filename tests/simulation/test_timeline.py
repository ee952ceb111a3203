"""`course.trace` tells who worked when, against sleeps of known length, and `lk.save_trace` writes it for viewers.

Only orders and lower bounds are asserted, since machines stall.
"""

import json
import time
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset

import labkit as lk
from labkit import course

LOAD_S, STEP_S, BATCH = 0.01, 0.03, 2
SLACK_S = 0.001  # clocks of two calls
COPIES = ("blocking", "non_blocking", "prefetch")


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


with_and_without_a_worker = pytest.mark.parametrize("num_workers", [0, 1])


def of(frame, kind):
    return frame[frame["kind"] == kind].reset_index(drop=True)


def overlaps(some, others, least_s=SLACK_S):
    """Pairs of spans that share time."""
    pairs = some.merge(others, how="cross")
    shared = pairs[["end_s_x", "end_s_y"]].min(axis=1) - pairs[["start_s_x", "start_s_y"]].max(axis=1)
    return int((shared > least_s).sum())


def test_each_worker_and_the_host_have_a_lane(spans):
    assert list(spans[1].columns) == ["lane", "kind", "start_s", "end_s", "batch"]
    kinds = {number: set(zip(frame.lane, frame.kind, strict=True)) for number, frame in spans.items()}
    assert kinds[0] == {("host", "load"), ("host", "step")}
    assert kinds[1] == {("worker 0", "load"), ("host", "wait"), ("host", "step")}
    assert list(dict.fromkeys(spans[1].lane)) == ["worker 0", "host"]  # from top to bottom


@with_and_without_a_worker
def test_every_batch_has_its_spans_in_order_and_as_long_as_its_work(spans, num_workers):
    frame = spans[num_workers]
    loads, steps = (of(frame, kind).set_index("batch") for kind in ("load", "step"))
    assert list(steps.index) == list(range(5))
    assert set(loads.index) <= set(range(5))
    assert (loads.end_s <= steps.start_s[loads.index] + SLACK_S).all()
    assert (frame.start_s >= 0).all()
    assert (steps.end_s - steps.start_s >= STEP_S - SLACK_S).all()
    whole = loads[loads.start_s > 0]  # one that began before the first step is cut off
    assert len(whole) >= 3 - num_workers
    assert (whole.end_s - whole.start_s >= BATCH * LOAD_S - SLACK_S).all()
    own = frame[frame["lane"] == "host"].sort_values("start_s")  # the host does one thing at a time
    assert (own.end_s.to_numpy()[:-1] <= own.start_s.to_numpy()[1:] + SLACK_S).all()


def test_a_worker_loads_during_steps_and_the_main_process_cannot(spans):
    assert overlaps(of(spans[0], "load"), of(spans[0], "step")) == 0
    assert overlaps(of(spans[1], "load"), of(spans[1], "step")) > 0


@pytest.mark.parametrize("copy", COPIES)
def test_what_came_before_the_first_step_is_left_out_and_nothing_is_copied_on_a_cpu(copy):
    begun = time.perf_counter()
    frame = traced(0, n_batches=2, copy=copy)
    assert frame.end_s.max() < time.perf_counter() - begun - 2 * STEP_S  # the steps that warmed up are not in it
    assert frame.start_s.min() < LOAD_S
    assert list(of(frame, "step").batch) == [0, 1]
    assert {*frame.lane, *frame.kind} == {"host", "load", "step"}


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


def test_what_cannot_be_traced_is_refused():
    with pytest.raises(ValueError, match="the loader must give 7 batches after 2 to warm up, got 6"):
        traced(0, n_batches=7)
    with pytest.raises(ValueError, match="copy must be one of blocking, non_blocking, prefetch, got 'telepathy'"):
        course.trace([], step, n_batches=1, copy="telepathy")


@pytest.mark.parametrize("copy", COPIES)
def test_on_cuda_only_prefetched_copies_overlap_compute(cuda, copy):
    """Steps of several milliseconds over batches of 16 MiB, which take a part of one to copy."""
    stamps = torch.tensor([[-1.0, 0.0, 0.0]], dtype=torch.float64).pin_memory()
    images = [torch.full((1 << 22,), float(number)).pin_memory() for number in range(8)]

    def compute(batch):
        torch.cuda._sleep(8_000_000)
        return batch.sum()

    frame = course.trace([(image, stamps) for image in images], compute, n_batches=6, device="cuda", copy=copy)
    computed, copied = frame[frame["lane"] == "GPU"], frame[frame["lane"] == "copy"]
    assert list(computed.batch) == list(range(6))
    assert set(copied.batch) >= set(range(1, 6))  # the first one may lie before the first step
    assert (computed.end_s > computed.start_s).all()
    assert (overlaps(copied, computed, 1e-4) > 0) == (copy == "prefetch")
    first, then = (of(part, kind).set_index("batch") for part, kind in ((copied, "copy"), (computed, "compute")))
    both = first.index.intersection(then.index)
    assert (first.end_s[both] <= then.start_s[both] + SLACK_S).all()  # no batch is computed on before it is there
    assert ("simulated" in frame) == (cuda is not None)
    course.plot_timeline(frame)


# Files for viewers

SPANS = pd.DataFrame({
    "lane": ["worker 0", "host", "worker 0"], "kind": ["load", "wait", "load"],
    "start_s": [0.0, 0.001, 0.5], "end_s": [0.25, 0.001, 0.75], "batch": [0, None, 1],
})  # fmt: skip


def events(path, phase):
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == phase]


def test_every_span_is_saved_as_a_complete_event_of_its_lanes_thread(tmp_path):
    path = lk.save_trace(SPANS, tmp_path / "trace.json")
    names = {event["tid"]: event["args"]["name"] for event in events(path, "M") if event["name"] == "thread_name"}
    assert list(names.values()) == ["worker 0", "host"]
    found = [(names[event["tid"]], event["name"], event["ts"], event["dur"]) for event in events(path, "X")]
    assert found == [("worker 0", "load", 0, 250_000), ("worker 0", "load", 500_000, 250_000)]
    assert [event["args"] for event in events(path, "X")] == [{"batch": 0, "span": 0}, {"batch": 1, "span": 2}]
    [instant] = events(path, "i")  # it took no time
    assert (names[instant["tid"]], instant["name"], instant["ts"]) == ("host", "wait", 1000)
    assert instant["args"] == {"span": 1}
    assert {event["pid"] for event in events(path, "X")} == {1}


def test_no_saved_span_overlaps_the_next(tmp_path):
    """Perfetto drops one that does, be it by a rounding: of spans without gaps every one must stay."""
    ends_s = np.random.default_rng(0).uniform(1e-4, 3e-3, 3000).cumsum()
    spans = pd.DataFrame({"lane": "GPU", "kind": "compute", "start_s": np.r_[0.0, ends_s[:-1]], "end_s": ends_s})
    found = events(lk.save_trace(spans, tmp_path / "trace.json"), "X")
    assert len(found) == 3000
    assert all(first["ts"] + first["dur"] == then["ts"] for first, then in pairwise(found))
    assert [event["ts"] for event in found] == pytest.approx(1e6 * spans["start_s"], abs=1 / 16 + 1e-6)


def test_a_simulation_is_saved_as_it_ran_and_says_that_it_is_one(tmp_path):
    def process(path):
        return [event["args"]["name"] for event in events(path, "M") if event["name"] == "process_name"]

    with lk.simulated_cuda(course.SimulatedDevice(clock_hz=1000.0, launch_s=0.0)) as simulation:
        torch.cuda._sleep(2000)
        simulation.work(0.5, "load")
        torch.cuda.synchronize()
        path = lk.save_trace(simulation.timeline(), tmp_path / "trace.json")
    found = [(event["cat"], event["name"], event["ts"], event["dur"]) for event in events(path, "X")]
    assert sorted(found) == [
        ("compute", "sleep", 0, 2e6), ("host", "load", 0, 0.5e6), ("host", "wait", 0.5e6, 1.5e6),
    ]  # fmt: skip
    assert process(path) == ["labkit (simulated)"]
    for spans in (SPANS, SPANS.assign(simulated=False)):
        assert process(lk.save_trace(spans, path)) == ["labkit"]


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        (SPANS.drop(columns="kind"), "must have the columns lane, kind, start_s, end_s; missing: kind"),
        (SPANS.assign(start_s=1.0, end_s=0.5), r"a span must end at or after its start: .*1\.0"),
        (SPANS.assign(end_s=np.inf), "a span must end at or after its start"),
    ],
)
def test_what_is_no_timeline_is_not_saved(tmp_path, spans, said):
    with pytest.raises(ValueError, match=said):
        lk.save_trace(spans, tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []
