# fmt: off
from .parts import shrink as shrink
from .store import PixelStore as PixelStore
