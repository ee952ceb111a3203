"""Where encoded images lie: folders, servers, buckets, simulated disks. A store yields bytes by key."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
