"""Tensors in any nest of containers and objects are mapped, and all else stays."""

import re
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

    def __repr__(self):
        return f"Named({self.name}, {super().__repr__()})"


class Movable:
    """Takes long to pickle, and then lacks something: it is not copied that way."""

    __slots__ = ("__image", "name")

    def __init__(self, image, name):
        self.__image, self.name = image, name

    def __reduce__(self):
        raise AssertionError("it was pickled")

    def __repr__(self):
        return f"Movable({self.__image}, {self.name})"

    def to(self, device):
        return Movable(self.__image.to(device), self.name)


def one(number: int = 1) -> torch.Tensor:
    return torch.tensor([float(number)])


NESTS = [
    one(), {"a": one(), "b": "text", "c": None}, [one(), 2, [one(3)]], (one(), (one(2), b"bytes")),
    Pair(one(), [one(2)]), OrderedDict([("z", one()), ("a", one(2))]), UserDict(a=one()), defaultdict(list, a=one()),
    MappingProxyType({"a": one()}), Thawed(one(), {"deep": Pair(one(2), None)}), Frozen(one(), one(2)),
    Slotted(one(), "text"), [Movable(one(), "name")], Named("mine", [one()]), None, "text", [(), {}, []],
    [Frozen, torch.Tensor, dict, object()],
]  # fmt: skip


@pytest.mark.parametrize("nest", NESTS, ids=lambda nest: type(nest).__name__)
def test_every_tensor_is_mapped_and_all_else_stays(nest):
    """What Python prints of a nest shows its types and all that it holds."""
    before, tensor = repr(nest), r"tensor\(\[(\d)\.\]\)"
    doubled = re.sub(tensor, lambda found: f"tensor([{2 * int(found[1])}.])", before)
    assert repr(map_tensors(nest, lambda tensor: tensor * 2)) == doubled
    assert repr(nest) == before  # nothing happened to the original
    assert [f"{found.item():.0f}" for found in iter_tensors(nest)] == re.findall(tensor, before)


def test_what_comes_twice_is_mapped_once_and_circles_end():
    circle = {"image": one()}
    circle["again"] = [circle["image"], circle]
    mapped = map_tensors(circle, lambda tensor: tensor * 2)
    assert mapped["again"][0] is mapped["image"]
    assert mapped["again"][1] is mapped
    assert len(list(iter_tensors(circle))) == 1
