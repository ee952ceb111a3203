# fmt: off
from .pairs import decode_picture as decode_picture, make_sample as make_sample
