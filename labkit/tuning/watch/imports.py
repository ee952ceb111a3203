"""Change modules as the program imports them, without importing any: what it sets before an import still has effect."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], object]


class WhenImported:
    """A finder of `sys.meta_path` that calls a function with a module once its code has run: at once, if it has.

    Attributes:
        failed: A line for each module for which the function failed, such as one of a version that is not known.
    """

    def __init__(self) -> None:
        self._changes: dict[str, Change] = {}
        self._looking = set[str]()
        self.failed: list[str] = []

    def start(self, changes: dict[str, Change]) -> None:
        """Call these functions, by the full names of their modules."""
        self._changes = changes
        for name in [name for name in changes if name in sys.modules]:
            self._imported(sys.modules[name])
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Call none of them any more."""
        self._changes = {}
        if self in sys.meta_path:  # a program may have put others in its place
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """What the other finders find; its loader tells this object when it has run the module's code."""
        if name not in self._changes or name in self._looking:  # another finder may ask all of them, too
            return None
        self._looking.add(name)
        try:
            specs = (finder.find_spec(name, path, target) for finder in list(sys.meta_path) if finder is not self)
            found = next((spec for spec in specs if spec is not None), None)
        finally:
            self._looking.discard(name)
        with suppress(AttributeError):  # a loader that cannot be followed still imports
            self._follow(found.loader)  # type: ignore[union-attr]
        return found

    def _follow(self, loader: Any) -> None:
        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the loader is as it was, and the module's for good
            loader.exec_module(module)
            self._imported(module)

        loader.exec_module = exec_module

    def _imported(self, module: ModuleType) -> None:
        change = self._changes.pop(module.__name__, None)
        if change is not None:
            try:
                change(module)
            except Exception as error:  # the program's import must not fail
                self.failed.append(f"{module.__name__} is of a version that is not known: {error!r}")
