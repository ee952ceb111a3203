"""Whether a transform may draw from the global generators of `random`, NumPy or torch, read off its code.

Whatever a function can use has a name in its code: global variables, attributes, what is imported in it; and it holds
what is in its closure and its defaults. Where none of these draws, it draws nothing. The unknown is taken to draw.
"""

import builtins
import dis
import functools
import random
import re
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import torch

from labkit.loading.seeding import is_installed

# Of functions and methods of torch, NumPy and OpenCV, and of modules. Those of `numpy.random` and `random` follow it.
_DRAWING = re.compile(
    r"_?(rand\w*|normal_?|log_normal_?|trunc_normal_?|uniform_?|bernoulli_?|multinomial|poisson|binomial|exponential_"
    r"|geometric_|cauchy_|\w*dropout\w*|\w*noise\w*|rrelu_?|gumbel_softmax|fractional_max_pool\w*|\w*attention\w*"
    r"|kaiming_\w*|xavier_\w*|orthogonal_|sparse_|distributions|\w*generator|\w*seed|\w*rng\w*|ops|jit|compile|hub|load"
    r"|__getattribute__|__dict__|__globals__)"
    r"|(?i:rand)(om|u|n|Shuffle)\w*"
)
_REFLECTING = {getattr(builtins, name) for name in (
    "eval", "exec", "getattr", "__import__", "compile", "globals", "vars", "locals", "open", "input", "breakpoint"
)}  # fmt: skip
_PACKAGES = ("builtins", "math", "operator", "functools", "itertools", "copy", "typing", "torch", "numpy", "cv2", "PIL")
_FUNCTIONAL = ("torchvision.transforms.functional", "torchvision.transforms.v2.functional", "torchvision.tv_tensors")
_KNOWN_KINDS = ("albumentations.", "torchvision.transforms.v2.")  # these draw from generators that are known
_HOLDERS = ("torch.nn.modules.module.", "torch.nn.modules.container.", "torch.nn.modules.linear.Identity")
_CONTAINERS = (tuple, list, set, frozenset, dict, OrderedDict, defaultdict, deque)
_VALUES = (
    type(None), bool, int, float, complex, str, bytes, bytearray, slice, range, type(Ellipsis), np.generic, np.dtype,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Tensor, np.ufunc,
)  # fmt: skip
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class _MayDraw(Exception):
    """Says what."""


def find_drawing(transform: Any) -> str:
    """What a transform uses that draws, or of which that is not known, such as `random.random`; "" if nothing does.

    Transforms of Albumentations and of torchvision's v2 count as drawing nothing: their generators are known.
    """
    waiting: list[tuple[Any, frozenset[str]]] = [(transform, frozenset())]
    seen: dict[tuple[int, frozenset[str]], Any] = {}
    try:
        while waiting:
            item, names = waiting.pop()
            if (id(item), names) not in seen:
                seen[id(item), names] = item  # kept, so that no other object gets its id
                waiting += _uses(item, names)
    except _MayDraw as found:
        return str(found)
    return ""


def _uses(item: Any, names: frozenset[str]) -> Iterator[tuple[Any, frozenset[str]]]:
    """What an object holds or uses; of a module, what code with these names of attributes may take from it."""
    kind = type(item)
    if isinstance(item, _VALUES) or (kind is np.ndarray and item.dtype != object):
        return
    if isinstance(item, _GENERATORS) and item is not random._inst and item is not np.random.mtrand._rand:  # its own
        return
    if isinstance(item, types.ModuleType):
        _check_module(item)
        yield from ((vars(item)[name], names) for name in names if name in vars(item))
    elif isinstance(item, types.FunctionType) and not is_installed(item.__globals__.get("__name__")):
        yield from _uses_of_code(item)
    elif isinstance(item, types.MethodType):
        yield from ((item.__func__, names), (item.__self__, names))
    elif isinstance(item, functools.partial):
        yield from ((part, names) for part in (item.func, item.args, item.keywords))
    elif isinstance(item, staticmethod | classmethod):
        yield item.__func__, names
    elif isinstance(item, property):
        yield from ((part, names) for part in (item.fget, item.fset) if part)
    elif isinstance(item, type):
        yield from ((part, names) for part in _parts_of_class(item))
    elif callable(item) and hasattr(item, "__name__"):
        _check_function(item)
    elif kind in _CONTAINERS:
        yield from ((part, names) for part in (item.values() if isinstance(item, dict) else item))
    else:
        for parent in kind.__mro__:
            if not _is_known(parent):
                yield from ((part, names) for part in _parts_of_class(parent, constructs=False))
        slots = (getattr(item, name) for parent in kind.__mro__ for name in _slots(parent) if hasattr(item, name))
        yield from ((part, names) for part in (*getattr(item, "__dict__", {}).values(), *slots))


def _is_known(kind: type) -> bool:
    """Whether a class draws from nothing but generators of its own, or what it holds does."""
    return f"{kind.__module__}.{kind.__qualname__}".startswith((*_KNOWN_KINDS, *_HOLDERS))


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _uses_of_code(function: types.FunctionType) -> Iterator[tuple[Any, frozenset[str]]]:
    variables, attributes, imported = set[str](), set[str](), set[str]()
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for step in dis.get_instructions(code):
            if step.opcode in dis.hasname:
                of_step = {"LOAD_GLOBAL": variables, "LOAD_NAME": variables, "IMPORT_NAME": imported}
                of_step.get(step.opname, attributes).add(step.argval)
    if drawing := sorted(filter(_DRAWING.fullmatch, attributes)):
        raise _MayDraw(f"`{drawing[0]}` in {function.__qualname__}")
    names = frozenset(attributes)
    found = {**vars(builtins), **function.__globals__}
    for name in variables:
        if name in found:  # else it is of a class or raises an error
            yield found[name], names
    for name in imported:
        if name not in sys.modules:
            raise _MayDraw(f"`import {name}` in {function.__qualname__}")
        yield sys.modules[name], names
        yield sys.modules[name.partition(".")[0]], names
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents, names
        except ValueError:  # empty
            continue
    yield from ((part, names) for part in (function.__defaults__, function.__kwdefaults__, vars(function)))


def _parts_of_class(kind: type, *, constructs: bool = True) -> Iterator[Any]:
    """What a class of the user's own holds; one of a package is known, or may draw."""
    if is_installed(kind.__module__):
        top, name = kind.__module__.partition(".")[0], f"{kind.__module__}.{kind.__qualname__}"
        is_data = top in ("builtins", "PIL", "collections", "typing") or kind.__module__ in ("numpy", "torch")
        is_data = is_data or kind.__module__.startswith(_FUNCTIONAL) or kind in (type(None), object)
        if not is_data or _DRAWING.fullmatch(kind.__qualname__):
            raise _MayDraw(f"`{name}`")
        return
    left_out = {"_abc_impl"} if constructs else {"_abc_impl", "__init__", "__new__"}
    for name, value in vars(kind).items():
        if name not in left_out and not isinstance(value, types.GetSetDescriptorType | types.MemberDescriptorType):
            yield value
    yield from (base for base in kind.__bases__ if not _is_known(base))


def _check_module(module: types.ModuleType) -> None:
    name = module.__name__
    top = name.partition(".")[0]
    is_pure = top in _PACKAGES or name == "torchvision" or name.startswith(("torchvision.transforms", *_FUNCTIONAL))
    if (is_installed(name) and not is_pure) or any(map(_DRAWING.fullmatch, name.split("."))):
        raise _MayDraw(f"`{name}`")


def _check_function(function: Any) -> None:
    """Raise for a function of a package that draws, or that is not known."""
    owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
    module = getattr(function, "__module__", None) or ""
    if getattr(cv2, function.__name__, None) is function:  # says no module
        module = "cv2"
    if isinstance(owner, types.ModuleType):
        module = module or owner.__name__
    elif owner is not None and not isinstance(owner, type):  # a method of an object
        kind = type(owner)
        if not isinstance(owner, _VALUES) and kind not in _CONTAINERS and kind is not np.ndarray:
            raise _MayDraw(f"`{kind.__module__}.{kind.__qualname__}.{function.__name__}`")
        return
    elif isinstance(owner, type):
        module = owner.__module__ if owner.__module__ != "torch._C" else "torch"
    is_known = module.partition(".")[0] in _PACKAGES or module.startswith((*_FUNCTIONAL, "albumentations."))
    if not is_known or function in _REFLECTING or any(map(_DRAWING.fullmatch, (*module.split("."), function.__name__))):
        raise _MayDraw(f"`{module}.{function.__name__}`")
