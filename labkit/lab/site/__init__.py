"""`python -m labkit site`: the stored notebooks, the API, the claims, the peers and the records as pages."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
