"""The reader's own training: what it waits for, and which settings help."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
