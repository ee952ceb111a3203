"""The API reference: an entry for each public name of `labkit/__init__.pyi`, on a page for each room."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import labkit

ALIAS = "lk"  # as notebooks import labkit, and so what entries are called

_ORDER = ("core", "measure", "data", "pipeline", "tuning", "peers", "teach")  # a room imports from those before it
_STUB = Path(labkit.__file__).with_name("__init__.pyi")
_TICKS = re.compile(r"(?<![`:\w])`(?P<name>[^`\n]+)`(?P<rest>\w*)")
_TAUGHT = re.compile(r"(?<=Taught in: )notebooks/(\w+)\.ipynb")
_INDEX = """API
===

Every public name of ``import labkit as lk``, by the room of the package that it comes from.

.. toctree::
   :hidden:

{pages}
"""


def public_names() -> dict[str, dict[str, str]]:
    """Room -> public name -> the module that defines it; rooms in the order of imports."""
    rooms: dict[str, dict[str, str]] = {}
    for node in ast.parse(_STUB.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = rooms.setdefault(node.module.partition(".")[0], {})
            names.update({alias.asname or alias.name: f"labkit.{node.module}" for alias in node.names})
    return {room: rooms[room] for room in sorted(rooms, key=_ORDER.index)}


def write_reference(folder: Path) -> None:
    """Write `index.rst` and a page for each room to `folder`, for Sphinx's autodoc within `documented_as_lk`."""
    rooms, parts = public_names(), []
    for room, modules in rooms.items():
        about = inspect.getdoc(import_module(f"labkit.{room}")) or ""
        entries = [_entry(name, modules[name]) for name in sorted(modules, key=str.lower)]
        page = [f"{room}\n{'=' * len(room)}", _as_rst(about), f".. py:currentmodule:: {ALIAS}", *entries]
        (folder / f"{room}.rst").write_text("\n\n".join(page) + "\n")
        parts.append(_contents(room, about, modules))
    pages = "\n".join(f"   {room}" for room in rooms)
    (folder / "index.rst").write_text("\n\n".join([_INDEX.format(pages=pages), *parts]) + "\n")


@contextmanager
def documented_as_lk() -> Iterator[None]:
    """labkit as a module `lk`, so that autodoc calls its names what readers call them. It leaves no trace."""
    before = sys.modules.get(ALIAS)
    sys.modules[ALIAS] = labkit
    try:
        yield
    finally:
        del sys.modules[ALIAS]
        if before is not None:
            sys.modules[ALIAS] = before
        _forget_signatures()


def _forget_signatures() -> None:
    """Take back what autodoc writes into functions, to show a default as it stands in the source."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == labkit.__name__]
    found = [each for module in modules for each in vars(module).values()]
    members = [member for each in found if isinstance(each, type) for member in vars(each).values()]
    for each in (*found, *members):
        function = getattr(each, "__func__", each)  # of a class method or a static one
        if isinstance(function, FunctionType):
            vars(function).pop("__signature__", None)


def rewrite_docstring(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str], *, notebooks: frozenset[str]
) -> None:
    """A handler of autodoc's docstrings, which are Markdown here: names and notebooks become links.

    Args:
        lines: Changed in place, as autodoc wants it.
        notebooks: Names of the notebooks that have a page.
    """
    lines[:] = [_as_rst(_TAUGHT.sub(partial(_taught, notebooks), line)) for line in lines]


def _taught(notebooks: frozenset[str], found: re.Match) -> str:
    name = found[1]
    return f":doc:`{name} </notebooks/{name}>`" if name in notebooks else f"``{name}``"


@cache
def _all_names() -> frozenset[str]:
    return frozenset(name for modules in public_names().values() for name in modules)


def _as_rst(text: str) -> str:
    """Words in backticks as reStructuredText: a link where they are a public name, else code."""

    def changed(found: re.Match) -> str:
        name = found["name"].removeprefix(f"{ALIAS}.").removeprefix("labkit.").removesuffix("()")
        code = f":py:obj:`{name} <{ALIAS}.{name}>`" if name in _all_names() else f"``{found['name']}``"
        return code + (rf"\ {found['rest']}" if found["rest"] else "")

    return _TICKS.sub(changed, text)


def _entry(name: str, module: str) -> str:
    value = getattr(labkit, name)
    if inspect.isclass(value):
        kind = "autoexception" if issubclass(value, Exception) else "autoclass"
        return f".. {kind}:: {ALIAS}.{name}\n   :members:"
    if inspect.isroutine(value):
        return f".. autofunction:: {ALIAS}.{name}"
    keys = f"\n\n   {'Keys' if isinstance(value, dict) else 'Values'}: {', '.join(f'``{key}``' for key in value)}."
    return f".. py:data:: {name}\n   :type: {type(value).__name__}\n\n   {_as_rst(_comment(name, module))}{keys}"


def _comment(name: str, module: str) -> str:
    """What the comment with `#:` above a constant says."""
    from sphinx.pycode import ModuleAnalyzer

    return " ".join(ModuleAnalyzer.for_module(module).find_attr_docs()[("", name)]).strip()


def _contents(room: str, about: str, modules: dict[str, str]) -> str:
    """A section of the index: each name of a room with the first sentence of its documentation."""
    lines = [
        f":py:obj:`{name} <{ALIAS}.{name}>`\n   {_as_rst(_first_sentence(name, modules[name]))}" for name in modules
    ]
    return f"{room}\n{'-' * len(room)}\n\n:doc:`{room}`: {_as_rst(about)}\n\n" + "\n\n".join(lines)


def _first_sentence(name: str, module: str) -> str:
    value: Any = getattr(labkit, name)
    documented = inspect.isclass(value) or inspect.isroutine(value)
    text = (inspect.getdoc(value) or "") if documented else _comment(name, module)
    return re.split(r"(?<=\.)\s|::", text.partition("\n\n")[0].replace("\n", " "), maxsplit=1)[0]
