# fmt: off
from .config import LoaderConfig as LoaderConfig
from .loader import Loader as Loader, make_loader as make_loader
