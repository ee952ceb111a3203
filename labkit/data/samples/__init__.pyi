# fmt: off
from .photos import make_photos as make_photos
