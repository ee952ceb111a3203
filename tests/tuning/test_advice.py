"""Advice: from measured costs to what to change first."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from labkit.watching import advice
from labkit.watching.advice import Costs, LoaderTraits, Recommendation, advise as advise_on


@pytest.fixture
def cores(monkeypatch):
    return lambda count: monkeypatch.setattr(advice, "usable_cores", lambda: count)


def _loader(**options):
    return DataLoader(TensorDataset(torch.zeros(120, 3, 8, 8)), **options)  # a long epoch, for which a start counts


def advise(costs, loader):
    return advise_on(costs, LoaderTraits.of(loader))


def _costs(**changed):
    base = {
        "step": 1.0, "copy": 0.0, "hand_over": 0.0, "fetch": 0.0, "prepare": 0.0, "start": 0.0,
        "together": 1.0, "making": None, "waiting": 0.0, "step_cpu": 0.0,
    }  # fmt: skip
    return Costs(**{**base, **changed})


def test_a_gain_is_said_and_none_is_not():
    said = Recommendation("copy", "Do", "since", 1.5, "07_cuda_prefetch")
    assert str(said) == "Do (since). Should bring up to 1.50x. Notebook 07_cuda_prefetch."
    assert str(replace(said, speedup=1.0)) == "Do (since). Notebook 07_cuda_prefetch."


@pytest.mark.parametrize(
    ("n_cores", "n_workers", "costs", "speedup"),
    [
        (8, 0, {"prepare": 4.0, "together": 5.0, "making": 4.0}, 5.0),  # half a second a batch: the step is slower then
        (2, 0, {"prepare": 1.0, "together": 2.0, "making": 1.0, "step_cpu": 2.0}, 2 / 1.5),  # 3 s of computing, 2 cores
        (4, 2, {"fetch": 3.0, "prepare": 2.0, "together": 6.0, "waiting": 0.5}, 6 / 2.5),  # 5 s by 2 are 10 s of making
        (4, 1, {"prepare": 5.0, "together": 6.0}, 6 / 1.25),  # by one worker 5 s of making
        (4, 0, {"copy": 2.0, "hand_over": 3.0, "prepare": 2.5, "together": 5.0, "making": 1.0}, 1.0),  # 6 s are busy
    ],
)
def test_what_workers_bring(cores, n_cores, n_workers, costs, speedup):
    """One cause of two is named once."""
    cores(n_cores)
    [found] = [each for each in advise(_costs(**costs), _loader(num_workers=n_workers)) if each.rung == "workers"]
    assert found.speedup == pytest.approx(speedup)
    settings = f"num_workers={n_cores}, persistent_workers=True"
    assert found.action == f"Use {n_cores} persistent workers instead of {n_workers}: {settings}"
    assert found.notebook == "03_persistent_workers"


def test_workers_are_asked_for_with_the_reason(cores):
    cores(2)
    waits = {
        "fetch": "waiting for storage",
        "prepare": "waiting for batches that are still being decoded and augmented",
    }
    for cause, what in waits.items():
        [found] = advise(_costs(**{cause: 1.0}, together=4.0, making=1.0), _loader())
        assert (found.rung, found.why) == ("workers", f"25% of the time goes into {what}")


class Wrapped(Dataset):
    """As lk.ImageDataset holds a store and names a decoder, within another data set."""

    def __init__(self, **attributes):
        self.dataset = SimpleNamespace(**attributes)

    def __len__(self):
        return 4


@pytest.mark.parametrize(
    ("attributes", "rung", "notebook"),
    [
        ({"store": object()}, "storage", "08_shard_formats"), ({}, "storage", "08_shard_formats"),
        ({"decoder": "pil"}, "decoding", "02_read_image"), ({"decoder": "turbojpeg"}, "decoding", "11_resize_once"),
        ({"decoder": len}, "decoding", "11_resize_once"), ({"decoder": None}, "decoding", "11_resize_once"),
    ],
)  # fmt: skip
def test_with_enough_workers_the_work_itself_is_changed(cores, attributes, rung, notebook):
    cores(1)
    cause, why = {
        "storage": ("fetch", "waiting for storage"),
        "decoding": ("prepare", "waiting for batches that are still being decoded and augmented"),
    }[rung]
    [found] = advise(_costs(**{cause: 3.0}, together=4.0), DataLoader(Wrapped(**attributes), num_workers=1))
    assert (found.rung, found.notebook, found.speedup) == (rung, notebook, 4.0)
    assert found.why == f"75% of the time goes into {why}"
    assert ("instead of pil" in found.action) == (notebook == "02_read_image")


def test_every_other_loss_has_its_advice_the_largest_first():
    costs = _costs(copy=1.0, hand_over=2.0, start=3.0, together=8.0)
    found = advise(costs, [])
    of_time = " of the time goes into "
    assert [(each.rung, each.why, each.notebook) for each in found] == [
        ("start", f"38%{of_time}waiting for an epoch's first batch", "03_persistent_workers"),
        ("hand-over", f"25%{of_time}receiving batches that are ready", "06_kornia_gpu"),
        ("copy", f"12%{of_time}copying batches to the device", "07_cuda_prefetch"),
    ]
    assert [each.speedup for each in found] == pytest.approx([8 / 5, 8 / 6, 8 / 7])
    for each, words in zip(found, ("Begin fewer epochs", "uint8", "lk.CUDAPrefetcher"), strict=True):
        assert words in each.action
    assert advise(_costs(fetch=2.0, together=2.0), [])[0].speedup == 2.0  # not beyond the step


@pytest.mark.parametrize(("persistent", "action"), [(False, "Keep the workers"), (True, "Begin fewer epochs")])
def test_workers_that_start_anew_are_kept(persistent, action):
    loader = _loader(num_workers=1, persistent_workers=persistent)
    assert advise(_costs(start=1.0, together=2.0), loader)[0].action.startswith(action)


def test_nothing_to_gain_is_said():
    none = advise(_costs(together=1.04, fetch=0.04), [])[0]
    leave, free = "Leave the loader as it is: it is not the bottleneck", "without waiting for data it would take"
    assert str(none) == f"{leave} ({free} 96% of the time)."
    assert "take 100% of" in advise(_costs(together=0.5), [])[0].why
    assert advise(_costs(together=2.0, copy=0.1), [])[0].rung == "copy"  # a twentieth is worth it


def test_a_start_that_is_not_advised_on_is_named():
    short = DataLoader(TensorDataset(torch.zeros(8, 1)))
    none = advise(_costs(start=0.5, fetch=0.04, together=1.54), short)[0]
    assert (none.rung, none.why) == (
        "none",
        "without waiting for data it would take 65% of the time; 32% is the start of an epoch, which weighs less in a "
        "longer one",
    )
    assert "start" not in advise(_costs(start=0.04, together=1.04), short)[0].why
