"""Batches of several processes, against those of threads alone."""

import multiprocessing
import pickle
from itertools import pairwise

import pytest
import torch

import labkit as lk
from labkit.errors import DecodeError
from labkit.loading.seeding import SeededIndices


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return lk.FolderStore(lk.make_photos(tmp_path_factory.mktemp("photos"), 30, progress=False))


@pytest.fixture(scope="module")
def pixels(store, tmp_path_factory):
    path = tmp_path_factory.mktemp("pixels") / "photos.pixels"
    return lk.PixelStore.build(store, path, short_side=64, progress=False)


FLOATS = {"dtype": torch.float32, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}


@pytest.mark.slow
@pytest.mark.parametrize("source", ["store", "pixels"])
@pytest.mark.parametrize("options", [{}, FLOATS])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_batches_are_those_of_threads_in_every_epoch(source, options, num_processes, request):
    given = request.getfixturevalue(source)
    threads, processes = (
        lk.BatchLoader(given, size=32, batch_size=8, num_threads=2, num_processes=number, seed=3, **options)
        for number in (0, num_processes)
    )
    assert len(threads) == len(processes) == 4
    for _ in range(2):
        epochs = list(zip(threads, processes, strict=True))
        assert len(epochs) == 4
        for (images, labels), (others, other_labels) in epochs:
            assert others.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(images, others)
            assert torch.equal(labels, other_labels)
        assert not any(torch.equal(first[0][0], second[0][0]) for first, second in pairwise(epochs[:3]))


@pytest.mark.slow
def test_a_loop_that_is_left_early_begins_the_next_epoch_anew(pixels):
    loader = lk.BatchLoader(pixels, size=32, batch_size=8, num_processes=2)
    next(iter(loader))
    expected = lk.BatchLoader(pixels, size=32, batch_size=8)
    expected.set_epoch(1)
    for (images, _), (others, _) in zip(loader, expected, strict=True):
        assert torch.equal(images, others)


def test_two_epochs_at_a_time_are_refused(pixels):
    loader = lk.BatchLoader(pixels, size=32, batch_size=8, num_processes=1)
    first = iter(loader)
    next(first)
    assert len(list(loader)) == 4
    with pytest.raises(RuntimeError, match="read one epoch at a time"):
        next(first)


def test_workers_get_no_sampler(pixels):
    class Order:
        def __iter__(self):
            return iter(range(8))

        def __len__(self):
            return 8

        def __reduce__(self):
            raise TypeError("not to be pickled")

    loader = lk.BatchLoader(pixels, size=32, batch_size=8, num_processes=1, sampler=Order())
    assert pickle.dumps(loader._processes._loader.dataset._fill)
    assert loader.num_workers == 1


@pytest.mark.slow
def test_a_broken_photo_is_named(store, tmp_path):
    lk.make_photos(tmp_path, 5, progress=False)
    broken = lk.FolderStore(tmp_path).paths()[2]
    broken.write_bytes(broken.read_bytes()[:5000])
    with pytest.raises(DecodeError, match=broken.name):
        list(lk.BatchLoader(lk.FolderStore(tmp_path), size=32, batch_size=2, num_processes=1))


def test_the_workers_end_with_the_loader(pixels):
    before = set(multiprocessing.active_children())
    loader = lk.BatchLoader(pixels, size=32, batch_size=8, num_processes=2)
    list(loader)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    del loader
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("source", ["store", "pixels"])
def test_what_goes_to_a_spawned_worker_can_be_pickled(source, request):
    loader = lk.BatchLoader(request.getfixturevalue(source), size=32, batch_size=8, num_processes=1)
    fill = pickle.loads(pickle.dumps(loader._processes._loader.dataset._fill))
    images, _ = fill(SeededIndices([0, 1, 2], seed=0, epoch=0))
    assert images.shape == (3, 3, 32, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": -1}, "num_processes must be an integer >= 0, got -1"),
        ({"num_processes": 1, "on_error": "skip"}, "num_processes=0"),
    ],
)
def test_bad_arguments_are_told(pixels, options, message):
    with pytest.raises(ValueError, match=message):
        lk.BatchLoader(pixels, **options)
