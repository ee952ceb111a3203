"""Headers: what Pillow says of every file, sound or broken, and nothing guessed."""

import random
import struct
import tracemalloc
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from labkit.course.oracles import broken_files, exif_of, oracle_files
from labkit.data.headers import Header, read_header
from labkit.data.partial_jpeg import WholeDecoder
from tests.image_files import encoded

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow's, of damaged files

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (63, 95, 3), dtype=np.uint8))
XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def saved(image_format: str, image: Image.Image = PICTURE, **options) -> bytes:
    return encoded(image, image_format, **options)


def test_a_length_that_a_header_states_is_not_asked_for(tmp_path):
    """A brush of GIMP's with a comment of 4 GB, in a file of 29 bytes: Pillow reads it at once."""
    path = tmp_path / "brush.gbr"
    path.write_bytes(struct.pack(">7I", 0xFFFFFFF0, 2, 1, 1, 1, 0x47494D50, 10) + b"x")
    tracemalloc.start()
    try:
        header = read_header(str(path))
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert header == Header(1, 1, 1)


def test_a_subsampling_that_simplejpeg_has_no_name_for(tmp_path):
    data = bytearray(saved("JPEG", subsampling=0))
    data[data.index(b"\xff\xc0") + 11] = 0x14  # the luma four times as high as the chroma: 4:4:1
    (tmp_path / "a.jpg").write_bytes(data)
    assert read_header(str(tmp_path / "a.jpg")) == Header(95, 63, 1)
    assert WholeDecoder().header(bytes(data)) is None


def camera_exif(orientation: int, thumbnail: int) -> Image.Exif:
    """As a camera writes it: a maker, a model, and a thumbnail's bytes in front of everything else."""
    exif = exif_of(orientation)
    exif[0x010F], exif[0x0110], exif[0x9286] = "Maker", "Model", b"t" * thumbnail
    return exif


def text(key: str, value: str, **options) -> dict:
    info = PngInfo()
    info.add_text(key, value, **options)
    return {"pnginfo": info}


def sequence(image_format: str) -> bytes:
    return saved(image_format, save_all=True, append_images=[PICTURE.rotate(180)], duration=40)


def jpegs() -> dict[str, bytes]:
    jpeg, noisy = saved("JPEG"), saved("JPEG", quality=100)
    return {
        "plain.jpg": jpeg,
        "progressive.jpg": saved("JPEG", progressive=True),
        "gray.jpg": saved("JPEG", PICTURE.convert("L")),
        "cmyk.jpg": saved("JPEG", PICTURE.convert("CMYK")),
        "one pixel.jpg": saved("JPEG", PICTURE.resize((1, 1))),
        "wide.jpg": saved("JPEG", Image.new("L", (40_000, 3))),
        "comment.jpg": saved("JPEG", comment=b"c" * 60_000),
        "profile in two segments.jpg": saved("JPEG", icc_profile=b"i" * 100_000),
        "camera.jpg": saved("JPEG", exif=camera_exif(8, 30_000)),
        "camera and profile.jpg": saved("JPEG", exif=camera_exif(6, 60_000), icc_profile=b"i" * 70_000),
        "little endian.jpg": saved("JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\3\0\0\0\0\0\0\0"),
        "orientation 0.jpg": saved("JPEG", exif=exif_of(0)),
        "orientation 9.jpg": saved("JPEG", exif=exif_of(9)),
        "without orientation.jpg": saved("JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"),
        "cut exif.jpg": saved("JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\5"),
        "orientation in XMP.jpg": saved("JPEG", xmp=XMP),
        "orientation in XMP behind 20 KB.jpg": saved("JPEG", xmp=b" " * 20_000 + XMP),
        "XMP and EXIF.jpg": saved("JPEG", xmp=XMP, exif=exif_of(3)),
        "EXIF behind the tables.jpg": _exif_last(jpeg),
        "padded marker.jpg": jpeg[:2] + b"\xff\xff" + jpeg[2:],
        "stray bytes.jpg": jpeg[:20] + b"abc" + jpeg[20:],
        "12 bits a sample.jpg": jpeg.replace(b"\x11\x08\0\x3f\0\x5f", b"\x11\x0c\0\x3f\0\x5f"),
        "no height.jpg": jpeg.replace(b"\x11\x08\0\x3f\0\x5f", b"\x11\x08\0\0\0\x5f"),
        "two pictures.jpg": sequence("MPO"),
        "another JPEG behind.jpg": jpeg + noisy,
    }


def pngs() -> dict[str, bytes]:
    two_chunks = saved("PNG", dpi=(72, 72))
    return {
        "plain.png": saved("PNG"),
        "palette.png": saved("PNG", PICTURE.quantize(16), transparency=1),
        "interlaced gray.png": saved("PNG", PICTURE.convert("L"), dpi=(72, 72)),
        "exif.png": saved("PNG", exif=exif_of(6)),
        "raw profile.png": saved("PNG", **text("Raw profile type exif", _raw_profile())),
        "compressed raw profile.png": saved("PNG", **text("Raw profile type exif", _raw_profile(), zip=True)),
        "XMP.png": saved("PNG", **text("XML:com.adobe.xmp", XMP.decode())),
        "prompt.png": saved("PNG", **text("parameters", "a cat, " * 40)),
        "workflow of 50 KB.png": saved("PNG", **text("workflow", "{node}" * 9_000)),
        "workflow, cut in its pixels.png": saved("PNG", **text("workflow", "{node}" * 9_000))[:-500],
        "profile.png": saved("PNG", icc_profile=bytes(range(256)) * 40),
        "animated.png": sequence("PNG"),
        "wrong checksum in the second chunk.png": _changed(two_chunks, two_chunks.index(b"pHYs") + 13, 1),
        "wrong checksum.png": saved("PNG").replace(b"IHDR\0\0\0\x5f", b"IHDR\0\0\0\x60"),
    }


def webps() -> dict[str, bytes]:
    return {
        "lossy.webp": saved("WEBP"),
        "lossless.webp": saved("WEBP", lossless=True),
        "alpha.webp": saved("WEBP", PICTURE.convert("RGBA").rotate(33, expand=True)),
        "exif.webp": saved("WEBP", exif=exif_of(5)),
        "scaled on display.webp": _changed(saved("WEBP"), 27, 0b0100_0000),
        "no key frame.webp": _changed(saved("WEBP"), 20, 0b1),
        "a frame that is not shown.webp": _changed(saved("WEBP"), 20, 0b10000),
        "an unknown profile.webp": _changed(saved("WEBP"), 20, 0b1000),
        "a partition beyond the end.webp": _changed(saved("WEBP"), 22, 0b1000_0000),
        "another start code.webp": _changed(saved("WEBP"), 24, 0b1),
        "another signature.webp": _changed(saved("WEBP", lossless=True), 20, 0b1),
        "another version.webp": _changed(saved("WEBP", lossless=True), 24, 0b0010_0000),
        "animated.webp": sequence("WEBP"),
    }


@cache
def made_files() -> dict[str, bytes]:
    has_avif = ".avif" in Image.registered_extensions()  # Pillow from 11.3 on
    avifs = {"plain.avif": saved("AVIF"), "exif.avif": saved("AVIF", exif=exif_of(6))} if has_avif else {}
    return {
        **jpegs(),
        **pngs(),
        **webps(),
        **avifs,
        "plain.bmp": saved("BMP"),
        "a GIF, renamed.jpg": saved("GIF"),
        "a PNG, renamed.webp": saved("PNG"),
        "not here.jxl": b"\xff\x0a" + b"\0" * 100,
        "RIFF of another kind.webp": b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 100,
        "a few bytes.webp": b"RIFF",
    }


def _exif_last(jpeg: bytes) -> bytes:
    segment = b"Exif\0\0" + exif_of(6).tobytes().removeprefix(b"Exif\0\0")
    frame = jpeg.index(b"\xff\xc0")
    return jpeg[:frame] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + jpeg[frame:]


def _raw_profile() -> str:
    return "\nexif\n     26\n" + exif_of(6).tobytes().hex()


def _changed(data: bytes, at: int, bits: int) -> bytes:
    """The same file with these bits of one byte turned over."""
    return data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]


def by_pillow(path: Path) -> tuple:
    """The oracle: ((width, height), orientation), or (None, None) where Pillow refuses the file."""
    try:
        with Image.open(path) as image:
            return image.size, _orientation(image)
    except Exception:
        return None, None


def _orientation(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(0x0112, 1)  # of a PNG also what stands behind the pixels
    except Exception:
        return 1
    return orientation if orientation in range(1, 9) else 1


def by_labkit(path: Path) -> tuple:
    header = read_header(str(path))
    assert (header.width is None) == (header.height is None) == bool(header.error)
    return (header.width, header.height) if header.width else None, header.orientation


def differing(folder: Path, files: dict[str, bytes]) -> dict:
    """Name -> what labkit and Pillow say, where they disagree."""
    found = {}
    for name, data in files.items():
        (folder / name).write_bytes(data)
        found[name] = by_labkit(folder / name), by_pillow(folder / name)
    return {
        name: (ours, theirs)
        for name, (ours, theirs) in found.items()
        if ours != theirs and not _is_png_with_broken_metadata(files[name], ours, theirs)
    }


def _is_png_with_broken_metadata(data: bytes, ours: tuple, theirs: tuple) -> bool:
    """What Pillow does not open for a chunk that no pixel needs: its first chunk has the size."""
    if theirs != (None, None) or not data.startswith(b"\x89PNG"):
        return False
    return ours == (struct.unpack(">II", data[16:24]), 1)


def test_every_file_has_the_size_and_orientation_that_pillow_gives(tmp_path):
    files = {**made_files(), **oracle_files(), **broken_files()}
    assert differing(tmp_path, files) == {}
    known = [by_labkit(tmp_path / name) for name in made_files()]
    assert {orientation for _, orientation in known} >= {1, 3, 5, 6, 8, None}
    assert by_labkit(tmp_path / "one pixel.jpg") == ((1, 1), 1)
    assert by_labkit(tmp_path / "EXIF behind the tables.jpg") == ((95, 63), 6)


@pytest.mark.parametrize("name", ["plain.jpg", "camera.jpg", "plain.png", "prompt.png", "lossy.webp", "lossless.webp"])
def test_a_file_cut_anywhere_is_refused_where_pillow_refuses_it(tmp_path, name):
    data = made_files()[name]
    ends = [*range(0, 100), *range(100, 700, 3), *range(700, len(data), 997)]
    assert differing(tmp_path, {f"{end} {name}": data[:end] for end in ends}) == {}


@pytest.mark.parametrize(
    "name", ["plain.jpg", "profile in two segments.jpg", "palette.png", "lossy.webp", "lossless.webp"]
)
def test_a_file_with_damaged_bytes_is_what_pillow_makes_of_it(tmp_path, name):
    data, rng, files = made_files()[name], random.Random(name), {}
    for number in range(300):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 2, 5])):
            damaged[rng.randrange(min(len(data), 900))] = rng.randrange(256)
        files[f"{number} {name}"] = bytes(damaged)
    assert differing(tmp_path, files) == {}


def test_pillows_limit_on_pixels_is_kept(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(saved("PNG"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 95 * 63 // 3)
    assert "decompression bomb" in read_header(str(tmp_path / "a.png")).error
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert read_header(str(tmp_path / "a.png")) == Header(95, 63, 1)


def test_pillow_is_asked_only_where_it_must_be(tmp_path, monkeypatch):
    plain = ("plain.jpg", "progressive.jpg", "camera and profile.jpg", "XMP and EXIF.jpg", "plain.png", "prompt.png",
             "lossy.webp", "lossless.webp")  # fmt: skip
    for name in plain:
        (tmp_path / name).write_bytes(made_files()[name])
    monkeypatch.setattr(Image, "open", None)
    assert [read_header(str(tmp_path / name)).error for name in plain] == [""] * len(plain)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("empty.jpg", "the file is empty"),
        ("text.jpg", "no image format"),
        ("missing.jpg", "No such file"),
        (".", "Is a directory"),
    ],
)
def test_the_reason_is_given_without_the_path(tmp_path, name, said):
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("no image\n" * 50)
    error = read_header(str(tmp_path / name)).error
    assert said in error
    assert str(tmp_path) not in error


def test_damaged_metadata_hides_no_size_and_states_no_orientation(tmp_path):
    info = text("Raw profile type exif", "\nexif\n 4\nnot hexadecimal")
    (tmp_path / "a.png").write_bytes(saved("PNG", **info))
    assert read_header(str(tmp_path / "a.png")) == Header(95, 63, 1)
