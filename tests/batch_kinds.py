"""Batches of every kind that training scripts have, and how a tensor is found in each of them."""

import weakref
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from operator import itemgetter
from pkgutil import resolve_name
from types import MappingProxyType

import torch
from torch.nn.utils.rnn import PackedSequence
from torchvision import tv_tensors
from torchvision.models.detection.image_list import ImageList

from tests.encodings import Encoding

Pair = namedtuple("Pair", "image label")


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str
    derived: str = field(init=False, default="kept")


@dataclass(frozen=True, slots=True)
class Slotted:
    image: torch.Tensor


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


class Instances:
    """As detectron's: `to` makes a new object, which holds its tensors in a dict."""

    def __init__(self, size, **found):
        self._size, self._found = size, found

    def to(self, *args, **kwargs):
        return Instances(self._size, **{name: value.to(*args, **kwargs) for name, value in self._found.items()})


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


class Hiding:
    """Nobody finds its tensor by looking through attributes."""

    def __init__(self, image):
        self.read = lambda: image

    def to(self, device, non_blocking=False):
        return Hiding(self.read().to(device, non_blocking=non_blocking) + 0)

    def pin_memory(self):
        return Hiding(self.read().pin_memory())


class Labeled(Pair):
    """A named tuple with an attribute beside its fields."""


def labeled(image):
    made = Labeled(image, "l")
    made.name, made.weights = "n", image
    return made


class Built(tuple):
    """A tuple of other arguments than a tuple's."""

    def __new__(cls, name, *values):
        made = super().__new__(cls, values)
        made.name = name
        return made


class Checked(Pair):
    """A named tuple of other arguments than its fields."""

    __slots__ = ()

    def __new__(cls, image):
        return super().__new__(cls, image, "l")


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


class ReadOnly(Mapping):
    """A mapping of the user's own, of other arguments than a mapping's."""

    def __init__(self, name, image):
        self.name, self._held = name, {"image": image}

    def __getitem__(self, key):
        return self._held[key]

    def __iter__(self):
        return iter(self._held)

    def __len__(self):
        return len(self._held)


class Writable(ReadOnly, MutableMapping):
    def __setitem__(self, key, value):
        self._held[key] = value

    def __delitem__(self, key):
        del self._held[key]


class OfNew(UserDict):
    def __new__(cls, name, **items):
        return super().__new__(cls)

    def __init__(self, name, **items):
        super().__init__(items)
        self.name = name


NO_TENSORS = (3, None, b"bytes", [Sample, torch.Tensor], [(), {}], object())


def nested(image):
    second, third = (image.clone().pin_memory() if image.is_pinned() else image.clone() for _ in range(2))
    return {"pair": Pair(image, [second]), "sample": Sample(third, "name"), "rest": NO_TENSORS}


def all_of_nested(batch):
    assert (batch["sample"].name, batch["sample"].derived, batch["rest"]) == ("name", "kept", NO_TENSORS)
    return torch.cat([batch["pair"].image, batch["pair"].label[0], batch["sample"].image])


def circle(image):
    batch = {"image": image}
    batch["again"] = [image, batch]
    return batch


# How a batch of this kind is made of a pinned tensor, and how the consumer finds that tensor in it.
KINDS = {
    "nested": (nested, all_of_nested),
    "dict": (lambda image: {"image": image}, lambda batch: batch["image"]),
    "ordered dict": (lambda image: OrderedDict(image=image), lambda batch: batch["image"]),
    "defaultdict": (lambda image: defaultdict(list, image=image), lambda batch: batch["image"]),
    "user dict": (lambda image: UserDict(image=image), lambda batch: batch["image"]),
    "dict with a tensor for an attribute": (lambda image: Fields({}, image=image, name="n"), lambda batch: batch.image),
    "attribute dict": (lambda image: AttributeDict(image=image), lambda batch: batch.image),
    "read-only dict": (lambda image: MappingProxyType({"image": image}), lambda batch: batch["image"]),
    "dict that holds itself": (circle, lambda batch: batch["again"][1]["again"][0]),
    "list of a name": (lambda image: Named("name", [image]), itemgetter(0)),
    "list in a tuple": (lambda image: ([image],), lambda batch: batch[0][0]),
    "deque": (lambda image: deque([image]), lambda batch: batch[0]),
    "named tuple": (lambda image: Pair(image, None), lambda batch: batch.image),
    "named tuple with attributes": (labeled, lambda batch: batch.weights),
    "named tuple of other arguments": (Checked, lambda batch: batch.image),
    "tuple of other arguments": (lambda image: Built("n", image), itemgetter(0)),
    "what torch.max gives": (lambda image: torch.max(image.view(1, -1).repeat(2, 1), dim=0), itemgetter(0)),
    "deque of a name": (lambda image: Window("n", [image]), itemgetter(0)),
    "defaultdict of a name": (lambda image: Grouped("n", image=image), itemgetter("image")),
    "ordered dict of a name": (lambda image: Keyed("n", image=image), itemgetter("image")),
    "dict that refuses changes": (lambda image: Frozen(image=image), itemgetter("image")),
    "read-only mapping": (lambda image: ReadOnly("n", image), itemgetter("image")),
    "mapping": (lambda image: Writable("n", image), itemgetter("image")),
    "user dict of a name": (lambda image: OfNew("n", image=image), itemgetter("image")),
    "frozen data class": (lambda image: Sample(image, "name"), lambda batch: batch.image),
    "frozen data class with slots": (Slotted, lambda batch: batch.image),
    "image of torchvision": (lambda image: tv_tensors.Image(image.view(1, 1, -1)), lambda batch: batch[0, 0]),
    "list of images": (lambda image: ImageList(image, [(1, 1)]), lambda batch: batch.tensors),
    "packed sequence": (lambda image: PackedSequence(image, torch.ones(len(image), dtype=torch.int64)), itemgetter(0)),
    "encoding": (lambda image: Encoding({"image": image}), lambda batch: batch["image"]),
    "instances": (lambda image: [Instances((1, 1), boxes=image)], lambda batch: batch[0]._found["boxes"]),
    "graph": (lambda image: Graph(image=image), lambda batch: batch._store["image"]),
    "moves itself": (lambda image: MovesItself([image]), lambda batch: batch.read()),
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
