"""`labkit.util.tensor_trees`: batches of every kind keep their types and all that they hold beside tensors."""

import copy
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from operator import itemgetter
from pkgutil import resolve_name
from types import MappingProxyType

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence

from labkit.util.tensor_trees import iter_tensors, map_tensors, move_tensors
from tests.encodings import Encoding

Pair = namedtuple("Pair", "image label")


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str
    derived: str = field(init=False, default="kept")


class Named(list):
    """A list whose constructor is not a list's."""

    def __init__(self, name, values):
        super().__init__(values)
        self.name = name


class Fields(dict):
    """A dict with attributes, as many projects have one."""

    def __init__(self, source, *, image, name):
        super().__init__(source)
        self.image, self.name = image, name


class AttributeDict(dict):
    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class Store(UserDict):
    """As the stores of torch_geometric's graphs, which know their graph."""

    def __init__(self, graph, **items):
        super().__init__(items)
        self._graph = weakref.ref(graph)


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
    """`to` takes a device alone, moves in place and returns nothing. It is copied, and not by pickling it."""

    __slots__ = ("__images",)

    def __init__(self, images):
        self.__images = images

    def __reduce__(self):
        raise AssertionError("it was pickled")

    def read(self):
        return self.__images[0]

    def to(self, device):
        self.__images = [image.to(device) for image in self.__images]


class Labeled(Pair):
    """A named tuple of other arguments than its fields, with attributes beside them."""

    def __new__(cls, image):
        made = super().__new__(cls, image, "l")
        made.name, made.weights = "n", image
        return made


class Window(deque):
    def __init__(self, name, values):
        super().__init__(values, maxlen=2)
        self.name = name


class Grouped(defaultdict):
    def __init__(self, name, **items):
        super().__init__(list, items)
        self.name = name


class Keyed(OrderedDict):
    def __new__(cls, name, **items):
        return super().__new__(cls)

    def __init__(self, name, **items):
        super().__init__(items)
        self.name = name


class Frozen(dict):
    name = "n"

    def __setitem__(self, key, value):
        raise TypeError("it cannot be changed")


class OfNew(UserDict):
    def __new__(cls, name, **items):
        return super().__new__(cls)

    def __init__(self, name, **items):
        super().__init__(items)
        self.name = name


NO_TENSORS = (3, None, b"bytes", [Sample, torch.Tensor], [(), {}], object())


def nested(image):
    return {"pair": Pair(image, [image.clone()]), "sample": Sample(image.clone(), "name"), "rest": NO_TENSORS}


def all_of_nested(batch):
    assert (batch["sample"].name, batch["sample"].derived, batch["rest"]) == ("name", "kept", NO_TENSORS)
    return torch.cat([batch["pair"].image, batch["pair"].label[0], batch["sample"].image])


def circle(image):
    batch = {"image": image}
    batch["again"] = [image, batch]
    return batch


# How a batch of this kind is made of a tensor, and how the consumer finds that tensor in it.
KINDS = {
    "nested": (nested, all_of_nested),
    "dict with a tensor for an attribute": (lambda image: Fields({}, image=image, name="n"), lambda batch: batch.image),
    "attribute dict": (lambda image: AttributeDict(image=image), lambda batch: batch.image),
    "read-only dict": (lambda image: MappingProxyType({"image": image}), itemgetter("image")),
    "dict that holds itself": (circle, lambda batch: batch["again"][1]["again"][0]),
    "list of a name": (lambda image: Named("name", [image]), itemgetter(0)),
    "named tuple with attributes": (Labeled, lambda batch: batch.weights),
    "what torch.max gives": (lambda image: torch.max(image.view(1, -1).repeat(2, 1), dim=0), itemgetter(0)),
    "deque of a name": (lambda image: Window("n", [image]), itemgetter(0)),
    "defaultdict of a name": (lambda image: Grouped("n", image=image), itemgetter("image")),
    "ordered dict of a name": (lambda image: Keyed("n", image=image), itemgetter("image")),
    "dict that refuses changes": (lambda image: Frozen(image=image), itemgetter("image")),
    "user dict of a name": (lambda image: OfNew("n", image=image), itemgetter("image")),
    "packed sequence": (lambda image: PackedSequence(image, torch.ones(len(image), dtype=torch.int64)), itemgetter(0)),
    "encoding": (lambda image: Encoding({"image": image}), itemgetter("image")),
    "graph": (lambda image: Graph(image=image), lambda batch: batch._store["image"]),
    "moves itself": (lambda image: MovesItself([image]), lambda batch: batch.read()),
}


def of_transformers(path, **data):
    return resolve_name(f"transformers.{path}")(**data)


OF_TRANSFORMERS = {
    "encoding": (lambda image: of_transformers("BatchEncoding", data={"image": image}), itemgetter("image")),
    "features": (lambda image: of_transformers("BatchFeature", data={"image": image}), lambda batch: batch.image),
    "output of a model": (
        lambda image: of_transformers("modeling_outputs:BaseModelOutput", last_hidden_state=image), itemgetter(0),
    ),
}  # fmt: skip


def attributes(batch):
    return {name: value for name, value in getattr(batch, "__dict__", {}).items() if isinstance(value, str | int)}


@pytest.mark.parametrize(
    ("make", "find"),
    [
        *(pytest.param(*kind, id=name) for name, kind in KINDS.items()),
        *(pytest.param(*kind, id=name, marks=pytest.mark.frameworks) for name, kind in OF_TRANSFORMERS.items()),
    ],
)
def test_tensors_are_moved_and_the_batch_stays_as_it_is(make, find):
    batch = make(torch.arange(3.0))
    before = copy.copy(attributes(batch))
    moved = move_tensors(batch, "meta")
    assert type(moved) is type(batch)
    assert find(moved).is_meta
    assert find(batch).flatten()[:3].tolist() == [0, 1, 2]
    assert attributes(moved) == attributes(batch) == before


@pytest.mark.parametrize(("make", "find"), KINDS.values(), ids=KINDS)
def test_each_tensor_is_found_and_mapped_once(make, find):
    batch, seen = make(torch.arange(3.0)), []

    def add_one(tensor):
        seen.append(tensor)
        return tensor + 1

    mapped = map_tensors(batch, add_one)
    assert type(mapped) is type(batch)
    assert find(mapped).flatten().tolist() == [1, 2, 3] * (find(mapped).numel() // 3)
    assert find(batch).flatten().tolist() == [0, 1, 2] * (find(batch).numel() // 3)
    assert {id(tensor) for tensor in seen} == {id(tensor) for tensor in iter_tensors(batch)}
    assert len({id(tensor) for tensor in seen}) == len(seen)


def test_other_attributes_of_a_batch_are_kept():
    image = torch.ones(3)
    batches = [Fields({"a": image}, image=image, name="n"), Encoding({"image": image}, n_sequences=2)]
    batches += [Named("n", [image]), circle(image), Labeled(image)]
    fields, encoding, named, again, pair = map_tensors(batches, torch.clone)
    assert (fields.name, named.name, pair.name, encoding.n_sequences) == ("n", "n", "n", 2)
    assert fields["a"] is fields.image  # the same tensor twice is copied once
    assert pair.weights is pair.image
    assert again["again"][0] is again["image"]
    assert again["again"][1] is again


def test_what_holds_a_file_is_neither_copied_nor_closed(tmp_path):
    class Archive(dict):
        def __del__(self):
            self.closed = True

    archive = Archive(image=torch.ones(1))
    assert map_tensors([archive], torch.clone)[0] is archive
