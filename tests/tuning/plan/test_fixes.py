"""What is proposed against each scarce resource, in which order, and what it brings."""

import pytest

import labkit as lk
from labkit.planning.fixes import EFFORTS
from labkit.planning.formulas import Estimate, LoaderCosts

MACHINE = {"cores_per_node": 16, "cpu_ms_per_image": 1, "step_cores_per_gpu": 0, "slowdown": 1, "storage": "memory"}


def planned(demand=10_000, **inputs):
    return lk.plan(demand, **{**MACHINE, **inputs})


def costs(**cpu_ms):
    """Known costs by data: `photos`, `small`, `pixels`."""
    names = {"photos": "photos", "small": "photos at 256", "pixels": "pixels at 256"}
    kb = {"photos": 100, "small": 25, "pixels": 250}
    return LoaderCosts({
        names[each]: {
            "cpu_ms_per_image": Estimate(ms, source="a run"), "kb_per_image": Estimate(kb[each], source="a run"),
        }
        for each, ms in cpu_ms.items()
    })  # fmt: skip


# Resource -> a plan that lacks it, and how the actions begin, in their order.
LACKING = {
    "the cores": ({"cores_per_node": 4}, ["Use nodes of 10 cores", "Resize once", "Decode once"]),
    "Python's lock": ({"gil_us_per_image": 250}, ["Load in 3 processes", "Resize once", "Decode once"]),
    "the PCIe bus": ({"dtype": "float32", "pcie_gb_per_s": 4}, ["Send bytes"]),
    "the network": (
        {"storage": "s3", "shard_mb": 500, "requests_in_flight_per_gpu": 1000, "network_gbit_per_node": 4,
         "kb_per_image": 100},
        ["Copy the images to a local NVMe disk of each node (128 GB)", "Use a network of 8 Gbit/s", "Resize once"],
    ),
    "the storage's requests per second": (
        {"storage": "s3", "requests_in_flight_per_gpu": 20_000, "batches_ahead": 100},
        ["Write shards", "Spread the keys over 2 prefixes", "Copy the images"],
    ),
    "the storage's MB per second": (
        {"storage": "nvme", "storage_mb_per_s": 500, "kb_per_image": 100, "requests_in_flight_per_gpu": 100},
        ["Use storage of 1,000 MB/s", "Resize once"],
    ),
    "the requests in flight": (
        {"storage": "s3", "n_prefixes": 2}, ["Keep ", "Write shards", "Copy the images"],
    ),
}  # fmt: skip


class TestProposals:
    @pytest.mark.parametrize("resource", LACKING)
    def test_what_is_proposed(self, resource):
        inputs, begins = LACKING[resource]
        plan = planned(**inputs)
        assert plan.bottleneck == resource
        assert len(plan.fixes) == len(begins)
        for fix, begin in zip(plan.fixes, begins, strict=True):
            assert fix.action.startswith(begin)

    @pytest.mark.parametrize("resource", LACKING)
    def test_known_ones_come_first_and_the_cheapest_of_them(self, resource):
        fixes = planned(**LACKING[resource][0]).fixes
        assert [fix.is_known for fix in fixes] == sorted((fix.is_known for fix in fixes), reverse=True)
        efforts = [EFFORTS.index(fix.effort) for fix in fixes if fix.is_known]
        assert efforts == sorted(efforts)

    @pytest.mark.parametrize("resource", LACKING)
    def test_the_first_known_one_heals(self, resource):
        plan = planned(**LACKING[resource][0])
        after = plan.after(plan.fixes[0])
        assert after.value("images_per_s")[0] == plan.fixes[0].images_per_s[0]
        assert after.value("images_per_s")[0] > 1.1 * plan.value("images_per_s")[0]
        assert plan.steps[-1].next_limit == "gpu_ceiling"

    def test_no_fix_where_the_gpus_limit(self):
        assert planned().fixes == []
        assert planned().steps == []

    def test_what_may_be_scarce_is_fixd_too(self):
        plan = planned(demand=(5000, 20_000), cores_per_node=12)
        assert plan.bottleneck == "the GPUs"
        assert plan.fixes[0].action.startswith("Use nodes of")
        assert plan.fixes[0].gain[0] == pytest.approx(1)
        assert plan.fixes[0].gain[2] > 1.3


class TestGains:
    def test_measured_costs_give_the_gain(self):
        plan = planned(cores_per_node=4, cpu_ms_per_image=None, costs=costs(photos=1, small=0.5, pixels=0.1))
        assert [fix.action[:6] for fix in plan.fixes] == ["Decode", "Resize", "Use no"]
        assert plan.fixes[1].gain == pytest.approx((2, 2, 2))
        assert plan.fixes[0].gain == pytest.approx((2.5, 2.5, 2.5))  # then the GPUs limit
        assert plan.after(plan.fixes[0]).setup.data == "pixels at 256"
        assert "a run" in " ".join(plan.after(plan.fixes[0]).frame.set_index("name").loc["core_ceiling", "sources"])

    def test_unknown_costs_give_the_most(self):
        fix = planned(cores_per_node=4).fixes[-1]
        assert not fix.is_known
        assert fix.gain == pytest.approx((2.5, 2.5, 2.5))
        assert str(fix).endswith("at most 2.50x [2.50, 2.50]; lk.loader_costs measures what it brings")

    def test_uncertain_inputs_give_an_interval(self):
        fix = planned(cores_per_node=4, cpu_ms_per_image=(0.8, 1.25)).fixes[0]
        assert fix.gain[1] < fix.gain[0] < fix.gain[2]
        assert fix.gain == pytest.approx((2.5, 2, 3.125), rel=0.01)

    def test_an_unknown_one_cannot_be_applied(self):
        plan = planned(cores_per_node=4)
        with pytest.raises(
            ValueError, match=r"the effect of 'Decode once, to prepared pixels: lk.PixelStore.build' is not"
        ):
            plan.after(plan.fixes[-1])

    def test_prepared_data_are_not_prepared_again(self):
        plan = planned(cores_per_node=1, cpu_ms_per_image=None, data="pixels at 256", costs=costs(pixels=0.5))
        assert [fix.action[:12] for fix in plan.fixes] == ["Use nodes of"]

    def test_requests_need_batches_to_put_images_in(self):
        """140 ms at 10,000 images/s: 1,400 and more images are on their way, and each has a place in a batch."""
        plan = planned(storage="s3", n_prefixes=2, batch_size=100)
        fix = plan.fixes[0]
        n_requests = fix.setup.inputs["requests_in_flight_per_gpu"].value
        assert n_requests >= 1400
        assert fix.setup.inputs["batches_ahead"].value >= n_requests / 100 + 1
        assert "batches in memory" in fix.action
