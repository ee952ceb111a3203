"""What measures a loader leaves it as it was: its epoch, its order and state, and all random numbers.

Otherwise a training that follows a measurement would begin with another epoch, or with none, and in another order.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import Any
from weakref import ref

from labkit.util.process import preserve_rng_state

WRAPPED = ("loader", "dataloader", "base_dataloader")  # where labkit, timm and Accelerate keep the loader they wrap
_MOST_WRAPPED = 20  # loaders, samplers, data sets: one may give itself for whatever attribute it is asked for
_MOST_LOOKED_AT, _LONG = 2000, 100  # objects in which generators are looked for, and items of a list that is data
# Of loaders of others: epochs, as Accelerate counts them; what torch keeps of persistent workers, and torchdata of a
# pass or of a loaded state.
_OF_LOADERS = ("epoch", "_epoch", "iteration", "_iterator", "next_iter_state", "_initial_iter_for_state_dict")


@contextmanager
def unchanged(*loaders: Any) -> Iterator[Callable[[Any], None]]:
    """Leave loaders as they were when this was entered, also after an error or Ctrl-C, and in the middle of a pass.

    These are restored: the epoch and state of labkit's loaders and data sets; the epochs and attributes of samplers;
    torch's persistent workers, of which a measurement gets its own, and torchdata's state of a pass; the global random
    generators, and those that loaders, samplers and data sets hold. What a foreign iterable data set counts, and an
    iterator, which can be read once, stay where they are.

    Args:
        loaders: Any iterables of batches, also wrapped ones, of labkit, torch or others.

    Yields:
        A function that takes a further loader, from when it is called on. It keeps none alive.

    >>> with unchanged(loader):  # doctest: +SKIP
    ...     seconds = measure(loader)
    """
    with preserve_rng_state(), ExitStack() as undo:
        kept = _Kept(undo)
        for loader in loaders:
            kept.add(loader)
        yield kept.add


class _Kept:
    """What is to be put back, each once."""

    def __init__(self, undo: ExitStack):
        self._undo = undo
        self._known: dict[int, Callable[[], Any]] = {}

    def add(self, loader: Any) -> None:
        found = [*_loaders_in(loader)]
        for each in found:  # first here, and so the last to be put back: it knows what its samplers have been told
            for counted in (each, *_following(each, "dataset")):
                if (place_of := getattr(type(counted), "_place", None)) is not None and self._is_new(counted):
                    self._later(counted, type(counted)._return_to, place_of(counted))
        for each in found:
            if not hasattr(type(each), "_place") and self._is_new(each):
                self._keep_loader(each)
            for sampler in _samplers_of(each):
                if self._is_new(sampler):
                    self._later(sampler, _put_attributes, _attributes_of(sampler))
            for generator, put_back in _generators_in(each):
                if self._is_new(generator):
                    self._undo.callback(put_back)

    def _keep_loader(self, loader: Any) -> None:
        attributes = getattr(loader, "__dict__", {})
        before = {name: attributes[name] for name in _OF_LOADERS if name in attributes}
        if before:
            self._later(loader, _put_loader, before)
            if "_iterator" in before:  # torch would end the pass that runs in these workers, and go on with their draws
                attributes["_iterator"] = None

    def _later(self, of: Any, put_back: Callable[[Any, Any], object], before: Any) -> None:
        there = self._known[id(of)]

        def put() -> None:
            if (still := there()) is not None:
                put_back(still, before)

        self._undo.callback(put)

    def _is_new(self, thing: Any) -> bool:
        known = self._known.get(id(thing))
        if known is not None and known() is thing:
            return False
        try:
            self._known[id(thing)] = ref(thing)
        except TypeError:  # such as NumPy's generators
            self._known[id(thing)] = lambda: thing
        return True


def _following(thing: Any, *names: str) -> Iterator[Any]:
    """What a loader, a sampler or a data set holds under one of these names, what that holds, and so on."""
    for _ in range(_MOST_WRAPPED):
        attributes = getattr(thing, "__dict__", {})
        thing = next((attributes[name] for name in names if name in attributes), None)
        if thing is None:
            return
        yield thing


def _loaders_in(loader: Any) -> Iterator[Any]:
    """A loader, and those that it wraps."""
    yield loader
    yield from _following(loader, *WRAPPED)


def _samplers_of(loader: Any) -> Iterator[Any]:
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(loader, "__dict__", {}).get(name)
        yield from (each for each in (sampler, *_following(sampler, name, "sampler")) if hasattr(each, "__dict__"))


def _attributes_of(sampler: Any) -> list[tuple[str, Any, Any]]:
    """Names and values, and what is in lists and arrays, which may be shuffled in place."""
    return [(name, value, _copied(value)) for name, value in vars(sampler).items()]


def _copied(value: Any) -> Any:
    return value.copy() if type(value) is list or _is_of("numpy", "ndarray", value) else None


def _put_attributes(sampler: Any, before: list[tuple[str, Any, Any]]) -> None:
    vars(sampler).clear()
    for name, value, contents in before:
        if contents is not None and value is not contents:
            value[:] = contents
        vars(sampler)[name] = value


def _put_loader(loader: Any, before: dict[str, Any]) -> None:
    attributes = vars(loader)
    own, theirs = attributes.get("_iterator"), before.get("_iterator")
    attributes.update(before)
    if own is not None and own is not theirs:
        getattr(own, "_shutdown_workers", lambda: None)()


def _generators_in(loader: Any) -> Iterator[tuple[Any, Callable[[], object]]]:
    """Random generators that a loader, its samplers and its data set hold, and what puts each back to where it is.

    Attributes and plain containers alone are looked into: nothing is asked for a value.
    """
    waiting, seen = deque([loader]), set[int]()
    while waiting and len(seen) < _MOST_LOOKED_AT:
        thing = waiting.popleft()
        if id(thing) in seen or isinstance(thing, str | bytes | int | float | type | ModuleType):
            continue
        seen.add(id(thing))
        if (put_back := _putting_back(thing)) is not None:
            yield thing, put_back
        elif type(thing) in (list, tuple, set, dict):
            if len(thing) <= _LONG:
                waiting += thing.values() if type(thing) is dict else thing
        else:
            held = getattr(thing, "__dict__", None)
            waiting += [value for name, value in held.items() if name != "_iterator"] if type(held) is dict else []


def _putting_back(thing: Any) -> Callable[[], object] | None:
    """What puts a generator back to where it is now; None: it is none, or has no state."""
    with suppress(NotImplementedError):  # random.SystemRandom has no state
        if isinstance(thing, random.Random):
            state = thing.getstate()
            return lambda: thing.setstate(state)
        if _is_of("numpy.random", "Generator", thing):
            state = thing.bit_generator.state
            return lambda: setattr(thing.bit_generator, "state", state)
        if _is_of("numpy.random", "RandomState", thing) or _is_of("torch", "Generator", thing):
            state = thing.get_state()
            return lambda: thing.set_state(state)
    return None


def _is_of(module: str, kind: str, thing: Any) -> bool:
    """Whether it is of that class: whoever has one of it has imported its module."""
    found = sys.modules.get(module)
    return found is not None and isinstance(thing, getattr(found, kind))
