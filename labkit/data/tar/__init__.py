"""Tars: an index that finds members, a strict reader, and a store over them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
