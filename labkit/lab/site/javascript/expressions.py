"""Expressions of Python as JavaScript: those that formulas need, and no others."""

import ast
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Protocol

from labkit.lab.site.javascript.tables import COMPARISONS, FORMATS, FUNCTIONS, OPERATIONS


class Untranslatable(ValueError):
    """Python that the translation does not know; its text names it and its place."""


class Program(Protocol):
    """What collects the things that a function uses."""

    methods: set[str]

    def add(self, name: str, value: Any) -> str: ...

    def constant(self, name: str, value: Any, namespace: Mapping[str, Any]) -> str: ...


class Expressions:
    """Translates expressions; `where` names their place in errors, `namespace` are the globals there."""

    def __init__(self, where: str, namespace: Mapping[str, Any], program: Program):
        self._where, self._namespace, self._program = where, namespace, program
        self._locals: set[str] = set()

    def expression(self, node: ast.AST) -> str:
        self._locals |= names_of(node)
        return self._of(node)

    def _refuse(self, node: ast.AST, what: str = "") -> NoReturn:
        name, line = what or type(node).__name__, getattr(node, "lineno", "?")
        raise Untranslatable(f"{self._where}, line {line}: {name} is not known: {ast.unparse(node)}")

    def _of(self, node: ast.AST) -> str:
        make: Callable[[Any], str] | None = getattr(self, f"_{type(node).__name__}", None)
        return make(node) if make else self._refuse(node)

    def _target(self, node: ast.AST) -> str:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Tuple):
            return f"[{', '.join(self._target(each) for each in node.elts)}]"
        if isinstance(node, ast.Subscript):
            return f"{self._of(node.value)}[{self._of(node.slice)}]"
        return self._refuse(node, "an assignment to it")

    def _Constant(self, node: ast.Constant) -> str:
        if node.value is not None and not isinstance(node.value, bool | int | float | str):
            self._refuse(node)
        return json.dumps(node.value, ensure_ascii=False)

    def _Name(self, node: ast.Name) -> str:
        name = node.id
        if name in self._locals:
            return name
        if name in self._namespace:
            value = self._namespace[name]
            return self._program.constant(name, value, self._namespace)
        if name in FUNCTIONS:
            return f"py.{name}"
        return self._refuse(node, f"the name {name}")

    def _Attribute(self, node: ast.Attribute) -> str:
        if self._dotted(node):
            self._refuse(node, ast.unparse(node))
        return f"{self._of(node.value)}.{node.attr}"

    def _dotted(self, node: ast.AST) -> str:
        """`np.minimum.reduce` and the like, of a module or a builtin class; the name itself; or nothing."""
        if isinstance(node, ast.Name):
            return node.id
        parts = ast.unparse(node).split(".")
        found = self._namespace.get(parts[0])
        is_global = inspect.ismodule(found) or (parts[0] == "dict" and found is None)
        return ".".join(parts) if is_global and parts[0] not in self._locals else ""

    def _Subscript(self, node: ast.Subscript) -> str:
        if isinstance(node.slice, ast.Slice):
            self._refuse(node, "a slice")
        return f"py.item({self._of(node.value)}, {self._of(node.slice)})"

    def _BinOp(self, node: ast.BinOp) -> str:
        if isinstance(node.op, ast.Pow):
            if not isinstance(node.right, ast.Constant) or node.right.value != 2:
                self._refuse(node, "a power other than 2")
            return f"py.square({self._of(node.left)})"
        return self._operation(node.op, node, self._of(node.left), self._of(node.right))

    def _operation(self, operator: ast.operator, node: ast.AST, left: str, right: str) -> str:
        if type(operator) not in OPERATIONS:
            self._refuse(node, f"the operator {type(operator).__name__}")
        return f"py.{OPERATIONS[type(operator)]}({left}, {right})"

    def _UnaryOp(self, node: ast.UnaryOp) -> str:
        if isinstance(node.op, ast.USub):
            return f"py.sub(0, {self._of(node.operand)})"
        if isinstance(node.op, ast.Not):
            return f"(!py.truth({self._of(node.operand)}))"
        return self._refuse(node, f"the operator {type(node.op).__name__}")

    def _BoolOp(self, node: ast.BoolOp) -> str:
        name = "and" if isinstance(node.op, ast.And) else "or"
        return f"py.{name}({', '.join(f'() => ({self._of(each)})' for each in node.values)})"

    def _Compare(self, node: ast.Compare) -> str:
        if len(node.ops) > 1:
            self._refuse(node, "a chain of comparisons")
        operator, left, right = node.ops[0], self._of(node.left), self._of(node.comparators[0])
        if isinstance(operator, ast.In | ast.NotIn):
            return f"{'!' if isinstance(operator, ast.NotIn) else ''}py.has({right}, {left})"
        if isinstance(operator, ast.Is | ast.IsNot):
            if right != "null":
                self._refuse(node, "`is` with anything but None")
            return f"({left} {'===' if isinstance(operator, ast.Is) else '!=='} null)"
        return f"py.{COMPARISONS[type(operator)]}({left}, {right})"

    def _IfExp(self, node: ast.IfExp) -> str:
        return f"(py.truth({self._of(node.test)}) ? {self._of(node.body)} : {self._of(node.orelse)})"

    def _NamedExpr(self, node: ast.NamedExpr) -> str:
        return f"({node.target.id} = {self._of(node.value)})"

    def _Lambda(self, node: ast.Lambda) -> str:
        return f"(({', '.join(each.arg for each in node.args.args)}) => {self._of(node.body)})"

    def _List(self, node: ast.List | ast.Tuple) -> str:
        return f"[{', '.join(map(self._of, node.elts))}]"

    _Tuple = _List

    def _Set(self, node: ast.Set) -> str:
        return f"py.set([{', '.join(map(self._of, node.elts))}])"

    def _Starred(self, node: ast.Starred) -> str:
        return f"...py.list({self._of(node.value)})"

    def _Dict(self, node: ast.Dict) -> str:
        return self._object(zip(node.keys, node.values, strict=True))

    def _object(self, pairs: Iterable[tuple[ast.expr | None, ast.expr]]) -> str:
        parts = [f"[{self._of(key)}]: {self._of(value)}" if key else f"...{self._of(value)}" for key, value in pairs]
        return "({" + ", ".join(parts) + "})"

    def _JoinedStr(self, node: ast.JoinedStr) -> str:
        return "(" + " + ".join(['""', *map(self._of, node.values)]) + ")"

    def _FormattedValue(self, node: ast.FormattedValue) -> str:
        spec = ast.unparse(node.format_spec)[2:-1] if node.format_spec else ""
        if spec not in FORMATS or node.conversion not in (-1, ord("r")):
            self._refuse(node, f"the format {spec!r}")
        value = self._of(node.value)
        return f"py.repr({value})" if node.conversion == ord("r") else f"py.format({value}, {json.dumps(spec)})"

    def _ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> str:
        return self._comprehension(node.generators, self._of(node.elt))

    _GeneratorExp = _ListComp

    def _SetComp(self, node: ast.SetComp) -> str:
        return f"py.set({self._comprehension(node.generators, self._of(node.elt))})"

    def _DictComp(self, node: ast.DictComp) -> str:
        pair = f"[{self._of(node.key)}, {self._of(node.value)}]"
        return f"py.dict({self._comprehension(node.generators, pair)})"

    def _comprehension(self, generators: list[ast.comprehension], element: str) -> str:
        [first, *rest] = generators
        code, target = f"py.list({self._of(first.iter)})", f"({self._target(first.target)})"
        for condition in first.ifs:
            code += f".filter({target} => py.truth({self._of(condition)}))"
        if rest:
            return f"{code}.flatMap({target} => {self._comprehension(rest, element)})"
        return f"{code}.map({target} => {element})"


def names_of(node: ast.AST) -> set[str]:
    """All names that are bound anywhere in it."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.arg):
            found.add(each.arg)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            found.add(each.id)
        elif isinstance(each, ast.FunctionDef) and each is not node:
            found.add(each.name)
    return found
