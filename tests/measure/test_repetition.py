"""Loaders that go on with the next pass: which can, what they deliver, and that they are themselves afterwards."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import labkit as lk
from labkit.measure.steady import LoaderWrapper, batches_in_flight, repeating

NUMBERS = TensorDataset(torch.arange(10))
FORK = {"num_workers": 2, "multiprocessing_context": "fork"}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def numbers(batches) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def take(loader, n_batches) -> list:
    """The batches of a run in which no more are wanted after `n_batches`, those under way included."""
    taken = []
    with repeating(loader, lambda: len(taken) < n_batches) as per_pass:
        for batch in loader:
            taken.append(batch)
    assert per_pass == len(loader)
    return taken


@pytest.mark.parametrize("options", [{}, FORK, {**FORK, "persistent_workers": True}])
def test_passes_follow_one_another_and_afterwards_the_loader_is_itself(options):
    loader = DataLoader(NUMBERS, 4, **options)
    one_pass = numbers(loader)
    for _ in range(2):  # persistent workers keep what they were given at first
        found = numbers(take(loader, 8))
        assert 8 <= len(found) <= 8 + batches_in_flight(loader)
        assert found == list(itertools.islice(itertools.cycle(one_pass), len(found)))
        assert numbers(loader) == one_pass
    assert len(loader) == 3


def test_workers_are_not_started_again_between_passes():
    loader = DataLoader(NUMBERS, 5, worker_init_fn=_name_worker, collate_fn=_worker_name, **FORK)
    names = take(loader, 20)
    assert len(set(names)) == 2  # a worker that starts anew has another process id


def _name_worker(number):
    torch.utils.data.get_worker_info().dataset.name = torch.multiprocessing.current_process().pid


def _worker_name(samples):
    return torch.utils.data.get_worker_info().dataset.name


def test_a_pass_is_cut_when_no_more_is_wanted():
    assert numbers(take(DataLoader(NUMBERS, 1), 4)) == [[0], [1], [2], [3]]
    assert len(take(DataLoader(NUMBERS, 1), 0)) == 1  # the first batch is always asked for


def test_samplers_of_single_samples_and_empty_ones():
    assert len(take(DataLoader(NUMBERS, batch_size=None), 25)) == 25
    with repeating(empty := DataLoader(NUMBERS, sampler=[]), lambda: True):
        assert list(empty) == []


@pytest.mark.parametrize("iterable", [DataLoader(Stream()), [1, 2], iter([1]), None])
def test_what_has_no_indices_is_left_alone(iterable):
    with repeating(iterable, lambda: True) as per_pass:
        assert per_pass is None
    assert batches_in_flight(iterable) == 0


def test_wrappers_are_seen_through(tmp_path):
    store = lk.FolderStore(lk.make_photos(tmp_path, 3))
    steps = []
    inner = DataLoader(NUMBERS, 4, **FORK, prefetch_factor=3)
    wrapped = lk.with_step(lk.CUDAPrefetcher(inner, "cpu", depth=2), lambda batch: steps.append(len(batch[0])))
    assert (batches_in_flight(wrapped), len(wrapped), wrapped.num_workers) == (8, 3, 2)
    assert len(take(wrapped, 9)) == len(steps) >= 9
    assert steps[:6] == [4, 4, 2, 4, 4, 2]
    threads = lk.BatchLoader(store, batch_size=2, size=16, prefetch_factor=3)
    assert batches_in_flight(threads) == 3
    assert [len(images) for images, _ in take(threads, 4)][:4] == [2, 1, 2, 1]
    assert [len(images) for images, _ in threads] == [2, 1]
    replay = lk.ReplayLoader([torch.zeros(2, 3, 4, 4)], 1, length=2)
    assert len(take(replay, 5)) == 5
    assert len(list(replay)) == len(replay) == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_make_loader_gives_its_own_order_pass_after_pass(num_workers):
    loader = lk.make_loader(NUMBERS, lk.LoaderConfig(4, num_workers, seed=3), shuffle=True)
    found = numbers(take(loader, 6))[:6]
    assert sorted(itertools.chain(*found[:3])) == sorted(itertools.chain(*found[3:])) == list(range(10))
    assert loader.epoch == 1
    assert sorted(itertools.chain(*numbers(loader))) == list(range(10))
    loader.close()


def test_a_sampler_s_other_attributes_are_reached():
    loader = DataLoader(NUMBERS, 4)
    with repeating(loader, lambda: True):
        assert (loader.batch_sampler.batch_size, len(loader.batch_sampler)) == (4, 3)
    with pytest.raises(AttributeError):
        LoaderWrapper().loader  # noqa: B018
