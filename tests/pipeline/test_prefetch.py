"""CUDAPrefetcher: its logic by a log, its use of CUDA and the race on a simulated device, and on a real one."""

import copy
import pickle
import traceback
import warnings
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass
from itertools import cycle
from operator import itemgetter
from pkgutil import resolve_name

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data._utils.pin_memory import pin_memory
from torchvision import tv_tensors
from torchvision.models.detection.image_list import ImageList

import labkit as lk
from labkit import course
from labkit.loading.prefetch import CopyStream
from tests.encodings import Encoding

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


def test_the_consumers_reference_is_the_last_one():
    passing_by = iter(lk.CUDAPrefetcher((torch.full((2,), number) for number in range(5)), "cpu"))
    with lk.simulated_cuda():
        on_the_way = iter(lk.CUDAPrefetcher((torch.full((2,), n).pin_memory() for n in range(5)), "cuda"))
        assert [is_forgotten(on_the_way) for _ in range(5)] == [True] * 5
    assert [is_forgotten(passing_by) for _ in range(5)] == [True] * 5


def test_on_a_cpu_batches_pass_through():
    batches = [nested(n) for n in range(3)]
    for found, sent in zip(lk.CUDAPrefetcher(batches, "cpu"), batches, strict=True):
        assert found["pair"].image is sent["pair"].image  # nothing is copied
        assert isinstance(found["pair"], Pair)
        assert isinstance(found["sample"], Sample)
        assert (found["sample"].name, found["n"]) == (sent["sample"].name, sent["n"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_without_cuda_the_cpu_is_the_remedy():
    with pytest.raises(RuntimeError, match="device='cuda', but CUDA is not available: pass device='cpu'"):
        lk.CUDAPrefetcher([1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without an accelerator")
def test_another_accelerator_must_be_there():
    with pytest.raises(RuntimeError, match="device='xpu:0', but xpu is not available: pass device='cpu'"):
        lk.CUDAPrefetcher([1], "xpu:0")


def test_depth_is_at_least_one():
    with pytest.raises(ValueError, match="depth must be an integer >= 1, got 0"):
        lk.CUDAPrefetcher([1], "cpu", depth=0)


def nested_pinned(n):
    return nested(n, lambda shape, value: torch.full(shape, value).pin_memory())


def test_every_tensor_is_copied_waited_for_and_recorded():
    with lk.simulated_cuda(course.SimulatedDevice(pcie_bytes_per_s=1.0, launch_s=0.0)) as simulation:
        consumer = torch.cuda.Stream()
        with torch.cuda.stream(consumer):
            first = next(iter(lk.CUDAPrefetcher([nested_pinned(n) for n in range(2)], "cuda")))
        assert simulation.now_s == 0  # the host has waited for nothing
        tensors = first["pair"].image, *first["pair"].label, first["sample"].image
        assert all(tensor.is_cuda for tensor in tensors)
        assert all(tensor.memory.block.users == {consumer.queue} for tensor in tensors)
        consumer.synchronize()
        copied_s = 8 * sum(tensor.numel() for tensor in tensors)  # int64, a byte a second; not those of the second one
        assert simulation.now_s == copied_s


def test_one_stream_for_life():
    with lk.simulated_cuda() as simulation:
        prefetcher = lk.CUDAPrefetcher([nested_pinned(n) for n in range(3)], "cuda", depth=2)
        for _ in range(3):
            list(prefetcher)
        assert len(simulation.engine.queues) == 2


def test_pageable_batches_are_said_once_and_to_whom_it_concerns():
    with lk.simulated_cuda():
        prefetcher = lk.CUDAPrefetcher([nested(n) for n in range(3)], "cuda")
        with pytest.warns(UserWarning, match="not in pinned memory.*pin_memory=True") as caught:
            assert len(list(prefetcher) + list(prefetcher)) == 6
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("batch", ["pinned", "nothing in it", "no tensor", "on the device"])
def test_other_batches_give_no_warning(batch):
    with lk.simulated_cuda(), warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = torch.ones(1)
        batches = {"pinned": tensor.pin_memory(), "nothing in it": torch.empty(0, 4), "no tensor": ["name"],
                   "on the device": tensor.cuda()}  # fmt: skip
        CopyStream(torch.device("cuda"))._warn_if_unpinned(batches[batch])


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


def wrong_sums(feed, n_batches, *, cycles=2_000_000, device="cuda", n_items=1 << 14):
    """How many of the batches, each filled with its number, are found overwritten, or not yet there.

    The consumer queues a wait and a sum on its stream, drops its reference and asks for the next batch, so the host is
    far ahead of the device. Sums are read at the end, since reading one would wait.
    """
    numbers = torch.arange(n_batches)
    pinned = numbers.view(-1, 1).repeat(1, n_items).pin_memory()  # 128 KiB a batch, all of them there until the end
    sums = torch.full((n_batches,), -1, device=device)
    torch.cuda.synchronize(device)
    batches = iter(feed(pinned[number] for number in range(n_batches)))
    for number in range(n_batches):
        batch = next(batches)
        torch.cuda._sleep(cycles)  # 2,000,000: about a millisecond, many times as long as a copy
        sums[number] = batch.sum()
        del batch
    torch.cuda.synchronize(device)
    return int((sums.cpu() != numbers * n_items).sum())


@pytest.mark.parametrize("depth", [1, 3])
def test_no_batch_is_overwritten_while_kernels_have_to_read_it(cuda, depth):
    assert wrong_sums(lambda loader: lk.CUDAPrefetcher(loader, depth=depth), n_batches_for(cuda)) == 0


def test_the_write_ups_prefetcher_loses_the_race(cuda):
    assert wrong_sums(WriteUp, n_batches_for(cuda)) > 0


def n_batches_for(simulation):
    """Real races are lost now and then, simulated ones always."""
    return 20 if simulation else 1000


class Mended(WriteUp):
    """The same with `record_stream`."""

    def __next__(self):
        consumer = torch.cuda.current_stream(self.device)
        consumer.wait_stream(self.stream)
        batch = self.following
        if batch is None:
            raise StopIteration
        batch.record_stream(consumer)
        self.preload()
        return batch


class WithoutRecordStream(CopyStream):
    def hand_over(self, sent, copied):
        torch.cuda.current_stream(self.device).wait_event(copied[0])
        return sent


class WithoutWaiting(CopyStream):
    def hand_over(self, sent, copied):
        sent.record_stream(torch.cuda.current_stream(self.device))
        return sent


class AStreamForEachBatch(CopyStream):
    def send(self, batch):
        self.stream = torch.cuda.Stream(self.device)
        return super().send(batch)


def planted(lane):
    def feed(loader):
        prefetcher = lk.CUDAPrefetcher(loader)
        prefetcher.lane = lane(prefetcher.device)
        return prefetcher

    return feed


@pytest.mark.parametrize(
    ("feed", "bytes_per_s"),
    [(WriteUp, 25e9), (planted(WithoutRecordStream), 25e9), (planted(WithoutWaiting), 1e6)],  # the last: a slow copy
)
def test_a_forgotten_promise_is_found(feed, bytes_per_s):
    with lk.simulated_cuda(course.SimulatedDevice(pcie_bytes_per_s=bytes_per_s)) as simulation:
        assert wrong_sums(feed, 20) > 0
        assert simulation.races


def test_a_stream_for_each_batch_is_found_by_its_memory():
    reserved = {}
    for lane in (CopyStream, AStreamForEachBatch):
        with lk.simulated_cuda() as simulation:
            assert wrong_sums(planted(lane), 40, cycles=1) == 0
            reserved[lane] = simulation.max_reserved_bytes
    assert reserved[AStreamForEachBatch] > 5 * reserved[CopyStream]


SECONDS = st.lists(st.sampled_from([0.0, 1e-6, 1e-5, 1e-4, 1e-3]), min_size=1, max_size=12)


def schedule(seconds):
    """Durations that an operation takes in turn, whatever its size."""
    turns = cycle(seconds)
    return lambda name, reckoned: next(turns)


@given(SECONDS, st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_in_no_schedule_is_a_batch_overwritten_or_too_late(seconds, depth):
    for feed in (lambda loader: lk.CUDAPrefetcher(loader, depth=depth), Mended):
        with lk.simulated_cuda(duration=schedule(seconds)) as simulation:
            assert wrong_sums(feed, 6, cycles=1, n_items=16) == 0
            assert simulation.races == []


@given(SECONDS)
@settings(max_examples=100, deadline=None)
def test_the_write_ups_race_is_found_in_every_schedule(seconds):
    with lk.simulated_cuda(duration=schedule(seconds)) as simulation:
        wrong_sums(WriteUp, 6, cycles=1, n_items=16)
        assert simulation.races


def test_a_consumer_on_a_stream_of_its_own(cuda):
    with torch.cuda.stream(torch.cuda.Stream()):
        assert wrong_sums(lambda loader: lk.CUDAPrefetcher(loader), 20 if cuda else 200) == 0


def test_a_consumer_that_is_faster_than_the_copy_waits_for_it(cuda):
    def held_up(loader):
        prefetcher = lk.CUDAPrefetcher(loader)
        with prefetcher.lane.stream:
            torch.cuda._sleep(500_000_000)  # a quarter of a second, before the first copy
        return prefetcher

    assert wrong_sums(held_up, 50, cycles=1) == 0


def test_nested_batches_arrive_whole_on_any_device(cuda):
    batches = [nested_pinned(n) for n in range(5)]
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number, batch in enumerate(lk.CUDAPrefetcher(batches, device, depth=2)):
                for tensor in (batch["pair"].image, batch["pair"].label[0], batch["sample"].image):
                    assert tensor.device == device
                    assert (tensor == number).all()
                assert (batch["sample"].name, batch["n"]) == (f"name {number}", number)


def test_pageable_batches_are_said_and_arrive(cuda):
    with pytest.warns(UserWarning, match="not in pinned memory"):
        found = [int(batch[0]) for batch in lk.CUDAPrefetcher([torch.full((3,), n) for n in range(3)])]
    assert found == [0, 1, 2]


def test_a_loader_with_workers_feeds_cuda(cuda):
    dataset = [(torch.full((3, 8, 8), n, dtype=torch.uint8), n) for n in range(12)]
    loader = lk.make_loader(dataset, lk.LoaderConfig(batch_size=4, num_workers=1))
    try:
        for _ in range(2):
            found = [(images, labels) for images, labels in lk.CUDAPrefetcher(loader)]
            assert [labels.tolist() for _, labels in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
            assert all((images[:, 0, 0, 0] == labels).all() for images, labels in found)
    finally:
        loader.close()


class Fields(dict):
    """A dict with attributes, as many projects have one."""

    def __init__(self, source, *, image, name):
        super().__init__(source)
        self.image, self.name = image, name


class AttributeDict(dict):
    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class Instances:
    """As detectron's: `to` makes a new object, which holds its tensors in a dict."""

    def __init__(self, size, **found):
        self._size, self._found = size, found

    def to(self, *args, **kwargs):
        return Instances(self._size, **{name: value.to(*args, **kwargs) for name, value in self._found.items()})


class Store(MutableMapping):
    """As the stores of torch_geometric's graphs, which know their graph."""

    def __init__(self, graph, **items):
        self._items, self._graph = items, weakref.ref(graph)

    def __getitem__(self, name):
        return self._items[name]

    def __setitem__(self, name, value):
        self._items[name] = value

    def __delitem__(self, name):
        del self._items[name]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Graph:
    """As torch_geometric's: `to` moves in place and returns the graph itself."""

    def __init__(self, **items):
        self._store = Store(self, **items)

    def __copy__(self):
        return Graph(**self._store)

    def to(self, device, *, non_blocking=False):
        assert self._store._graph() is self
        for name, value in self._store.items():
            self._store[name] = value.to(device, non_blocking=non_blocking)
        return self


class MovesItself:
    """`to` takes a device alone, moves in place and returns nothing."""

    __slots__ = ("images",)

    def __init__(self, images):
        self.images = images

    def to(self, device):
        self.images = [image.to(device) for image in self.images]


class Hiding:
    """Nobody finds its tensor by looking through attributes."""

    def __init__(self, image):
        self.read = lambda: image

    def to(self, device, non_blocking=False):
        return Hiding(self.read().to(device, non_blocking=non_blocking) + 0)

    def pin_memory(self):
        return Hiding(self.read().pin_memory())


# How a batch of this kind is made of a pinned tensor, and how the consumer finds that tensor in it.
KINDS = {
    "dict": (lambda image: {"image": image}, lambda batch: batch["image"]),
    "ordered dict": (lambda image: OrderedDict(image=image), lambda batch: batch["image"]),
    "defaultdict": (lambda image: defaultdict(list, image=image), lambda batch: batch["image"]),
    "user dict": (lambda image: UserDict(image=image), lambda batch: batch["image"]),
    "dict with a tensor for an attribute": (lambda image: Fields({}, image=image, name="n"), lambda batch: batch.image),
    "attribute dict": (lambda image: AttributeDict(image=image), lambda batch: batch.image),
    "list in a tuple": (lambda image: ([image],), lambda batch: batch[0][0]),
    "deque": (lambda image: deque([image]), lambda batch: batch[0]),
    "named tuple": (lambda image: Pair(image, None), lambda batch: batch.image),
    "frozen data class": (lambda image: Sample(image, "name"), lambda batch: batch.image),
    "image of torchvision": (lambda image: tv_tensors.Image(image.view(1, 1, -1)), lambda batch: batch[0, 0]),
    "list of images": (lambda image: ImageList(image, [(1, 1)]), lambda batch: batch.tensors),
    "packed sequence": (lambda image: PackedSequence(image, torch.ones(len(image), dtype=torch.int64)), itemgetter(0)),
    "encoding": (lambda image: Encoding({"image": image}), lambda batch: batch["image"]),
    "instances": (lambda image: [Instances((1, 1), boxes=image)], lambda batch: batch[0]._found["boxes"]),
    "graph": (lambda image: Graph(image=image), lambda batch: batch._store["image"]),
    "moves itself": (lambda image: MovesItself([image]), lambda batch: batch.images[0]),
    "hiding": (lambda image: {"deep": Hiding(image)}, lambda batch: batch["deep"].read()),
}  # fmt: skip


def of_transformers(path, **data):
    return resolve_name(f"transformers.{path}")(**data)


OF_TRANSFORMERS = {
    "encoding of transformers": (
        lambda image: of_transformers("BatchEncoding", data={"image": image}), lambda batch: batch["image"],
    ),
    "features of transformers": (
        lambda image: of_transformers("BatchFeature", data={"image": image}), lambda batch: batch.image,
    ),
    "output of a model of transformers": (
        lambda image: of_transformers("modeling_outputs:BaseModelOutput", last_hidden_state=image), itemgetter(0),
    ),
}  # fmt: skip
kinds = pytest.mark.parametrize(
    ("make", "find"),
    [
        *(pytest.param(*kind, id=name) for name, kind in KINDS.items()),
        *(pytest.param(*kind, id=name, marks=pytest.mark.frameworks) for name, kind in OF_TRANSFORMERS.items()),
    ],
)


@kinds
def test_no_kind_of_batch_is_overwritten_and_each_keeps_its_type(cuda, make, find):
    """The host is far ahead of the device: a batch's memory is free for the next copy before its sum has begun."""
    n_batches, n_items = n_batches_for(cuda), 1 << 14
    pinned = torch.arange(n_batches).view(-1, 1).repeat(1, n_items).pin_memory()
    sums = torch.full((n_batches,), -1, device="cuda")
    torch.cuda.synchronize()
    for number, batch in enumerate(lk.CUDAPrefetcher(make(pinned[number]) for number in range(n_batches))):
        assert type(batch) is type(make(pinned[0])) or isinstance(batch, torch.Tensor)  # simulated ones have one type
        assert find(batch).is_cuda
        torch.cuda._sleep(2_000_000)
        sums[number] = find(batch).sum()
        del batch
    torch.cuda.synchronize()
    assert sums.tolist() == [number * n_items for number in range(n_batches)]
    assert cuda is None or cuda.races == []


@kinds
def test_batches_that_the_loader_keeps_stay_on_the_host(make, find):
    with lk.simulated_cuda():
        kept = [make(torch.full((3,), number).pin_memory()) for number in range(3)]
        for _ in range(2):
            assert [int(find(batch)[0]) for batch in lk.CUDAPrefetcher(kept)] == [0, 1, 2]
            assert not any(find(batch).is_cuda for batch in kept)


def test_other_attributes_of_a_batch_are_kept():
    with lk.simulated_cuda():
        image = torch.ones(3).pin_memory()
        batches = [Fields({"a": image}, image=image, name="n"), Encoding({"image": image}, n_sequences=2)]
        fields, encoding = lk.CUDAPrefetcher(batches)
        assert fields.name == "n"
        assert fields["a"] is fields.image  # the same tensor twice is copied once
        assert encoding.n_sequences == 2


@pytest.mark.parametrize("kind", ["packed sequence", "encoding", "hiding"])
def test_what_torch_pins_gives_no_warning(kind):
    make, _ = KINDS[kind]
    with lk.simulated_cuda(), warnings.catch_warnings():
        warnings.simplefilter("error")
        list(lk.CUDAPrefetcher([pin_memory(make(torch.ones(3)))]))


def test_what_torch_does_not_pin_is_said_with_the_remedy():
    with lk.simulated_cuda(), pytest.warns(UserWarning, match=r"data classes among them, only by a method pin_memory"):
        list(lk.CUDAPrefetcher([pin_memory(Sample(torch.ones(3), "name"))]))
