"""A simulated CUDA device: streams, copies, an allocator and a clock, for machines without a GPU."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
