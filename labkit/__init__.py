"""labkit: how image data reaches a GPU in PyTorch, measured one step at a time.

`import labkit as lk` gives the names that `__init__.pyi` lists. Each is imported on first use (PEP 562), so that the
command line starts without loading torch; editors and type checkers read the same list.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def load_ipython_extension(shell) -> None:
    """`%load_ext labkit` gives the cell magic `%%variant`."""
    from labkit.app.magics import VariantMagics

    shell.register_magics(VariantMagics)
