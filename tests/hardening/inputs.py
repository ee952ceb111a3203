"""Images and tars as bytes, and the checksums of tars made right after a change."""

import io

from PIL import Image

from tests.image_files import encoded
from tests.tars import Member, make_tar


def image_bytes(size: tuple[int, int] = (16, 12), kind: str = "PNG", **options) -> bytes:
    """An image of one colour."""
    return encoded(Image.new("RGB", size, (200, 10, 10)), kind, **options)


def files_of(store) -> dict[str, bytes]:
    return {key: store.read(key) for key in list(store.keys())}


def tar_bytes(*members: Member, **options) -> bytes:
    buffer = io.BytesIO()
    make_tar(None, members, fileobj=buffer, **options)
    return buffer.getvalue()


def fix_tar(data: bytes) -> bytes:
    """Make the checksum of every header right: a fuzzer does not guess one, an attacker computes it."""
    blocks = bytearray(data)
    for start in range(0, len(blocks) - 511, 512):
        if blocks[start + 257 : start + 262] == b"ustar":
            blocks[start + 148 : start + 156] = b" " * 8
            blocks[start + 148 : start + 156] = b"%06o\0 " % sum(blocks[start : start + 512])
    return bytes(blocks)
