"""Images decoded and resized once, then read from one memory-mapped file."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
