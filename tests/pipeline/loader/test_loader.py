"""make_loader: the data set's batches whatever the number of workers, errors that name the sample."""

import itertools
import multiprocessing
import os
import sys
import threading
import traceback

import cloudpickle
import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, Subset, TensorDataset

import labkit as lk
from labkit.loading import torch_loader as loaders
from tests.loading import Numbers, config, indices

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spawned workers cannot import a test file


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "error"),
    [
        (Stream(), {}, TypeError),
        (iter([1]), {}, TypeError),
        ([], {}, ValueError),
        (Numbers(), {"shuffle": True, "sampler": [1, 2]}, ValueError),
    ],
)
def test_refused(dataset, options, error):
    with pytest.raises(error):
        lk.make_loader(dataset, config(0), **options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_attributes_and_lengths(num_workers):
    loader = lk.make_loader(Numbers(10), config(num_workers, prefetch_factor=3 if num_workers else None))
    assert (loader.batch_size, loader.num_workers, len(loader)) == (4, num_workers, 3)
    assert len(iter(loader)) == 3
    assert indices(loader) == list(range(10))
    assert loader.dataset.keys[3] == "key-3"  # the data set's own attributes stay in reach
    assert len(loader.dataset) == 10
    whole = lk.make_loader(Numbers(10), config(num_workers), drop_last=True)
    assert (len(whole), indices(whole)) == (2, list(range(8)))


class Halves(DistributedSampler):
    def set_epoch(self, epoch: int) -> None:
        self.epochs = [*getattr(self, "epochs", []), epoch]
        super().set_epoch(epoch)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_distributed_sampler(num_workers):
    samplers = [Halves(Numbers(), num_replicas=2, rank=rank, seed=5) for rank in range(2)]
    made = [lk.make_loader(Numbers(), config(num_workers), sampler=sampler) for sampler in samplers]
    epochs = [[indices(loader) for loader in made] for _ in range(2)]
    assert [sorted(one + other) for one, other in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]
    made[0].set_epoch(0)
    assert indices(made[0]) == epochs[0][0]
    told = samplers[0].epochs
    assert [epoch for epoch, _ in itertools.groupby(told)] == [0, 1, 0]  # torch asks twice when workers start
    assert len(made[0]) == 2


class Cropped(Numbers):
    """Zeros of the bucket's shape with the index and a random number in them."""

    def __init__(self, sizes, buckets):
        super().__init__(len(sizes))
        self.keys, self.buckets = sizes["path"].tolist(), buckets
        self.numbers = buckets.select(sizes["width"], sizes["height"])

    def __getitem__(self, index):
        width, height = self.buckets.shapes[self.numbers[index]]
        return torch.zeros(1, height, width), index, torch.rand(())


def bucketed(num_workers=2, rank=0, world_size=1, **options):
    widths, heights = np.random.default_rng(5).integers(100, 300, (2, 50))
    sizes = pd.DataFrame({"path": [f"{n}.jpg" for n in range(50)], "width": widths, "height": heights})
    buckets = lk.Buckets.fit(sizes, 64, step=16, min_side=32, max_side=128)
    place = {"rank": rank, "world_size": world_size}
    sampler = lk.BucketBatchSampler(sizes, 4, buckets=buckets, seed=3, **place)
    return lk.make_loader(Cropped(sizes, buckets), config(num_workers, seed=9), batch_sampler=sampler, **options)


def contents(loader):
    return [(images.shape, indices.tolist(), drawn.tolist()) for images, indices, drawn in loader]


class TestBatchSampler:
    @pytest.mark.parametrize("num_workers", [0, 1, 2])
    def test_each_sample_once_an_epoch_and_the_same_for_any_number_of_workers(self, num_workers):
        loader, expected = bucketed(num_workers), bucketed(0)
        sampler = bucketed(0).batch_sampler
        for epoch in range(2):
            batches = contents(loader)
            assert batches == contents(expected)
            sampler.set_epoch(epoch)
            assert [indices for _, indices, _ in batches] == list(sampler)
            assert sorted(index for _, indices, _ in batches for index in indices) == list(range(50))
            assert len({shape for shape, _, _ in batches}) > 3
        assert len(loader) == len(batches)
        assert (loader.epoch, loader.batch_size) == (2, 4)
        loader.set_epoch(1)
        assert contents(loader) == batches

    def test_the_ranks_share_an_epoch(self):
        ranks = [contents(bucketed(2, rank, 3)) for rank in range(3)]
        assert len({len(batches) for batches in ranks}) == 1
        assert sorted(index for batches in ranks for _, found, _ in batches for index in found) == list(range(50))

    def test_of_another_kind(self):
        given = [[3, 1], [2], [0, 4, 5]]
        loader = lk.make_loader(Numbers(), config(), batch_sampler=given)
        assert [batch.flatten().tolist() for batch in loader] == given
        assert len(loader) == 3

    def test_torchs_own(self):
        loader = lk.make_loader(
            Numbers(), config(batch_size=9), batch_sampler=BatchSampler(DistributedSampler(Numbers(), 2, 1), 4, True)
        )
        epochs = [indices(loader) for _ in range(2)]
        assert [len(set(epoch)) for epoch in epochs] == [4, 4]
        assert epochs[0] != epochs[1]  # the sampler within is told, too
        assert loader.batch_size == 4

    @pytest.mark.parametrize("other", [{"shuffle": True}, {"sampler": [1]}, {"drop_last": True}])
    def test_beside_what_it_replaces(self, other):
        with pytest.raises(ValueError, match=f"got a batch_sampler and {next(iter(other))}"):
            lk.make_loader(Numbers(), config(0), batch_sampler=[[1]], **other)

    def test_of_other_images(self):
        with pytest.raises(ValueError, match=r"row 0 of sizes is '0.jpg', but image 0 is 'key-0'"):
            lk.make_loader(Numbers(50), config(0), batch_sampler=bucketed(0).batch_sampler)

    def test_of_images_that_have_changed_their_size(self):
        loader = bucketed(0)
        sampler, dataset = loader.batch_sampler, loader.dataset
        dataset.numbers[:] = range(50) % np.array(5)
        with pytest.raises(RuntimeError) as failure:
            list(lk.make_loader(dataset, config(0), batch_sampler=sampler))
        notes = "".join(failure.value.__notes__)
        assert "with buckets, collect the sizes again" in notes
        assert "collect_sizes(root, caches=False)" in notes


class Whole(Numbers):
    """Fetches a batch by one call, and says which."""

    def __getitem__(self, index):
        raise AssertionError("one by one")

    def __getitems__(self, wanted):
        assert all(type(index) is int for index in wanted)
        return [torch.tensor([index, len(wanted), torch.randint(2**40, ()).item()]) for index in wanted]


def test_getitems_is_called_once_a_batch():
    expected = torch.cat(list(lk.make_loader(Whole(10), config(0))))
    assert expected[:, :2].tolist() == [[index, 4 if index < 8 else 2] for index in range(10)]
    assert len(expected[:, 2].unique()) == 10
    assert torch.equal(torch.cat(list(lk.make_loader(Whole(10), config(2)))), expected)


def with_process_and_noise(batch):
    return batch, os.getpid(), torch.rand(())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batch_transform_runs_in_the_worker(num_workers):
    loader = lk.make_loader(Numbers(), config(num_workers), batch_transform=with_process_and_noise)
    _, processes, noise = zip(*loader, strict=True)
    assert len(set(processes)) == max(1, num_workers)
    assert (os.getpid() in processes) == (num_workers == 0)
    expected = list(lk.make_loader(Numbers(), config(0), batch_transform=with_process_and_noise))
    assert list(noise) == [drawn for _, _, drawn in expected]
    assert len(set(noise)) == 3


class Sizes(Numbers):
    def __getitem__(self, index):
        return torch.zeros(3, 5 + index % 2, 7), index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_images_of_different_sizes(num_workers):
    loader = lk.make_loader(Sizes(), config(num_workers), sampler=[4, 5, 6, 7])
    with pytest.raises(RuntimeError) as failure:
        list(loader)
    said = str(failure.value) + "".join(getattr(failure.value, "__notes__", []))
    for part in ("batch of 4", "the first: key-4", "2 sizes", "(3, 5, 7)", "(3, 6, 7)"):
        assert part in said


class Particular(Exception):
    """What cannot be made from a message alone."""

    def __init__(self, code: int, *, reason: str):
        super().__init__(code, reason)


def the_faulty_transform(index: int, make) -> None:
    if index == 6:
        raise make()


def failing(make):
    return lambda index: the_faulty_transform(index, make)


MODES = [(0, None), (2, "fork"), (1, "spawn"), (1, "forkserver")]


@pytest.mark.parametrize(("num_workers", "start_method"), MODES)
@pytest.mark.parametrize("kind", [lk.DecodeError, KeyError])
def test_an_error_keeps_its_type_and_names_the_sample(num_workers, start_method, kind):
    loader = lk.make_loader(
        Numbers(action=failing(lambda: kind("lost"))), config(num_workers, start_method=start_method)
    )
    with pytest.raises(kind) as failure:
        indices(loader)
    shown = "".join(traceback.format_exception(failure.value))
    assert "while loading key-6" in shown
    assert "the_faulty_transform" in shown
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("num_workers", "start_method"), MODES[1:])
def test_an_error_whose_type_cannot_be_made_again(num_workers, start_method):
    """A message is not enough for its constructor and, under spawn, its class cannot be sent."""
    action = failing(lambda: Particular(5, reason="why"))
    loader = lk.make_loader(Numbers(action=action), config(num_workers, start_method=start_method))
    with pytest.raises(RuntimeError) as failure:
        indices(loader)
    for part in ("Particular", "(5, 'why')", "while loading key-6", "the_faulty_transform"):
        assert part in str(failure.value)
    assert type(failure.value) is RuntimeError


def test_an_error_of_a_class_that_no_process_can_name():
    class Local(ValueError):
        pass

    with pytest.raises(RuntimeError, match="Local: here"):
        indices(lk.make_loader(Numbers(action=failing(lambda: Local("here"))), config()))


def test_a_batch_that_cannot_be_sent():
    with pytest.raises(RuntimeError, match="may hold only what can be pickled"):
        list(lk.make_loader(Numbers(), config(), collate_fn=lambda samples: threading.Lock()))


def test_a_data_set_that_cannot_be_pickled():
    loader = lk.make_loader(Numbers(action=threading.Lock()), config(start_method="spawn"))
    with pytest.warns(UserWarning, match="pickle error"), pytest.raises(TypeError) as failure:
        iter(loader)
    assert any("may hold no open file, lock" in note for note in failure.value.__notes__)


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (Numbers(), "key-3"),
        (Subset(Subset(Numbers(), [1, 3]), [1]), "key-3"),
        (TensorDataset(torch.zeros(9)), "sample 3"),
    ],
)
def test_names_of_samples(dataset, name):
    assert loaders.key_of(dataset, 0 if isinstance(dataset, Subset) else 3) == name


def test_closed_and_used_again():
    loader = lk.make_loader(Numbers(), config())
    indices(loader)
    assert len(multiprocessing.active_children()) == 2
    loader.close()
    assert multiprocessing.active_children() == []
    loader.close()
    assert indices(loader) == list(range(12))


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_persist_if_asked(persistent):
    loader = lk.make_loader(Numbers(), config(persistent_workers=persistent), batch_transform=with_process_and_noise)
    epochs = [{process for _, process, _ in loader} for _ in range(2)]
    assert (epochs[0] == epochs[1]) == persistent


CELLS = [
    "import torch, labkit as lk",
    "class Squares(torch.utils.data.Dataset):\n"
    "    def __len__(self):\n        return 6\n"
    "    def __getitem__(self, index):\n        return power(torch.tensor(index))\n"
    "power = lambda number: number**2",
    *(
        f"config = lk.LoaderConfig(batch_size=4, num_workers=1, start_method={method!r})\n"
        "print(torch.cat(list(lk.make_loader(Squares(), config, batch_transform=lambda batch: batch + 1))).tolist())"
        for method in multiprocessing.get_all_start_methods()
    ),
]


@pytest.mark.exhaustive
def test_classes_and_lambdas_of_a_notebook(tmp_path):
    from labkit.app.notebooks import Notebook, execute

    path = tmp_path / "01_cells.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS]), path)
    executed = execute(Notebook(path, "", ""), timeout_s=60)
    assert executed.error == ""
    outputs = [cell.outputs for cell in executed.node.cells]
    assert outputs[:2] == [[], []]
    assert [[output.text for output in cell] for cell in outputs[2:]] == [["[1, 2, 5, 10, 17, 26]\n"]] * 3


@pytest.mark.parametrize(("arguments", "said"), [
    (("photos",), r"dataset must be a data set, got a path: lk.ImageDataset\('photos'\) reads it"),
    ((range(4), 32), r"config must be a LoaderConfig, such as .*, got 32"),
])  # fmt: skip
def test_make_loader_says_what_it_takes(arguments, said):
    with pytest.raises(TypeError, match=said):
        lk.make_loader(*arguments)


@pytest.mark.parametrize("make", [
    lambda store: lk.BatchLoader(store, size=32, batch_size=4, dtype=torch.float32, mean=(0.5,) * 3, std=(0.5,) * 3),
    lambda store: lk.make_loader(lk.ImageDataset(store, transform=_corner), config(2, batch_size=4), shuffle=True),
])  # fmt: skip
def test_a_default_device_changes_no_batch(tmp_path, make):
    store = lk.FolderStore(lk.make_photos(tmp_path, 8, progress=False))
    expected = list(make(store))
    torch.set_default_device("meta")
    try:
        found = list(make(store))
    finally:
        torch.set_default_device(None)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def _corner(image):
    return image[:, :16, :16]
