"""CUDAPrefetcher: its logic by a log, its use of CUDA by stand-ins; and where there is a GPU, the race itself."""

import copy
import pickle
import traceback
import warnings
import weakref
from collections import namedtuple
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

import labkit as lk
from labkit.pipeline import prefetch
from labkit.pipeline.prefetch import CopyStream

Pair = namedtuple("Pair", "image label")


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str


def nested(n, make=torch.full):
    return {"pair": Pair(make((2,), n), [make((3,), n)]), "sample": Sample(make((1,), n), f"name {n}"), "n": n}


class LoggingLane:
    """Stands in for a stream: notes what is sent and handed over, and when."""

    def __init__(self):
        self.log = []

    def send(self, batch):
        self.log.append(("send", batch))
        return batch, None

    def hand_over(self, sent, copied):
        self.log.append(("hand over", sent))
        return sent


def logged(source, depth=1):
    prefetcher = lk.CUDAPrefetcher(source, "cpu", depth=depth)
    prefetcher.lane = LoggingLane()
    return prefetcher


@pytest.mark.parametrize("n_batches", [0, 1, 2, 3, 10])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_order_and_depth(n_batches, depth):
    prefetcher = logged(range(n_batches), depth)
    assert list(prefetcher) == list(range(n_batches))
    n_sent = 0
    for what, batch in prefetcher.lane.log:
        if what == "send":
            assert batch == n_sent
            n_sent += 1
        else:
            assert n_sent == min(n_batches, batch + 1 + depth)


def test_nothing_is_sent_before_the_first_batch_is_asked_for():
    prefetcher = logged(range(5))
    batches = iter(prefetcher)
    assert prefetcher.lane.log == []
    next(batches)
    assert prefetcher.lane.log == [("send", 0), ("send", 1), ("hand over", 0)]


class Breaking:
    """Raises in place of batch `at`."""

    def __init__(self, at):
        self.at = at

    def __iter__(self):
        yield from range(self.at)
        raise OSError("disk on fire")


@pytest.mark.parametrize("at", [0, 1, 2, 5])
@pytest.mark.parametrize("depth", [1, 3])
def test_an_exception_comes_after_the_batches_before_it(at, depth):
    prefetcher, got = logged(Breaking(at), depth), []
    batches = iter(prefetcher)
    with pytest.raises(OSError, match="disk on fire") as caught:
        got.extend(batches)
    assert got == list(range(at))
    frames = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == 'raise OSError("disk on fire")'
    assert next(batches, "ended") == "ended"
    with pytest.raises(OSError):  # again in the next epoch
        list(prefetcher)


def test_every_epoch_begins_anew():
    prefetcher = logged([1, 2, 3], depth=2)
    assert [list(prefetcher) for _ in range(3)] == [[1, 2, 3]] * 3
    for batch in prefetcher:
        if batch == 2:
            break
    assert list(prefetcher) == [1, 2, 3]
    one, other = iter(prefetcher), iter(prefetcher)
    assert [next(one), next(other), next(one)] == [1, 1, 2]


def test_a_labkit_loader_goes_on_epoch_by_epoch():
    loader = lk.make_loader([(torch.full((1,), n), n) for n in range(6)], lk.LoaderConfig(batch_size=2, num_workers=0))
    prefetcher = lk.CUDAPrefetcher(loader, "cpu")
    assert [labels.tolist() for _, labels in prefetcher] == [[0, 1], [2, 3], [4, 5]]
    assert loader.epoch == 1
    prefetcher.set_epoch(7)
    assert (loader.epoch, prefetcher.epoch, prefetcher.batch_size, len(prefetcher)) == (7, 7, 2, 3)


def test_what_is_not_there_is_named():
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


def test_an_unfinished_copy_asks_no_loader():
    empty = lk.CUDAPrefetcher.__new__(lk.CUDAPrefetcher)
    with pytest.raises(AttributeError):
        empty.anything  # noqa: B018


def is_forgotten(batches):
    """Whether a batch ends with the consumer's reference."""
    batch = next(batches)
    watched = weakref.ref(batch)
    del batch
    return watched() is None


def test_the_consumers_reference_is_the_last_one(machine):
    made = (fake(machine)((2,), number) for number in range(5))
    on_the_way = iter(lk.CUDAPrefetcher(made, "cuda"))
    passing_by = iter(lk.CUDAPrefetcher((torch.full((2,), number) for number in range(5)), "cpu"))
    assert [is_forgotten(on_the_way) for _ in range(5)] == [True] * 5
    assert [is_forgotten(passing_by) for _ in range(5)] == [True] * 5


def test_on_a_cpu_batches_pass_through():
    batches = [nested(n) for n in range(3)]
    for found, given in zip(lk.CUDAPrefetcher(batches, "cpu"), batches, strict=True):
        assert found["pair"].image is given["pair"].image  # nothing is copied
        assert isinstance(found["pair"], Pair)
        assert isinstance(found["sample"], Sample)
        assert (found["sample"].name, found["n"]) == (given["sample"].name, given["n"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_without_cuda_the_cpu_is_the_remedy():
    with pytest.raises(RuntimeError, match="device='cuda', but CUDA is not available: pass device='cpu'"):
        lk.CUDAPrefetcher([1])


def test_depth_is_at_least_one():
    with pytest.raises(ValueError, match="depth must be an integer >= 1, got 0"):
        lk.CUDAPrefetcher([1], "cpu", depth=0)


class Machine:
    """Stands in for torch.cuda: streams are names, events are counts of copies, and all calls are logged."""

    def __init__(self):
        self.log, self.n_streams, self.consumer, self.now = [], 0, FakeStream(self, "default"), None

    def Stream(self, device):
        self.n_streams += 1
        return FakeStream(self, f"side {self.n_streams}")

    def current_stream(self, device):
        return self.consumer

    @contextmanager
    def stream(self, stream):
        self.now = stream.name
        yield
        self.now = None

    @staticmethod
    def is_available():
        return True


class FakeStream:
    def __init__(self, machine, name):
        self.machine, self.name = machine, name

    def record_event(self):
        """An event is the number of copies before it, all of them on this stream."""
        copies = [entry for entry in self.machine.log if entry[0] == "copy"]
        assert {name for _, name, *_ in copies} == {self.name}
        return len(copies)

    def wait_event(self, event):
        self.machine.log.append(("wait", self.name, event))


class FakeTensor(torch.Tensor):
    """Has a machine to copy to."""

    machine: Machine
    is_cuda = False
    pinned = True

    def to(self, device, non_blocking=False):
        self.machine.log.append(("copy", self.machine.now, int(self.flatten()[0]), non_blocking))
        sent = self.clone()
        sent.machine, sent.is_cuda = self.machine, True
        return sent

    def is_pinned(self):
        return self.pinned

    def record_stream(self, stream):
        self.machine.log.append(("record", stream.name, int(self.flatten()[0])))


@pytest.fixture
def machine(monkeypatch):
    """A machine with a CUDA device that does nothing."""
    machine = Machine()
    for name in ("Stream", "current_stream", "stream", "is_available"):
        monkeypatch.setattr(prefetch.torch.cuda, name, getattr(machine, name))
    return machine


def fake(machine, *, pinned=True):
    def make(shape, number):
        tensor = torch.full(shape, number).as_subclass(FakeTensor)
        tensor.machine, tensor.pinned = machine, pinned
        return tensor

    return make


def test_every_tensor_is_copied_waited_for_and_recorded(machine):
    prefetcher = lk.CUDAPrefetcher([nested(n, fake(machine)) for n in range(2)], "cuda")
    batches = iter(prefetcher)
    first = next(batches)
    copies = [("copy", "side 1", n, True) for n in (0, 0, 0, 1, 1, 1)]  # asynchronous, on the side stream
    assert machine.log == [*copies, ("wait", "default", 3), *[("record", "default", 0)] * 3]
    assert first["pair"].label[0].is_cuda
    machine.log.clear()
    machine.consumer = FakeStream(machine, "of the consumer")
    next(batches)
    assert machine.log == [("wait", "of the consumer", 6), *[("record", "of the consumer", 1)] * 3]


def test_one_stream_for_life(machine):
    prefetcher = lk.CUDAPrefetcher([nested(n, fake(machine)) for n in range(3)], "cuda", depth=2)
    for _ in range(3):
        list(prefetcher)
    assert machine.n_streams == 1
    assert {entry[1] for entry in machine.log if entry[0] == "copy"} == {"side 1"}


def test_pageable_batches_are_said_once_and_to_whom_it_concerns(machine):
    prefetcher = lk.CUDAPrefetcher([nested(n, fake(machine, pinned=False)) for n in range(3)], "cuda")
    with pytest.warns(UserWarning, match="not in pinned memory.*pin_memory=True") as caught:
        assert len(list(prefetcher) + list(prefetcher)) == 6
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("batch", ["pinned", "nothing in it", "no tensor", "on the device"])
def test_other_batches_give_no_warning(machine, batch):
    tensor = fake(machine, pinned=batch == "pinned")((1,), 1)
    empty = torch.empty(0, 4)
    elsewhere = torch.empty(2, device="meta")
    batches = {"pinned": tensor, "nothing in it": empty, "no tensor": ["name"], "on the device": elsewhere}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CopyStream("cuda")._warn_if_unpinned(batches[batch])


class WriteUp:
    """The prefetcher of the write-ups: side stream and `wait_stream`, but no `record_stream`."""

    def __init__(self, loader, device="cuda"):
        self.loader, self.device, self.stream = loader, device, torch.cuda.Stream(device)

    def __iter__(self):
        self.source = iter(self.loader)
        self.preload()
        return self

    def preload(self):
        self.following = next(self.source, None)
        with torch.cuda.stream(self.stream):
            if self.following is not None:
                self.following = self.following.to(self.device, non_blocking=True)

    def __next__(self):
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        batch = self.following
        if batch is None:
            raise StopIteration
        self.preload()
        return batch


def wrong_sums(feed, n_batches=1000, *, cycles=2_000_000, device="cuda"):
    """How many of the batches, each filled with its number, are found overwritten, or not yet there.

    The consumer queues a wait and a sum on its stream, drops its reference and asks for the next batch, so the host is
    far ahead of the device. Sums are read at the end, since reading one would wait.
    """
    numbers = torch.arange(n_batches)
    pinned = numbers.view(-1, 1).repeat(1, 1 << 14).pin_memory()  # 128 KiB a batch, all of them there until the end
    sums = torch.full((n_batches,), -1, device=device)
    torch.cuda.synchronize(device)
    batches = iter(feed(pinned[number] for number in range(n_batches)))
    for number in range(n_batches):
        batch = next(batches)
        torch.cuda._sleep(cycles)  # 2,000,000: about a millisecond, many times as long as a copy
        sums[number] = batch.sum()
        del batch
    torch.cuda.synchronize(device)
    return int((sums.cpu() != numbers * (1 << 14)).sum())


@pytest.mark.cuda
@pytest.mark.parametrize("depth", [1, 3])
def test_no_batch_is_overwritten_while_kernels_have_to_read_it(depth):
    assert wrong_sums(lambda loader: lk.CUDAPrefetcher(loader, depth=depth)) == 0


@pytest.mark.cuda
def test_the_write_ups_prefetcher_loses_the_race():
    assert wrong_sums(WriteUp) > 0


@pytest.mark.cuda
def test_a_consumer_on_a_stream_of_its_own():
    with torch.cuda.stream(torch.cuda.Stream()):
        assert wrong_sums(lambda loader: lk.CUDAPrefetcher(loader), 200) == 0


@pytest.mark.cuda
def test_a_consumer_that_is_faster_than_the_copy_waits_for_it():
    def held_up(loader):
        prefetcher = lk.CUDAPrefetcher(loader)
        with torch.cuda.stream(prefetcher.lane.stream):
            torch.cuda._sleep(500_000_000)  # a quarter of a second, before the first copy
        return prefetcher

    assert wrong_sums(held_up, 50, cycles=1) == 0


@pytest.mark.cuda
@pytest.mark.parametrize("index", range(max(1, torch.cuda.device_count())))
def test_nested_batches_arrive_whole_on_any_device(index):
    device = torch.device("cuda", index)
    batches = [nested(n, lambda shape, value: torch.full(shape, value).pin_memory()) for n in range(5)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, batch in enumerate(lk.CUDAPrefetcher(batches, device, depth=2)):
            for tensor in (batch["pair"].image, batch["pair"].label[0], batch["sample"].image):
                assert tensor.device == device
                assert (tensor == number).all()
            assert (batch["sample"].name, batch["n"]) == (f"name {number}", number)


@pytest.mark.cuda
def test_pageable_batches_are_said_and_arrive():
    with pytest.warns(UserWarning, match="not in pinned memory"):
        found = [int(batch[0]) for batch in lk.CUDAPrefetcher([torch.full((3,), n) for n in range(3)])]
    assert found == [0, 1, 2]


@pytest.mark.cuda
def test_a_loader_with_workers_feeds_cuda():
    dataset = [(torch.full((3, 8, 8), n, dtype=torch.uint8), n) for n in range(12)]
    loader = lk.make_loader(dataset, lk.LoaderConfig(batch_size=4, num_workers=1))
    try:
        for _ in range(2):
            found = [(images, labels) for images, labels in lk.CUDAPrefetcher(loader)]
            assert [labels.tolist() for _, labels in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
            assert all((images[:, 0, 0, 0] == labels).all() for images, labels in found)
    finally:
        loader.close()
