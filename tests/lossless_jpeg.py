"""A writer of lossless JPEGs (ITU-T T.81, process 14), which Pillow and OpenCV do not have."""

import struct

import numpy as np

_LENGTH = 5  # bits of each Huffman code: of 17 categories of differences, and code words of ones alone are forbidden


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
