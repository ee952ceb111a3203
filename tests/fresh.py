"""Modules run once more."""

import importlib.util
from types import ModuleType


def fresh_copy(module: ModuleType) -> ModuleType:
    """A second one, which takes what it imports as that is now, and has caches of its own."""
    spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
