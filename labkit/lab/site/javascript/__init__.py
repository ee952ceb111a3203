"""Functions of Python as JavaScript, so that a page computes with the very formulas that labkit has."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
