"""A function that a command line names: module:function, of the current folder or anything installed."""

import importlib
import os
import sys
from typing import Any


def named_function(name: str) -> Any:
    """The function behind `package.module:function`.

    Raises:
        ValueError: not of that form, no such module or function; says which. What the module itself raises while it
            is imported is passed on.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"{name!r}: write module:function, such as train:make_training for train.py in this folder")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the script lies where the command is given
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ValueError(f"there is no module {module_name} here ({os.getcwd()}) and none is installed") from None
        raise
    function = getattr(module, function_name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{module_name} has no function {function_name}; it has {', '.join(sorted(found)) or 'none'}")
    return function


def made_training(name: str) -> tuple[Any, Any]:
    """What the function gives: a loader and a step.

    Raises:
        ValueError: it gives something else.
    """
    made = named_function(name)()
    if not (isinstance(made, tuple | list) and len(made) == 2 and hasattr(made[0], "__iter__") and callable(made[1])):
        raise ValueError(
            f"{name} gave a {type(made).__name__}: return loader, step, where step(batch) trains on a batch"
        )
    return made[0], made[1]
