import json
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch

import labkit as lk
from labkit import course

SPANS = pd.DataFrame({
    "lane": ["worker 0", "host", "worker 0"], "kind": ["load", "wait", "load"],
    "start_s": [0.0, 0.001, 0.5], "end_s": [0.25, 0.001, 0.75], "batch": [0, None, 1],
})  # fmt: skip


def events(path, phase):
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == phase]


def test_every_span_is_a_complete_event_of_its_lanes_thread(tmp_path):
    path = lk.save_trace(SPANS, tmp_path / "trace.json")
    names = {event["tid"]: event["args"]["name"] for event in events(path, "M") if event["name"] == "thread_name"}
    found = [(names[event["tid"]], event["name"], event["ts"], event["dur"]) for event in events(path, "X")]
    assert found == [("worker 0", "load", 0, 250_000), ("worker 0", "load", 500_000, 250_000)]
    [instant] = events(path, "i")  # it took no time
    assert (names[instant["tid"]], instant["name"], instant["ts"], instant["args"]) == (
        "host",
        "wait",
        1000,
        {"span": 1},
    )
    assert [event["args"] for event in events(path, "X")] == [{"batch": 0, "span": 0}, {"batch": 1, "span": 2}]
    assert {event["pid"] for event in events(path, "X")} == {1}


def test_no_span_overlaps_the_next(tmp_path):
    """Perfetto drops one that does, be it by a rounding: of spans without gaps every one must stay."""
    ends_s = np.random.default_rng(0).uniform(1e-4, 3e-3, 3000).cumsum()
    spans = pd.DataFrame({"lane": "GPU", "kind": "compute", "start_s": np.r_[0.0, ends_s[:-1]], "end_s": ends_s})
    found = events(lk.save_trace(spans, tmp_path / "trace.json"), "X")
    assert len(found) == 3000
    assert all(first["ts"] + first["dur"] == then["ts"] for first, then in pairwise(found))
    assert [event["ts"] for event in found] == pytest.approx(1e6 * spans["start_s"], abs=1 / 16 + 1e-6)


@pytest.mark.parametrize(("simulated", "name"), [(False, "labkit"), (True, "labkit (simulated)")])
def test_the_process_says_what_it_is(tmp_path, simulated, name):
    path = lk.save_trace(SPANS.assign(simulated=simulated), tmp_path / "trace.json")
    assert [event["args"]["name"] for event in events(path, "M") if event["name"] == "process_name"] == [name]


def test_a_simulation_is_saved_as_it_ran(tmp_path):
    with lk.simulated_cuda(course.SimulatedDevice(clock_hz=1000.0, launch_s=0.0)) as simulation:
        torch.cuda._sleep(2000)
        torch.cuda.synchronize()
        path = lk.save_trace(simulation.timeline(), tmp_path / "trace.json")
    assert [(event["name"], event["dur"]) for event in events(path, "X")] == [("sleep", 2_000_000), ("wait", 2_000_000)]


def test_what_is_no_timeline(tmp_path):
    with pytest.raises(ValueError, match="must have the columns lane, kind, start_s, end_s; missing: kind"):
        lk.save_trace(SPANS.drop(columns="kind"), tmp_path / "trace.json")
    with pytest.raises(ValueError, match=r"a span must end at or after its start: .*1\.0"):
        lk.save_trace(SPANS.assign(start_s=1.0, end_s=0.5), tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []
