"""The private names of torch that labkit uses are there, in the known shape; else workers are refused."""

from types import SimpleNamespace

import pytest
import torch

import labkit as lk
from labkit.pipeline.loader import torch_internals
from tests.loading import Numbers, config, indices

ITERATOR = torch.utils.data.dataloader._MultiProcessingDataLoaderIter


def test_this_torch_has_the_names_that_are_used():
    assert torch_internals.find_differences() == [], f"torch {torch.__version__} changed its DataLoader"


def reject_batches(self, timeout, retry):
    pass


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda patch: patch.delattr(ITERATOR, "_shutdown_workers"), r"_shutdown_workers is gone"),
        (
            lambda patch: patch.setattr(ITERATOR, "_try_get_data", reject_batches),
            r"_try_get_data takes \(self, timeout, retry\), not \(self, timeout\)",
        ),
        (
            lambda patch: patch.setattr(torch.utils.data._utils.worker, "_worker_loop", reject_batches),
            r"_worker_loop does not use ManagerWatchdog",
        ),
    ],
)
def test_another_torch_is_named(monkeypatch, change, said):
    change(monkeypatch)
    assert len(torch_internals.find_differences()) == 1
    with pytest.raises(RuntimeError, match=rf"torch {torch.__version__.split('+')[0]}.*{said}.*num_workers=0"):
        lk.make_loader(Numbers(), config(2))
    assert indices(lk.make_loader(Numbers(), config(0))) == list(range(12))


def test_what_is_no_death_is_passed_on(monkeypatch):
    clock = SimpleNamespace(monotonic=iter(range(99)).__next__, sleep=lambda s: None)
    monkeypatch.setattr(torch_internals, "time", clock)
    running = iter(lk.make_loader(Numbers(80), config()))

    def cannot_fetch(self, timeout):
        raise ConnectionResetError("a cable was pulled")

    monkeypatch.setattr(ITERATOR, "_try_get_data", cannot_fetch)
    with pytest.raises(ConnectionResetError, match="cable"):
        next(running)
