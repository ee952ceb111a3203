"""`lk.plan`: against figures worked out by hand, and a simulation that moves single images."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, Dataset

import labkit as lk
from labkit.planning.plan import Plan
from labkit.watching.advice import Costs
from tests.pipeline_simulation import Pipeline, constant, exponential, images_per_s

OWN = {"cores_per_node": 8, "cpu_ms_per_image": 2}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"images_per_s": 0, **OWN}, "images_per_s must be a number > 0, got 0"),
        ({"images_per_s": 1, **OWN, "cores_per_node": math.inf}, "cores_per_node must be a number > 0, got inf"),
        ({"images_per_s": 1, **OWN, "kb_per_image": "115"}, "kb_per_image must be a number > 0, got '115'"),
        ({"images_per_s": 1, **OWN, "latency_ms": -1}, "latency_ms must be a number > 0, got -1"),
        ({"images_per_s": 1, **OWN, "requests_per_s": 0}, "requests_per_s must be a number > 0, got 0"),
        ({"images_per_s": 1, **OWN, "n_gpus": 0}, "n_gpus must be an integer >= 1, got 0"),
        ({"images_per_s": 1, **OWN, "n_images": 1.5}, "n_images must be an integer >= 1, got 1.5"),
    ],
)
def test_a_mistake_is_told_with_what_to_do(arguments, says):
    with pytest.raises(ValueError, match=says):
        lk.plan(**arguments)


# --- what was seen of a training

COSTS = Costs(step=0.1, copy=0, hand_over=0, fetch=0, prepare=0.1, start=0, together=0.2, making=0.4, waiting=0.25,
              step_cpu=0.08)  # fmt: skip


@pytest.fixture
def diagnosis():
    frame = pd.DataFrame({
        "variant": ["step", "loader", "step", "step"], "images_per_s": [640, 300, 600, 660], "batch_size": 64,
    })  # fmt: skip
    return SimpleNamespace(frame=frame, costs=COSTS)


def test_a_diagnosis_gives_the_demand_and_what_an_image_costs(diagnosis):
    found = lk.plan(diagnosis, cores_per_node=4)
    assert found.demand == 640
    image_ms = 1.1 * 0.4 * 0.75 * 1e3 / 64
    assert found.needs["cores_per_gpu"] == pytest.approx(640 * image_ms / 1e3 + 0.8)
    assert found.ceilings["the cores"] == pytest.approx((4 - 0.8) * 1e3 / image_ms)
    entered = lk.plan(diagnosis, cores_per_node=4, cpu_ms_per_image=2, step_cores_per_gpu=0, slowdown=1)
    assert entered.ceilings["the cores"] == 2000


def test_the_report_of_a_watch_gives_them_with_its_batch_size(tmp_path):
    path = tmp_path / "watch.json"
    report = {"costs_s": {name: getattr(COSTS, name) for name in COSTS.__dataclass_fields__}}
    path.write_text(json.dumps(report))
    for seen in (path, SimpleNamespace(to_dict=lambda: report)):
        found = lk.plan(seen, batch_size=32, cores_per_node=4)
        assert found.demand == 320
        assert found.needs["cores_per_gpu"] == pytest.approx(320 * 0.4 * 0.75 / 32 + 0.8)  # not slowed down once more


@pytest.mark.parametrize("text", ["{}", "[1]", '{"costs_s": {}, '])
def test_other_and_missing_files_are_told(tmp_path, text):
    other = tmp_path / "other.json"
    with pytest.raises(FileNotFoundError):
        lk.plan(other, **OWN, batch_size=2)
    other.write_text(text)
    with pytest.raises(ValueError, match=r"other.json is not a report of `labkit watch --json`"):
        lk.plan(other, batch_size=2, cores_per_node=4)


class Photos(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.rand(3, 64, 64).sort().values


def test_a_real_diagnosis_and_a_real_watch_are_taken():
    loader = DataLoader(Photos(), batch_size=8)
    assert lk.plan(lk.diagnose(loader, torch.sum, batches=4, rounds=1, limit_s=5), cores_per_node=8).demand > 0
    with lk.watch() as watched:
        for batch in loader:
            batch.sum()
    assert lk.plan(watched.report(), batch_size=8, **OWN).demand > 0


# --- worked out by hand

EXACT = {
    "cores_per_node": 32, "step_cores_per_gpu": 1, "cpu_ms_per_image": 2, "slowdown": 1.25, "gil_us_per_image": 1500,
    "kb_per_image": 100, "n_images": 3_600_000, "latency_ms": 9, "mb_per_s_per_request": 100, "requests_per_s": 1000,
    "storage_mb_per_s": 2000, "network_gbit_per_node": 10,
}  # fmt: skip


def planned(demand=1000, n_gpus=8, n_nodes=2, **inputs):
    return lk.plan(demand, n_gpus=n_gpus, n_nodes=n_nodes, **{**EXACT, **inputs})


NEEDS = {
    "cores_per_gpu": 3.5,  # 1000 x 2.5 ms + 1
    "cores_per_node": 14,
    "processes_per_gpu": 2,  # 1000 x 1.5 ms = 1.5 locks
    "mb_per_s": 800,  # 8 x 1000 x 0.1 MB
    "gbit_per_s_per_node": 3.2,
    "requests_per_s": 8000,
    "requests_in_flight": 80,  # 8000 x (9 ms + 0.1 MB at 100 MB/s)
    "requests_in_flight_per_gpu": 10,
    "dataset_gb": 360,
}
CEILINGS = {
    "the GPUs": 8000,  # 8 x 1000
    "the cores": 22_400,  # 2 x (32 - 4) cores / 2.5 ms
    "Python's lock": 8 / 0.0015,
    "the requests in flight": 56 / 0.0125,  # 56 threads that read for 10 ms and decode for 2.5 ms
    "the storage's requests per second": 1000,
    "the storage's MB per second": 20_000,
    "the network": 25_000,  # 2 x 10 Gbit/s / 100 KB
}


def test_each_quantity_is_what_was_worked_out_by_hand():
    plain = planned()
    assert plain.needs == pytest.approx(NEEDS)
    assert plain.ceilings == pytest.approx(CEILINGS)
    assert (plain.demand, plain.images_per_s, plain.bottleneck) == (8000, 1000, "the storage's requests per second")
    assert (plain.busy_share, plain.epoch_hours) == (0.125, 1)


def test_the_requests_of_shards_and_their_client_count():
    shards = planned(images_per_request=100)  # 10 MB, which take 9 + 100 ms
    assert shards.needs["requests_per_s"] == 80
    assert shards.needs["requests_in_flight"] == pytest.approx(8.72)
    assert shards.ceilings["the storage's requests per second"] == 100_000
    client = {"request_cpu_ms": 4, "request_gil_ms": 2}
    single, ranges = planned(**client), planned(**client, images_per_request=100)
    assert single.ceilings["the cores"] == pytest.approx(56e3 / (6 * 1.25))
    assert single.ceilings["Python's lock"] == pytest.approx(8e6 / 3500)
    assert single.needs["processes_per_gpu"] == 4
    assert ranges.ceilings["the cores"] == pytest.approx(56e3 / (2.04 * 1.25))
    assert ranges.ceilings["Python's lock"] == pytest.approx(8e6 / 1520)


def test_the_steps_take_at_most_half_of_the_cores():
    assert planned(cores_per_node=4, n_gpus=8, n_nodes=2).ceilings["the cores"] == pytest.approx(2 * 2 * 1e3 / 2.5)


def test_the_published_rule_of_s3_holds():
    """AWS: about 15 requests of 85 to 90 MB/s fill 10 Gbit/s. With ranges of 16 MB, latency takes a few more."""
    found = planned(12_500, 1, 1, images_per_request=160, latency_ms=0, mb_per_s_per_request=87.5)
    assert found.needs["gbit_per_s_per_node"] == 10
    assert found.needs["requests_in_flight"] == pytest.approx(15, rel=0.06)


def test_threads_that_decode_hide_short_waits_and_are_held_up_by_long_ones():
    """8 cores less one, 2 ms of a core slowed down to 2.2: 7 threads."""
    near, far, apart = (lk.plan(9000, **OWN, latency_ms=ms, requests_in_flight_per_gpu=n)
                        for ms, n in ((0.2, None), (20, None), (20, 32)))  # fmt: skip
    assert (near.bottleneck, near.images_per_s) == ("the cores", pytest.approx(7e3 / (0.2 + 2.2)))
    assert (far.bottleneck, far.images_per_s) == ("the requests in flight", pytest.approx(7e3 / (20 + 2.2)))
    assert (apart.bottleneck, apart.images_per_s) == ("the requests in flight", 1600)


def test_what_is_not_given_is_no_limit():
    assert set(lk.plan(100, **OWN).ceilings) == {"the GPUs", "the cores"}


def test_its_page_has_each_figure_and_says_what_limits():
    text = str(planned())
    for said in ("the limit is the storage's requests per second", "1,000 images/s of the 8,000", "12% of the time"):
        assert said in text
    for name in NEEDS | CEILINGS:
        assert f"\n  {name} " in text
    assert text.index("the cores  ") < text.index("the network  ")  # the scarcest first


# --- which way each input moves them

MORE_IS_SLOWER = ["cpu_ms_per_image", "request_cpu_ms", "request_gil_ms", "gil_us_per_image", "kb_per_image",
                  "latency_ms", "slowdown"]  # fmt: skip
MORE_IS_FASTER = ["cores_per_node", "processes_per_gpu", "requests_per_s", "storage_mb_per_s", "network_gbit_per_node",
                  "mb_per_s_per_request", "requests_in_flight_per_gpu"]  # fmt: skip
values = st.integers(2, 5000)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(MORE_IS_SLOWER + MORE_IS_FASTER), values, values, st.sampled_from([500, 3000, 40_000]))
def test_more_of_an_input_never_moves_the_rate_the_other_way(name, one, other, demand):
    less, more = (planned(demand, **{name: value}).images_per_s for value in sorted((one, other)))
    assert less >= more * 0.999999 if name in MORE_IS_SLOWER else more >= less * 0.999999


# --- a simulation


def predicted(of: Pipeline) -> Plan:
    """The plan of a pipeline."""
    inputs = {"gil_us_per_image": 1e6 * of.lock_s, "latency_ms": 1e3 * of.latency_s}
    if of.gap_s:
        inputs["requests_per_s"] = 1 / of.gap_s
    if of.link_s:
        inputs["network_gbit_per_node"] = 100 * 8 / 1e6 / of.link_s
    if of.reads_apart or of.readers != of.cores:
        inputs["requests_in_flight_per_gpu"] = min(of.readers, (of.ahead + 1) * of.batch_size)
    return lk.plan(
        of.batch_size / of.step_s, cores_per_node=of.cores, cpu_ms_per_image=1e3 * of.cpu_s, step_cores_per_gpu=0,
        slowdown=1, kb_per_image=100, **inputs,
    )  # fmt: skip


# The cores give 2000 images/s, the step takes 1000.
ROOMY = Pipeline(readers=4, cores=4, latency_s=1e-5, cpu_s=0.002, step_s=0.008)

# One resource is half as plentiful as the next.
SCARCE = {
    "the GPUs": ROOMY,
    "the cores": replace(ROOMY, step_s=0.002),
    "the requests in flight": replace(ROOMY, latency_s=0.02, step_s=0.002),
    "the requests in flight, apart": replace(ROOMY, latency_s=0.02, reads_apart=True, readers=16, step_s=0.002),
    "Python's lock": replace(ROOMY, lock_s=0.0018, cores=16, readers=16, step_s=0.002),
    "the storage's requests per second": replace(ROOMY, gap_s=0.002, step_s=0.002),
    "the network": replace(ROOMY, link_s=0.002, step_s=0.002, reads_apart=True, readers=16),
}


@pytest.mark.parametrize("times", [constant, exponential])
@pytest.mark.parametrize("name", SCARCE)
def test_the_smallest_ceiling_is_the_rate(name, times):
    pipeline = replace(SCARCE[name], ahead=8)
    found = predicted(pipeline)
    assert found.bottleneck == name.partition(",")[0]
    simulated = images_per_s(replace(pipeline, times=times), n_batches=400 if times is constant else 1200)
    assert simulated == pytest.approx(found.images_per_s, rel=0.05)


# Two as scarce as each other. 40 requests in flight need 40 images in the batches ahead.
EVEN = {
    "GPU and cores": replace(ROOMY, step_s=0.004),
    "GPU and requests": replace(ROOMY, latency_s=0.02, reads_apart=True, readers=40, step_s=0.004, cores=8),
    "cores and requests": replace(ROOMY, latency_s=0.02, reads_apart=True, readers=40, step_s=0.001),
    "cores and network": replace(ROOMY, link_s=0.0005, reads_apart=True, readers=16, step_s=0.001),
}


@pytest.mark.parametrize("ahead", [1, 2, 8])
@pytest.mark.parametrize("name", EVEN)
def test_of_two_scarce_resources_at_most_a_third_is_lost(name, ahead):
    """With times that vary as widely as exponential ones; the more batches ahead, the less is lost."""
    pipeline = replace(EVEN[name], ahead=ahead, times=exponential)
    share = images_per_s(pipeline, n_batches=800) / predicted(pipeline).images_per_s
    assert 2 / 3 <= share <= 1.03
    assert ahead < 8 or share > 0.9


def test_nothing_is_lost_where_nothing_varies_or_one_resource_is_scarce():
    pipeline = replace(EVEN["GPU and cores"], ahead=1)
    assert "can be a third lower" in str(predicted(pipeline))
    assert images_per_s(pipeline) == pytest.approx(predicted(pipeline).images_per_s, rel=0.01)
    assert "a third" not in str(predicted(ROOMY))
