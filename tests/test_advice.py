"""Advice: from measured costs to what to change first."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from labkit.measure.advice import Costs, advise
from labkit.measure.env import usable_cores


def _loader(batch_size=4, **options):
    return DataLoader(TensorDataset(torch.zeros(40, 3, 8, 8)), batch_size, **options)


def _costs(**changed):
    base = {
        "step": 1.0, "copy": 0.0, "hand_over": 0.0, "fetch": 0.0, "prepare": 0.0, "start": 0.0,
        "together": 1.0, "making": None, "waiting": 0.0, "step_cpu": 0.0,
    }  # fmt: skip
    return Costs(**{**base, **changed})


class TestAdvice:
    def test_the_largest_loss_comes_first(self):
        found = advise(_costs(copy=0.5, hand_over=1.0, together=2.5), [])
        assert [advice.rung for advice in found] == ["hand-over", "copy"]

    def test_little_is_not_worth_a_change(self):
        assert [advice.rung for advice in advise(_costs(copy=0.04, together=1.04), [])] == ["none"]

    def test_workers_bring_what_the_cores_allow(self, monkeypatch):
        monkeypatch.setattr("labkit.measure.advice.usable_cores", lambda: 8)
        found = advise(_costs(prepare=4.0, together=5.0, making=4.0), _loader())
        assert [advice.rung for advice in found] == ["workers"]
        assert found[0].speedup == pytest.approx(5.0)  # half a second a batch: the step is slower then
        assert "num_workers=8" in found[0].action

    def test_workers_share_the_cores_with_the_step(self, monkeypatch):
        monkeypatch.setattr("labkit.measure.advice.usable_cores", lambda: 2)
        found = advise(_costs(prepare=1.0, together=2.0, making=1.0, step_cpu=2.0), _loader())
        assert found[0].speedup == pytest.approx(2 / 1.5)  # 3 s of computing on two cores

    def test_enough_workers_are_not_asked_for_again(self):
        loader = _loader(num_workers=usable_cores())
        assert advise(_costs(prepare=1.0, together=2.0), loader)[0].rung == "decoding"
        assert advise(_costs(fetch=1.0, together=2.0), loader)[0].rung == "storage"

    def test_no_gain_beyond_the_step(self):
        assert advise(_costs(fetch=1.0, together=2.0), [])[0].speedup == pytest.approx(2.0)

    def test_a_slow_decoder_is_named(self):
        loader = _loader(num_workers=usable_cores())
        loader.dataset.decoder = "pil"
        found = advise(_costs(prepare=1.0, together=2.0), loader)[0]
        assert found.notebook == "02_read_image"
        assert "instead of pil" in found.action
