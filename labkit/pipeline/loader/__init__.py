"""torch's DataLoader with the settings that are easy to get wrong already right."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
