"""Advice: from measured costs to what to change first."""

from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from labkit.core.machine import usable_cores
from labkit.tuning.advice import Costs, Recommendation, advise


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
        monkeypatch.setattr("labkit.tuning.advice.usable_cores", lambda: 8)
        found = advise(_costs(prepare=4.0, together=5.0, making=4.0), _loader())
        assert [advice.rung for advice in found] == ["workers"]
        assert found[0].speedup == pytest.approx(5.0)  # half a second a batch: the step is slower then
        assert "num_workers=8" in found[0].action

    def test_workers_share_the_cores_with_the_step(self, monkeypatch):
        monkeypatch.setattr("labkit.tuning.advice.usable_cores", lambda: 2)
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


def test_a_gain_is_said_and_none_is_not():
    said = Recommendation("copy", "Do", "since", 1.5, "07_cuda_prefetch")
    assert str(said) == "Do (since). Should bring up to 1.50x. Notebook 07_cuda_prefetch."
    assert str(replace(said, speedup=1.0)) == "Do (since). Notebook 07_cuda_prefetch."


def test_workers_are_asked_for_with_the_reason(monkeypatch):
    monkeypatch.setattr("labkit.tuning.advice.usable_cores", lambda: 2)
    waits = {"fetch": "waiting for storage", "prepare": "waiting for batches that are still decoded and augmented"}
    for cause, what in waits.items():
        [found] = advise(_costs(**{cause: 1.0}, together=4.0, making=1.0), _loader())
        assert (found.rung, found.why) == ("workers", f"25% of the time goes into {what}")


class Wrapped(torch.utils.data.Dataset):
    """As lk.ImageDataset holds a store and names a decoder, within another data set."""

    def __init__(self, **attributes):
        self.dataset = TensorDataset(torch.zeros(4))
        for name, value in attributes.items():
            setattr(self.dataset, name, value)

    def __len__(self):
        return 4


class Store:
    def __init__(self, mode):
        self.mode = mode


@pytest.mark.parametrize(
    ("attributes", "notebook"),
    [
        ({"store": Store("tarfile")}, "09_marigold_storage"), ({"store": Store("index")}, "08_shard_formats"),
        ({"store": object()}, "08_shard_formats"), ({}, "08_shard_formats"),
    ],
)  # fmt: skip
def test_what_waits_for_storage_reads_it_otherwise(monkeypatch, attributes, notebook):
    monkeypatch.setattr("labkit.tuning.advice.usable_cores", lambda: 1)
    found = advise(_costs(fetch=3.0, together=4.0), DataLoader(Wrapped(**attributes), num_workers=1))
    assert [(advice.rung, advice.notebook, advice.speedup) for advice in found] == [("storage", notebook, 4.0)]
    assert found[0].why == "75% of the time goes into waiting for storage"


@pytest.mark.parametrize(
    ("decoder", "notebook"),
    [("pil", "02_read_image"), ("turbojpeg", "11_resize_once"), (len, "11_resize_once"), (None, "11_resize_once")],
)
def test_what_waits_for_decoding_decodes_otherwise(monkeypatch, decoder, notebook):
    monkeypatch.setattr("labkit.tuning.advice.usable_cores", lambda: 1)
    found = advise(_costs(prepare=1.0, together=4.0), DataLoader(Wrapped(decoder=decoder), num_workers=1))
    assert [(advice.rung, advice.notebook) for advice in found] == [("decoding", notebook)]
    assert found[0].speedup == pytest.approx(4 / 3)
    assert found[0].why == "25% of the time goes into waiting for batches that are still decoded and augmented"


def test_every_other_loss_has_its_advice():
    costs = _costs(copy=1.0, hand_over=2.0, start=3.0, together=8.0)
    found = {advice.rung: advice for advice in advise(costs, [])}
    assert list(found) == ["start", "hand-over", "copy"]
    assert [advice.speedup for advice in found.values()] == pytest.approx([8 / 5, 8 / 6, 8 / 7])
    assert [advice.why.partition(" of the time goes into ")[::2] for advice in found.values()] == [
        ("38%", "waiting for an epoch's first batch"), ("25%", "receiving batches that are ready"),
        ("12%", "copying batches to the device"),
    ]  # fmt: skip
    notebooks = [advice.notebook for advice in found.values()]
    assert notebooks == ["03_persistent_workers", "06_kornia_gpu", "07_cuda_prefetch"]
    assert found["start"].action.startswith("Begin fewer epochs")
    assert "lk.CUDAPrefetcher" in found["copy"].action
    assert "uint8" in found["hand-over"].action


@pytest.mark.parametrize(("persistent", "action"), [(False, "Keep the workers"), (True, "Begin fewer epochs")])
def test_workers_that_start_anew_are_kept(persistent, action):
    loader = _loader(num_workers=1, persistent_workers=persistent)
    assert advise(_costs(start=1.0, together=2.0), loader)[0].action.startswith(action)


def test_nothing_to_gain_is_said():
    none = advise(_costs(together=1.04, fetch=0.04), [])[0]
    assert str(none) == (
        "Leave the loader as it is: it is not the bottleneck (without waiting for data it would take 96% of the time). "
        "Notebook 07_cuda_prefetch."
    )
    assert "take 100% of" in advise(_costs(together=0.5), [])[0].why
    assert advise(_costs(together=2.0, copy=0.1), [])[0].rung == "copy"  # a twentieth is worth it


def test_one_cause_of_two_is_named_once_and_workers_bring_something_or_nothing(monkeypatch):
    monkeypatch.setattr("labkit.tuning.advice.usable_cores", lambda: 4)
    found = advise(_costs(fetch=3.0, prepare=2.0, together=6.0, waiting=0.5), _loader(num_workers=2))
    assert [advice.rung for advice in found] == ["workers"]
    assert found[0].speedup == pytest.approx(6 / 2.5)  # 5 s a batch by 2 workers are 10 s of making, by 4 workers 2.5 s
    assert found[0].action == "Use 4 persistent workers instead of 2: num_workers=4, persistent_workers=True"
    assert str(found[0]).endswith(" Should bring up to 2.40x. Notebook 03_persistent_workers.")
    busy = advise(_costs(step=1, copy=2.0, hand_over=3.0, prepare=2.5, together=5.0, making=1.0), _loader())
    assert {advice.rung: advice.speedup for advice in busy}["workers"] == 1.0  # 6 s are busy already
    alone = advise(_costs(prepare=5.0, together=6.0), _loader(num_workers=1))
    assert alone[0].speedup == pytest.approx(6 / 1.25)  # by one worker 5 s of making
