"""What every room needs and no reader thinks about: the machine, whole-file writes, locks, packed strings."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
