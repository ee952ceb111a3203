"""Every random draw of a sample depends only on (seed, epoch, index, occurrence), whichever process makes it.

Seeding workers is not enough: which worker gets which sample depends on how many there are, persistent workers are not
reseeded between epochs, and a library may draw from a generator of its own that nobody seeds. So before each sample all
generators that it can reach are seeded: `random`, NumPy, torch, and the private ones of the data set.
"""

import copyreg
import functools
import gc
import hashlib
import inspect
import operator
import pickle
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from labkit.errors import WrongTypeError
from labkit.util.process import Lazy, preserve_rng_state

_128_BITS = (1 << 128) - 1
_TORCH_SEEDS = (1 << 63) - 1  # as a mask
_MULTIPLIER = 0xDA942042E4DD58B5DA3E39CB94B95BDB  # of a 128-bit congruential generator, with good spectral properties
_OF_BATCH, AGAIN = -1, -2  # follow (seed, epoch, index); private generators are numbered from 0
_OPAQUE_TYPES = (type(None), types.ModuleType, torch.Tensor, np.ndarray, Lazy)
_HOLDERS = ("__dict__", "__self__", "__func__", "func", "args", "keywords", "fget")  # of objects, methods and partials
_SEQUENCES = (list, tuple, set, frozenset, deque)
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def derived_seed(*numbers: int) -> int:
    """128 bits derived from integers such as (seed, epoch, index); neighboring inputs give unrelated seeds."""
    state = _MULTIPLIER
    for number in numbers:  # not a hash function, which takes four times as long: this runs for every sample
        state = (state ^ number) * _MULTIPLIER & _128_BITS
        state ^= state >> 67
    state = state * _MULTIPLIER & _128_BITS
    return state ^ state >> 61


def number_of(index: Any) -> int:
    """The integer that the draws of a sample depend on: its index; of a string or a tuple, a hash that never changes.

    Raises:
        TypeError: the index is of another kind, which may look different in each process.
    """
    try:
        return operator.index(index)
    except TypeError:
        return int.from_bytes(hashlib.blake2b(ascii(_plain_index(index)).encode(), digest_size=16).digest())


def _plain_index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_plain_index, index))
    kind: Any
    for kind in (str, bytes, float):  # NumPy's are of these, too, and show their types
        if isinstance(index, kind):
            return kind(index)
    if index is None:
        return index
    try:
        return operator.index(index)
    except TypeError:
        raise WrongTypeError(
            "random draws depend on a sample's index, so a sampler must give integers, strings, bytes, or tuples of "
            f"these: got {index!r:.200}, a {type(index).__name__}. Let the data set look it up under a number or name"
        ) from None


def permutation(length: int, *numbers: int) -> torch.Tensor:
    """An order of 0 to length - 1 that depends only on integers such as (seed, epoch): int64 (length,)."""
    seed = derived_seed(*numbers) & _TORCH_SEEDS
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed), device="cpu")


class SeededIndices(list):
    """The indices of one batch. Taking them one by one seeds all random generators again for each sample.

    So a batch of indices carries its seeds into any loader over the same data set, in this process or in a worker:
    torch's `DataLoader` makes a batch by `[dataset[index] for index in batch]`.

    Args:
        indices: As a sampler gave them: integers, strings, bytes, or tuples of these.
        seed, epoch: Of the loader, and of the pass over it.
        occurrences: How many times each index came before in this epoch.
        sources: What to seed. Default: the generators of the worker's data set, or of `dataset` outside of a worker,
            where the state of the global ones is restored at the end.
        dataset: The data set of a loader without workers; it does not travel.
    """

    def __init__(
        self, indices: Iterable[Any], seed: int, epoch: int, occurrences: Sequence[int] = (), dataset: Any = None
    ):
        super().__init__(indices)
        self.seed, self.epoch, self.dataset = seed, epoch, dataset
        self.occurrences = list(occurrences) or [0] * len(self)
        self.sources: RandomSources | None = None

    def __reduce__(self) -> tuple:
        return SeededIndices, (self.plain(), self.seed, self.epoch, self.occurrences)

    def __iter__(self) -> Iterator[Any]:
        is_foreign, worker = self.sources is None, get_worker_info()
        sources = self.sources or _sources_of(worker.dataset if worker else self.dataset)
        with preserve_rng_state() if is_foreign and worker is None else nullcontext():
            for position, index in enumerate(self.plain()):
                sources.seed(*self.numbers(position))
                yield index
            if is_foreign:
                sources.seed(*self.numbers_of_batch())

    def __getitem__(self, place: Any) -> Any:  # accelerate cuts batches into the shares of its processes
        found = super().__getitem__(place)
        if not isinstance(place, slice):
            return found
        return SeededIndices(found, self.seed, self.epoch, self.occurrences[place], self.dataset)

    def __add__(self, others: Any) -> Any:  # and fills up the last ones
        occurrences = getattr(others, "occurrences", [0] * len(others))
        whole = self.plain() + list.copy(others)
        return SeededIndices(whole, self.seed, self.epoch, self.occurrences + occurrences, self.dataset)

    __iadd__ = __add__

    def plain(self) -> list[Any]:
        """The indices alone, as a list that seeds nothing."""
        return list.copy(self)

    def numbers(self, position: int) -> tuple[int, ...]:
        """What the draws of the sample at `position` depend on."""
        numbers = self.seed, self.epoch, number_of(list.__getitem__(self, position))
        return (*numbers, AGAIN, again) if (again := self.occurrences[position]) else numbers

    def numbers_of_batch(self) -> tuple[int, ...]:
        """What the draws of the batch as a whole depend on."""
        return (*self.numbers(0), _OF_BATCH) if self else (self.seed, self.epoch)


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
            seed_generator(generator, derived_seed(*numbers, position))


_latest: tuple[Any, RandomSources] | None = None  # in a worker, the sources of its data set


def _sources_of(dataset: Any) -> RandomSources:
    global _latest
    if _latest is None or _latest[0] is not dataset:
        _latest = dataset, RandomSources(dataset)
    return _latest[1]


def find_generators(roots: Iterable[Any]) -> list[Any]:
    """Private generators reachable from `roots`, each once, in the order in which they are found.

    Raises:
        RecursionError: containers are nested hundreds of levels deep.
    """
    finder = _Finder()
    finder.waiting += list(roots)[::-1]
    while finder.waiting:
        finder.dump(finder.waiting.pop())
    return finder.found


class _Finder(pickle.Pickler):
    """Meets every object that another one holds, each once, as a pickler does: at the speed of C, however many.

    Nothing is pickled. Each object that is no plain container gives way to a constant, and what it holds is looked at
    later.
    """

    def __init__(self) -> None:
        super().__init__(_Nowhere(), pickle.HIGHEST_PROTOCOL)
        self.found: list[Any] = []
        self.waiting: list[Any] = []

    def reducer_override(self, item: Any) -> Any:
        if item is _nothing:
            return NotImplemented
        if _is_generator(item):
            if not any(item is known for known in self.found):  # a pipeline's
                self.found.append(item)
        elif not issubclass(type(item), _OPAQUE_TYPES):
            is_pipeline = hasattr(type(item), "set_random_state") and hasattr(item, "py_random")
            if is_pipeline and not any(item.py_random is known for known in self.found):  # else it is part of one
                self.found += _share_generators(item)
            self.waiting.append(_contents(item))
        return _nothing, ()


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def _nothing() -> None:
    """Stands for whatever an object is pickled as."""


def _is_generator(item: Any) -> bool:
    kind = type(item)  # not isinstance, which asks the object for its class: one may read a file for each attribute
    if issubclass(kind, torch.Generator):
        return item.device.type == "cpu"
    is_system = issubclass(kind, random.SystemRandom)  # cannot be seeded, by design
    return issubclass(kind, random.Random | np.random.Generator | np.random.RandomState) and not is_system


def _share_generators(transform: Any) -> list[Any]:
    """Make an Albumentations pipeline draw from one pair of generators.

    Its own `set_random_seed` gives each transform a generator with the *same* seed, so their draws are equal: of two
    flips with p=0.5 either both happen or neither.
    """
    pair = [np.random.Generator(np.random.PCG64()), random.Random()]
    transform.set_random_state(*pair)
    return pair


def seed_generator(generator: Any, number: int) -> None:
    """Seed one that `find_generators` found."""
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
    """Objects that an object holds or uses; of functions and classes, only of those that no package brings along."""
    kind = type(item)
    if issubclass(kind, type):
        yield from () if is_installed(item.__module__) else (*vars(item).values(), *item.__bases__)
        return
    if kind is types.FunctionType and not is_installed(item.__globals__.get("__name__")):
        for cell in item.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                yield cell.cell_contents
        yield item.__defaults__
        yield item.__kwdefaults__
        yield [item.__globals__.get(name) for name in _used_names(item.__code__)]
    elif kind is types.MappingProxyType:
        yield from gc.get_referents(item)  # the mapping behind it
    yield from held_by(item)
    yield kind


def held_by(item: Any) -> Iterator[Any]:
    """What an object holds: its attributes, and the items of a container of Python's own.

    These by the methods of Python's own containers: a subclass, or another mapping or sequence, may read a file for
    each value that it is asked for.
    """
    kind = type(item)
    if issubclass(kind, dict):
        yield from dict.values(item)
    elif issubclass(kind, _SEQUENCES):
        base: Any = next(base for base in _SEQUENCES if issubclass(kind, base))
        yield from base.__iter__(item)
    for name in _member_names(kind):  # type: ignore[arg-type]
        with suppress(AttributeError):  # a slot that was never set
            yield object.__getattribute__(item, name)


def _used_names(code: types.CodeType) -> Iterator[str]:
    """Names used by a function and by the lambdas and comprehensions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _used_names(constant)


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a module is of Python, of labkit or of an installed package: no function of theirs is looked into."""
    top = (module or "").partition(".")[0]
    path = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return top in sys.stdlib_module_names - {"__main__"} or top == "labkit" or path.startswith(_INSTALLED)


@functools.cache
def _member_names(kind: type) -> tuple[str, ...]:
    """Attributes of instances that are there already: no property, which may compute or read something."""
    names = (*_HOLDERS, *copyreg._slotnames(kind))  # type: ignore[attr-defined]
    stored = types.MemberDescriptorType | types.GetSetDescriptorType
    return tuple(name for name in names if isinstance(inspect.getattr_static(kind, name, None), stored))
