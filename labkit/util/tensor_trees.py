"""What a batch may be, for all that moves, copies or looks through batches.

Tensors in any nest of dicts, lists, tuples, named tuples, data classes, and their subclasses with attributes of their
own; and objects with a method `to` of their own, such as tokenizers' encodings, graphs and packed sequences.
"""

import copy
import sys
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import is_dataclass
from typing import Any

_ATOMS = (str, bytes, int, float, type(None), type)


def map_tensors(batch: Any, function: Callable[[Any], Any], *, of_object: Callable[[Any], Any] | None = None) -> Any:
    """The same batch in new containers, with each tensor replaced by `function(tensor)`; all else stays as it is.

    Containers and objects keep their types and their other attributes. A tensor, container or object that comes twice
    is mapped once, and its result comes twice.

    Args:
        batch: As this module says.
        function: Called with each tensor.
        of_object: Called with each object, container or not, that has a method `to` and is no tensor; its result takes
            the object's place. Default: the tensors in its items and attributes are mapped.
    """
    return _Mapper(function, of_object).map(batch)


def move_tensors(batch: Any, device: Any, *, non_blocking: bool = False) -> Any:
    """The batch with its tensors on a device: by their own `to` where objects have one, else tensor by tensor.

    The batch itself stays where it is, also if the `to` of its objects moves them in place.
    """

    def move(item: Any) -> Any:
        own = map_tensors(item, lambda tensor: tensor)
        try:
            moved = own.to(device, non_blocking=non_blocking)
        except TypeError:  # as torchvision's ImageList, it takes a device only
            moved = own.to(device)
        return own if moved is None else moved

    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking), of_object=move)


def iter_tensors(batch: Any) -> Iterator[Any]:
    """Every tensor of a batch once, also those in the attributes of its objects."""
    seen: dict[int, Any] = {}
    waiting = [batch]
    while waiting:
        item = waiting.pop()
        if isinstance(item, _ATOMS) or id(item) in seen:
            continue
        seen[id(item)] = item  # kept, so that no other object gets its id
        if is_tensor(item):
            yield item
        else:
            waiting += reversed(_contents(item))


def is_tensor(item: Any) -> bool:
    """Whether an object is one of torch's tensors."""
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    return torch is not None and isinstance(item, torch.Tensor)


def has_own_to(item: Any) -> bool:
    """Whether an object's class has a method `to`; a field of that name, or an item, is none."""
    return callable(getattr(type(item), "to", None))


def _contents(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        items = list(item.values())
    elif isinstance(item, list | tuple | deque | UserList):
        items = list(item)
    elif is_dataclass(item) or has_own_to(item):
        items = []
    else:
        return []
    return items + [getattr(item, name) for name in _attribute_names(item)]


def _attribute_names(item: Any) -> list[str]:
    """Of all that an object holds, in `__dict__` or slots."""
    names = dict.fromkeys(getattr(item, "__dict__", ()))
    for kind in type(item).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            names[f"_{kind.__name__.lstrip('_')}{name}" if is_private else name] = None
    return [name for name in names if name not in ("__dict__", "__weakref__") and hasattr(item, name)]


class _Mapper:
    """One call of `map_tensors`; knows what it has mapped already."""

    def __init__(self, function: Callable[[Any], Any], of_object: Callable[[Any], Any] | None):
        self._function, self._of_object = function, of_object
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that no other object gets the id of one that is done

    def map(self, item: Any) -> Any:
        if isinstance(item, _ATOMS):
            return item
        if id(item) not in self._done:
            self._note(item, self._map_new(item))
        return self._done[id(item)]

    def _note(self, item: Any, result: Any) -> Any:
        """Remember a result, which is not mapped once more either: an object may hold it in two places."""
        self._kept += (item, result)
        self._done[id(item)] = self._done[id(result)] = result
        return result

    def _map_new(self, item: Any) -> Any:
        if is_tensor(item):
            return self._function(item)
        if self._of_object is not None and has_own_to(item):
            return self._of_object(item)
        if isinstance(item, Mapping):
            return self._map_mapping(item)
        if isinstance(item, tuple):
            return self._map_tuple(item)
        if isinstance(item, list | deque | UserList):
            return self._map_list(item)
        return self._map_object(item) if is_dataclass(item) or has_own_to(item) else item

    def _map_mapping(self, item: Mapping) -> Any:
        own = _shallow_copy(item)
        if isinstance(own, MutableMapping):
            self._note(item, own)
            for key in list(own):
                own[key] = self.map(own[key])
            return self._map_attributes(own)
        values = {key: self.map(value) for key, value in item.items()}
        try:
            return type(item)(values)  # type: ignore[call-arg]
        except TypeError:  # its constructor differs: a plain container does as well
            return values

    def _map_tuple(self, item: tuple) -> Any:
        values = [self.map(value) for value in item]
        make = getattr(item, "_make", type(item))  # of a named tuple
        try:
            return make(values)
        except TypeError:
            return tuple(values)

    def _map_list(self, item: Any) -> Any:
        own = _shallow_copy(item)
        if own is None:
            return [self.map(value) for value in item]
        self._note(item, own)
        for place, value in enumerate(item):
            own[place] = self.map(value)
        return self._map_attributes(own)

    def _map_object(self, item: Any) -> Any:
        own = _shallow_copy(item) if hasattr(item, "__copy__") else _bare_copy(item)
        if own is None:
            return item
        self._note(item, own)
        return self._map_attributes(own)

    def _map_attributes(self, own: Any) -> Any:
        for name in _attribute_names(own):
            value = getattr(own, name)
            if (mapped := self.map(value)) is not value:
                # Not setattr, which a frozen data class forbids: nobody else has seen this copy yet.
                object.__setattr__(own, name, mapped)
        return own


def _shallow_copy(item: Any) -> Any:
    """As the object's own class copies it; None if it cannot be copied."""
    try:
        return copy.copy(item)
    except Exception:  # whatever a foreign class raises
        return None


def _bare_copy(item: Any) -> Any:
    """Not by `copy.copy`, which goes by how an object is pickled: that may take long, and leave something out."""
    try:
        own = object.__new__(type(item))
    except TypeError:  # of a class of another language
        return None
    for name in _attribute_names(item):
        object.__setattr__(own, name, getattr(item, name))
    return own
