"""Tensors in any nest of containers are mapped, and all else stays."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch

from labkit.util.tensor_trees import iter_tensors, map_tensors

Pair = namedtuple("Pair", "image label")


@dataclass
class Thawed:
    image: Any
    label: Any = None


@dataclass(frozen=True)
class Frozen:
    image: Any
    label: Any
    derived: Any = field(init=False, default="kept")


@dataclass(slots=True, frozen=True)
class Slotted:
    image: Any
    label: Any


class Named(list):
    """A list whose constructor is not a list's."""

    def __init__(self, name, values):
        super().__init__(values)
        self.name = name


def one(number: float = 1.0) -> torch.Tensor:
    return torch.tensor([number])


NESTS = {
    "tensor": one(),
    "dict": {"a": one(), "b": "text", "c": None},
    "list": [one(), 2, [one(3)]],
    "tuple": (one(), (one(2), b"bytes")),
    "named tuple": Pair(one(), [one(2)]),
    "ordered": OrderedDict([("z", one()), ("a", one(2))]),
    "user dict": UserDict(a=one()),
    "data class": Thawed(one(), {"deep": Pair(one(2), None)}),
    "frozen": Frozen(one(), one(2)),
    "slotted": Slotted(one(), "text"),
    "none": None,
    "text": "text",
    "empty": [(), {}, []],
}


def flat(nest: Any) -> list[Any]:
    """Every leaf with the types above it; an oracle that shares no code with the walk under test."""
    if isinstance(nest, dict | UserDict):
        return [(type(nest), key, leaf) for key in nest for leaf in flat(nest[key])] or [type(nest)]
    if isinstance(nest, list | tuple):
        return [(type(nest), leaf) for item in nest for leaf in flat(item)] or [type(nest)]
    if isinstance(nest, Thawed | Frozen | Slotted):
        return [(type(nest), leaf) for name in ("image", "label") for leaf in flat(getattr(nest, name))]
    return [("tensor", nest.item())] if isinstance(nest, torch.Tensor) else [nest]


def doubled(leaf: Any) -> Any:
    if isinstance(leaf, tuple):
        return ("tensor", 2 * leaf[1]) if leaf[0] == "tensor" else (*leaf[:-1], doubled(leaf[-1]))
    return leaf


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_every_tensor_is_mapped_and_all_else_stays(nest):
    before = flat(nest)
    assert flat(map_tensors(nest, lambda tensor: tensor * 2)) == [doubled(leaf) for leaf in before]
    assert flat(nest) == before  # nothing happened to the original
    assert [tensor.item() for tensor in iter_tensors(nest)] == [number for number in map(innermost, before) if number]


def innermost(leaf: Any) -> float | None:
    """The number in a tensor's place, else None."""
    while isinstance(leaf, tuple) and leaf[0] != "tensor":
        leaf = leaf[-1]
    return leaf[1] if isinstance(leaf, tuple) else None


def test_a_data_class_keeps_what_its_constructor_does_not_take():
    assert map_tensors(Frozen(one(), one()), lambda tensor: tensor).derived == "kept"


@pytest.mark.parametrize("other", [object(), Frozen, torch.Tensor, dict])
def test_other_objects_and_classes_are_left_alone(other):
    assert map_tensors([other], lambda tensor: "mapped") == [other]


def test_containers_keep_their_type_and_their_own_attributes():
    moved = map_tensors(Named("mine", [one()]), lambda tensor: tensor.item())
    assert (type(moved), moved, moved.name) == (Named, [1.0], "mine")
    moved = map_tensors(defaultdict(list, a=one()), lambda tensor: tensor.item())
    assert (type(moved), dict(moved), moved["other"]) == (defaultdict, {"a": 1.0}, [])
    moved = map_tensors(MappingProxyType({"a": one()}), lambda tensor: tensor.item())
    assert (type(moved), dict(moved)) == (MappingProxyType, {"a": 1.0})


class Movable:
    """Takes long to pickle, and then lacks something: it is not copied that way."""

    __slots__ = ("__image", "name")

    def __init__(self, image, name):
        self.__image, self.name = image, name

    def __reduce__(self):
        raise AssertionError("it was pickled")

    def to(self, device):
        return Movable(self.__image.to(device), self.name)

    def read(self):
        return self.__image.item(), self.name


def test_objects_that_can_be_moved_are_looked_into():
    whole = Movable(one(), "name")
    assert [tensor.item() for tensor in iter_tensors([whole])] == [1.0]
    [mapped] = map_tensors([whole], lambda tensor: tensor * 2)
    assert (mapped.read(), whole.read()) == ((2.0, "name"), (1.0, "name"))


def test_what_comes_twice_is_mapped_once_and_circles_end():
    circle = {"image": one()}
    circle["again"] = [circle["image"], circle]
    mapped = map_tensors(circle, lambda tensor: tensor * 2)
    assert mapped["again"][0] is mapped["image"]
    assert mapped["again"][1] is mapped
    assert len(list(iter_tensors(circle))) == 1
