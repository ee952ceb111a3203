"""`lk.CUDAPrefetcher`: the loader's batches, in order and whole, on a simulated device and by `-m cuda` a real one."""

import copy
import pickle
import threading
import traceback
import warnings
import weakref
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings, strategies as st

import labkit as lk
from labkit import course
from tests.loaders import Numbers, eventually, loader_of, new_threads, solid, store_that_reads
from tests.memory_store import MemoryStore

# Any device: what is asked of the loader, and when


class Source:
    """Gives 0, 1, ..., and counts what it gave; raises in place of batch `breaks_at`."""

    def __init__(self, n_batches, breaks_at=None):
        self.n_batches, self.breaks_at, self.n_given = n_batches, breaks_at, 0

    def __iter__(self):
        self.n_given = 0
        for number in range(self.n_batches):
            if number == self.breaks_at:
                raise OSError("disk on fire")
            self.n_given += 1
            yield number


@pytest.mark.parametrize("n_batches", [0, 1, 10])
@pytest.mark.parametrize("depth", [1, 5])
def test_batches_come_in_order_while_depth_more_are_on_their_way(n_batches, depth):
    source, came = Source(n_batches), []
    batches = iter(lk.CUDAPrefetcher(source, "cpu", depth=depth))
    assert source.n_given == 0, "nothing is asked for before the first batch is"
    for batch in batches:
        came.append(batch)
        assert source.n_given == min(n_batches, batch + 1 + depth)
    assert came == list(range(n_batches))


@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("depth", [1, 3])
def test_an_exception_comes_after_the_batches_before_it(at, depth):
    prefetcher, got = lk.CUDAPrefetcher(Source(9, breaks_at=at), "cpu", depth=depth), []
    batches = iter(prefetcher)
    with pytest.raises(OSError, match="disk on fire") as caught:
        got.extend(batches)
    assert got == list(range(at))
    frames = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == 'raise OSError("disk on fire")'
    assert next(batches, "ended") == "ended"
    with pytest.raises(OSError):  # again in the next epoch
        list(prefetcher)


class Fragile:
    """A batch on whose copy `fail(number)` is called."""

    def __init__(self, number, fail):
        self.number, self.fail = number, fail

    def to(self, device, non_blocking=False):
        self.fail(self.number)
        return self.number


@pytest.mark.filterwarnings("ignore:batches are not in pinned memory")
@pytest.mark.parametrize("place", ["a worker", "a thread of BatchLoader", "the copy"])
def test_an_error_leaves_no_thread_and_the_next_pass_is_whole(place):
    trouble, before = ["no room left"], threading.enumerate()

    def fail(number):
        if number == 9 and trouble:
            raise LookupError(*trouble)

    store = MemoryStore({f"class/{number:02}.png": solid(number) for number in range(12)})
    failing = store_that_reads(store, lambda key: fail(int(key[6:8])) or store.read(key))
    loader = {
        "a worker": loader_of(Numbers(action=fail), 2),
        "a thread of BatchLoader": lk.BatchLoader(failing, batch_size=4, size=16, num_threads=2),
        "the copy": [Fragile(number, fail) for number in range(12)],
    }[place]
    with lk.simulated_cuda():
        prefetcher = lk.CUDAPrefetcher(loader, depth=2)
        with pytest.raises(LookupError, match="no room left") as caught:
            list(prefetcher)
        assert caught.type is LookupError
        trouble.clear()
        assert len(list(prefetcher)) == len(loader)
    del loader, prefetcher, caught
    assert eventually(lambda: not new_threads(before))


def test_it_has_the_loaders_attributes_and_goes_on_epoch_by_epoch():
    loader = lk.make_loader([(torch.full((1,), n), n) for n in range(6)], lk.LoaderConfig(batch_size=2, num_workers=0))
    prefetcher = lk.CUDAPrefetcher(loader, "cpu")
    assert [labels.tolist() for _, labels in prefetcher] == [[0, 1], [2, 3], [4, 5]]
    assert loader.epoch == 1
    prefetcher.set_epoch(7)
    assert (loader.epoch, prefetcher.epoch, prefetcher.batch_size, len(prefetcher)) == (7, 7, 2, 3)
    with pytest.raises(AttributeError, match="no attribute 'set_epoch'"):
        lk.CUDAPrefetcher([1], "cpu").set_epoch(0)
    with pytest.raises(TypeError, match=r"len\(\)"):
        len(lk.CUDAPrefetcher(iter([1]), "cpu"))


class CopiesItself(list):
    def __deepcopy__(self, memo):
        return CopiesItself(self)


@pytest.mark.parametrize("again", [lambda it: pickle.loads(pickle.dumps(it)), copy.copy, copy.deepcopy])
def test_it_can_be_pickled_and_copied(again):
    copied = again(lk.CUDAPrefetcher(CopiesItself([1, 2]), "cpu", depth=3))
    assert (type(copied), list(copied), copied.depth) == (lk.CUDAPrefetcher, [1, 2], 3)


def is_forgotten(batches):
    """Whether a batch ends with the consumer's reference."""
    batch = next(batches)
    watched = weakref.ref(batch)
    del batch
    return watched() is None


def test_the_consumers_reference_is_the_last_one():
    passing_by = iter(lk.CUDAPrefetcher((torch.full((2,), number) for number in range(5)), "cpu"))
    with lk.simulated_cuda():
        on_the_way = iter(lk.CUDAPrefetcher((torch.full((2,), n).pin_memory() for n in range(5)), "cuda"))
        assert [is_forgotten(on_the_way) for _ in range(5)] == [True] * 5
    assert [is_forgotten(passing_by) for _ in range(5)] == [True] * 5


@pytest.mark.parametrize(
    ("device", "said", "reason"),
    [("cuda", "device='cuda', but CUDA is not", "CUDA"), ("xpu:0", "device='xpu:0', but xpu is not", "an accelerator")],
)
def test_without_the_device_the_cpu_is_the_remedy(device, said, reason):
    if torch.cuda.is_available():
        pytest.skip(f"about machines without {reason}")
    with pytest.raises(RuntimeError, match=f"{said} available: pass device='cpu'"):
        lk.CUDAPrefetcher([1], device)


def test_depth_is_at_least_one():
    with pytest.raises(ValueError, match="depth must be an integer >= 1, got 0"):
        lk.CUDAPrefetcher([1], "cpu", depth=0)


# A device: no batch is overwritten, and none is there too early


class HandWritten:
    """The prefetcher of the write-ups, with what they forget: `record_stream`."""

    def __init__(self, loader, *, waits=True, records=True):
        self.loader, self.waits, self.records, self.stream = loader, waits, records, torch.cuda.Stream()

    def __iter__(self):
        self.source = iter(self.loader)
        self.preload()
        return self

    def preload(self):
        self.following = next(self.source, None)
        with torch.cuda.stream(self.stream):
            if self.following is not None:
                self.following = self.following.to("cuda", non_blocking=True)

    def __next__(self):
        if self.waits:
            torch.cuda.current_stream().wait_stream(self.stream)
        batch = self.following
        if batch is None:
            raise StopIteration
        if self.records:
            batch.record_stream(torch.cuda.current_stream())
        self.preload()
        return batch


def wrong_sums(feed, n_batches, *, cycles=2_000_000, n_items=1 << 14):
    """How many of the batches, each filled with its number, are found overwritten, or not yet there.

    The consumer queues a wait and a sum on its stream, drops its reference and asks for the next batch, so the host is
    far ahead of the device. Sums are read at the end, since reading one would wait.
    """
    numbers = torch.arange(n_batches)
    pinned = numbers.view(-1, 1).repeat(1, n_items).pin_memory()  # 128 KiB a batch, all of them there until the end
    sums = torch.full((n_batches,), -1, device="cuda")
    torch.cuda.synchronize()
    batches = iter(feed(pinned[number] for number in range(n_batches)))
    for number in range(n_batches):
        batch = next(batches)
        torch.cuda._sleep(cycles)  # 2,000,000: about a millisecond, many times as long as a copy
        sums[number] = batch.sum()
        del batch
    torch.cuda.synchronize()
    return int((sums.cpu() != numbers * n_items).sum())


def n_batches_for(simulation):
    """Real races are lost now and then, simulated ones always."""
    return 20 if simulation else 1000


@pytest.mark.parametrize("depth", [1, 3])
def test_no_batch_is_overwritten_while_kernels_have_to_read_it(cuda, depth):
    assert wrong_sums(lambda loader: lk.CUDAPrefetcher(loader, depth=depth), n_batches_for(cuda)) == 0


def test_the_write_ups_prefetcher_loses_the_race(cuda):
    assert wrong_sums(lambda loader: HandWritten(loader, records=False), n_batches_for(cuda)) > 0
    assert cuda is None or cuda.races


SECONDS = st.lists(st.sampled_from([0.0, 1e-6, 1e-5, 1e-4, 1e-3]), min_size=1, max_size=12)


@given(SECONDS, st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_no_schedule_spoils_a_batch_and_each_shows_a_forgotten_order(seconds, depth):
    for feed, is_right in (
        (lambda loader: lk.CUDAPrefetcher(loader, depth=depth), True),
        (lambda loader: HandWritten(loader, records=False), False),
        (lambda loader: HandWritten(loader, waits=False), False),
    ):  # fmt: skip
        turns = cycle(seconds)  # what an operation takes, whatever its size
        with lk.simulated_cuda(duration=lambda name, reckoned, turns=turns: next(turns)) as simulation:
            n_wrong = wrong_sums(feed, 6, cycles=1, n_items=16)
            assert (simulation.races == []) == is_right
            assert not (is_right and n_wrong)


def test_all_epochs_take_the_memory_of_one_stream():
    with lk.simulated_cuda() as simulation:
        prefetcher = lk.CUDAPrefetcher([torch.ones(128).pin_memory()] * 4, "cuda", depth=2)
        for _ in range(5):
            list(prefetcher)
            torch.cuda.synchronize()
        assert simulation.max_reserved_bytes == 4 * 512


def test_a_consumer_on_a_stream_of_its_own_is_waited_for(cuda):
    with torch.cuda.stream(torch.cuda.Stream()):
        assert wrong_sums(lk.CUDAPrefetcher, 20 if cuda else 200) == 0


def test_a_consumer_that_is_faster_than_the_copy_waits_for_it(cuda):
    def held_up(loader):
        prefetcher = lk.CUDAPrefetcher(loader)
        with prefetcher.transfer.stream:
            torch.cuda._sleep(500_000_000)  # a quarter of a second, before the first copy
        return prefetcher

    assert wrong_sums(held_up, 50, cycles=1) == 0


def test_the_host_waits_for_nothing_and_the_consumer_for_its_batch_alone():
    with lk.simulated_cuda(course.SimulatedDevice(pcie_bytes_per_s=1.0, launch_s=0.0)) as simulation:
        batches = [{"images": torch.ones(2).pin_memory(), "label": [torch.ones(1).pin_memory()]} for _ in range(2)]
        consumer = torch.cuda.Stream()
        with torch.cuda.stream(consumer):
            first = next(iter(lk.CUDAPrefetcher(batches, "cuda")))
        assert (first["images"].is_cuda, first["label"][0].is_cuda, simulation.now_s) == (True, True, 0)
        consumer.synchronize()
        assert simulation.now_s == 4 * 3  # a byte a second


class Hiding:
    """Moves itself; nobody finds its tensor by looking through attributes."""

    def __init__(self, image):
        self.read = lambda: image

    def to(self, device, non_blocking=False):
        return Hiding(self.read().to(device, non_blocking=non_blocking) + 0)


def test_a_tensor_that_an_object_hides_is_not_overwritten(cuda):
    def read(batch):
        return batch["deep"][0].read()

    def feed(loader):  # nothing here may hold a batch, so no generator
        return map(read, lk.CUDAPrefetcher({"deep": [Hiding(image)]} for image in loader))

    assert wrong_sums(feed, n_batches_for(cuda)) == 0
    assert cuda is None or cuda.races == []


def test_on_a_cpu_batches_pass_through():
    batches = [{"image": torch.full((2,), number), "name": "n"} for number in range(3)]
    for found, batch in zip(lk.CUDAPrefetcher(batches, "cpu"), batches, strict=True):
        assert found["image"] is batch["image"]  # nothing is copied


# Pinned memory


def test_pageable_batches_are_said_once_and_arrive(cuda):
    prefetcher = lk.CUDAPrefetcher([torch.full((3,), n) for n in range(3)])
    with pytest.warns(UserWarning, match="not in pinned memory.*pin_memory=True") as caught:
        assert [int(batch[0]) for _ in range(2) for batch in prefetcher] == [0, 1, 2] * 2
    assert [warning.filename for warning in caught] == [__file__]


def test_other_batches_give_no_warning():
    with lk.simulated_cuda(), warnings.catch_warnings(action="error"):
        for batch in (torch.ones(1).pin_memory(), torch.ones(1).cuda(), torch.empty(0, 4), ["name"]):
            list(lk.CUDAPrefetcher([batch]))
