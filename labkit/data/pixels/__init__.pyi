# fmt: off
from .store import PixelStore as PixelStore
