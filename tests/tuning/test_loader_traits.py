"""What is noted of a loader."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import labkit as lk
from labkit.watching.advice import Costs, LoaderTraits, advise


def test_a_loaders_settings():
    loader = DataLoader(TensorDataset(torch.zeros(9, 1)), 2, num_workers=1, prefetch_factor=3)
    found = LoaderTraits.of(loader)
    assert (found.num_workers, found.starts_workers, found.prefetch_factor, found.n_batches) == (1, True, 3, 5)
    assert LoaderTraits.of(SimpleNamespace(loader=loader)).num_workers == 1
    assert LoaderTraits.of([1, 2]) == LoaderTraits(n_batches=2)


def test_prepared_pixels_have_nothing_to_decode(tmp_path):
    root = lk.make_photos(tmp_path / "photos", 4)
    store = lk.PixelStore.build(lk.FolderStore(root), tmp_path / "pixels", short_side=32)
    traits = LoaderTraits.of(DataLoader(Subset(store, [0, 1]), num_workers=64))
    assert not traits.decodes
    [advice] = advise(_costs(prepare=3.0, together=4.0), traits)
    assert (advice.rung, advice.notebook) == ("transforms", "06_kornia_gpu")


def test_who_uses_a_batch_loader_is_not_advised_to_use_one(tmp_path):
    root = lk.make_photos(tmp_path / "photos", 4, progress=False)
    store = lk.FolderStore(root)
    [advice] = advise(_costs(prepare=3.0, together=4.0), LoaderTraits.of(lk.BatchLoader(store)))
    assert "PixelStore" in advice.action
    pixels = lk.PixelStore.build(store, tmp_path / "pixels", short_side=32, progress=False)
    [advice] = advise(_costs(prepare=3.0, together=4.0), LoaderTraits.of(lk.BatchLoader(pixels)))
    assert advice.rung == "transforms"


@pytest.mark.parametrize(
    ("n_batches", "starts_workers", "rung"), [(8, False, "none"), (8, True, "start"), (100, False, "start")]
)
def test_a_toys_epoch_is_no_reason_for_longer_ones(n_batches, starts_workers, rung):
    traits = LoaderTraits(num_workers=2, starts_workers=starts_workers, n_batches=n_batches)
    assert advise(_costs(start=1.0, together=2.0), traits)[0].rung == rung


def _costs(**changed):
    base = dict.fromkeys(Costs.__dataclass_fields__, 0.0) | {"step": 1.0, "making": None}
    return Costs(**(base | changed))
