"""Headers: what Pillow says of every file, sound or broken, and nothing guessed."""

import random
import struct
import tracemalloc
from functools import cache
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from labkit.course.oracles import broken_files, exif_of, oracle_files
from labkit.data.headers import Header, read_header
from tests.image_files import encoded
from tests.oriented_files import stated_oddly

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow's, of damaged files

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (63, 95, 3), dtype=np.uint8))
PLAIN = Header(95, 63, 1)
XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def saved(image_format: str, image: Image.Image = PICTURE, **options) -> bytes:
    return encoded(image, image_format, **options)


def sequence(image_format: str) -> bytes:
    return saved(image_format, save_all=True, append_images=[PICTURE.rotate(180)], duration=40)


def text(key: str, value: str, **options) -> bytes:
    """A PNG that says something."""
    info = PngInfo()
    info.add_text(key, value, **options)
    return saved("PNG", pnginfo=info)


def camera_exif(orientation: int, thumbnail: int) -> Image.Exif:
    """As a camera writes it: a maker, a model, and a thumbnail's bytes in front of everything else."""
    exif = exif_of(orientation)
    exif[0x010F], exif[0x0110], exif[0x9286] = "Maker", "Model", b"t" * thumbnail
    return exif


def changed(data: bytes, at: int, bits: int) -> bytes:
    """The same file with these bits of one byte turned over."""
    return data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]


@cache
def made_files() -> dict[str, bytes]:
    """Beside those of `oracle_files`. How metadata are read: test_decode.py, of all of `oriented_files`."""
    jpeg, frame, start = saved("JPEG"), b"\x11\x08\0\x3f\0\x5f", b"\xff\xc0"
    two_chunks, luma = saved("PNG", dpi=(72, 72)), jpeg.index(start) + 11
    lossy, lossless = saved("WEBP"), saved("WEBP", lossless=True)
    has_avif = ".avif" in Image.registered_extensions()  # Pillow from 11.3 on
    avifs = {"plain.avif": saved("AVIF"), "exif.avif": saved("AVIF", exif=exif_of(6))} if has_avif else {}
    return {
        "plain.jpg": jpeg,
        "progressive.jpg": saved("JPEG", progressive=True),
        "one pixel.jpg": saved("JPEG", PICTURE.resize((1, 1))),
        "wide.jpg": saved("JPEG", Image.new("L", (40_000, 3))),
        "comment.jpg": saved("JPEG", comment=b"c" * 60_000),
        "profile in two segments.jpg": saved("JPEG", icc_profile=b"i" * 100_000),
        "camera.jpg": saved("JPEG", exif=camera_exif(8, 30_000)),
        "camera and profile.jpg": saved("JPEG", exif=camera_exif(6, 60_000), icc_profile=b"i" * 70_000),
        "orientation in XMP behind 20 KB.jpg": saved("JPEG", xmp=b" " * 20_000 + XMP),
        "4:4:1, of which simplejpeg has no name.jpg": jpeg[:luma] + b"\x14" + jpeg[luma + 1 :],
        "12 bits a sample.jpg": jpeg.replace(frame, b"\x11\x0c\0\x3f\0\x5f"),
        "no height.jpg": jpeg.replace(frame, b"\x11\x08\0\0\0\x5f"),
        "two pictures.jpg": sequence("MPO"),
        "another JPEG behind.jpg": jpeg + saved("JPEG", quality=100),
        "plain.png": saved("PNG"),
        "palette.png": saved("PNG", PICTURE.quantize(16), transparency=1),
        "interlaced gray.png": saved("PNG", PICTURE.convert("L"), dpi=(72, 72)),
        "prompt.png": text("parameters", "a cat, " * 40),
        "workflow of 50 KB.png": text("workflow", "{node}" * 9_000),
        "workflow, cut in its pixels.png": text("workflow", "{node}" * 9_000)[:-500],
        "profile.png": saved("PNG", icc_profile=bytes(range(256)) * 40),
        "animated.png": sequence("PNG"),
        "wrong checksum in the second chunk.png": changed(two_chunks, two_chunks.index(b"pHYs") + 13, 1),
        "wrong checksum.png": saved("PNG").replace(b"IHDR\0\0\0\x5f", b"IHDR\0\0\0\x60"),
        "lossy.webp": lossy,
        "lossless.webp": lossless,
        "alpha.webp": saved("WEBP", PICTURE.convert("RGBA").rotate(33, expand=True)),
        "scaled on display.webp": changed(lossy, 27, 0b0100_0000),
        "no key frame.webp": changed(lossy, 20, 0b1),
        "a frame that is not shown.webp": changed(lossy, 20, 0b10000),
        "an unknown profile.webp": changed(lossy, 20, 0b1000),
        "a partition beyond the end.webp": changed(lossy, 22, 0b1000_0000),
        "another start code.webp": changed(lossy, 24, 0b1),
        "another signature.webp": changed(lossless, 20, 0b1),
        "another version.webp": changed(lossless, 24, 0b0010_0000),
        "animated.webp": sequence("WEBP"),
        **avifs,
        "plain.bmp": saved("BMP"),
        "a GIF, renamed.jpg": saved("GIF"),
        "a PNG, renamed.webp": saved("PNG"),
        "not here.jxl": b"\xff\x0a" + b"\0" * 100,
        "RIFF of another kind.webp": b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 100,
        "a few bytes.webp": b"RIFF",
    }


def header_of(folder: Path, name: str, data: bytes) -> Header:
    (folder / name).write_bytes(data)
    header = read_header(str(folder / name))
    assert (header.width is None) == (header.height is None) == (header.orientation is None) == bool(header.error)
    return header


def by_pillow(path: Path) -> Header:
    """The oracle; without a size where Pillow refuses the file."""
    try:
        with Image.open(path) as image:
            size = image.size
            try:
                orientation = image.getexif().get(0x0112, 1)  # of a PNG also what stands behind the pixels
            except Exception:
                orientation = 1
    except Exception:
        return Header()
    return Header(*size, orientation if orientation in range(1, 9) else 1)


def differing(folder: Path, files: dict[str, bytes]) -> dict[str, tuple[Header, Header]]:
    """What labkit and Pillow say, where they disagree.

    They may of a PNG that Pillow does not open for a chunk that no pixel needs: its first chunk has the size.
    """
    found = {}
    for name, data in files.items():
        ours, theirs = header_of(folder, name, data)._replace(error=""), by_pillow(folder / name)
        if (
            not theirs.width
            and data.startswith(b"\x89PNG")
            and crc32(data[12:29]) == int.from_bytes(data[29:33], "big")
        ):
            theirs = Header() if ours.width is None else Header(*struct.unpack(">II", data[16:24]), 1)
        if ours != theirs:
            found[name] = ours, theirs
    return found


def test_every_file_has_the_size_and_orientation_that_pillow_gives(tmp_path):
    assert differing(tmp_path, {**made_files(), **oracle_files(), **broken_files()}) == {}
    found = {name: header_of(tmp_path, name, data) for name, data in made_files().items()}
    assert {header.orientation for header in found.values()} >= {1, 6, 8, None}
    assert found["one pixel.jpg"] == Header(1, 1, 1)


CUT = ("plain.jpg", "camera.jpg", "plain.png", "prompt.png", "lossy.webp", "lossless.webp")


@pytest.mark.parametrize("name", [*CUT, "profile in two segments.jpg", "palette.png"])
def test_a_cut_or_damaged_file_is_what_pillow_makes_of_it(tmp_path, name):
    data, rng, files = made_files()[name], random.Random(name), {}
    for end in [*range(0, 100), *range(100, 700, 3), *range(700, len(data), 997)] if name in CUT else []:
        files[f"{end} {name}"] = data[:end]
    for number in range(300):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 2, 5])):
            damaged[rng.randrange(min(len(data), 900))] = rng.randrange(256)
        files[f"damaged {number} {name}"] = bytes(damaged)
    assert differing(tmp_path, files) == {}


def test_pillow_is_asked_only_where_it_must_be_and_files_are_closed(tmp_path, monkeypatch, n_open_files):
    usual = (
        "plain.jpg", "progressive.jpg", "camera and profile.jpg", "little endian.jpg", "XMP, EXIF.jpg", "EXIF, XMP.jpg",
        "behind fill bytes.jpg", "0.jpg", "plain.png", "prompt.png", "lossy.webp", "lossless.webp",
    )  # fmt: skip
    files = {name: {**stated_oddly(), **made_files()}[name] for name in usual}
    monkeypatch.setattr(Image, "open", None)
    before = n_open_files()
    assert {header_of(tmp_path, name, data).error for name, data in files.items()} == {""}
    assert n_open_files() == before


def test_a_length_that_a_header_states_is_not_asked_for(tmp_path):
    """A brush of GIMP's with a comment of 4 GB, in a file of 29 bytes: Pillow reads it at once."""
    brush = struct.pack(">7I", 0xFFFFFFF0, 2, 1, 1, 1, 0x47494D50, 10) + b"x"
    tracemalloc.start()
    try:
        assert header_of(tmp_path, "brush.gbr", brush) == Header(1, 1, 1)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
