"""`lk.save_trace` writes timelines for viewers."""

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
