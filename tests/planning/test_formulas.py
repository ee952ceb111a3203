"""The formulas of a plan: against figures worked out by hand, and a simulation that moves single images."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import labkit as lk
from labkit.planning.formulas import FORMULAS, Estimate, as_estimate, of_draws
from labkit.planning.plan import Plan
from tests.pipeline_simulation import Pipeline, constant, exponential, images_per_s

# --- numbers with an interval


@settings(deadline=None)
@given(st.floats(1e-3, 1e6), st.floats(1, 10), st.floats(1, 10))
def test_draws_have_the_median_and_interval_of_their_estimate(value, below, above):
    estimate = Estimate(value, value / below, value * above)
    found = of_draws(estimate.draw("any"))
    assert found == pytest.approx((value, *estimate.interval), rel=0.01)
    assert found[0] == value


def test_each_name_has_draws_of_its_own_and_what_is_exact_is_constant():
    first, again, other = (Estimate(2, 1, 4).draw(name) for name in "aab")
    assert (first == again).all()
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.06
    assert sorted(first) == sorted(other)
    for value in (0.0, 3.0):
        assert set(Estimate(value).draw("any")) == {value}


@pytest.mark.parametrize("limits", [(2, 3, 4), (2, 1, 1.5), (2, 0, 3), (-1, None, None), (np.inf, None, None)])
def test_wrong_limits_and_kinds_are_refused(limits):
    with pytest.raises(ValueError, match="0 < low <= value <= high"):
        Estimate(*limits)
    with pytest.raises(ValueError, match="kind must be one of measured here, entered"):
        Estimate(1, kind="guessed")


def test_a_number_two_limits_or_all_three_are_an_estimate():
    assert as_estimate("kb", 2) == Estimate(2.0, 2.0, 2.0)
    assert as_estimate("kb", [1, 4]) == Estimate(2.0, 1.0, 4.0)
    assert as_estimate("kb", (1, 3, np.float64(4))) == Estimate(3.0, 1.0, 4.0)
    assert as_estimate("kb", own := Estimate(2, source="a run")) is own
    with pytest.raises(ValueError, match="kb: an estimate must be"):
        as_estimate("kb", (4, 1))


@pytest.mark.parametrize("wrong", ["2", [], [1, 2, 3, 4], None, True, [1, "2"], float("nan"), {"low": 1}])
def test_anything_else_is_no_estimate(wrong):
    with pytest.raises(ValueError, match=r"kb must be a number, \(low, high\) or"):
        as_estimate("kb", wrong)


# --- worked out by hand

EXACT = {
    "cores_per_node": 32, "step_cores_per_gpu": 1, "cpu_ms_per_image": 2, "slowdown": 1.25, "gil_us_per_image": 1500,
    "kb_per_image": 100, "n_images": 3_600_000, "process_gb": 0.5, "batches_ahead": 4, "batch_size": 250,
}  # fmt: skip
FAR = {"latency_ms": 9, "mb_per_s_per_request": 100, "requests_per_s": 1000, "storage_mb_per_s": 2000,
       "request_cpu_ms": 0}  # fmt: skip


def planned(demand=1000, n_gpus=8, n_nodes=2, **inputs):
    return lk.plan(demand, n_gpus=n_gpus, n_nodes=n_nodes, storage="s3", **{**EXACT, **FAR, **inputs})


BY_HAND = {
    "demand": 8000,  # 8 x 1000
    "gpus_per_node": 4,
    "cores_per_gpu": 3.5,  # 1000 x 2.5 ms + 1
    "cores_needed_per_node": 14,
    "lock_us": 1500,
    "processes_needed": 2,  # 1000 x 1.5 ms = 1.5 locks
    "mb_per_s_per_node": 400,  # 4 x 1000 x 0.1 MB
    "gbit_per_s_per_node": 3.2,
    "gbit_per_s": 6.4,
    "requests_needed_per_s": 8000,
    "request_ms": 10,  # 9 ms + 0.1 MB at 100 MB/s
    "in_flight_needed": 80,
    "in_flight_needed_per_gpu": 10,
    "batch_kb_per_image": 150.528,  # 224 x 224 x 3
    "pcie_needed_gb_per_s": 0.150528,
    "memory_gb": 4 * (4 * 250 * 150.528e-6 + 10 * 1e-4 + 2 * 0.5),
    "dataset_gb": 360,
    "core_ceiling": 22_400,  # 2 x (32 - 4) cores / 2.5 ms
    "lock_ceiling": 8 / 0.0015,
    "request_rate_ceiling": 1000,
    "bandwidth_ceiling": 20_000,
    "in_flight_ceiling": 56 / 0.0125,  # 56 threads that read for 10 ms and decode for 2.5 ms
    "images_per_s": 1000,
    "busy_share": 0.125,
    "epoch_hours": 1,
}
CLIENT = {  # a request costs 4 ms of a core, half of them under the lock
    "busy_cpu_ms": (2 + 4) * 1.25, "lock_us": 1500 + 2000, "processes_needed": 4, "core_ceiling": 56 / 0.0075,
    "lock_ceiling": 8 / 0.0035,
}  # fmt: skip
IN_SHARDS = {  # of 50 MB, read in requests of 10 MB
    "images_per_request": 100, "requests_needed_per_s": 80, "request_ms": 109, "in_flight_needed": 8.72,
    "shards": 7200, "request_rate_ceiling": 100_000,
}  # fmt: skip


def test_each_quantity_is_what_was_worked_out_by_hand():
    plain, shards = planned(), planned(shard_mb=50, request_mb=10)
    assert {name: plain.value(name) for name in BY_HAND} == {
        name: pytest.approx((value,) * 3) for name, value in BY_HAND.items()
    }
    assert {name: shards.value(name)[0] for name in IN_SHARDS} == pytest.approx(IN_SHARDS)
    for requests, costs in (({}, CLIENT), ({"shard_mb": 50, "request_mb": 10}, {"lock_us": 1520, "busy_cpu_ms": 2.55})):
        client = planned(request_cpu_ms=4, request_lock_share=0.5, **requests)
        assert {name: client.value(name)[0] for name in costs} == pytest.approx(costs)
    others = {"busy_cpu_ms", "gpu_ceiling", "loading_cores_per_node", "in_flight_per_gpu", "requesting_threads_per_gpu",
              "pcie_ceiling", "network_ceiling"}  # fmt: skip
    assert {formula.name for formula in FORMULAS} - {*BY_HAND, *IN_SHARDS} == others


def test_shards_are_read_in_ranges_and_one_core_is_shared():
    assert planned(shard_mb=5).value("request_mb")[0] == 5  # not in longer ones than a shard
    assert planned(shard_mb=500).value("request_mb")[1:] == (8, 16)
    assert planned(n_gpus=1, n_nodes=1, cores_per_node=1).value("loading_cores_per_node")[0] == 0.5


def test_the_published_rule_of_s3_holds():
    """AWS: about 15 requests of 85 to 90 MB/s fill 10 Gbit/s. With ranges of 16 MB, latency takes a few more."""
    plan = planned(
        demand=12_500, n_gpus=1, n_nodes=1, shard_mb=500, request_mb=16, latency_ms=0.001, mb_per_s_per_request=(85, 90)
    )
    assert plan.value("gbit_per_s")[0] == 10
    assert plan.value("in_flight_needed")[0] == pytest.approx(15, rel=0.06)


def test_what_is_local_needs_no_network_and_adds_up():
    inputs = {"cores_per_node": 4, "cpu_ms_per_image": 2}
    over_network, local = (
        lk.plan(100, storage=storage, network_gbit_per_node=10, **inputs).setup.draws for storage in ("s3", "nvme")
    )
    assert {"network_ceiling", "gbit_per_s"} <= over_network.keys() - local.keys()
    one, four = (lk.plan(100, n_gpus=4, n_nodes=nodes, **inputs).value("bandwidth_ceiling") for nodes in (1, 4))
    assert four == pytest.approx([4 * value for value in one])


def test_draws_in_which_a_resource_is_scarce_add_up():
    shares = lk.plan((500, 1500), cores_per_node=4, cpu_ms_per_image=(2, 4), storage="memory").setup.scarcities
    assert sum(shares.values()) == pytest.approx(1)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert set(shares) == {"gpu_ceiling", "core_ceiling"}


# --- which way each input moves them

MORE_IS_SLOWER = ["cpu_ms_per_image", "request_cpu_ms", "gil_us_per_image", "kb_per_image", "latency_ms", "slowdown",
                  "crop_size"]  # fmt: skip
MORE_IS_FASTER = ["cores_per_node", "processes_per_gpu", "requests_per_s", "storage_mb_per_s", "network_gbit_per_node",
                  "pcie_gb_per_s", "mb_per_s_per_request", "requests_in_flight_per_gpu", "batches_ahead"]  # fmt: skip
NEEDS = ["cores_per_gpu", "processes_needed", "mb_per_s_per_node", "gbit_per_s", "requests_needed_per_s",
         "in_flight_needed", "pcie_needed_gb_per_s", "memory_gb"]  # fmt: skip
values = st.integers(2, 5000)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(MORE_IS_SLOWER + MORE_IS_FASTER), values, values, st.sampled_from([500, 3000, 40_000]))
def test_more_of_an_input_never_moves_the_rate_the_other_way(name, one, other, demand):
    others = {"network_gbit_per_node": 10, "pcie_gb_per_s": 5}
    less, more = (planned(demand, **{**others, name: value}).value("images_per_s")[0] for value in sorted((one, other)))
    assert less >= more * 0.999999 if name in MORE_IS_SLOWER else more >= less * 0.999999


@settings(max_examples=30, deadline=None)
@given(values, values)
def test_more_demand_needs_more(one, other):
    less, more = (planned(demand) for demand in sorted((one, other)))
    assert [name for name in NEEDS if less.value(name)[0] > more.value(name)[0]] == []
    assert less.value("busy_share")[0] >= more.value("busy_share")[0]


@settings(max_examples=30, deadline=None)
@given(st.floats(1, 3), st.floats(1, 3), st.floats(100, 5000))
def test_wider_inputs_make_wider_results(one, other, demand):
    spreads = sorted((one, other))
    narrow, wide = (planned((demand / each, demand, demand * each)).value("cores_per_gpu") for each in spreads)
    assert wide[1] <= narrow[1] * 1.000001
    assert wide[2] >= narrow[2] * 0.999999
    assert narrow[0] == pytest.approx(wide[0])


# --- a simulation


def predicted(of: Pipeline) -> Plan:
    """The plan of a pipeline: every input exact."""
    rates = {"latency_ms": 1e3 * of.latency_s, "mb_per_s_per_request": 1e9, "request_cpu_ms": 0}
    rates["requests_per_s"] = 1 / of.gap_s if of.gap_s else 1e9
    inputs = {"gil_us_per_image": 1e6 * of.lock_s} if of.lock_s else {}
    if of.link_s:
        inputs["network_gbit_per_node"] = 100 * 8 / 1e6 / of.link_s
    if of.reads_apart or of.readers != of.cores:
        inputs["requests_in_flight_per_gpu"] = of.readers
    return lk.plan(
        of.batch_size / of.step_s, cores_per_node=of.cores, cpu_ms_per_image=1e3 * of.cpu_s, step_cores_per_gpu=0,
        batch_size=of.batch_size, batches_ahead=of.ahead + 2,  # one in use, one being made
        slowdown=1, kb_per_image=100, storage="s3", **rates, **inputs,
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
    plan = predicted(pipeline)
    assert plan.bottleneck == name.partition(",")[0]
    simulated = images_per_s(replace(pipeline, times=times), n_batches=400 if times is constant else 1200)
    assert simulated == pytest.approx(plan.value("images_per_s")[0], rel=0.05)


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
    plan = predicted(pipeline)
    share = images_per_s(pipeline, n_batches=800) / plan.value("images_per_s")[0]
    assert 2 / 3 <= share <= 1.03
    assert ahead < 8 or share > 0.9


def test_nothing_is_lost_where_nothing_varies_or_one_resource_is_scarce():
    pipeline = replace(EVEN["GPU and cores"], ahead=1)
    assert "a third below" in " ".join(predicted(pipeline).notes)
    assert images_per_s(pipeline) == pytest.approx(predicted(pipeline).value("images_per_s")[0], rel=0.01)
    notes = predicted(ROOMY).notes
    assert [note.split()[0] for note in notes] == ["gil_us_per_image", "network_gbit_per_node"]
    assert all("is not known" in note for note in notes)
