# fmt: off
from .config import LoaderConfig as LoaderConfig, cores_per_rank as cores_per_rank
from .loader import Loader as Loader, make_loader as make_loader
from .workers import worker_context as worker_context
