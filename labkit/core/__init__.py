"""What all rooms share: the machine, atomic writes, locks, packed strings, argument checks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
