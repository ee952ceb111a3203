"""Every random draw of a sample follows from (seed, epoch, index), whichever process makes it.

Seeding workers is not enough: which worker gets which sample depends on how many there are, persistent workers are not
reseeded between epochs, and a library may draw from a generator of its own that nobody seeds. Here every sample
is preceded by seeding all generators that it can reach: `random`, NumPy, torch, and the private ones of the data set.
"""

import functools
import hashlib
import random
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from labkit.core import Lazy

_LARGEST_WALK = 10_000  # objects: transforms are few, a list of a million file names is not one of them
_LARGEST_SEQUENCE = 1000
_128_BITS = (1 << 128) - 1
TORCH_SEEDS = (1 << 63) - 1  # as a mask
_ODD = 0xDA942042E4DD58B5DA3E39CB94B95BDB  # a multiplier of 128-bit generators, with good spectral properties
_LIBRARIES = {*sys.stdlib_module_names, "torch", "torchvision", "numpy", "albumentations", "kornia", "labkit"}
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.Tensor, np.ndarray, Lazy)


def derived_seed(*numbers: int) -> int:
    """128 bits that follow from integers, such as (seed, epoch, index); neighbours give unrelated seeds."""
    state = _ODD
    for number in numbers:  # arithmetic, since a hash function takes four times as long, and this runs for every sample
        state = (state ^ number) * _ODD & _128_BITS
        state ^= state >> 67
    state = state * _ODD & _128_BITS
    return state ^ state >> 61


class RandomSources:
    """The generators that code reachable from some objects may draw from, to be seeded together.

    Global ones (`random`, `numpy.random`, torch's CPU generator) are always among them. Private ones are looked for in
    the objects' attributes, containers, and in the variables that their functions and methods use: `random.Random`,
    `numpy.random.Generator` and `RandomState`, `torch.Generator` (CPU), and the pair in Albumentations' transforms.
    """

    def __init__(self, *roots: Any):
        self._private = find_generators(roots)

    def seed(self, *numbers: int) -> None:
        """Seed all of them from integers."""
        number = derived_seed(*numbers)
        random.seed(number)
        np.random.mtrand._rand.seed(number & 0xFFFFFFFF)  # what np.random.seed calls, without its detour
        torch.default_generator.manual_seed(number & TORCH_SEEDS)  # torch.manual_seed takes 100 us
        for position, generator in enumerate(self._private):
            _seed_one(generator, derived_seed(*numbers, position))


def find_generators(roots: Iterable[Any]) -> list[Any]:
    """Private generators that can be reached from `roots`, each once, in the order in which they are found."""
    found, seen, waiting = [], set(), list(roots)[::-1]
    while waiting and len(seen) < _LARGEST_WALK:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _PLAIN):
            continue
        seen.add(id(item))
        if _is_generator(item):
            found.append(item)
        elif hasattr(type(item), "set_random_state") and hasattr(item, "py_random"):
            found += _one_pair_for_all(item)
        else:
            waiting += reversed(_looked_into(item))
    return found


def count_repeats(batches: Iterable[Any]) -> int:
    """Images that equal an earlier one, bit for bit.

    Over one picture loaded many times through random transforms, any repeat means that two draws came from the same
    stream: two workers with one seed, or an epoch that repeats the one before.

    Args:
        batches: Tensors of shape (N, ...), or tuples, lists or dicts that begin with one.

    Taught in: notebooks/05_albumentations.ipynb
    """
    seen, repeats = set(), 0
    for batch in batches:
        for image in _first_tensor(batch):
            digest = hashlib.blake2b(image.contiguous().numpy().tobytes(), digest_size=16).digest()
            repeats += digest in seen
            seen.add(digest)
    return repeats


def _first_tensor(batch: Any) -> torch.Tensor:
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return batch


def _is_generator(item: Any) -> bool:
    if isinstance(item, torch.Generator):
        return item.device.type == "cpu"
    is_system = isinstance(item, random.SystemRandom)  # cannot be seeded, and is chosen for that
    return isinstance(item, random.Random | np.random.Generator | np.random.RandomState) and not is_system


def _one_pair_for_all(transform: Any) -> list[Any]:
    """Let an Albumentations pipeline draw from one pair of generators.

    Its own `set_random_seed` gives each transform a generator with the *same* seed, so their coins fall alike: with
    two flips at p=0.5, both or none.
    """
    pair = [np.random.Generator(np.random.PCG64()), random.Random()]
    transform.set_random_state(*pair)
    return pair


def _seed_one(generator: Any, number: int) -> None:
    if isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(number & TORCH_SEEDS)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(number & 0xFFFFFFFF)
    elif type(generator.bit_generator) is np.random.PCG64:  # by its state: ten times as fast as by SeedSequence
        state = {"state": number, "inc": (number >> 64 | number << 64) & _128_BITS | 1}
        generator.bit_generator.state = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}
    else:
        generator.bit_generator.state = type(generator.bit_generator)(number).state


def _looked_into(item: Any) -> list[Any]:
    try:
        return list(_parts(item))
    except Exception:  # a proxy without a connection, a pool that will not be listed: nothing that transforms draw from
        return []


def _parts(item: Any) -> Iterator[Any]:
    """What an object holds or uses."""
    if isinstance(item, Mapping):
        yield from list(item.values())[:_LARGEST_SEQUENCE]
    elif isinstance(item, list | tuple | set | frozenset):
        if len(item) <= _LARGEST_SEQUENCE:
            yield from item
    elif isinstance(item, functools.partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, types.MethodType):
        yield from (item.__self__, item.__func__)
    elif isinstance(item, types.FunctionType):
        yield from _used_by(item)
    yield from getattr(item, "__dict__", {}).values()
    for name in _slots(type(item)):
        yield getattr(item, name, None)
    yield from _of_class(type(item))


def _used_by(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from (function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__)


def _names(code: types.CodeType) -> Iterator[str]:
    """Names used by a function, its lambdas and comprehensions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


@functools.cache
def _of_class(kind: type) -> list[Any]:
    """Methods, which may use a global variable, and class attributes; those of libraries are many, and hold none."""
    own = [parent for parent in kind.__mro__ if parent.__module__.partition(".")[0] not in _LIBRARIES]
    return [getattr(value, "__func__", value) for parent in own for value in vars(parent).values()]


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    names = [getattr(parent, "__slots__", ()) for parent in kind.__mro__]
    return tuple(name for slots in names for name in ([slots] if isinstance(slots, str) else slots))
