"""Every random draw of a sample depends only on (seed, epoch, index), whichever process makes it.

Seeding workers is not enough: which worker gets which sample depends on how many there are, persistent workers are not
reseeded between epochs, and a library may draw from a generator of its own that nobody seeds. So before each sample all
generators that it can reach are seeded: `random`, NumPy, torch, and the private ones of the data set.
"""

import functools
import hashlib
import random
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Sampler, SequentialSampler

from labkit.core import Lazy

_MAX_OBJECTS = 10_000  # to look at: enough for any transforms, but not for a list of a million file names
_MAX_SEQUENCE_LENGTH = 1000
_128_BITS = (1 << 128) - 1
_TORCH_SEEDS = (1 << 63) - 1  # as a mask
_MULTIPLIER = 0xDA942042E4DD58B5DA3E39CB94B95BDB  # of a 128-bit congruential generator, with good spectral properties
_LIBRARIES = {*sys.stdlib_module_names, "torch", "torchvision", "numpy", "albumentations", "kornia", "labkit"}
_OPAQUE_TYPES = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    types.ModuleType,
    torch.Tensor,
    np.ndarray,
    Lazy,
)


def derived_seed(*numbers: int) -> int:
    """128 bits derived from integers such as (seed, epoch, index); neighbouring inputs give unrelated seeds."""
    state = _MULTIPLIER
    for number in numbers:  # not a hash function, which takes four times as long: this runs for every sample
        state = (state ^ number) * _MULTIPLIER & _128_BITS
        state ^= state >> 67
    state = state * _MULTIPLIER & _128_BITS
    return state ^ state >> 61


def permutation(length: int, *numbers: int) -> torch.Tensor:
    """An order of 0 to length - 1 that depends only on integers such as (seed, epoch): int64 (length,)."""
    seed = derived_seed(*numbers) & _TORCH_SEEDS
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


@runtime_checkable
class HasEpochs(Protocol):
    """A sampler with another order each epoch, such as torch's `DistributedSampler`."""

    def set_epoch(self, epoch: int) -> None: ...


class _Shuffled(Sampler[int]):
    """All indices, in an order that depends only on (seed, epoch)."""

    def __init__(self, n_samples: int, seed: int):
        self._n_samples, self._seed, self._epoch = n_samples, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._n_samples

    def __iter__(self) -> Iterator[int]:
        yield from permutation(self._n_samples, self._seed, self._epoch).tolist()


def choose_sampler(
    samples: Any, sampler: Sampler[int] | Iterable[int] | None, shuffle: bool | None, seed: int
) -> Sampler[int] | Iterable[int]:
    """The order of samples: the sampler's, or that of `samples`, which a seed may shuffle."""
    if sampler is None:
        return _Shuffled(len(samples), seed) if shuffle else SequentialSampler(samples)
    if shuffle:
        raise ValueError("got shuffle=True and a sampler: leave out one of them, the sampler decides the order")
    return sampler


class RandomSources:
    """All generators that code reachable from some objects may draw from, seeded together.

    The global ones (`random`, `numpy.random`, torch's CPU generator) are always included. Private ones are found in the
    objects' attributes and containers, and in the variables that their functions and methods use: `random.Random`,
    `numpy.random.Generator` and `RandomState`, `torch.Generator` (CPU), and the pair in Albumentations' transforms.
    """

    def __init__(self, *roots: Any):
        self._private = find_generators(roots)

    def seed(self, *numbers: int) -> None:
        """Seed all of them from integers."""
        number = derived_seed(*numbers)
        random.seed(number)
        np.random.mtrand._rand.seed(number & 0xFFFFFFFF)  # what np.random.seed calls, without its overhead
        torch.default_generator.manual_seed(number & _TORCH_SEEDS)  # torch.manual_seed would take 100 us
        for position, generator in enumerate(self._private):
            _seed_one(generator, derived_seed(*numbers, position))


def find_generators(roots: Iterable[Any]) -> list[Any]:
    """Private generators reachable from `roots`, each once, in the order in which they are found."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting = list(roots)[::-1]
    while waiting and len(seen) < _MAX_OBJECTS:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _OPAQUE_TYPES):
            continue
        seen.add(id(item))
        if _is_generator(item):
            found.append(item)
        elif hasattr(type(item), "set_random_state") and hasattr(item, "py_random"):
            found += _share_generators(item)
        else:
            waiting += reversed(_contents(item))
    return found


def count_repeats(batches: Iterable[Any]) -> int:
    """Count images that equal an earlier one bit for bit.

    If one image is loaded many times through random transforms, a repeat means that two draws came from the same
    stream: two workers shared a seed, or an epoch repeated the one before.

    Args:
        batches: Tensors of shape (N, ...), or tuples, lists or dicts whose first entry is one.

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
    is_system = isinstance(item, random.SystemRandom)  # cannot be seeded, by design
    return isinstance(item, random.Random | np.random.Generator | np.random.RandomState) and not is_system


def _share_generators(transform: Any) -> list[Any]:
    """Make an Albumentations pipeline draw from one pair of generators.

    Its own `set_random_seed` gives each transform a generator with the *same* seed, so their draws are equal: of two
    flips with p=0.5 either both happen or neither.
    """
    pair = [np.random.Generator(np.random.PCG64()), random.Random()]
    transform.set_random_state(*pair)
    return pair


def _seed_one(generator: Any, number: int) -> None:
    if isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(number & _TORCH_SEEDS)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(number & 0xFFFFFFFF)
    elif type(generator.bit_generator) is np.random.PCG64:  # set by its state, ten times as fast as by SeedSequence
        increment = (number >> 64 | number << 64) & _128_BITS | 1
        generator.bit_generator.state = {
            "bit_generator": "PCG64", "state": {"state": number, "inc": increment}, "has_uint32": 0, "uinteger": 0,
        }  # fmt: skip
    else:
        generator.bit_generator.state = type(generator.bit_generator)(number).state


def _contents(item: Any) -> list[Any]:
    try:
        return list(_references(item))
    except Exception:  # such as a proxy without a connection: no transform draws from that
        return []


def _references(item: Any) -> Iterator[Any]:
    """Objects that an object holds or uses."""
    if isinstance(item, Mapping):
        yield from list(item.values())[:_MAX_SEQUENCE_LENGTH]
    elif isinstance(item, list | tuple | set | frozenset):
        if len(item) <= _MAX_SEQUENCE_LENGTH:
            yield from item
    elif isinstance(item, functools.partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, types.MethodType):
        yield from (item.__self__, item.__func__)
    elif isinstance(item, types.FunctionType):
        yield from _function_references(item)
    yield from getattr(item, "__dict__", {}).values()
    kind: Any = type(item)
    for name in _slot_names(kind):
        yield getattr(item, name, None)
    yield from _class_attributes(kind)


def _function_references(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from (function.__globals__[name] for name in _used_names(function.__code__) if name in function.__globals__)


def _used_names(code: types.CodeType) -> Iterator[str]:
    """Names used by a function and by the lambdas and comprehensions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _used_names(constant)


@functools.cache
def _class_attributes(kind: type) -> list[Any]:
    """Class attributes and methods, which may use global variables; those of libraries are skipped."""
    own = [parent for parent in kind.__mro__ if parent.__module__.partition(".")[0] not in _LIBRARIES]
    return [getattr(value, "__func__", value) for parent in own for value in vars(parent).values()]


@functools.cache
def _slot_names(kind: type) -> tuple[str, ...]:
    names = [getattr(parent, "__slots__", ()) for parent in kind.__mro__]
    return tuple(name for slots in names for name in ([slots] if isinstance(slots, str) else slots))
