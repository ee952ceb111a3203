"""Published figures: each with its address, found by the names that people use."""

import re

import pytest

from labkit import course
from labkit.planning.plan import INPUTS
from labkit.planning.published import STORAGES, cores_of, find_training, pcie, published_inputs

KEYS = list(course.PUBLISHED_TRAINING)


class TestSources:
    @pytest.mark.parametrize("key", KEYS)
    def test_each_rate_has_an_address(self, key):
        training = course.PUBLISHED_TRAINING[key]
        assert training.url.startswith("https://github.com/")
        demand = published_inputs(key, 8)["images_per_s_per_gpu"]
        assert (demand.value, demand.kind) == (training.images_per_s, "published")
        assert training.url in demand.source
        assert demand.interval[0] < demand.value <= demand.interval[1]
        assert (demand.interval[1] == demand.value) == training.is_tuned

    @pytest.mark.parametrize("estimate", [
        *(each.default for each in INPUTS.values() if each.default),
        *(rate for storage in STORAGES.values() for rate in storage.rates.values()),
    ])  # fmt: skip
    def test_whatever_is_published_has_an_address_and_the_rest_says_why(self, estimate):
        assert estimate.kind in ("published", "assumed")
        assert (estimate.kind == "assumed") != ("https://" in estimate.source)
        assert len(estimate.source) > 10

    def test_theory_says_so(self):
        assert pcie().kind == "theory"
        assert "32 GB/s in theory" in pcie().source
        assert pcie(64e9).interval == (38.4, 64)

    def test_a_step(self):
        assert course.PUBLISHED_TRAINING["ResNet-50, V100 16GB"].step_s(60) == 0.05


class TestNames:
    @pytest.mark.parametrize(
        ("gpu", "key"),
        [("h100", "ResNet-50, H100 SXM"), ("H100 SXM", "ResNet-50, H100 SXM"), ("rtx3090", "ResNet-50, RTX 3090"),
         ("3090", "ResNet-50, RTX 3090"), ("RTX-3090", "ResNet-50, RTX 3090"), ("l40s", "ResNet-50, L40S")],
    )  # fmt: skip
    def test_a_gpu(self, gpu, key):
        assert find_training(gpu, "ResNet-50") == key

    @pytest.mark.parametrize("gpu", ["T4", "B200", "100", "", "-"])
    def test_others_are_refused(self, gpu):
        with pytest.raises(ValueError, match=r"gpu must name one of H100 SXM.*got .*enter the images/s"):
            find_training(gpu, "ResNet-50")

    def test_a_model(self):
        assert find_training("3090", "ViT-B/16") == "ViT-B/16, RTX 3090"
        with pytest.raises(ValueError, match=re.escape("model must be one of ResNet-50, got 'ViT-B/16'")):
            find_training("h100", "ViT-B/16")


class TestCores:
    def test_a_vcpu_is_half_a_core(self):
        assert (cores_of(8).value, *cores_of(8).interval) == (4, 4, 5.2)

    def test_rented_machines(self):
        assert published_inputs("ResNet-50, H100 SXM", 8)["cores_per_node"].value == 96
        assert "cores_per_node" not in published_inputs("ResNet-50, RTX 3090", 1)
