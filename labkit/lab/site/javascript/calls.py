"""Calls in Python as JavaScript: of labkit's own functions and classes, and of those that `py` has."""

import ast
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from labkit.lab.site.javascript.expressions import Expressions
from labkit.lab.site.javascript.tables import FUNCTIONS, METHODS, SKIPPED


class Calls(Expressions):
    """Translates calls, and all other expressions."""

    def _Call(self, node: ast.Call) -> str:
        function = node.func
        name = self._dotted(function)
        if isinstance(function, ast.Attribute) and not name:
            return self._method_call(node, function)
        target = self._object_named(name)
        if target is isinstance:
            return f"({self._of(node.args[0])} instanceof {self._class_named(node.args[1])})"
        if target is dataclasses.replace:
            return f"py.replace({self._of(node.args[0])}, {self._keywords(node.keywords)})"
        if name in FUNCTIONS and target is None and name not in self._locals:
            return f"py.{name.removeprefix('np.').removeprefix('math.')}({self._plain(node, FUNCTIONS[name])})"
        return self._own_call(node, name, target)

    def _own_call(self, node: ast.Call, name: str, target: Any) -> str:
        """A call of labkit's own function or class, or of a function that a name of the function holds."""
        if not isinstance(node.func, ast.Name):
            self._refuse(node, f"the function {name}")
        code = self._of(node.func)
        if name in self._locals:
            return f"{code}({self._plain(node, ())})"
        return f"{'new ' if isinstance(target, type) else ''}{code}({self._arguments(node, target)})"

    def _object_named(self, name: str) -> Any:
        if name in self._locals:
            return None
        found = self._namespace.get(name)
        return isinstance if name == "isinstance" and found is None else found

    def _class_named(self, node: ast.AST) -> str:
        if not isinstance(node, ast.Name) or not isinstance(self._namespace.get(node.id), type):
            self._refuse(node, "isinstance with anything but a class of labkit")
        return self._of(node)

    def _method_call(self, node: ast.Call, function: ast.Attribute) -> str:
        code, name = self._of(function.value), function.attr
        if name in self._program.methods and name not in METHODS:
            return f"{code}.{name}({self._plain(node, ())})"
        if name not in METHODS:
            self._refuse(node, f"the method {name}")
        return f"py.{METHODS[name][0]}({', '.join(filter(None, [code, self._plain(node, METHODS[name][1:])]))})"

    def _plain(self, node: ast.Call, names: tuple[str, ...]) -> str:
        """Arguments by place; those by name follow in the order of `names`."""
        by_name = {each.arg: each.value for each in node.keywords if each.arg not in SKIPPED}
        if not set(by_name) <= set(names):
            self._refuse(node, f"the argument {', '.join(map(str, set(by_name) - set(names)))}")
        given = [self._of(each) for each in node.args]
        given += [self._of(by_name[name]) if name in by_name else "undefined" for name in names if by_name]
        return ", ".join(given)

    def _arguments(self, node: ast.Call, target: Any) -> str:
        """Arguments of labkit's own function, all by place; what its `**` takes comes last, as an object."""
        given = list(map(self._of, node.args))
        if not node.keywords:
            return ", ".join(given)
        self._refuse_stars(node)
        names, takes_any = _parameters(target)
        by_name = {each.arg: each.value for each in node.keywords if each.arg in names[len(given) :]}
        others = [each for each in node.keywords if each.arg not in by_name]
        if others and not takes_any:
            self._refuse(node, "such arguments")
        given += self._by_name(by_name, names[len(given) :])
        return ", ".join([*given, self._keywords(others)] if others else given)

    def _by_name(self, values: Mapping[Any, ast.expr], names: list[str]) -> list[str]:
        return [self._of(values[name]) if name in values else "undefined" for name in names]

    def _refuse_stars(self, node: ast.Call) -> None:
        """Their number is not known, so what comes after them by name has no place."""
        if any(isinstance(each, ast.Starred) for each in node.args):
            self._refuse(node, "`*` before arguments by name")

    def _keywords(self, keywords: list[ast.keyword]) -> str:
        return self._object((ast.Constant(each.arg) if each.arg else None, each.value) for each in keywords)


def _parameters(function: Any) -> tuple[list[str], bool]:
    """Names, and whether it takes any others by name."""
    every = inspect.signature(function).parameters
    names = [name for name, each in every.items() if each.kind is not each.VAR_KEYWORD]
    return names, len(names) < len(every)
