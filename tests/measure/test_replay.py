"""ReplayLoader gives the kept batches again; map_tensors and tensors reach every tensor of a nest."""

from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from labkit import ReplayLoader
from tests.encodings import Encoding

Pair = namedtuple("Pair", "image label")


def one(number: float = 1.0) -> torch.Tensor:
    return torch.tensor([number])


def batches(n_batches: int):
    for number in range(n_batches):
        yield {"image": one(number)}, number


@pytest.mark.parametrize(("length", "expected"), [(None, [0, 1, 2]), (7, [0, 1, 2, 0, 1, 2, 0]), (2, [0, 1])])
def test_the_first_batches_again_and_again(length, expected):
    source = batches(10)
    loader = ReplayLoader(source, 3, length=length)
    assert next(source)[1] == 3  # no more is taken than kept
    assert len(loader) == len(expected)
    two_passes_at_once = [(one, other) for (_, one), (_, other) in zip(loader, loader, strict=True)]
    assert two_passes_at_once == list(zip(expected, expected, strict=True))


def test_moves_to_the_device_once():
    loader = ReplayLoader(batches(2), 2, device="meta")
    images = [batch["image"] for batch, _ in loader]
    assert [image.device.type for image in images] == ["meta", "meta"]
    assert next(iter(loader))[0]["image"] is images[0]


def test_looks_like_its_loader():
    source = torch.utils.data.DataLoader(list(range(10)), batch_size=4)
    loader = ReplayLoader(source, 2)
    assert (loader.batch_size, loader.num_workers) == (4, 0)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ReplayLoader(batches(1), 1).batch_size is None


def test_a_loader_that_is_too_short():
    with pytest.raises(ValueError, match="n_batches is 3, but the loader gave only 2 batches"):
        ReplayLoader(batches(2), 3)


@pytest.mark.parametrize("bad", [{"n_batches": 0}, {"n_batches": -1}, {"n_batches": 1, "length": 0}], ids=str)
def test_bad_numbers(bad):
    with pytest.raises(ValueError, match="must be an integer >= 1"):
        ReplayLoader(batches(2), **bad)


def test_batches_of_workers_hold_no_file_open():
    """Each tensor in shared memory does: a thousand of them, and the process can open no more."""
    loader = DataLoader(torch.arange(60).view(20, 3), batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert all(batch.is_shared() for batch in loader)
    replay = ReplayLoader(loader, 5)
    assert not any(batch.is_shared() for batch in replay)
    assert torch.equal(torch.cat(list(replay)), torch.arange(60).view(20, 3))


def test_batches_are_the_kept_ones_but_for_shared_memory():
    plain, shared = torch.zeros(3), torch.zeros(3).share_memory_()
    [one, other] = ReplayLoader([plain, shared], 2)
    assert one.data_ptr() == plain.data_ptr()
    assert other.data_ptr() != shared.data_ptr()
    assert len(list(ReplayLoader([plain, shared], 2, length=1))) == 1


def encoded(samples):
    return Encoding(default_collate(samples))


def test_a_loaders_encodings_stay_where_they_are():
    """Their own `to` moves them in place."""
    kept = [Encoding({"ids": one(number)}) for number in range(2)]
    assert [batch["ids"].device.type for batch in ReplayLoader(kept, 2, device="meta")] == ["meta"] * 2
    assert [batch["ids"].device.type for batch in kept] == ["cpu"] * 2


def test_encodings_of_workers_hold_no_file_open():
    samples = [{"ids": one(number)} for number in range(8)]
    loader = DataLoader(samples, 4, num_workers=1, multiprocessing_context="fork", collate_fn=encoded)
    assert all(batch["ids"].is_shared() for batch in loader)
    replay = list(ReplayLoader(loader, 2))
    assert [type(batch) for batch in replay] == [Encoding] * 2
    assert not any(batch["ids"].is_shared() for batch in replay)
