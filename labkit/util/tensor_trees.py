"""What a batch may be, for all that moves, copies or looks through batches.

Tensors in any nest of dicts, lists, tuples, named tuples, data classes, and their subclasses with attributes of their
own; and objects with a method `to` of their own, such as tokenizers' encodings, graphs and packed sequences.
"""

import copy
import copyreg
import sys
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

_ATOMS = (str, bytes, int, float, type(None), type)
_BUILT_IN = dict | list | deque
# Those of the standard library lose attributes, or call the class.
_COPIES: tuple[Any, ...] = (None, defaultdict.__copy__, deque.__copy__, UserDict.__copy__, UserList.__copy__)


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


class _Mapper:
    """One call of `map_tensors`; knows what it has mapped already.

    Not a function within `map_tensors` that calls itself: that is a circle, which would keep the batch in memory.
    """

    def __init__(self, function: Callable[[Any], Any], of_object: Callable[[Any], Any] | None):
        self._function, self._of_object = function, of_object
        # By id; both the original and the result are kept, so that no other object gets their ids.
        self._done: dict[int, tuple[Any, Any]] = {}

    def _note(self, item: Any, result: Any) -> Any:
        """Remember a result, which is not mapped once more either: an object may hold it in two places."""
        self._done[id(item)] = self._done[id(result)] = item, result
        return result

    def map(self, item: Any) -> Any:
        if isinstance(item, _ATOMS):
            return item
        if id(item) in self._done:
            return self._done[id(item)][1]
        if is_tensor(item):
            return self._note(item, self._function(item))
        if self._of_object is not None and has_own_to(item):
            return self._note(item, self._of_object(item))
        if _is_sealed(item):
            kind: Any = type(item)
            return self._note(item, kind({key: self.map(value) for key, value in item.items()}))
        if isinstance(item, tuple):
            own = _make_tuple(type(item), [self.map(value) for value in item])
            _copy_attributes(item, own)
        else:
            own = _copy(item)
            if own is item:
                return item
        self._note(item, own)
        if isinstance(own, _BUILT_IN):
            base = _base_of(own)  # whose methods do not do what a subclass adds to them
            for place, value in list(dict.items(own) if isinstance(own, dict) else enumerate(own)):
                base.__setitem__(own, place, self.map(value))
        for name in _attribute_names(own):
            value = getattr(own, name)
            if (mapped := self.map(value)) is not value:
                # Not setattr, which a frozen data class forbids: nobody else has seen this copy yet.
                object.__setattr__(own, name, mapped)
        return own


def _make_tuple(kind: type, values: list[Any]) -> Any:
    try:
        return tuple.__new__(kind, values)  # not `kind(...)`: a subclass may take other arguments
    except TypeError:  # of what PyTorch's functions return, such as `torch.return_types.max`
        return kind(values)


def _base_of(item: Any) -> Any:
    """The built-in container that an object is an instance of."""
    return next(kind for kind in (OrderedDict, defaultdict, dict, list, deque) if isinstance(item, kind))


def _copy_attributes(item: Any, own: Any) -> None:
    for name in _attribute_names(item):
        object.__setattr__(own, name, getattr(item, name))


def _copy(item: Any) -> Any:
    """A copy of a container, a data class or an object with a method `to`, with the same contents; else the item.

    By its own `__copy__`, where there is one. Not by how an object is pickled, as `copy.copy` would: that may take long
    and leave something out. Nor by its class, which may take other arguments than a list or a dict.
    """
    is_built_in = isinstance(item, _BUILT_IN)
    if not (is_built_in or isinstance(item, Mapping | UserList) or is_dataclass(item) or has_own_to(item)):
        return item
    if hasattr(type(item), "__del__"):  # it would close what both hold: a file, for example
        return item
    if getattr(type(item), "__copy__", None) not in _COPIES:
        return copy.copy(item)
    base: Any = _base_of(item) if is_built_in else object
    try:
        own = base.__new__(type(item))
    except TypeError:  # of a class of another language
        return item
    if isinstance(item, deque):
        deque.__init__(own, item, item.maxlen)
    elif isinstance(item, list):
        list.extend(own, item)
    elif isinstance(item, dict):
        for key, value in dict.items(item):
            base.__setitem__(own, key, value)
        if isinstance(item, defaultdict):
            object.__setattr__(own, "default_factory", item.default_factory)
    if getattr(item, "__dict__", None) is item:  # whose items are its attributes
        object.__setattr__(own, "__dict__", own)
    _copy_attributes(item, own)
    return own


def _is_sealed(item: Any) -> bool:
    """Whether it is a mapping that keeps what it holds where Python cannot see it, such as a `MappingProxyType`."""
    return isinstance(item, Mapping) and not isinstance(item, dict) and not _attribute_names(item)


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
    if isinstance(item, dict) or _is_sealed(item):
        items = list(item.values())
    elif isinstance(item, tuple | _BUILT_IN):
        items = list(item)
    elif isinstance(item, Mapping | UserList) or is_dataclass(item) or has_own_to(item):
        items = []
    else:
        return []
    return items + [getattr(item, name) for name in _attribute_names(item)]


def _attribute_names(item: Any) -> list[str]:
    """The names of all that an object holds, in `__dict__` or slots."""
    names = [*getattr(item, "__dict__", ()), *copyreg._slotnames(type(item))]  # type: ignore[attr-defined]
    return [name for name in names if hasattr(item, name)]
