"""Whoever does what an error of `lk.plan` advises gets a plan."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import labkit as lk

OWN = {"cores_per_node": 8, "cpu_ms_per_image": 2}


class Photos(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.rand(3, 64, 64).sort().values


def told(call) -> str:
    with pytest.raises(Exception) as caught:
        call()
    return str(caught.value)


def diagnosis(loader=None, **options):
    loader = DataLoader(Photos(), batch_size=8) if loader is None else loader
    return lk.diagnose(loader, lambda batch: batch.sum(), batches=4, rounds=1, limit_s=5, **options)


def test_a_diagnosis_of_a_dataloader_knows_what_an_image_takes():
    assert "and so does lk.diagnose(loader, step) of a DataLoader" in told(lambda: lk.plan(100, cores_per_node=8))
    found = lk.plan(diagnosis(), cores_per_node=8)
    assert found.needs["cores_per_gpu"] > 0
    assert lk.plan(100, **OWN).demand == 100  # or it is entered


def test_images_are_counted_by_count():
    empty = [torch.zeros(0, 3, 8, 8)] * 8
    assert "pass count= to lk.diagnose" in told(lambda: lk.plan(diagnosis(empty), **OWN))
    assert lk.plan(diagnosis(empty, count=lambda batch: 4), **OWN).demand > 0


def test_what_a_rate_can_be_is_taken(tmp_path):
    said = told(lambda: lk.plan("fast", **OWN))
    assert "does not exist" in said
    said = told(lambda: lk.plan([100], **OWN))
    assert "a number > 0, what lk.diagnose or lk.watch gives, or the path of what `labkit watch --json` wrote" in said
    with lk.watch() as watched:
        for batch in DataLoader(Photos(), batch_size=8):
            batch.sum()
    report = watched.report()
    assert "batch_size is missing: a watch counts batches, so enter the images of one" in told(
        lambda: lk.plan(report, **OWN)
    )
    assert lk.plan(report, batch_size=8, **OWN).demand > 0
    assert lk.plan(diagnosis(), **OWN).demand > 0


def test_gpus_are_shared_evenly():
    assert "n_gpus must be a multiple of n_nodes" in told(lambda: lk.plan(100, n_gpus=8, n_nodes=3, **OWN))
    assert lk.plan(100, n_gpus=8, n_nodes=4, **OWN).demand == 800
