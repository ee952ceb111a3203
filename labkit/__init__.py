"""labkit: how image data reaches a GPU in PyTorch, measured one step at a time.

`import labkit as lk` gives the names that `__init__.pyi` lists. Each is imported on first use (PEP 562), so that the
command line starts without loading torch; editors and type checkers read the same list. Only the standard library is
imported here: the processes of a watched training import this package.
"""

import ast
from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

_HOME = {
    name.name: f"{__name__}.{line.module}"
    for line in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(line, ast.ImportFrom)
    for name in line.names
}
__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        from labkit.util.machine import is_labkits, missing_library

        if not is_labkits(error):
            raise
        extra = "lab" if _HOME[name].endswith((".plots", ".samples")) else "loaders"
        raise missing_library(f"lk.{name}", extra, error) from None


def __dir__():
    return __all__


def load_ipython_extension(shell) -> None:
    """`%load_ext labkit` gives the cell magic `%%variant`."""
    from labkit.app.magics import VariantMagics

    shell.register_magics(VariantMagics)
