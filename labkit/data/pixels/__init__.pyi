from .store import PixelStore as PixelStore
