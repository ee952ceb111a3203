"""Headers: what Pillow says of every file, sound or broken, and nothing guessed."""

import struct
from functools import cache
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from labkit.course.oracles import broken_files, exif_of, oracle_files
from labkit.data.sizes import Header, read_header
from tests.image_files import encoded

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow's, of damaged files

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (63, 95, 3), dtype=np.uint8))
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
    jpeg, frame, two_chunks = saved("JPEG"), b"\x11\x08\0\x3f\0\x5f", saved("PNG", dpi=(72, 72))
    has_avif = ".avif" in Image.registered_extensions()  # Pillow from 11.3 on
    avifs = {"plain.avif": saved("AVIF"), "exif.avif": saved("AVIF", exif=exif_of(6))} if has_avif else {}
    return {
        "plain.jpg": jpeg,
        "one pixel.jpg": saved("JPEG", PICTURE.resize((1, 1))),
        "camera.jpg": saved("JPEG", exif=camera_exif(8, 30_000)),
        "orientation in XMP behind 20 KB.jpg": saved("JPEG", xmp=b" " * 20_000 + XMP),
        "12 bits a sample.jpg": jpeg.replace(frame, b"\x11\x0c\0\x3f\0\x5f"),
        "no height.jpg": jpeg.replace(frame, b"\x11\x08\0\0\0\x5f"),
        "two pictures.jpg": sequence("MPO"),
        "plain.png": saved("PNG"),
        "workflow of 50 KB.png": text("workflow", "{node}" * 9_000),
        "workflow, cut in its pixels.png": text("workflow", "{node}" * 9_000)[:-500],
        "profile.png": saved("PNG", icc_profile=bytes(range(256)) * 40),
        "animated.png": sequence("PNG"),
        "wrong checksum in the second chunk.png": changed(two_chunks, two_chunks.index(b"pHYs") + 13, 1),
        "wrong checksum.png": saved("PNG").replace(b"IHDR\0\0\0\x5f", b"IHDR\0\0\0\x60"),
        "lossy.webp": saved("WEBP"),
        "lossless.webp": saved("WEBP", lossless=True),
        "alpha.webp": saved("WEBP", PICTURE.convert("RGBA").rotate(33, expand=True)),
        "animated.webp": sequence("WEBP"),
        **avifs,
        "a brush of GIMP's.jpg": struct.pack(">7I", 0xFFFFFFF0, 2, 1, 1, 1, 0x47494D50, 10) + b"x",  # of 4 GB, it says
        "a GIF, renamed.jpg": saved("GIF"),
        "not here.jxl": b"\xff\x0a" + b"\0" * 100,
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
            if image.format == "GBR":  # as some others, of which photos have none
                return Header()
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


def test_files_are_closed(tmp_path, n_open_files):
    before = n_open_files()
    for name in ("plain.jpg", "not here.jxl", "wrong checksum.png"):
        header_of(tmp_path, name, made_files()[name])
    assert n_open_files() == before
