"""What runs the lab: command line, tour, report, JupyterLab."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
