"""A function of Python as JavaScript: its parameters and statements."""

import ast
from collections.abc import Iterator

from labkit.lab.site.javascript.calls import Calls
from labkit.lab.site.javascript.expressions import names_of
from labkit.lab.site.javascript.tables import RESERVED


class FunctionTranslator(Calls):
    """Translates one function, with those within it."""

    def function(self, node: ast.FunctionDef) -> str:
        """Parameters and body."""
        parameters, body = self._whole(node, node.args.args)
        return f"{parameters} {{ {body} }}"

    def method(self, node: ast.FunctionDef) -> tuple[str, str]:
        """Parameters without `self`, and body."""
        parameters, body = self._whole(node, node.args.args[1:])
        return parameters, f"const self = this; {body}"

    def _whole(self, node: ast.FunctionDef, arguments: list[ast.arg]) -> tuple[str, str]:
        self._locals |= names_of(node)
        self._check_names(node)
        every = arguments + node.args.kwonlyargs
        if node.args.vararg or node.args.posonlyargs:
            self._refuse(node.args, "such parameters")
        ordinary = node.args.defaults
        defaults: list[ast.expr | None] = [None] * (len(arguments) - len(ordinary)) + [*ordinary]
        defaults += node.args.kw_defaults
        given = [
            each.arg + (f" = {self._of(default)}" if default else "")
            for each, default in zip(every, defaults, strict=True)
        ]
        if node.args.kwarg:
            given.append(f"{node.args.kwarg.arg} = {{}}")
        names = {each.arg for each in every} | ({node.args.kwarg.arg} if node.args.kwarg else set())
        fresh = sorted(set(_assigned(node.body)) - names)
        return f"({', '.join(given)})", (f"let {', '.join(fresh)}; " if fresh else "") + self._block(node.body)

    def _check_names(self, node: ast.AST) -> None:
        if bad := sorted(self._locals & RESERVED):
            self._refuse(node, f"{bad[0]}, a word of JavaScript, as a name")

    def _block(self, nodes: list[ast.stmt]) -> str:
        return " ".join(self._of(node) for node in nodes if not _is_text(node))

    def _Return(self, node: ast.Return) -> str:
        return f"return {self._of(node.value) if node.value else 'null'};"

    def _If(self, node: ast.If) -> str:
        rest = f" else {{ {self._block(node.orelse)} }}" if node.orelse else ""
        return f"if (py.truth({self._of(node.test)})) {{ {self._block(node.body)} }}{rest}"

    def _While(self, node: ast.While) -> str:
        if node.orelse:
            self._refuse(node, "else of a loop")
        return f"while (py.truth({self._of(node.test)})) {{ {self._block(node.body)} }}"

    def _For(self, node: ast.For) -> str:
        if node.orelse:
            self._refuse(node, "else of a loop")
        return f"for ({self._target(node.target)} of py.list({self._of(node.iter)})) {{ {self._block(node.body)} }}"

    def _Assign(self, node: ast.Assign) -> str:
        if len(node.targets) > 1:
            self._refuse(node, "an assignment to several names")
        [target] = node.targets
        value = self._of(node.value)
        if isinstance(target, ast.Tuple):
            return f"{self._target(target)} = py.list({value});"
        return f"{self._target(target)} = {value};"

    def _AnnAssign(self, node: ast.AnnAssign) -> str:
        if node.value is None:
            self._refuse(node, "a name without a value")
        return f"{self._target(node.target)} = {self._of(node.value)};"

    def _AugAssign(self, node: ast.AugAssign) -> str:
        target = self._target(node.target)
        return f"{target} = {self._operation(node.op, node, target, self._of(node.value))};"

    def _FunctionDef(self, node: ast.FunctionDef) -> str:
        return f"const {node.name} = (function {self.function(node)});"

    def _Expr(self, node: ast.Expr) -> str:
        return f"{self._of(node.value)};"

    def _Raise(self, node: ast.Raise) -> str:
        made = node.exc
        if not isinstance(made, ast.Call) or not isinstance(made.func, ast.Name) or made.func.id != "ValueError":
            self._refuse(node, "raising anything but ValueError")
        return f"throw new py.ValueError({self._of(made.args[0])});"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _assigned(nodes: list[ast.stmt]) -> Iterator[str]:
    """Names that become variables of the function: not those of functions and comprehensions within it."""
    waiting: list[ast.AST] = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if isinstance(node, ast.comprehension):
            waiting += [node.iter, *node.ifs]
        elif not isinstance(node, ast.FunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
