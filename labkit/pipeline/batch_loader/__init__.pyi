# fmt: off
from .loader import BatchLoader as BatchLoader
