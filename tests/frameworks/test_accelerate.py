"""accelerate takes a loader apart and puts it together again: the same batches, other ones each epoch, shared out."""

import itertools
from collections import Counter

import pytest
import torch

import labkit as lk
from tests.frameworks.samples import loader_of, rows, run_ranks

pytestmark = pytest.mark.frameworks
accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _fresh_state():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("num_workers", [0, 2])
class TestOneProcess:
    def test_gives_the_loaders_own_batches(self, num_workers):
        own = loader_of()
        expected = [rows(own) for _ in range(3)]
        prepared = accelerate.Accelerator(cpu=True).prepare(loader_of(num_workers))
        assert [rows(prepared) for _ in range(3)] == expected
        assert len({tuple(epoch) for epoch in expected}) == 3

    def test_goes_on_exactly_with_skip_first_batches(self, num_workers):
        own = loader_of()
        own.set_epoch(2)
        prepared = accelerate.Accelerator(cpu=True).prepare(loader_of(num_workers))
        prepared.set_epoch(2)
        assert rows(accelerate.skip_first_batches(prepared, 4)) == rows(own)[16:]

    def test_goes_on_exactly_with_a_stateful_loader(self, num_workers):
        def prepared():
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            settings = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True)
            return accelerate.Accelerator(cpu=True, dataloader_config=settings).prepare(loader_of(num_workers))

        begun, resumed = prepared(), prepared()
        begun.set_epoch(1)
        iterator = iter(begun)
        list(itertools.islice(iterator, 3))
        state, expected = begun.state_dict(), rows(iterator)
        resumed.set_epoch(1)
        resumed.load_state_dict(state)
        assert rows(resumed) == expected


RANKS = """
import sys, torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from tests.frameworks.samples import loader_of, rows
option, num_workers = sys.argv[1:]
settings = DataLoaderConfiguration(**({option: True} if option else {}))
prepared = Accelerator(cpu=True, dataloader_config=settings).prepare(loader_of(int(num_workers)))
result = [rows(prepared) for _ in range(2)]
"""


@pytest.mark.parametrize("option", ["", "split_batches", "dispatch_batches"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_two_processes_share_the_loaders_own_epochs(tmp_path, option, num_workers):
    ranks = run_ranks(tmp_path, RANKS, option, num_workers)
    own = loader_of()
    for first, second in zip(*ranks, strict=True):
        assert len(first) == len(second) == 12
        assert sorted(map(tuple, first + second)) == sorted(rows(own))


NOT_PREPARED = """
import torch, labkit as lk
from accelerate import Accelerator
from tests.frameworks.samples import loader_of, rows
Accelerator(cpu=True)
result = [rows(loader) for loader in [loader_of()] for _ in range(2)]
"""


def test_a_loader_that_is_not_prepared_shares_out_by_itself(tmp_path):
    ranks = run_ranks(tmp_path, NOT_PREPARED)
    own = loader_of()
    for first, second in zip(*ranks, strict=True):
        assert sorted(map(tuple, first + second)) == sorted(rows(own))


SHARDS = """
import sys, torch, labkit as lk
from accelerate import Accelerator
folder, kind = sys.argv[1:]
accelerator = Accelerator(cpu=True)
if kind == "pixels":
    loader = accelerator.prepare(lk.BatchLoader(lk.FolderStore(folder), size=32, batch_size=3))
    result = [[image.sum().item() for images, _ in loader for image in images] for _ in range(2)]
else:
    dataset = lk.read_shards(folder, transform=lambda image: image[:, :8, :8].float().mean())
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=0)
    if kind == "prepared":
        try:
            result = [len(list(accelerator.prepare(loader)))]
        except RuntimeError as error:
            result = str(error)
    else:
        result = [[value.item() for values, _ in loader for value in values] for _ in range(2)]
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return lk.FolderStore(lk.make_photos(tmp_path_factory.mktemp("photos"), 12, progress=False))


@pytest.fixture(scope="module")
def shards(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards") / "written"
    lk.write_shards(photos, folder, max_count=3, progress=False)
    return folder


def test_batch_loader_shares_out_by_itself(tmp_path, photos):
    ranks = run_ranks(tmp_path, SHARDS, photos.root, "pixels")
    whole = lk.BatchLoader(photos, size=32, batch_size=3)
    for first, second in zip(*ranks, strict=True):
        assert sorted(first + second) == sorted(image.sum().item() for images, _ in whole for image in images)


def test_read_shards_shares_out_by_itself(tmp_path, shards):
    ranks = run_ranks(tmp_path, SHARDS, shards, "as it is")
    for first, second in zip(*ranks, strict=True):
        assert len(first) == len(second) == 6
        assert set(Counter(first + second).values()) == {1}


def test_prepared_shards_of_several_processes_are_an_error_that_says_what_to_do(tmp_path, shards):
    for said in run_ranks(tmp_path, SHARDS, shards, "prepared"):
        assert "Leave this loader out of accelerator.prepare()" in said


def test_prepared_shards_of_one_process_are_whole_and_differ_by_epoch(shards):
    dataset = lk.read_shards(shards, shuffle=12, transform=lambda image: image[:, :8, :8].float().mean())
    prepared = accelerate.Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(dataset, batch_size=2))
    epochs = [[value.item() for values, _ in prepared for value in values] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
