"""Images, tars and pixel files as bytes, and their checksums made right after a change."""

import io
import struct
import zlib

from PIL import Image

from tests.image_files import encoded
from tests.tars import Member, make_tar, member


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


def fix_png(data: bytes) -> bytes:
    """Make the checksum of every chunk right."""
    fixed, at = bytearray(data), 8
    while at + 12 <= len(fixed):
        end = at + 8 + int.from_bytes(fixed[at : at + 4], "big")
        fixed[end : end + 4] = struct.pack(">I", zlib.crc32(fixed[at + 4 : end]))
        at = end + 4
    return bytes(fixed[: len(data)])


def sparse_member(name: str, real_size: int, offset: int, length: int, data: bytes = b"") -> Member:
    """A member in GNU's sparse format 1.0, of one piece: its map fills a block, then comes what is stored."""
    about = {"major": "1", "minor": "0", "name": name, "realsize": str(real_size)}
    headers = {f"GNU.sparse.{key}": value for key, value in about.items()}
    return member("sparse", f"1\n{offset}\n{length}\n".encode().ljust(512, b"\0") + data, pax_headers=headers)
