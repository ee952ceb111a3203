"""How many cores, which storage and how many requests a training on many GPUs asks for; needs no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
