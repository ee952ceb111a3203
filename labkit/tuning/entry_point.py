"""Find the function that a command line names as module:function, and call it for a loader and a step."""

import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from labkit.tuning.epochs import CannotDiagnose


def named_function(name: str) -> Any:
    """The function behind `package.module:function`, from the current folder or from what is installed.

    Raises:
        CannotDiagnose: another form, no such module or no such function. What the module itself raises while it is
            imported is passed on.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name or module_name.endswith(".py"):
        example = "train:make_training for train.py in this folder"
        raise CannotDiagnose(f"{name!r}: write module:function, such as {example}")
    if module_name.startswith("."):
        raise CannotDiagnose(f"{name!r}: name the module from the current folder, without a leading dot")
    module = _import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [key for key, value in inspect.getmembers(module, inspect.isfunction) if value.__module__ == module_name]
        raise CannotDiagnose(f"{module_name} has no function {function_name}; it has {', '.join(own) or 'none'}")
    return function


def _import_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise CannotDiagnose(f"there is no module {name} here ({os.getcwd()}) and none is installed") from None
        raise


def made_training(name: str, arguments: Sequence[str] = ()) -> tuple[Any, Any]:
    """The loader and the step that the function returns.

    Args:
        name: `package.module:function`.
        arguments: For the script's `sys.argv`, as if it were started with them.

    Raises:
        CannotDiagnose: it returns something else, or needs arguments of its own.
    """
    sys.argv = [name.partition(":")[0], *arguments]
    function = named_function(name)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise CannotDiagnose(f"{name}: {error}; it must work without arguments") from None
    returned = function()
    parts = returned if isinstance(returned, tuple | list) else [returned]
    if len(parts) != 2 or not hasattr(parts[0], "__iter__") or not callable(parts[1]):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise CannotDiagnose(f"{name} gave {kinds}: return loader, step, where step(batch) trains on a batch")
    return parts[0], parts[1]
