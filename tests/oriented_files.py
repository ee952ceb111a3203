"""Images that say in odd ways how they are to be turned, and images whose metadata are broken: JPEG, PNG and WebP.

Each shows four colored quarters, so whatever is made of it tells how it was turned: `turn_of`.
"""

import struct
import zlib
from functools import cache

import numpy as np
from PIL import Image

from labkit.course.oracles import exif_of, oracle_files, png_chunk
from tests.image_files import encoded

WIDTH, HEIGHT = 80, 48
_QUARTERS = np.array([[[220, 20, 20], [20, 200, 20]], [[20, 20, 220], [240, 240, 240]]], np.uint8)
PIXELS = _QUARTERS.repeat(HEIGHT // 2, 0).repeat(WIDTH // 2, 1)  # of every file, as it is stored

# What brings the stored pixels (H, W, 3) upright, by orientation: the EXIF standard's table, in NumPy's words.
UPRIGHT = {
    1: lambda pixels: pixels, 2: lambda pixels: pixels[:, ::-1], 3: lambda pixels: np.rot90(pixels, 2),
    4: lambda pixels: pixels[::-1], 5: lambda pixels: pixels.swapaxes(0, 1), 6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.rot90(pixels, 2).swapaxes(0, 1), 8: lambda pixels: np.rot90(pixels, 1),
}  # fmt: skip


def turn_of(pixels: np.ndarray) -> int | None:
    """The orientation by which the picture was turned, from its pixels (H, W, 3); None if they show no such picture."""
    height, width = pixels.shape[:2]
    corners = pixels[[height // 4, -height // 4]][:, [width // 4, -width // 4]].astype(int)
    return next((turn for turn in UPRIGHT if np.abs(corners - UPRIGHT[turn](_QUARTERS)).max() < 60), None)


@cache
def stated_oddly() -> dict[str, bytes]:
    """Files that Pillow opens, and turns or not."""
    return {**_jpegs(), **_pngs(), **_webps()}


@cache
def camera_files() -> dict[str, bytes]:
    """In each format and each orientation, as cameras state it: `3.png`."""
    return {
        f"{number}.{image_format.lower()}": _plain(image_format, exif=exif_of(number))
        for image_format in ("JPEG", "PNG", "WEBP")
        for number in UPRIGHT
    }


@cache
def broken() -> dict[str, bytes]:
    """Sound pictures whose metadata state nothing that Pillow can read."""
    jpeg, with_dpi, png = _plain("JPEG"), _plain("JPEG", dpi=(72, 72)), _plain("PNG")
    garbage = b"a text by some tool"
    in_jpeg = {
        "garbage": garbage, "a short head": b"MM\0*",
        "a prefix thrice": b"Exif\0\0Exif\0\0" + tiff(orientation(6)),
    }  # fmt: skip
    raw, value = b"Raw profile type exif\0", b"\nexif\n 4\nnot hexadecimal"
    in_png = {
        "garbage": png_chunk(b"eXIf", garbage), "a raw profile": png_chunk(b"tEXt", raw + value),
        "a packed raw profile": png_chunk(b"zTXt", raw + b"\0" + zlib.compress(value)),
        "packed text": png_chunk(b"zTXt", b"exif\0\0" + zlib.compress(garbage)),
        "XMP under another name": png_chunk(b"tEXt", b"xmp\0" + xmp(6)),
        "text with a wrong checksum": png_chunk(b"tEXt", b"Comment\0hi")[:-4] + b"crc.",
        "EXIF with a wrong checksum": png_chunk(b"eXIf", b"II*\0")[:-4] + b"crc.",
        "half a size": png_chunk(b"pHYs", b"\0\0"),
        "text that does not inflate": png_chunk(b"zTXt", b"Comment\0\0no zlib"),
    }  # fmt: skip
    return {
        **{f"{name}.jpg": behind_jfif(jpeg, segment(b"Exif\0\0" + body)) for name, body in in_jpeg.items()},
        **{f"{name}, dpi.jpg": behind_jfif(with_dpi, segment(b"Exif\0\0" + body)) for name, body in in_jpeg.items()},
        "garbage and XMP, dpi.jpg": behind_jfif(with_dpi, segment(b"Exif\0\0" + garbage) + segment(xmp(6))),
        **{f"{name}.png": behind_header(png, chunk) for name, chunk in in_png.items()},
        **{f"{name} behind the pixels.png": behind_pixels(png, chunk) for name, chunk in in_png.items()},
        "garbage.webp": webp(EXIF=garbage),
        "a short head.webp": webp(EXIF=b"MM"),
        # Pillow does not open these, which other libraries read.
        "a photoshop block that is cut.jpg": behind_jfif(jpeg, segment(b"Photoshop 3.0\0008BIM\4\4", 0xED)),
        "a profile without a number.jpg": behind_jfif(jpeg, segment(b"ICC_PROFILE\0", 0xE2)),
    }


def turned_by_others() -> bytes:
    """To be turned by 6: Pillow does not open it, for a resolution of another type; other libraries do, and turn it."""
    resolution, unit = (0x11A, 2, 2, b"7\0\0\0"), (0x128, 3, 1, b"\0\2\0\0")
    return behind_jfif(_plain("JPEG"), segment(b"Exif\0\0" + tiff(orientation(6), resolution, unit)))


def tiff(*entries: tuple[int, int, int, bytes], order: str = ">") -> bytes:
    """A TIFF block with one directory of (tag, type, count, four bytes)."""
    head = (b"MM\0*" if order == ">" else b"II*\0") + struct.pack(f"{order}IH", 8, len(entries))
    return head + b"".join(struct.pack(f"{order}HHI4s", *entry) for entry in entries) + bytes(4)


def orientation(number: int, order: str = ">") -> tuple[int, int, int, bytes]:
    return 0x112, 3, 1, struct.pack(f"{order}HH", number, 0)


def exif(number: int) -> bytes:
    return b"Exif\0\0" + tiff(orientation(number))


def xmp(number: int) -> bytes:
    return b'http://ns.adobe.com/xap/1.0/\0<rdf:Description tiff:Orientation="%d"/>' % number


def segment(body: bytes, marker: int = 0xE1) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def behind_jfif(jpeg: bytes, added: bytes) -> bytes:
    return jpeg[:20] + added + jpeg[20:]


def behind_header(png: bytes, chunk: bytes) -> bytes:
    return png[:33] + chunk + png[33:]


def behind_pixels(png: bytes, chunk: bytes) -> bytes:
    return png[:-12] + chunk + png[-12:]


def webp(**chunks: bytes) -> bytes:
    """The picture with chunks behind it, and the flags that announce them."""
    names = {"EXIF": (b"EXIF", 8), "XMP": (b"XMP ", 4)}
    sides = (WIDTH - 1).to_bytes(3, "little") + (HEIGHT - 1).to_bytes(3, "little")
    flags = bytes([sum(names[key][1] for key in chunks), 0, 0, 0])
    body = b"VP8X" + struct.pack("<I", 10) + flags + sides + _plain("WEBP")[12:]
    for key, data in chunks.items():
        body += names[key][0] + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def _plain(image_format: str, **options) -> bytes:
    quality = {"quality": 95} if image_format == "JPEG" else {"lossless": True} if image_format == "WEBP" else {}
    return encoded(Image.fromarray(PIXELS), image_format, **quality, **options)


def _jpegs() -> dict[str, bytes]:
    jpeg = _plain("JPEG")
    scan, long = jpeg.index(b"\xff\xda"), (0x112, 4, 1, struct.pack(">I", 6))
    maker = 0x10F, 2, 10, struct.pack(">I", 9999)  # a text that lies behind the block's end
    blocks = {
        "EXIF": [exif(6)], "little endian": [b"Exif\0\0" + tiff(orientation(8, "<"), order="<")],
        "two EXIF": [exif(3), exif(6)], "EXIF, garbage": [exif(6), b"Exif\0\0garbage"],
        "XMP alone": [xmp(6)], "XMP, EXIF": [xmp(6), exif(3)], "EXIF, XMP": [exif(3), xmp(6)],
        "EXIF 1, XMP": [exif(1), xmp(6)], "XMP, EXIF without it": [xmp(6), b"Exif\0\0" + tiff()],
        "two XMP": [xmp(6), xmp(8)],
        "a prefix twice": [b"Exif\0\0" + exif(6)], "another case": [b"Exif\0\1" + exif(6)[6:]],
        "LONG": [b"Exif\0\0" + tiff(long)], "BYTE": [b"Exif\0\0" + tiff((0x112, 1, 1, b"\6\0\0\0"))],
        "FLOAT": [b"Exif\0\0" + tiff((0x112, 11, 1, struct.pack(">f", 6)))],
        "ASCII": [b"Exif\0\0" + tiff((0x112, 2, 2, b"6\0\0\0"))],
        "two values": [b"Exif\0\0" + tiff((0x112, 3, 2, b"\0\6\0\3"))],
        "twice": [b"Exif\0\0" + tiff(orientation(6), orientation(3))],
        "0": [exif(0)], "9": [exif(9)], "0, XMP": [exif(0), xmp(6)],
        "behind a maker that is cut": [b"Exif\0\0" + tiff(maker, orientation(6))],
        "behind a maker that is cut, XMP": [b"Exif\0\0" + tiff(maker, orientation(6)), xmp(3)],
        "behind an unknown type": [b"Exif\0\0" + tiff((0x10F, 99, 50, b"1234"), orientation(6))],
        "a cut directory": [(b"Exif\0\0" + tiff(orientation(6))).replace(b"\0\1\1\x12", b"\0\5\1\x12")],
        "swapped magic": [b"Exif\0\0MM*\0" + exif(6)[10:]], "EXIF without its prefix": [exif(6)[6:]],
        "far behind": [b"http://ns.adobe.com/xap/1.0/\0" + b" " * 60_000, exif(6)],
    }  # fmt: skip
    added = {name: b"".join(map(segment, bodies)) for name, bodies in blocks.items()}
    added |= {
        "behind stray bytes": b"abc" + segment(exif(6)), "behind a restart marker": b"\xff\xd0" + segment(exif(6)),
        "behind fill bytes": b"\xff\xff\xff" + segment(exif(6)), "in another segment": segment(exif(6), 0xE2),
    }  # fmt: skip
    late = {number: jpeg[:scan] + segment(exif(number)) + jpeg[scan:] for number in (3, 6)}
    return {
        **{f"{name}.jpg": behind_jfif(jpeg, segments) for name, segments in added.items()},
        "behind the frame header.jpg": late[6],
        "XMP behind the frame header.jpg": jpeg[:scan] + segment(xmp(6)) + jpeg[scan:],
        "on both sides of the frame header.jpg": behind_jfif(late[3], segment(exif(6))),
        "before all else.jpg": jpeg[:2] + segment(exif(6)) + jpeg[2:],
    }


def _pngs() -> dict[str, bytes]:
    png, as_text = _plain("PNG"), oracle_files()["exif 6 as text.png"]
    exif_chunks = {number: png_chunk(b"eXIf", exif(number)[6:]) for number in (3, 5, 6)}
    in_xmp = {number: png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(number)) for number in (6, 8)}
    date, raw_profile = png_chunk(b"tEXt", b"date:create\x002026-11-26"), as_text[33 : as_text.index(b"IDAT") - 4]
    front = {
        "eXIf": exif_chunks[6], "eXIf with a prefix": png_chunk(b"eXIf", exif(6)), "XMP": in_xmp[6],
        "two eXIf": exif_chunks[3] + exif_chunks[6], "XMP, eXIf": in_xmp[6] + exif_chunks[3],
        "as text": png_chunk(b"tEXt", b"exif\0" + exif(6)), "a raw profile of 6": raw_profile,
        "XMP in Latin-1": png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0\xe9" + xmp(6)),
        "packed XMP": png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp(6))),
    }  # fmt: skip
    late = {
        "eXIf": exif_chunks[6], "XMP": in_xmp[8], "a date": date, "a date, eXIf": date + exif_chunks[5],
        "a long eXIf": png_chunk(b"eXIf", exif(6)[6:] + bytes(30_000)), "a raw profile of 6": raw_profile,
    }  # fmt: skip
    many = _in_many_chunks(png)
    return {
        **{f"{name}.png": behind_header(png, chunk) for name, chunk in front.items()},
        **{f"{name} behind the pixels.png": behind_pixels(png, chunk) for name, chunk in late.items()},
        **{f"{name} behind many chunks.png": behind_pixels(many, chunk) for name, chunk in late.items()},
        "eXIf on both sides.png": behind_pixels(behind_header(png, exif_chunks[3]), exif_chunks[6]),
    }


def _in_many_chunks(png: bytes) -> bytes:
    """The same pixels in chunks of 16 bytes, as most writers cut them: all but the last have one length."""
    start = png.index(b"IDAT") - 4
    end = start + 12 + int.from_bytes(png[start : start + 4], "big")
    pixels = png[start + 8 : end - 4]
    chunks = [png_chunk(b"IDAT", pixels[at : at + 16]) for at in range(0, len(pixels), 16)]
    return png[:start] + b"".join(chunks) + png[end:]


def _webps() -> dict[str, bytes]:
    return {
        "EXIF.webp": webp(EXIF=exif(6)[6:]),
        "EXIF with a prefix.webp": webp(EXIF=exif(6)),
        "XMP.webp": webp(XMP=xmp(6)),
        "EXIF, XMP.webp": webp(EXIF=exif(3), XMP=xmp(6)),
        "empty EXIF.webp": webp(EXIF=b""),
    }
