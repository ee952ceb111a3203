"""ReplayLoader gives the kept batches again; map_tensors and tensors reach every tensor of a nest."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from labkit import ReplayLoader
from labkit.core.tensor_trees import iter_tensors, map_tensors

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


def test_strings_and_none_are_the_same_objects():
    text, moved = "text", map_tensors(["text", None, one()], lambda tensor: tensor)
    assert moved[0] is text
    assert moved[1] is None


def test_a_data_class_keeps_what_its_constructor_does_not_take():
    assert map_tensors(Frozen(one(), one()), lambda tensor: tensor).derived == "kept"


@pytest.mark.parametrize("kind", [Frozen, torch.Tensor, dict])
def test_a_class_is_left_alone(kind):
    assert map_tensors([kind], lambda tensor: "mapped") == [kind]


def test_a_container_with_another_constructor_becomes_a_plain_one():
    assert map_tensors(Named("mine", [one()]), lambda tensor: tensor.item()) == [1.0]
    moved = map_tensors(defaultdict(list, a=one()), lambda tensor: tensor.item())
    assert dict(moved) == {"a": 1.0}
    assert dict(map_tensors(MappingProxyType({"a": one()}), lambda tensor: tensor.item())) == {"a": 1.0}


def batches(n_batches: int):
    for number in range(n_batches):
        yield {"image": one(number)}, number


def numbers(loader) -> list[int]:
    return [number for _, number in loader]


@pytest.mark.parametrize(("length", "expected"), [(None, [0, 1, 2]), (7, [0, 1, 2, 0, 1, 2, 0]), (2, [0, 1])])
def test_the_first_batches_again_and_again(length, expected):
    loader = ReplayLoader(batches(10), 3, length=length)
    assert len(loader) == len(expected)
    assert numbers(loader) == numbers(loader) == expected


def test_two_passes_at_once():
    loader = ReplayLoader(batches(3), 3)
    assert [(a[1], b[1]) for a, b in zip(loader, loader, strict=True)] == [(0, 0), (1, 1), (2, 2)]


def test_no_more_is_taken_than_kept():
    source = batches(10)
    ReplayLoader(source, 3)
    assert next(source)[1] == 3


def test_the_same_tensors_each_time():
    loader = ReplayLoader(batches(2), 2)
    assert next(iter(loader))[0]["image"] is next(iter(loader))[0]["image"]


def test_moves_to_the_device_once():
    loader = ReplayLoader(batches(2), 2, device="meta")
    images = [batch["image"] for batch, _ in loader]
    assert [image.device.type for image in images] == ["meta", "meta"]
    assert next(iter(loader))[0]["image"] is images[0]


def test_looks_like_its_loader():
    source = torch.utils.data.DataLoader(list(range(10)), batch_size=4)
    loader = ReplayLoader(source, 2)
    assert (loader.batch_size, loader.num_workers) == (4, 0)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ReplayLoader(batches(1), 1).batch_size is None


def test_a_loader_that_is_too_short():
    with pytest.raises(ValueError, match="n_batches is 3, but the loader gave only 2 batches"):
        ReplayLoader(batches(2), 3)


@pytest.mark.parametrize("bad", [{"n_batches": 0}, {"n_batches": -1}, {"n_batches": 1, "length": 0}], ids=str)
def test_bad_numbers(bad):
    with pytest.raises(ValueError, match="must be an integer >= 1"):
        ReplayLoader(batches(2), **bad)


def test_batches_of_workers_hold_no_file_open():
    """Each tensor in shared memory does: a thousand of them, and the process can open no more."""
    loader = DataLoader(torch.arange(60).view(20, 3), batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert all(batch.is_shared() for batch in loader)
    replay = ReplayLoader(loader, 5)
    assert not any(batch.is_shared() for batch in replay)
    assert torch.equal(torch.cat(list(replay)), torch.arange(60).view(20, 3))


def test_batches_are_the_kept_ones_but_for_shared_memory():
    plain, shared = torch.zeros(3), torch.zeros(3).share_memory_()
    [one, other] = ReplayLoader([plain, shared], 2)
    assert one.data_ptr() == plain.data_ptr()
    assert other.data_ptr() != shared.data_ptr()
    assert len(list(ReplayLoader([plain, shared], 2, length=1))) == 1
