"""A line of a plan: a formula whose parameters name what it uses, and how a list of them is computed."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

Draws = np.ndarray
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Line:
    """A quantity that is computed.

    Args:
        group: `need` (to keep the GPUs busy), `ceiling` (images/s at most) or `result`.
        label: Its name in a plan.
        unit: Of its values.
        function: Takes and gives arrays; its docstring is the formula as a plan shows it, and its parameters name
            inputs and earlier lines. One that has a default may be unknown.
        is_remote: Has a meaning only if images come over a network.
    """

    group: str
    label: str
    unit: str
    function: Callable[..., Any]
    is_remote: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def formula(self) -> str:
        return " ".join((inspect.getdoc(self.function) or "").split())

    @cached_property
    def uses(self) -> list[str]:
        return list(inspect.signature(self.function).parameters)

    @cached_property
    def needs(self) -> set[str]:
        parameters = inspect.signature(self.function).parameters
        return {name for name, each in parameters.items() if each.default is inspect.Parameter.empty}


def compute(lines: Iterable[Line], draws: dict[str, Draws]) -> dict[str, Draws]:
    """The draws, and after them those of every line whose inputs are known."""
    found = dict(draws)
    for line in lines:
        if line.needs <= set(found):
            found[line.name] = np.asarray(line.function(**{name: found[name] for name in line.uses if name in found}))
    return found


def line(lines: list[Line], group: str, label: str, unit: str, *, is_remote: bool = False) -> Callable[[_F], _F]:
    """Add the function that follows to `lines`."""

    def add(function: _F) -> _F:
        lines.append(Line(group, label, unit, function, is_remote))
        return function

    return add
