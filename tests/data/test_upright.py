"""Which way is up has one answer, Pillow's, in all that decodes an image or reads its size.

Every file shows four colored quarters, so each result says how it was turned. Most state an orientation in an odd way.
"""

import io
import struct
import zlib
from functools import cache

import numpy as np
import pytest
from PIL import Image, ImageOps

import labkit as lk
from labkit import course
from labkit.course.oracles import exif_of, png_chunk
from labkit.data.decode import jpeg_orientation
from tests.image_files import encoded
from tests.memory_store import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow's, of damaged metadata

WIDTH, HEIGHT = 80, 48
COLORS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220), "white": (240, 240, 240)}
# Colors at top left, top right, bottom left and bottom right, of the stored picture and turned by each orientation.
SEEN = {
    ("red", "green", "blue", "white"): 1, ("green", "red", "white", "blue"): 2, ("white", "blue", "green", "red"): 3,
    ("blue", "white", "red", "green"): 4, ("red", "blue", "green", "white"): 5, ("blue", "red", "white", "green"): 6,
    ("white", "green", "blue", "red"): 7, ("green", "white", "red", "blue"): 8,
}  # fmt: skip
DECODERS = [name for name in lk.DECODERS if name not in course.missing_decoders()]


@cache
def picture() -> Image.Image:
    image = Image.new("RGB", (WIDTH, HEIGHT), COLORS["red"])
    image.paste(COLORS["green"], (WIDTH // 2, 0, WIDTH, HEIGHT))
    image.paste(COLORS["blue"], (0, HEIGHT // 2, WIDTH // 2, HEIGHT))
    image.paste(COLORS["white"], (WIDTH // 2, HEIGHT // 2, WIDTH, HEIGHT))
    return image


def turn(pixels: np.ndarray) -> int:
    """The orientation by which the picture was turned, from its pixels (H, W, 3)."""
    height, width = pixels.shape[:2]
    corners = [pixels[y, x] for y in (height // 4, -height // 4) for x in (width // 4, -width // 4)]
    names = [min(COLORS, key=lambda name: np.abs(corner.astype(int) - COLORS[name]).sum()) for corner in corners]
    return SEEN[tuple(names)]


def by_pillow(data: bytes) -> int:
    return turn(np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")))


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


def png_xmp(number: int) -> bytes:
    return png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(number))


@cache
def stated_oddly() -> dict[str, bytes]:
    return {**_jpegs(), **_pngs(), **_webps()}


@cache
def broken() -> dict[str, bytes]:
    """Sound pictures whose metadata state nothing that Pillow can read."""
    jpeg, with_dpi, png = plain("JPEG"), encoded(picture(), quality=95, dpi=(72, 72)), plain("PNG")
    garbage = b"a text by some tool"
    in_jpeg = {
        "garbage": garbage,
        "a short head": b"MM\0*",
        "a prefix thrice": b"Exif\0\0Exif\0\0" + tiff(orientation(6)),
    }
    raw, value = b"Raw profile type exif\0", b"\nexif\n 4\nnot hexadecimal"
    return {
        **{f"{name}.jpg": behind_jfif(jpeg, segment(b"Exif\0\0" + body)) for name, body in in_jpeg.items()},
        **{f"{name}, dpi.jpg": behind_jfif(with_dpi, segment(b"Exif\0\0" + body)) for name, body in in_jpeg.items()},
        "garbage and XMP, dpi.jpg": behind_jfif(with_dpi, segment(b"Exif\0\0" + garbage) + segment(xmp(6))),
        "garbage.png": behind_header(png, png_chunk(b"eXIf", garbage)),
        "garbage behind the pixels.png": behind_pixels(png, png_chunk(b"eXIf", garbage)),
        "a raw profile.png": behind_header(png, png_chunk(b"tEXt", raw + value)),
        "a raw profile behind the pixels.png": behind_pixels(
            png, png_chunk(b"zTXt", raw[:22] + b"\0" + zlib.compress(raw[22:]))
        ),
        "EXIF as compressed text.png": behind_header(png, png_chunk(b"zTXt", b"exif\0\0" + zlib.compress(garbage))),
        "XMP under another name.png": behind_header(png, png_chunk(b"tEXt", b"xmp\0" + xmp(6))),
        "garbage.webp": webp(EXIF=garbage),
        "a short head.webp": webp(EXIF=b"MM"),
        # Pillow does not open these, which other libraries read.
        "a photoshop block that is cut.jpg": behind_jfif(jpeg, segment(b"Photoshop 3.0\0008BIM\4\4", 0xED)),
        "a profile without a number.jpg": behind_jfif(jpeg, segment(b"ICC_PROFILE\0", 0xE2)),
    }


def behind_jfif(jpeg: bytes, added: bytes) -> bytes:
    return jpeg[:20] + added + jpeg[20:]


def behind_header(png: bytes, chunk: bytes) -> bytes:
    return png[:33] + chunk + png[33:]


def behind_pixels(png: bytes, chunk: bytes) -> bytes:
    return png[:-12] + chunk + png[-12:]


@cache
def plain(image_format: str) -> bytes:
    return encoded(picture(), image_format, **({"quality": 95} if image_format == "JPEG" else {}))


def webp(**chunks: bytes) -> bytes:
    """The picture with chunks behind it, and the flags that announce them."""
    names = {"EXIF": (b"EXIF", 8), "XMP": (b"XMP ", 4)}
    stored = encoded(picture(), "WEBP", lossless=True)[12:]
    sides = (WIDTH - 1).to_bytes(3, "little") + (HEIGHT - 1).to_bytes(3, "little")
    body = b"VP8X" + struct.pack("<I", 10) + bytes([sum(names[key][1] for key in chunks), 0, 0, 0]) + sides + stored
    for key, data in chunks.items():
        body += names[key][0] + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def _jpegs() -> dict[str, bytes]:
    jpeg = plain("JPEG")
    scan, long = jpeg.index(b"\xff\xda"), (0x112, 4, 1, struct.pack(">I", 6))
    maker = 0x10F, 2, 10, struct.pack(">I", 9999)  # a text that lies behind the block's end
    blocks = {
        "EXIF": [exif(6)], "little endian": [b"Exif\0\0" + tiff(orientation(8, "<"), order="<")],
        "two EXIF": [exif(3), exif(6)], "EXIF, garbage": [exif(6), b"Exif\0\0garbage"],
        "XMP alone": [xmp(6)], "XMP, EXIF": [xmp(6), exif(3)], "EXIF, XMP": [exif(3), xmp(6)],
        "XMP, EXIF without it": [xmp(6), b"Exif\0\0" + tiff()], "two XMP": [xmp(6), xmp(8)],
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
    return {
        **{f"{name}.jpg": behind_jfif(jpeg, b"".join(map(segment, bodies))) for name, bodies in blocks.items()},
        "behind the frame header.jpg": jpeg[:scan] + segment(exif(6)) + jpeg[scan:],
        "XMP behind the frame header.jpg": jpeg[:scan] + segment(xmp(6)) + jpeg[scan:],
        "on both sides of the frame header.jpg": behind_jfif(
            jpeg[:scan] + segment(exif(3)) + jpeg[scan:], segment(exif(6))
        ),
        "behind stray bytes.jpg": behind_jfif(jpeg, b"abc" + segment(exif(6))),
        "behind a restart marker.jpg": behind_jfif(jpeg, b"\xff\xd0" + segment(exif(6))),
        "behind fill bytes.jpg": behind_jfif(jpeg, b"\xff\xff\xff" + segment(exif(6))),
        "in another segment.jpg": behind_jfif(jpeg, segment(exif(6), 0xE2)),
        "before all else.jpg": jpeg[:2] + segment(exif(6)) + jpeg[2:],
    }


def _pngs() -> dict[str, bytes]:
    png = plain("PNG")
    date = png_chunk(b"tEXt", b"date:create\x002026-11-26")
    front = {
        "eXIf": png_chunk(b"eXIf", exif(6)[6:]), "eXIf with a prefix": png_chunk(b"eXIf", exif(6)), "XMP": png_xmp(6),
        "two eXIf": png_chunk(b"eXIf", exif(3)[6:]) + png_chunk(b"eXIf", exif(6)[6:]),
        "XMP, eXIf": png_xmp(6) + png_chunk(b"eXIf", exif(3)[6:]), "as text": png_chunk(b"tEXt", b"exif\0" + exif(6)),
        "XMP in Latin-1": png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0\xe9" + xmp(6)),
        "packed XMP": png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp(6))),
    }  # fmt: skip
    late = {
        "eXIf": png_chunk(b"eXIf", exif(6)[6:]), "XMP": png_xmp(8), "a date": date,
        "a date, eXIf": date + png_chunk(b"eXIf", exif(5)[6:]),
        "a long eXIf": png_chunk(b"eXIf", exif(6)[6:] + bytes(30_000)),
    }  # fmt: skip
    many = _in_many_chunks(png)
    return {
        **{f"{name}.png": behind_header(png, chunk) for name, chunk in front.items()},
        **{f"{name} behind the pixels.png": behind_pixels(png, chunk) for name, chunk in late.items()},
        **{f"{name} behind many chunks.png": behind_pixels(many, chunk) for name, chunk in late.items()},
        "eXIf on both sides.png": behind_pixels(
            behind_header(png, png_chunk(b"eXIf", exif(3)[6:])), png_chunk(b"eXIf", exif(6)[6:])
        ),
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


def answers(tmp_path, name: str, data: bytes) -> dict[str, int]:
    """How each part of labkit turns the image."""
    (tmp_path / name).write_bytes(data)
    store = MemoryStore({f"a/{name}": data})
    found = {decoder: turn(lk.decode(data, decoder).permute(1, 2, 0).numpy()) for decoder in DECODERS}
    batch, _ = next(iter(lk.BatchLoader(store, size=32, batch_size=1, train=False, num_threads=1)))
    found["BatchLoader"] = turn(batch[0].permute(1, 2, 0).numpy())
    found["ImageDataset"] = turn(lk.ImageDataset(store)[0][0].permute(1, 2, 0).numpy())
    lk.PixelStore.build(store, tmp_path / "x.pixels", short_side=HEIGHT, num_workers=0, progress=False)
    found["PixelStore"] = turn(lk.PixelStore(tmp_path / "x.pixels")[0][0].permute(1, 2, 0).numpy())
    (row,) = lk.collect_sizes(tmp_path, progress=False).itertuples()
    assert (row.width, row.height) == (WIDTH, HEIGHT)
    found["collect_sizes"] = row.exif_orientation
    return found


@pytest.mark.parametrize("name", stated_oddly())
def test_all_turn_an_image_as_pillow_does(tmp_path, name):
    expected = by_pillow(stated_oddly()[name])
    assert set(answers(tmp_path, name, stated_oddly()[name]).values()) == {expected}


def test_the_odd_files_are_turned_in_many_ways():
    assert {by_pillow(data) for data in stated_oddly().values()} >= {1, 3, 5, 6, 8}


@pytest.mark.parametrize("name", broken())
def test_broken_metadata_cost_no_picture_and_turn_none(tmp_path, name):
    assert set(answers(tmp_path, name, broken()[name]).values()) == {1}


def test_an_orientation_stands_where_another_part_of_the_metadata_is_broken(tmp_path):
    """Pillow does not open the file, for a resolution of another type; other libraries do, and turn it."""
    resolution, unit = (0x11A, 2, 2, b"7\0\0\0"), (0x128, 3, 1, b"\0\2\0\0")
    block = b"Exif\0\0" + tiff(orientation(6), resolution, unit)
    data = behind_jfif(plain("JPEG"), segment(block))
    assert set(answers(tmp_path, "a.jpg", data).values()) == {6}


@pytest.mark.parametrize("number", range(1, 9))
def test_a_camera_held_in_any_way(tmp_path, number):
    for image_format, suffix in (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")):
        data = encoded(picture(), image_format, exif=exif_of(number))
        folder = tmp_path / suffix
        folder.mkdir()
        assert set(answers(folder, f"a.{suffix}", data).values()) == {number}


def test_a_usual_jpeg_is_judged_without_pillow(monkeypatch):
    noted = {name: stated_oddly()[f"{name}.jpg"] for name in ("EXIF", "little endian", "EXIF, XMP", "XMP, EXIF", "0")}
    noted["plain"] = plain("JPEG")
    expected = {name: by_pillow(data) for name, data in noted.items()}
    monkeypatch.setattr(Image, "open", None)
    assert {name: jpeg_orientation(data) for name, data in noted.items()} == expected


def test_a_bucket_has_images_of_one_shape_however_they_state_their_orientation(tmp_path):
    for name, data in stated_oddly().items():
        (tmp_path / name).write_bytes(data)
    buckets = lk.Buckets(((WIDTH, HEIGHT), (HEIGHT, WIDTH)))
    sampler = lk.BucketBatchSampler(lk.collect_sizes(tmp_path, progress=False), 4, buckets=buckets)
    dataset = lk.ImageDataset(lk.FolderStore(tmp_path))
    shapes = [{tuple(dataset[index][0].shape) for index in batch} for batch in sampler]
    assert {len(each) for each in shapes} == {1}
    assert set.union(*shapes) == {(3, WIDTH, HEIGHT), (3, HEIGHT, WIDTH)}
