"""Batches are tensors in any nest of dicts, lists, tuples, named tuples and data classes."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Movable(Protocol):
    """What counts as a tensor: an object with a `to` method."""

    def to(self, *args: Any, **kwargs: Any) -> Any: ...


def map_tensors(batch: Any, function: Callable[[Any], Any]) -> Any:
    """The same nest with each tensor replaced by `function(tensor)`; all other objects stay as they are.

    Containers keep their type. Objects with a `to` method count as tensors.
    """
    map_nested = partial(map_tensors, function=function)
    if isinstance(batch, type):
        return batch
    if isinstance(batch, Movable):
        return function(batch)
    if isinstance(batch, Mapping):
        return _rebuild(batch, dict(zip(batch.keys(), map(map_nested, batch.values()), strict=True)))
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*map(map_nested, batch))
    if isinstance(batch, list | tuple):
        return _rebuild(batch, [*map(map_nested, batch)])
    return _map_fields(batch, map_nested) if is_dataclass(batch) else batch


def iter_tensors(batch: Any) -> Iterator[Any]:
    """Every tensor of a nest."""
    found: list[Any] = []
    map_tensors(batch, found.append)
    return iter(found)


def _rebuild(container: Any, values: Any) -> Any:
    try:
        return type(container)(values)
    except TypeError:  # a defaultdict, or a class whose constructor differs: a plain container does as well
        return values


def _map_fields(batch: Any, map_nested: Callable[[Any], Any]) -> Any:
    mapped = copy.copy(batch)
    for field in fields(batch):
        if hasattr(batch, field.name):
            # Not setattr, which a frozen data class forbids: nobody else has seen this copy yet.
            object.__setattr__(mapped, field.name, map_nested(getattr(batch, field.name)))
    return mapped
