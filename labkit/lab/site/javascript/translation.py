"""A function in Python with all that it uses, as JavaScript: a page computes with the very formulas that labkit has.

What cannot be translated is refused by its name and place, so nothing is left out in silence. Arithmetic and the
functions of NumPy and of Python are calls of `py`, which `plan_numbers.js` defines.
"""

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from labkit.lab.site.javascript.expressions import Untranslatable
from labkit.lab.site.javascript.functions import FunctionTranslator


class Translation:
    """JavaScript of everything that was asked for, and of what that uses, in an order in which it can be run.

    Args:
        by_hand: Functions and classes, by name, that are written in JavaScript already.
        as_data: Classes whose instances become plain objects of their fields and properties.
        omitted: Class -> its members that the page does without.
        methods: Of classes that are written by hand.
        package: Whose functions and classes may be translated.

    Raises:
        Untranslatable: from `add`.
    """

    def __init__(
        self, *, by_hand: Collection[str] = (), as_data: Collection[str] = (),
        omitted: Mapping[str, Collection[str]] | None = None, methods: Collection[str] = (), package: str = "labkit",
    ):  # fmt: skip
        self._by_hand, self._as_data, self._omitted = set(by_hand), set(as_data), omitted or {}
        self._package = package
        self.methods = set(methods)
        self._objects: dict[str, Any] = {}
        self._written: list[str] = []

    def add(self, name: str, value: Any) -> str:
        """The name in JavaScript of a function, a class or a constant; what it is comes before what uses it."""
        module = getattr(value, "__module__", None)
        if inspect.isroutine(value) or inspect.isclass(value):
            name = value.__name__
        if name in self._by_hand:
            return name
        if name in self._objects:
            if self._objects[name] is not value and self._objects[name] != value:
                raise Untranslatable(f"two different objects are named {name}")
            return name
        self._objects[name] = value
        if inspect.isclass(value):
            self._written.append(self._class(value))
        elif inspect.isfunction(value):
            if not str(module).startswith(f"{self._package}."):
                raise Untranslatable(f"{name} of {module} is not {self._package}'s")
            self._written.append(f"function {name}{self._function(value)}")
        else:
            self._written.append(f"const {name} = {self.value(value, name)};")
        return name

    def constant(self, name: str, value: Any, namespace: Mapping[str, Any]) -> str:
        """As `add`, for a name of a module; a value that holds functions is translated from its assignment."""
        is_plain = inspect.isroutine(value) or inspect.isclass(value) or not _holds_functions(value)
        if is_plain or name in self._by_hand or name in self._objects:
            return self.add(name, value)
        self._objects[name] = value
        where = f"{namespace['__name__']}.{name}"
        code = FunctionTranslator(where, namespace, self).expression(_assigned_to(name, namespace))
        self._written.append(f"const {name} = {code};")
        return name

    def value(self, value: Any, where: str = "") -> str:
        """Plain data, and instances of classes."""
        if value is None or isinstance(value, bool | int | float | str):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{json.dumps(str(k))}: {self.value(v, where)}" for k, v in value.items()) + "}"
        if isinstance(value, list | tuple | set | frozenset):
            return f"[{', '.join(self.value(each, where) for each in _in_order(value))}]"
        if inspect.isfunction(value):
            return f"(function {self._function(value)})"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._instance(value, where)
        raise Untranslatable(f"a {type(value).__name__} in {where}: no such data are known")

    def text(self) -> str:
        """All that was added."""
        return "\n".join(self._written)

    def _instance(self, value: Any, where: str) -> str:
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        if type(value).__name__ not in self._as_data:
            arguments = ", ".join(self.value(each, where) for each in fields.values())
            return f"new {self.add('', type(value))}({arguments})"
        members = vars(type(value)).items()
        properties = [name for name, each in members if isinstance(each, property | cached_property)]
        return self.value({**fields, **{name: getattr(value, name) for name in properties}}, where)

    def _function(self, function: Any) -> str:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        where = f"{function.__module__}.{function.__qualname__}"
        if not isinstance(tree, ast.FunctionDef):
            raise Untranslatable(f"{where} is not a plain function")
        return FunctionTranslator(where, function.__globals__, self).function(tree)

    def _class(self, of: type) -> str:
        """A dataclass: its fields are the arguments of its constructor."""
        if not dataclasses.is_dataclass(of):
            raise Untranslatable(f"{of.__name__} is not a dataclass")
        omitted = self._omitted.get(of.__name__, ())
        nodes = [node for node in _functions_of(of) if node.name not in omitted]
        self.methods |= {node.name for node in nodes}
        fields = [f"{each.name}_{self._default(each)}" for each in dataclasses.fields(of)]
        names = [each.name for each in dataclasses.fields(of)]
        sets = " ".join(f"this.{name} = {name}_;" for name in names)
        members = [f"static fields = {json.dumps(names)};", f"constructor({', '.join(fields)}) {{ {sets} }}"]
        members += [self._member(of, node) for node in nodes]
        return f"class {of.__name__} {{\n" + "\n".join(members) + "\n}"

    def _default(self, of: dataclasses.Field) -> str:
        if of.default is not dataclasses.MISSING:
            return f" = {self.value(of.default)}"
        made = None if of.default_factory is dataclasses.MISSING else of.default_factory()
        return "" if made is None else f" = {self.value(made)}"

    def _member(self, of: type, node: ast.FunctionDef) -> str:
        member = vars(of)[node.name]
        getter = member.func if isinstance(member, cached_property) else getattr(member, "fget", None)
        function = getter or member
        where = f"{of.__module__}.{of.__name__}.{node.name}"
        if not inspect.isfunction(function):
            raise Untranslatable(f"{where} is a {type(member).__name__}")
        code = FunctionTranslator(where, function.__globals__, self).method(node)
        if isinstance(member, cached_property):
            return f"get {node.name}() {{ return py.cached(this, {json.dumps(node.name)}, () => {{ {code[1]} }}); }}"
        name = {"__str__": "toString"}.get(node.name, node.name)
        if name.startswith("__"):
            raise Untranslatable(f"{where}: such a method is not known")
        return f"{'get ' if getter else ''}{name}{code[0]} {{ {code[1]} }}"


def _in_order(values: Collection[Any]) -> Collection[Any]:
    """Those of a set sorted, so that the text is the same each time."""
    return sorted(values) if isinstance(values, set | frozenset) else values


def _assigned_to(name: str, namespace: Mapping[str, Any]) -> ast.expr:
    """What a module assigns to a name."""
    for node in ast.parse(inspect.getsource(sys.modules[namespace["__name__"]])).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and ast.unparse(targets[0] or node) == name:
            return node.value
    raise Untranslatable(f"{name} of {namespace['__name__']} has no assignment")


def _functions_of(of: type) -> list[ast.FunctionDef]:
    """The functions that stand in a class."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(of))).body[0]
    return [node for node in getattr(tree, "body", []) if isinstance(node, ast.FunctionDef)]


def _holds_functions(value: Any) -> bool:
    """Whether they are functions that other functions made, which have no source of their own."""
    if isinstance(value, Mapping):
        return any(map(_holds_functions, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_functions, value))
    return inspect.isfunction(value)
