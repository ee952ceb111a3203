"""A function that a command line names: module:function, of the current folder or anything installed."""

import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any

from labkit.tuning.epochs import CannotDiagnose


def named_function(name: str) -> Any:
    """The function behind `package.module:function`.

    Raises:
        CannotDiagnose: not of that form, no such module or function; says which. What the module itself raises while
            it is imported is passed on.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name or module_name.endswith(".py"):
        raise CannotDiagnose(
            f"{name!r}: write module:function, such as train:make_training for train.py in this folder"
        )
    if module_name.startswith("."):
        raise CannotDiagnose(f"{name!r}: a module is named from the folder where the command is given, without a dot")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the script lies where the command is given
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise CannotDiagnose(
                f"there is no module {module_name} here ({os.getcwd()}) and none is installed"
            ) from None
        raise
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
        found = [key for key in own if inspect.isfunction(vars(module)[key])]
        raise CannotDiagnose(
            f"{module_name} has no function {function_name}; it has {', '.join(sorted(found)) or 'none'}"
        )
    return function


def made_training(name: str, arguments: Sequence[str] = ()) -> tuple[Any, Any]:
    """What the function gives: a loader and a step.

    Args:
        name: `package.module:function`.
        arguments: What the script finds in `sys.argv`, as if it were started with them.

    Raises:
        CannotDiagnose: it gives something else, or wants arguments of its own.
    """
    sys.argv = [name.partition(":")[0], *arguments]
    function = named_function(name)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise CannotDiagnose(f"{name}: {error}; a function without arguments is wanted") from None
    made = function()
    if not (isinstance(made, tuple | list) and len(made) == 2 and hasattr(made[0], "__iter__") and callable(made[1])):
        found = ", ".join(type(part).__name__ for part in (made if isinstance(made, tuple | list) else [made]))
        raise CannotDiagnose(f"{name} gave {found}: return loader, step, where step(batch) trains on a batch")
    return made[0], made[1]
