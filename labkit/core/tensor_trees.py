"""Batches are tensors in any nest of dicts, lists, tuples, named tuples and data classes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def map_tensors(batch: Any, function: Callable[[Any], Any]) -> Any:
    """The same nest with `function(tensor)` in every tensor's place; what is no tensor stays.

    Containers keep their type. Objects with a `to` method that are no known container count as tensors.
    """
    if hasattr(batch, "to") and not isinstance(batch, type):
        return function(batch)
    if isinstance(batch, Mapping):
        return _like(batch, {key: map_tensors(value, function) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return _like(batch, [map_tensors(value, function) for value in batch])
    if is_dataclass(batch) and not isinstance(batch, type):
        return _dataclass_like(batch, function)
    return batch


def iter_tensors(batch: Any) -> Iterator[Any]:
    """Every tensor of a nest."""
    found = []
    map_tensors(batch, found.append)
    return iter(found)


def _like(container: Any, values: Any) -> Any:
    try:
        return type(container)(values)
    except TypeError:  # a defaultdict, or a class with a signature of its own: a plain container carries it as well
        return values


def _dataclass_like(batch: Any, function: Callable[[Any], Any]) -> Any:
    import copy

    moved = copy.copy(batch)
    for field in fields(batch):
        if hasattr(batch, field.name):
            # Not setattr: a frozen data class forbids it, and a copy has nobody yet who relies on that.
            object.__setattr__(moved, field.name, map_tensors(getattr(batch, field.name), function))
    return moved
