"""Where a loader stands: after looks, caught errors and copies, and when a state is loaded late or saved at the end."""

import copy
import gc
import itertools
import multiprocessing
import pickle
import threading

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, get_worker_info

import labkit as lk
from tests.loaders import Numbers, eventually, firsts, loader_of, red, rows, same, solid, store_that_reads
from tests.memory_store import MemoryStore


def refuse_five(index):
    if index == 5:
        raise ValueError("sample 5 is broken")


def broken_loader(kind, pictures, batch_size=1):
    """16 samples of `make_loader` and of torch, 12 of `BatchLoader`, of which number 5 raises an error."""
    if kind == "BatchLoader":

        def read(key):
            refuse_five(int(key[-6:-4]))
            return pictures.read(key)

        store = store_that_reads(pictures, read)
        return lk.BatchLoader(store, size=16, batch_size=batch_size, shuffle=False)
    options = {"num_workers": 2, "multiprocessing_context": "fork"} if "workers" in kind else {}
    dataset = Numbers(16, refuse_five)
    if "torch" in kind:
        return DataLoader(dataset, batch_size, **options)
    start = {"start_method": "fork"} if options else {}
    loader = loader_of(dataset, 2 if options else 0, batch_size=batch_size, **start)
    return lk.CUDAPrefetcher(loader, "cpu") if "prefetched" in kind else loader


def taken_with_errors(loader):
    """The batches of an epoch for somebody who catches errors, and how many those were."""
    iterator, batches, n_errors = iter(loader), [], 0
    while True:
        try:
            batches.append(next(iterator))
        except StopIteration:
            return batches, n_errors
        except ValueError:
            n_errors += 1


KINDS = ["make_loader", "make_loader, workers", "BatchLoader", "prefetched"]


class TestACaughtError:
    @pytest.mark.parametrize("kind", ["torch", "torch, workers", *KINDS])
    def test_costs_one_batch_as_it_does_with_torch(self, kind, pictures):
        batches, n_errors = taken_with_errors(broken_loader(kind, pictures))
        assert (len(batches), n_errors) == (11 if kind == "BatchLoader" else 15, 1)

    @pytest.mark.parametrize("kind", ["make_loader", "make_loader, workers", "BatchLoader"])
    def test_of_the_sampler_comes_after_the_batches_before_and_ends_the_pass(self, kind, pictures):
        class Broken:
            def __len__(self):
                return 6

            def __iter__(self):
                yield from ([0], [1], [2])
                raise OSError("the list of samples is gone")

        options = {"num_workers": 2, "start_method": "fork"} if "workers" in kind else {}
        make = (lambda **given: lk.BatchLoader(pictures, size=16, **given)) if kind == "BatchLoader" else loader_of
        iterator = iter(make(batch_sampler=Broken(), **options))
        assert len(list(itertools.islice(iterator, 3))) == 3
        with pytest.raises(OSError, match="the list of samples is gone"):
            next(iterator)
        assert next(iterator, "the end") == "the end"

    def test_ctrl_c_in_a_sample_of_shards_loses_none(self, tmp_path):
        def interrupt(image):
            if red(image) == 3 and not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt
            return red(image)

        interrupted = []
        files = {f"all/{n:02}.png": solid(n) for n in range(6)}
        lk.write_shards(MemoryStore(files), tmp_path / "set", engine="threads", progress=False)
        dataset = lk.read_shards(tmp_path / "set", transform=interrupt)
        iterator = iter(dataset)
        came = firsts(list(itertools.islice(iterator, 3)))
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        state = dataset.state_dict()
        resumed = lk.read_shards(tmp_path / "set", transform=red)
        resumed.load_state_dict(state)
        assert came + firsts(list(resumed)) == list(range(6))

    def test_ctrl_c_ends_the_pass(self):
        def interrupt(index):
            if index == 5:
                raise KeyboardInterrupt

        iterator = iter(loader_of(Numbers(16, interrupt), batch_size=1))
        assert len(list(itertools.islice(iterator, 5))) == 5
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert next(iterator, "the end") == "the end"


def make(kind, pictures, **options):
    options = {"batch_size": 2, "seed": 1, "shuffle": True, **options}
    if "BatchLoader" in kind:
        loader = lk.BatchLoader(pictures, size=16, **options)
    else:
        start = {"start_method": "fork"} if "workers" in kind else {}
        loader = loader_of(num_workers=2 if start else 0, **start, **options)
    return lk.CUDAPrefetcher(loader, "cpu", depth=2) if "prefetched" in kind else loader


class TestALook:
    @pytest.mark.parametrize("look", ["dropped", "kept", "begun"])
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_does_not_disturb_a_generator_of_the_samplers_own(self, num_workers, look):
        def epochs(look):
            sampler = RandomSampler(range(12), generator=torch.Generator().manual_seed(3))
            start, kept = {"start_method": "fork"} if num_workers else {}, []
            loader = loader_of(num_workers=num_workers, sampler=sampler, **start)
            if look == "begun":
                iter(loader)
            for number, batch in enumerate(itertools.chain(loader, loader, loader)):
                if look in ("dropped", "kept") and number in (1, 4):
                    kept.append(iter(loader))
                    next(kept[-1])
                    if look == "dropped":
                        kept.clear()
                yield batch

        assert same(list(epochs(look)), list(epochs("")))

    def test_that_gave_nothing_keeps_the_epoch_that_was_told_to_the_sampler(self):
        sampler = DistributedSampler(range(12), num_replicas=1, rank=0)
        loader = loader_of(num_workers=2, sampler=sampler, start_method="fork")
        sampler.set_epoch(7)
        iter(loader)
        oracle = DistributedSampler(range(12), num_replicas=1, rank=0)
        oracle.set_epoch(7)
        assert [row[0] for row in rows(loader)] == list(oracle)


class TestAState:
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_behind_the_last_batch_is_known_without_a_length_too(self, num_workers):
        class Unsized:
            def __iter__(self):
                return iter([[0, 1], [2], [3, 4]])

        loader = loader_of(
            num_workers=num_workers, batch_sampler=Unsized(), start_method="fork" if num_workers else None
        )
        places = [(state["epoch"], state["n_batches"]) for _ in loader for state in [loader.state_dict()]]
        assert places == [(0, 1), (0, 2), (1, 0)]

    def test_behind_the_last_batch_has_the_generator_of_the_next_epoch(self):
        def made():
            return loader_of(sampler=RandomSampler(range(12), generator=torch.Generator().manual_seed(3)))

        whole, begun, resumed = made(), made(), made()
        _, expected = list(whole), list(whole)
        for _ in begun:
            state = begun.state_dict()
        resumed.load_state_dict(state)
        assert same(list(resumed), expected)


def first_epochs(loader, queue):
    queue.put([rows(loader) for _ in range(2)])


class TestACopy:
    @pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
    @pytest.mark.parametrize("kind", KINDS)
    def test_goes_on_by_itself(self, kind, again, pictures):
        if again is copy.copy and "prefetched" in kind:
            pytest.skip("it is another wrapper around the same loader")
        loader, expected = make(kind, pictures), make(kind, pictures)
        epochs = [list(expected) for _ in range(3)]
        assert same(list(loader), epochs[0])
        copied = again(loader)
        assert same([list(copied), list(copied)], epochs[1:])
        assert same([list(loader), list(loader)], epochs[1:])

    def test_may_go_to_a_spawned_process(self):
        loader, expected = (loader_of(num_workers=n, shuffle=True) for n in (2, 0))
        assert rows(loader) == rows(expected)
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        child = context.Process(target=first_epochs, args=(loader, queue))
        child.start()
        assert queue.get(timeout=120) == [rows(expected), rows(expected)]
        child.join(60)
        assert child.exitcode == 0


def test_a_pass_collected_in_one_of_its_threads_does_not_wait_for_itself(pictures):
    may_read, in_a_circle = threading.Event(), []

    def read(key):
        if len(asked) == 1:
            may_read.wait()
        asked.append(key)
        if in_a_circle:
            in_a_circle.clear()
            gc.collect()
        return pictures.read(key)

    asked = []
    loader = lk.BatchLoader(store_that_reads(pictures, read), size=16, batch_size=1, num_threads=1)
    iterator = iter(loader)
    next(iterator)
    circle = [iterator]
    circle.append(circle)
    in_a_circle.append(True)
    gc.disable()
    del iterator, circle
    may_read.set()
    assert eventually(lambda: not in_a_circle)
    gc.enable()
    assert len(list(loader)) == 12


class Asks(Numbers):
    """What its worker says of the data set."""

    def __getitem__(self, index):
        return get_worker_info().dataset is self, get_worker_info().dataset.keys[index]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_data_set_that_a_worker_tells_of_is_the_data_set(method):
    loader = loader_of(Asks(), 1, start_method=method, collate_fn=list)
    assert next(iter(loader)) == [(True, f"key-{number}") for number in range(4)]
