"""The ceilings of a plan against a simulation that moves single images."""

from dataclasses import replace

import pytest

import labkit as lk
from labkit import course
from tests.pipeline_simulation import Pipeline, constant, exponential, images_per_s


def predicted(of: Pipeline) -> course.Plan:
    """The plan of a pipeline: every input exact."""
    rates = {"latency_ms": 1e3 * of.latency_s, "mb_per_s_per_request": 1e9}
    if of.gap_s:
        rates["requests_per_s"] = 1 / of.gap_s
    inputs = {"gil_us_per_image": 1e6 * of.lock_s} if of.lock_s else {}
    if of.link_s:
        inputs["network_gbit_per_node"] = 100 * 8 / 1e6 / of.link_s
    if of.reads_apart or of.readers != of.cores:
        inputs["requests_in_flight_per_gpu"] = of.readers
    return lk.plan(
        of.batch_size / of.step_s, cores_per_node=of.cores, cpu_ms_per_image=1e3 * of.cpu_s, step_cores_per_gpu=0,
        batch_size=of.batch_size, batches_ahead=of.ahead + 2,  # one in use, one being made
        slowdown=1, kb_per_image=100, storage=course.Storage("simulated", rates), **inputs,
    )  # fmt: skip


ROOMY = Pipeline(
    readers=4, cores=4, latency_s=1e-5, cpu_s=0.002, step_s=0.008
)  # cores give 2000/s, the step takes 1000

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


class TestOneScarceResource:
    @pytest.mark.parametrize("times", [constant, exponential])
    @pytest.mark.parametrize("name", SCARCE)
    def test_the_smallest_ceiling_is_the_rate(self, name, times):
        pipeline = replace(SCARCE[name], ahead=8)
        plan = predicted(pipeline)
        assert plan.bottleneck == name.partition(",")[0]
        simulated = images_per_s(replace(pipeline, times=times), n_batches=1200)
        assert simulated == pytest.approx(plan.value("images_per_s")[0], rel=0.05)


# Two as scarce as each other. 40 requests in flight need 40 images in the batches ahead.
EVEN = {
    "GPU and cores": replace(ROOMY, step_s=0.004),
    "GPU and requests": replace(ROOMY, latency_s=0.02, reads_apart=True, readers=40, step_s=0.004, cores=8),
    "cores and requests": replace(ROOMY, latency_s=0.02, reads_apart=True, readers=40, step_s=0.001),
    "cores and network": replace(ROOMY, link_s=0.0005, reads_apart=True, readers=16, step_s=0.001),
}


class TestQueues:
    @pytest.mark.parametrize("ahead", [1, 2, 8])
    @pytest.mark.parametrize("name", EVEN)
    def test_at_most_a_third_is_lost(self, name, ahead):
        """With times that vary as widely as exponential ones; the more batches ahead, the less is lost."""
        pipeline = replace(EVEN[name], ahead=ahead, times=exponential)
        plan = predicted(pipeline)
        share = images_per_s(pipeline, n_batches=800) / plan.value("images_per_s")[0]
        assert 2 / 3 <= share <= 1.03
        assert ahead < 8 or share > 0.9

    def test_the_plan_says_so(self):
        assert "a third below" in " ".join(predicted(EVEN["GPU and cores"]).notes)
        assert predicted(ROOMY).notes == ["gil_us_per_image is not known, so Python's lock is left out.", _NO_NETWORK]

    def test_nothing_is_lost_without_variation(self):
        pipeline = replace(EVEN["GPU and cores"], ahead=1)
        assert images_per_s(pipeline) == pytest.approx(predicted(pipeline).value("images_per_s")[0], rel=0.01)


_NO_NETWORK = "network_gbit_per_node is not known, so the network has no limit here."


class TestSetup:
    def test_draws_that_are_scarce_add_up(self):
        plan = lk.plan((500, 1500), cores_per_node=4, cpu_ms_per_image=(2, 4), storage="memory")
        shares = plan.setup.scarcities
        assert sum(shares.values()) == pytest.approx(1)
        assert list(shares.values()) == sorted(shares.values(), reverse=True)
        assert set(shares) == {"gpu_ceiling", "core_ceiling"}

    @pytest.mark.parametrize("name", ["network_ceiling", "gbit_per_s", "prefixes_needed"])
    def test_what_is_local_needs_no_network(self, name):
        inputs = {"cores_per_node": 4, "cpu_ms_per_image": 2, "network_gbit_per_node": 10}
        assert name in lk.plan(100, storage="s3", **inputs).setup.draws
        assert name not in lk.plan(100, storage="nvme", **inputs).setup.draws

    def test_local_disks_add_up(self):
        one, four = (
            lk.plan(100, n_gpus=4, n_nodes=nodes, cores_per_node=4, cpu_ms_per_image=2).value("bandwidth_ceiling")
            for nodes in (1, 4)
        )
        assert four == pytest.approx([4 * value for value in one])
