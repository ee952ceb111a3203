"""make_loader: settings that fit the machine, torch's own parts, and errors that name the sample."""

import dataclasses
import multiprocessing
import os
import sys
import threading
import traceback
import warnings
from types import ModuleType

import cloudpickle
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

import labkit as lk
from labkit.loading.samplers import LoaderWarning
from tests.loaders import Numbers, eventually, indices, loader_of, red, rows, same, solid

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spawned workers cannot import a test file

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


class TestSettings:
    """They are changed with a warning, and only where they would do harm or nothing."""

    @pytest.fixture(autouse=True)
    def _in_a_notebook_with_one_core(self, monkeypatch):
        """Threads run besides, where Python warns of forks; and torch warns of more workers than cores."""
        monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})
        yield
        os.sched_setaffinity(0, before)

    @staticmethod
    def said_of(settings: dict) -> tuple[list[str], DataLoader]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = lk.make_loader(Numbers(), lk.LoaderConfig(**settings))
            if settings.get("num_workers", 0) < 2:
                assert len(list(loader)) == len(loader)
        assert {(warning.category, warning.filename) for warning in caught} <= {(LoaderWarning, __file__)}
        return [str(warning.message) for warning in caught], loader

    def test_more_workers_than_cores_are_reduced(self):
        [said], loader = self.said_of({"num_workers": 5})
        for part in ("num_workers=5", "reduced to 1", f"cpu_count {os.cpu_count()}", "affinity 1", "oversubscribe="):
            assert part in said
        assert loader.num_workers == 1

    def test_workers_that_wait_for_a_network_are_kept(self):
        store = lk.HttpStore("http://127.0.0.1:9/photos", keys=["cat/0.jpg"])
        assert lk.make_loader(lk.ImageDataset(store), lk.LoaderConfig(1, num_workers=8)).num_workers == 8

    def test_nothing_is_said_where_nothing_changes(self):
        oversubscribed = {"num_workers": 2, "oversubscribe": True}
        for settings in ({}, {"num_workers": 1}, {"num_workers": 0}, {"pin_memory": False}, oversubscribed):
            said, loader = self.said_of(settings)
            assert said == []
            assert loader.num_workers == settings.get("num_workers", 1)

    def test_what_needs_workers_is_left_out_without(self):
        asked = {"persistent_workers": True, "prefetch_factor": 4, "start_method": "spawn"}
        [said], _ = self.said_of({"num_workers": 0, **asked})
        for part in ("num_workers=0", *(f"{name}={value!r}" for name, value in asked.items())):
            assert part in said
        assert self.said_of({"num_workers": 0, "persistent_workers": False})[0] == []

    @pytest.mark.skipif(torch.cuda.is_available(), reason="says what is left out without CUDA")
    def test_pinned_memory_is_left_out_without_cuda(self):
        [said], _ = self.said_of({"num_workers": 0, "pin_memory": True})
        assert "pin_memory=True is left out" in said


def test_defaults_fit_the_machine(monkeypatch):
    loader = lk.make_loader(Numbers())
    found = loader.num_workers, loader.batch_size, loader.prefetch_factor, loader.persistent_workers
    assert found == (lk.usable_cores(), 64, 2, True)
    for n_ranks in (lk.usable_cores(), 1000):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(n_ranks))
        assert lk.make_loader(Numbers()).num_workers == 1
    for nothing in ("", "0", "-1", "many"):  # left over from another program
        monkeypatch.setenv("LOCAL_WORLD_SIZE", nothing)
        assert lk.make_loader(Numbers()).num_workers == lk.usable_cores()


@pytest.mark.parametrize("bad", [
    {"batch_size": 0}, {"num_workers": -1}, {"prefetch_factor": 0}, {"start_method": "thread"}, {"seed": 0.5},
], ids=str)  # fmt: skip
def test_bad_settings_are_refused(bad):
    [(name, value)] = bad.items()
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value!r}"):
        lk.LoaderConfig(**bad)


def test_settings_are_keywords_too():
    every = {
        "batch_size": 3, "num_workers": 2, "prefetch_factor": 4, "persistent_workers": False, "pin_memory": False,
        "seed": 5, "start_method": "spawn", "oversubscribe": True,
    }  # fmt: skip
    assert every.keys() == {field.name for field in dataclasses.fields(lk.LoaderConfig)}
    loaders = lk.make_loader(Numbers(), **every), lk.make_loader(Numbers(), lk.LoaderConfig(**every))
    for loader in loaders:
        assert (loader.batch_size, loader.num_workers, loader.prefetch_factor, loader.seed) == (3, 2, 4, 5)
        assert (loader.persistent_workers, loader.multiprocessing_context.get_start_method()) == (False, "spawn")


def test_images_of_one_size_are_loaded_from_a_path_or_store(tmp_path):
    for name in ("cat/1.png", "cat/2.png", "dog/3.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(solid(int(name[4])))
    for source in (tmp_path, str(tmp_path), lk.FolderStore(tmp_path)):
        [(images, labels)] = lk.make_loader(source, num_workers=0)
        assert images.shape == (3, 3, 30, 40)
        assert [red(image) for image in images] == [1, 2, 3]
        assert labels.tolist() == [0, 0, 1]
    Image.new("RGB", (8, 8)).save(tmp_path / "dog/4.png")
    with pytest.raises(RuntimeError) as failure:
        next(iter(lk.make_loader(tmp_path, num_workers=0)))
    assert "transform=torchvision.transforms.v2.RandomResizedCrop(224)), or use lk.BatchLoader" in shown_of(failure)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(("dataset", "options", "error", "said"), [
    (Stream(), {}, TypeError, "Stream is not a map-style data set"),
    ([], {}, ValueError, "holds no sample"),
    ("no photos", {}, ValueError, r"'no photos' is not a folder of images"),
    (range(4), {"config": 32}, TypeError, r"got 32; its .* keywords, as lk.make_loader\(dataset, batch_size=32\)"),
    (range(4), {"batch_size": 2, "seed": 1}, ValueError, "got config and batch_size, seed: pass a LoaderConfig, or"),
    (range(4), {"shuffle": True, "sampler": [1, 2]}, ValueError, "got shuffle=True and a sampler"),
    (range(4), {"batch_sampler": [[1]], "shuffle": True}, ValueError, "got a batch_sampler and shuffle"),
])  # fmt: skip
def test_what_no_loader_can_be_made_of_is_refused(dataset, options, error, said):
    with pytest.raises(error, match=said):
        lk.make_loader(dataset, **{"config": lk.LoaderConfig(num_workers=0), **options})


class TestParts:
    def test_are_those_that_were_given_or_torchs(self):
        dataset, sampler = Numbers(), DistributedSampler(range(12), num_replicas=2, rank=1)
        loader = loader_of(dataset, 2, sampler=sampler, prefetch_factor=3)
        assert isinstance(loader, DataLoader)
        assert loader.dataset is dataset
        assert loader.sampler is loader.batch_sampler.sampler is sampler
        assert (len(loader.sampler), len(loader), len(iter(loader)), loader.batch_size) == (6, 2, 2, 4)
        assert (loader.num_workers, loader.prefetch_factor, loader.drop_last) == (2, 3, False)
        batches = BatchSampler(range(12), 5, True)
        loader = loader_of(dataset, batch_sampler=batches, collate_fn=list)
        assert (loader.batch_sampler, loader.sampler, loader.collate_fn) == (batches, batches.sampler, list)
        assert (loader.batch_size, len(loader)) == (5, 2)
        assert type(loader_of().sampler) is SequentialSampler
        shuffled = loader_of(shuffle=True)
        assert isinstance(shuffled.sampler, RandomSampler)
        assert len(shuffled.sampler) == 12
        assert isinstance(shuffled.batch_sampler, BatchSampler)

    @WORKERS
    def test_give_the_samples_in_their_order(self, num_workers):
        assert indices(loader_of(Numbers(10), num_workers)) == list(range(10))
        whole = loader_of(Numbers(10), num_workers, drop_last=True)
        assert (len(whole), indices(whole)) == (2, list(range(8)))

    @WORKERS
    def test_that_are_changed_take_effect_from_the_next_epoch_on(self, num_workers):
        loader = loader_of(num_workers=num_workers)
        first = rows(loader)
        loader.dataset.transform = lambda item: item + 100
        assert [row[0] for row in rows(loader)] == [row[0] + 100 for row in first]
        loader.dataset.transform = None
        assert indices(loader) == list(range(12))
        loader.batch_sampler.sampler = [3, 1, 2]
        assert indices(loader) == [3, 1, 2]
        loader.collate_fn = tuple
        assert [(len(batch), type(batch)) for batch in loader] == [(3, tuple)]

    @pytest.mark.parametrize(
        "offsets",
        [torch.zeros(4), [0] * 4, [0] * 2000, np.zeros((8, 2))[::2, 0]],
        ids=["tensor", "list", "long list", "view"],
    )
    def test_that_are_changed_in_place_take_effect_too(self, offsets):
        dataset = Numbers(4)
        dataset.transform = lambda item: item + int(offsets[int(item[0])])
        dataset.offsets = offsets
        loader = loader_of(dataset, 1)
        assert indices(loader) == [0, 1, 2, 3]
        offsets[2] = 40
        assert indices(loader) == [0, 1, 42, 3]

    @pytest.mark.parametrize("order", [np.array([3, 1], np.uint64), np.array([3, 1]), torch.tensor([3, 1]), [True, 2]])
    def test_may_give_other_kinds_of_integers(self, order):
        assert rows(loader_of(sampler=order)) == rows(loader_of(sampler=[int(index) for index in order]))

    @pytest.mark.parametrize("make", [
        lambda store: lk.BatchLoader(store, size=32, dtype=torch.float32, mean=(0.5,) * 3, std=(0.5,) * 3),
        lambda store: loader_of(lk.ImageDataset(store, transform=corner), shuffle=True),
        lambda store: loader_of(lk.ImageDataset(store, transform=corner), 2, shuffle=True),
    ], ids=["BatchLoader", "make_loader", "its workers"])  # fmt: skip
    def test_stay_on_the_cpu_whatever_torchs_default_device_is(self, pictures, make):
        expected = list(make(pictures))
        torch.set_default_device("meta")
        try:
            found = list(make(pictures))
        finally:
            torch.set_default_device(None)
        assert same(found, expected)


def corner(image):
    return image[:, :16, :16]


class Whole(Numbers):
    """Fetches a batch by one call, and says which."""

    def __getitem__(self, index):
        raise AssertionError("one by one")

    def __getitems__(self, wanted):
        assert all(type(index) is int for index in wanted)
        return [torch.tensor([index, len(wanted), torch.randint(2**40, ()).item()]) for index in wanted]


def test_a_data_set_that_fetches_batches_is_called_once_for_each():
    expected = list(loader_of(Whole(10)))
    found = torch.cat(expected)
    assert found[:, :2].tolist() == [[index, 4 if index < 8 else 2] for index in range(10)]
    assert len(found[:, 2].unique()) == 10
    assert same(list(loader_of(Whole(10), 2)), expected)


def with_process_and_noise(batch):
    return batch, os.getpid(), torch.rand(())


@WORKERS
def test_a_batch_is_transformed_in_the_worker(num_workers):
    loader = loader_of(Numbers(), num_workers, batch_transform=with_process_and_noise)
    _, processes, noise = zip(*loader, strict=True)
    assert len(set(processes)) == max(1, num_workers)
    assert (os.getpid() in processes) == (num_workers == 0)
    assert list(noise) == [drawn for _, _, drawn in loader_of(Numbers(), batch_transform=with_process_and_noise)]
    assert len(set(noise)) == 3


class TestBatchSampler:
    def test_may_be_of_any_kind(self):
        given = [[3, 1], [2], [0, 4, 5]]
        loader = loader_of(Numbers(), 2, batch_sampler=given)
        assert [batch[:, 0].tolist() for batch in loader] == given
        assert len(loader) == 3
        loader = loader_of(batch_size=9, batch_sampler=BatchSampler(DistributedSampler(Numbers(), 2, 1), 4, True))
        epochs = [indices(loader) for _ in range(2)]
        assert [len(set(epoch)) for epoch in epochs] == [4, 4]
        assert epochs[0] != epochs[1]  # the sampler within is told, too
        assert loader.batch_size == 4


def test_samplers_that_can_be_read_once_are_refused(pictures):
    said = r"ampler is a range_iterator, which can be read once: .*Give a list"
    once = iter(range(8))
    for options in ({"sampler": once}, {"batch_sampler": once}, {"batch_sampler": BatchSampler(once, 4, False)}):
        with pytest.raises(TypeError, match=said):
            loader_of(**options)
    with pytest.raises(TypeError, match=said):
        lk.BatchLoader(pictures, sampler=once)


def test_a_sampler_that_gives_nothing_in_the_second_epoch_is_an_error():
    class Once:
        left = iter(range(8))

        def __iter__(self):
            yield from self.left

        def __len__(self):
            return 8

    loader = loader_of(sampler=Once())
    assert len(list(loader)) == 2
    with pytest.raises(RuntimeError, match="gave no batch in epoch 1, although its length is 2"):
        list(loader)


def use_up(batch=None):
    return next(iter(()))


class Particular(Exception):
    """What cannot be made from a message alone."""

    def __init__(self, code: int, *, reason: str):
        super().__init__(code, reason)


def the_faulty_transform(index: int, make) -> None:
    if index == 6:
        raise make()


def failing(make):
    return Numbers(action=lambda index: the_faulty_transform(index, make))


def shown_of(failure) -> str:
    return "".join(traceback.format_exception(failure.value))


MODES = [(0, None), (2, "fork"), (1, "spawn")]


class TestErrors:
    @pytest.mark.parametrize(("num_workers", "start_method"), MODES)
    def test_keep_their_type_and_name_the_sample(self, num_workers, start_method):
        for kind in (lk.DecodeError, KeyError):
            with pytest.raises(kind) as failure:
                indices(loader_of(failing(lambda kind=kind: kind("lost")), num_workers, start_method=start_method))
            assert "while loading key-6" in shown_of(failure)
            assert "the_faulty_transform" in shown_of(failure)
            del failure  # which holds the pass: it might go on
            assert eventually(lambda: multiprocessing.active_children() == [])

    @WORKERS
    def test_name_the_sample_of_a_subset_which_fetches_a_batch_by_one_call(self, num_workers):
        part = Subset(Subset(failing(lambda: KeyError("lost")), [9, 1, 6, 2]), [0, 1, 2])
        with pytest.raises(KeyError) as failure:
            list(loader_of(part, num_workers, batch_size=3))
        assert "while loading key-6" in shown_of(failure)
        del failure  # whose traceback holds the pass, and its workers: it might go on

    @pytest.mark.parametrize(("num_workers", "start_method"), MODES[1:])
    def test_whose_type_cannot_be_made_again_are_told_in_full(self, num_workers, start_method):
        """A message is not enough for its constructor and, under spawn, its class cannot be sent."""
        with pytest.raises(RuntimeError) as failure:
            indices(loader_of(failing(lambda: Particular(5, reason="why")), num_workers, start_method=start_method))
        for part in ("Particular", "(5, 'why')", "while loading key-6", "the_faulty_transform"):
            assert part in str(failure.value)
        assert type(failure.value) is RuntimeError
        del failure  # whose traceback holds the pass, and its workers: it might go on

    @WORKERS
    def test_of_images_of_different_sizes_list_the_sizes_and_say_what_to_do(self, num_workers):
        dataset = Numbers()
        dataset.transform = lambda item: torch.zeros(3, 5 + int(item[0]) % 2, 7)
        with pytest.raises(RuntimeError) as failure:
            list(loader_of(dataset, num_workers, sampler=[4, 5, 6, 7]))
        remedy = "with buckets, collect the sizes again", "collect_sizes(root, caches=False)"
        for part in ("batch of 4", "the first: key-4", "2 sizes", "(3, 5, 7)", "(3, 6, 7)", *remedy):
            assert part in shown_of(failure)
        del failure  # whose traceback holds the pass, and its workers: it might go on

    @WORKERS
    @pytest.mark.parametrize("options", [{}, {"collate_fn": use_up}, {"batch_transform": use_up}], ids="".join)
    def test_come_of_a_stop_iteration_which_is_no_end_of_the_epoch(self, num_workers, options):
        dataset = Numbers() if options else Numbers(action=lambda index: index == 6 and use_up())
        with pytest.raises(RuntimeError, match="raised StopIteration") as failure:
            list(loader_of(dataset, num_workers, **options))
        assert ("key-0" if options else "while loading key-6") in shown_of(failure)
        del failure  # whose traceback holds the pass, and its workers: it might go on

    def test_say_what_cannot_be_sent(self):
        with pytest.raises(RuntimeError, match="may hold only what can be pickled"):
            list(loader_of(Numbers(), 2, collate_fn=lambda samples: threading.Lock()))
        loader = loader_of(Numbers(action=threading.Lock()), 2, start_method="spawn")
        with pytest.warns(UserWarning, match="pickle error"), pytest.raises(TypeError) as failure:
            iter(loader)
        assert any("may hold no open file, lock" in note for note in failure.value.__notes__)


def refused_in_a_pool() -> str:
    try:
        return str(len(list(loader_of(Numbers(), num_workers=1))))
    except lk.LabkitError as error:
        return str(error)


def test_where_no_worker_can_start_or_be_reached_an_error_says_what_to_do(tmp_path, monkeypatch):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert "a daemonic process, such as a worker of a multiprocessing.Pool" in pool.apply(refused_in_a_pool)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 90)))
    with pytest.raises(lk.LabkitError, match="set TMPDIR to a shorter one, or num_workers=0"):
        list(loader_of(Numbers(), num_workers=1))
    assert len(list(loader_of(Numbers(), num_workers=0))) > 0
