"""JPEGs of every process of the standard (ITU-T T.81), most of which Pillow and OpenCV do not write."""

import base64
import struct
from functools import cache

import numpy as np
from PIL import Image

from tests.image_files import encoded

HEIGHT, WIDTH = 96, 128  # of most of them
# With coefficients of 8 bits a sample.
SCALABLE = ("baseline", "behind fill bytes", "progressive", "arithmetic", "arithmetic progressive")
_RARE = (3, 5, 6, 7, 11, 13, 14, 15)
_LENGTH = 5  # bits of each Huffman code: of 17 categories of differences, and code words of ones alone are forbidden

# 64 x 48 pixels of libjpeg-turbo 3 with arithmetic coding, sequential and progressive, and 16 x 16 of 12 bits a sample.
ARITHMETIC = """\
/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAUDBAQEAwUEBAQFBQUGBwwIBwcHBw8LCwkMEQ8SEhEPERETFhwXExQaFRERGCEYGh0dHx8fExciJCIe
JBweHx7/2wBDAQUFBQcGBw4ICA4eFBEUHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh7/yQARCAAwAEAD
AREAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/ANzICOTdezcfcCuEyhRZ7gfOt/a8V8h+339iyvb3Oc+1To734gRzCTK2U/tMr72I
uTpKV90w01fl8TG9jxVehqGLPw30FXyNanzeqamk7afa+4NMgn90XlLn/wCfMfDEWxCW+uzMmSiP0a0qYNKi7Xvs7R3Ftt8EKPu2pRN16y52Phoy
cHnzBHWb6L2qfVn+T6Ux1tOH99ui3b0a/Ultlx8a4A6P6jVOwPkuU376e5oaX8how+1wj7+XjGpuWodNzVO3lfYwPvGQKNPB+L+lGn9KL5knLTfI
iWoCQBEP9GFI80xVcTY0eI2vI2BaaOnCw+yyeXnTSZEyJeQ4FySYMdVuxkeIpWSchO+B0qoOcSPgIksHvIH7ZUk4rmrx+yNbULY4/9k="""
ARITHMETIC_PROGRESSIVE = """\
/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAUDBAQEAwUEBAQFBQUGBwwIBwcHBw8LCwkMEQ8SEhEPERETFhwXExQaFRERGCEYGh0dHx8fExciJCIe
JBweHx7/2wBDAQUFBQcGBw4ICA4eFBEUHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh7/ygARCAAwAEAD
AREAAhEBAxEB/8wABgAQARD/2gAMAwEAAhADEAAAAf8AuYh5ogJ1vNEXLLCCmAhbInIu8dQV8o8C9sln7xBw9uVgjyLuEZ0jaYvxfBxeh+13T45L
fK1JsfIDCrmuvJLds2JjuK81I0KAgT/4QyA4/8wABBAF/9oACAEBAAEFAh6dkZernxcThuOJhx81T+IdRv8AIclkli5kzYSlKUpSlKUg/8wABBEF
/9oACAEDAQE/ARe0w3zIHf0v37BDGMYxjGMYxjGMYxjGMYxjGMYxjGMYwP/MAAQRBf/aAAgBAgEBPwF+gjmMVDD/zAAEEAX/2gAIAQEABj8CqP/M
AAQQBf/aAAgBAQABPyENZI07pcWnUT9DHnnVa7vj/9oADAMBAAIAAwAAABC2iEUSFcc8hQagZkfnLLevTtD/zAAEEQX/2gAIAQMBAT8QvGz/zAAE
EQX/2gAIAQIBAT8Q31OI1kkkkkkkkv/MAAQQBf/aAAgBAQABPxCoE3iCK7M8uOdAjoIKMOJ/0H//2Q=="""
TWELVE_BITS = """\
/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4UG1RV19iZ2hnPk1xeXBk
eFxlZ2P/2wBDARESEhgVGC8aGi9jQjhCY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2P/wQARDAAQABAD
AREAAhEBAxEB/8QAFQABAQAAAAAAAAAAAAAAAAAABwr/xAAZEAABBQAAAAAAAAAAAAAAAAAABgcjMqH/xAAYAQADAQEAAAAAAAAAAAAAAAAEBQcG
CP/EABoRAAEFAQAAAAAAAAAAAAAAAAADBAUGITH/2gAMAwEAAhEDEQA/AIf0y2VIMBknYJA2Xmi4mWypBg0SdlvgbLzRvTLZUgwwiTs4IgbLzRbT
LZUgwZpOy3wNl5p//9k="""


@cache
def jpeg_of_each_process() -> dict[str, bytes]:
    """Sound ones, and some that no decoder reads."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    channels = [columns * 255 // WIDTH, rows * 255 // HEIGHT, (rows + columns) * 255 // (HEIGHT + WIDTH)]
    pixels = np.stack(channels, 2)
    image = Image.fromarray(pixels.astype(np.uint8))
    plain, lossless = encoded(image, quality=92), lossless_jpeg(pixels)
    frame = plain.index(b"\xff\xc0")
    return {
        "baseline": plain,
        "behind fill bytes": plain[:2] + b"\xff\xff\xff" + plain[2:],
        "progressive": encoded(image, quality=92, progressive=True),
        "arithmetic": base64.b64decode(ARITHMETIC),
        "arithmetic progressive": base64.b64decode(ARITHMETIC_PROGRESSIVE),
        "12 bits": base64.b64decode(TWELVE_BITS),
        "lossless": lossless,
        "lossless gray": lossless_jpeg(pixels[..., :1]),
        "lossless CMYK": lossless_jpeg(pixels[..., [0, 1, 2, 2]]),
        "lossless 12 bits": lossless_jpeg(pixels * 16, bits=12),
        "lossless 16 bits": lossless_jpeg(pixels * 256, bits=16),
        "hierarchical": plain[:2] + b"\xff\xde" + plain[frame + 2 : frame + 21] + plain[2:],
        # A marker without a length: who reads one there skips the lossless frame, and finds the other.
        "lossless behind TEM": _hidden(lossless, plain[frame : frame + 19]),
        **{f"SOF{number}": plain[: frame + 1] + bytes([0xC0 + number]) + plain[frame + 2 :] for number in _RARE},
    }


def _hidden(lossless: bytes, other_frame: bytes) -> bytes:
    frame = lossless.index(b"\xff\xc3")
    return lossless[:frame] + b"\xff\x01" + lossless[frame:].ljust(0xFFC3, b"\0") + other_frame + b"\xff\xd9"


def lossless_jpeg(pixels: np.ndarray, bits: int = 8) -> bytes:
    """Encode (H, W, C) samples of so many bits, C from 1 to 4; each is predicted from the one on its left."""
    height, width, channels = pixels.shape
    categories, extra = _differences(pixels.astype(np.int64), bits)
    codes = [
        f"{category:0{_LENGTH}b}" + (f"{low:0{category}b}" if 0 < category < 16 else "")
        for category, low in zip(categories.tolist(), extra.tolist(), strict=True)
    ]
    stream = "".join(codes)
    stream += "1" * (-len(stream) % 8)
    scan = int(stream, 2).to_bytes(len(stream) // 8, "big").replace(b"\xff", b"\xff\0")
    ids = b"RGB" if channels == 3 else b"1234"[:channels]
    frame = struct.pack(">BHHB", bits, height, width, channels) + b"".join(bytes([name, 0x11, 0]) for name in ids)
    lengths = bytes(17 if length == _LENGTH else 0 for length in range(1, 17))
    table = b"\0" + lengths + bytes(range(17))
    scan_header = bytes([channels]) + b"".join(bytes([name, 0]) for name in ids) + b"\1\0\0"
    segments = [(0xC3, frame), (0xC4, table), (0xDA, scan_header)]
    head = b"".join(bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body for marker, body in segments)
    return b"\xff\xd8" + head + scan + b"\xff\xd9"


def _differences(pixels: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The category of each difference, and its lowest bits: of a negative one those of the number below it."""
    predicted = np.roll(pixels, 1, axis=1)
    predicted[1:, 0] = pixels[:-1, 0]
    predicted[0, 0] = 1 << (bits - 1)
    differences = (pixels - predicted + 32767) % 65536 - 32767
    categories = np.ceil(np.log2(np.abs(differences) + 1)).astype(np.int64)
    low = np.where(differences < 0, differences - 1, differences) & ((1 << categories) - 1)
    return categories.ravel(), low.ravel()
