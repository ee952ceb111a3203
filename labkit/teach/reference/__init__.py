"""Stored runs of machines with a CUDA GPU, for readers who have none."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
