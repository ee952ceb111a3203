"""accelerate takes a loader apart and puts it together again: the same batches, other ones each epoch, shared out."""

import itertools

import pytest

import labkit as lk
from tests.frameworks.samples import LOADERS, assert_shared_out, loader_of, rows, run_script, shards_loader

pytestmark = pytest.mark.frameworks
accelerate = pytest.importorskip("accelerate")


def prepared(loader, **settings):
    """By an accelerator of its own."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    settings = accelerate.utils.DataLoaderConfiguration(**settings)
    return accelerate.Accelerator(cpu=True, dataloader_config=settings).prepare(loader)


def test_one_process_gets_the_loaders_own_batches_and_goes_on_after_some():
    own, loader = loader_of(), prepared(loader_of(2))
    expected = [rows(own) for _ in range(3)]
    assert [rows(loader) for _ in range(3)] == expected
    assert len({tuple(epoch) for epoch in expected}) == 3
    loader.set_epoch(2)
    assert rows(accelerate.skip_first_batches(loader, 4)) == expected[2][16:]


def test_one_process_goes_on_exactly_with_a_stateful_loader():
    begun, resumed = (prepared(loader_of(2), use_stateful_dataloader=True) for _ in range(2))
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
from tests.frameworks.samples import LOADERS, rows, save

kind, option, num_workers, folder = sys.argv[1:]
settings = {option: True} if option.endswith("_batches") else {}
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))
loader = LOADERS[kind](int(num_workers), folder)
try:
    loader = loader if option == "left out" else accelerator.prepare(loader)
    save([rows(loader) for _ in range(2)])
except RuntimeError as error:
    save(str(error))
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folders(first_photos, tmp_path_factory):
    shards = tmp_path_factory.mktemp("shards") / "written"
    lk.write_shards(lk.FolderStore(first_photos(12)), shards, max_count=3, progress=False)
    return {"make_loader": "", "BatchLoader": first_photos(12), "read_shards": shards}


@pytest.mark.parametrize(
    ("kind", "option", "num_workers"),
    [
        *itertools.product(["make_loader"], ["prepared", "split_batches", "dispatch_batches"], [1]),
        ("make_loader", "left out", 0), ("BatchLoader", "prepared", 0), ("read_shards", "left out", 0),
    ],
)  # fmt: skip
def test_two_processes_share_the_loaders_own_epochs(tmp_path, folders, kind, option, num_workers):
    ranks = run_script(tmp_path, RANKS, kind, option, num_workers, folders[kind], n_ranks=2)
    assert_shared_out(ranks, LOADERS[kind](0, folders[kind]))


def test_prepared_shards_of_several_processes_are_refused(tmp_path, folders):
    for said in run_script(tmp_path, RANKS, "read_shards", "prepared", 0, folders["read_shards"], n_ranks=2):
        assert "Leave this loader out of accelerator.prepare()" in said


def test_prepared_shards_of_one_process_are_whole_and_differ_by_epoch(folders):
    loader = prepared(shards_loader(folders["read_shards"], shuffle=True, shuffle_buffer=12))
    epochs = [rows(loader) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(rows(shards_loader(folders["read_shards"])))
    assert epochs[0] != epochs[1]
