"""What it takes to keep the GPUs busy: against figures worked out by hand, and which way each input moves it."""

import pytest
from hypothesis import given, settings, strategies as st

import labkit as lk
from labkit import course
from labkit.planning.formulas import FORMULAS

EXACT = {
    "cores_per_node": 32, "step_cores_per_gpu": 1, "cpu_ms_per_image": 2, "slowdown": 1.25, "gil_us_per_image": 1500,
    "kb_per_image": 100, "n_images": 3_600_000, "process_gb": 0.5, "batches_ahead": 4, "batch_size": 250,
}  # fmt: skip
NFS = course.Storage(
    "NFS", {"latency_ms": 9, "mb_per_s_per_request": 100, "requests_per_s": 1000, "storage_mb_per_s": 2000}
)


def planned(demand=1000, n_gpus=8, n_nodes=2, storage=NFS, **inputs):
    return lk.plan(demand, n_gpus=n_gpus, n_nodes=n_nodes, storage=storage, **{**EXACT, **inputs})


BY_HAND = {
    "demand": 8000,  # 8 x 1000
    "gpus_per_node": 4,
    "cores_per_gpu": 3.5,  # 1000 x 2.5 ms + 1
    "cores_needed_per_node": 14,
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


class TestByHand:
    @pytest.mark.parametrize("name", BY_HAND)
    def test_a_file_an_image(self, name):
        assert planned().value(name) == pytest.approx((BY_HAND[name],) * 3)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("images_per_request", 100), ("requests_needed_per_s", 80), ("request_ms", 109), ("in_flight_needed", 8.72),
         ("shards", 7200), ("request_rate_ceiling", 100_000)],
    )  # fmt: skip
    def test_shards(self, name, value):
        assert planned(shard_mb=50, request_mb=10).value(name)[0] == pytest.approx(value)

    def test_the_published_rule_of_s3(self):
        """AWS: about 15 requests of 85 to 90 MB/s fill 10 Gbit/s. With ranges of 16 MB, latency takes a few more."""
        plan = planned(demand=12_500, n_gpus=1, n_nodes=1, storage="s3", shard_mb=500, request_mb=16, latency_ms=0.001)
        assert plan.value("gbit_per_s")[0] == 10
        assert plan.value("in_flight_needed")[0] == pytest.approx(15, rel=0.06)

    def test_a_shard_is_not_read_in_longer_ranges(self):
        assert planned(shard_mb=5).value("request_mb")[0] == 5
        assert planned(shard_mb=500).value("request_mb")[1:] == (8, 16)

    def test_one_core_is_shared(self):
        assert planned(n_gpus=1, n_nodes=1, cores_per_node=1).value("loading_cores_per_node")[0] == 0.5

    def test_every_line_was_worked_out(self):
        others = {"busy_cpu_ms", "images_per_request", "prefixes_needed", "shards", "gpu_ceiling",
                  "loading_cores_per_node", "in_flight_per_gpu", "pcie_ceiling", "network_ceiling"}  # fmt: skip
        assert {formula.name for formula in FORMULAS} - set(BY_HAND) == others
        assert [formula.name for formula in FORMULAS if not formula.text] == []


MORE_IS_SLOWER = ["cpu_ms_per_image", "gil_us_per_image", "kb_per_image", "latency_ms", "slowdown", "crop_size"]
MORE_IS_FASTER = ["cores_per_node", "processes_per_gpu", "requests_per_s", "storage_mb_per_s", "network_gbit_per_node",
                  "pcie_gb_per_s", "mb_per_s_per_request", "requests_in_flight_per_gpu", "batches_ahead"]  # fmt: skip
NEEDS = ["cores_per_gpu", "processes_needed", "mb_per_s_per_node", "gbit_per_s", "requests_needed_per_s",
         "in_flight_needed", "pcie_needed_gb_per_s", "memory_gb"]  # fmt: skip
values = st.integers(2, 5000)


class TestDirections:
    @settings(max_examples=30, deadline=None)
    @given(st.sampled_from(MORE_IS_SLOWER + MORE_IS_FASTER), values, values, st.sampled_from([500, 3000, 40_000]))
    def test_of_the_rate(self, name, one, other, demand):
        less, more = (
            planned(demand, network_gbit_per_node=10, **{"pcie_gb_per_s": 5, name: value}).value("images_per_s")[0]
            if name != "network_gbit_per_node"
            else planned(demand, **{name: value}).value("images_per_s")[0]
            for value in sorted((one, other))
        )
        assert less >= more * 0.999999 if name in MORE_IS_SLOWER else more >= less * 0.999999

    @settings(max_examples=30, deadline=None)
    @given(values, values)
    def test_more_demand_needs_more(self, one, other):
        less, more = (planned(demand) for demand in sorted((one, other)))
        assert [name for name in NEEDS if less.value(name)[0] > more.value(name)[0]] == []
        assert less.value("busy_share")[0] >= more.value("busy_share")[0]

    @settings(max_examples=30, deadline=None)
    @given(st.floats(1, 3), st.floats(1, 3), st.floats(100, 5000))
    def test_wider_inputs_make_wider_results(self, narrow, wide, demand):
        narrow, wide = sorted((narrow, wide))
        found = [planned((demand / each, demand, demand * each)).value("cores_per_gpu") for each in (narrow, wide)]
        assert found[1][1] <= found[0][1] * 1.000001
        assert found[1][2] >= found[0][2] * 0.999999
        assert found[0][0] == pytest.approx(found[1][0])
