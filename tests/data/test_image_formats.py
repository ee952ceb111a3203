"""The formats that torchvision's `ImageFolder` reads, by every public name: Pillow's pixels, or an error."""

import ast
import io
import re
import struct
import tarfile
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

import labkit as lk
from labkit.course.oracles import exif_of
from labkit.data import decode as decode_module
from labkit.data.decode import BitDepthWarning, missing_decoders
from labkit.data.image_formats import IMAGE_SUFFIXES, OTHER_IMAGE_SUFFIXES, format_of
from tests.image_files import encoded, tiff
from tests.paths import REPO

SIDE = 24  # a multiple of what pads rows, so that every byte of a BMP counts
PIXELS = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE + 8, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)
GRAY16 = PIXELS[..., 0].astype(np.uint16) * 256 + PIXELS[..., 1]
INSTALLED = [name for name in lk.DECODERS if name not in missing_decoders()]


def ppm(kind: str, largest: int, samples: np.ndarray) -> bytes:
    """By hand, with comments, as Pillow writes none; https://netpbm.sourceforge.net/doc/ppm.html."""
    height, width = samples.shape[:2]
    body = samples.astype(">u2" if largest > 255 else "u1").tobytes()
    if kind in "P2 P3":
        body = "\n".join(map(str, samples.ravel().tolist())).encode() + b"\n"
    return f"{kind} # one\n{width} # two\n{height}\n{largest}\n".encode() + body


def run_length_bmp() -> bytes:
    """A BMP of 8 bits whose rows are runs of two, and its palette."""
    rows = PIXELS[::-1, ::2, 0]
    body = b"".join(b"".join(bytes([2, index]) for index in row) + b"\0\0" for row in rows.tolist()) + b"\0\1"
    palette = b"".join(bytes([index, 255 - index, 7, 0]) for index in range(256))
    start = 14 + 40 + len(palette)
    header = struct.pack("<IiiHHIIiiII", 40, 2 * rows.shape[1], SIDE, 1, 8, 1, len(body), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + header + palette + body


def variants() -> dict[str, bytes]:
    """Files in the forms that occur in practice, by name."""
    rgba, tags = PICTURE.convert("RGBA"), {f"turned {n}": n for n in range(1, 9)}
    rgba.putalpha(PICTURE.convert("L"))
    os2 = struct.pack("<IHHIIHHHH", 0, 0, 0, 26, 12, SIDE, SIDE, 1, 24)  # sides in 16 bits, as in the oldest BMPs
    kinds = {
        "gray": PICTURE.convert("L"), "palette": PICTURE.quantize(64), "1-bit": PICTURE.convert("1"), "rgb": PICTURE,
    }  # fmt: skip
    packed = ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")
    return {
        **{f"{kind}.bmp": encoded(image, "BMP") for kind, image in {**kinds, "rgba": rgba}.items()},
        "runs.bmp": run_length_bmp(),
        "of OS2.bmp": b"BM" + os2 + PIXELS[:, :SIDE].tobytes(),
        **{f"{kind}.ppm": encoded(kinds[kind], "PPM") for kind in ("rgb", "1-bit")},
        "gray.pgm": encoded(kinds["gray"], "PPM"),
        "plain.ppm": ppm("P3", 255, PIXELS),
        "plain.pgm": ppm("P2", 255, PIXELS[..., 0]),
        "up to 100.ppm": ppm("P6", 100, PIXELS % 101),
        **{f"{kind}.tif": encoded(image, "TIFF") for kind, image in {**kinds, "rgba": rgba}.items()},
        **{f"{name}.tiff": encoded(PICTURE, "TIFF", compression=name) for name in packed},
        **{f"{name}.tif": encoded(PICTURE, "TIFF", exif=exif_of(tag)) for name, tag in tags.items()},
        "turned 6, packed.tif": encoded(PICTURE, "TIFF", exif=exif_of(6), compression="tiff_lzw"),
        "fax.tif": encoded(kinds["1-bit"], "TIFF", compression="group4"),
        "cmyk.tif": encoded(PICTURE.convert("CMYK"), "TIFF"),
        "big.tif": encoded(PICTURE, "TIFF", big_tiff=True),
        "pages.tif": encoded(PICTURE, "TIFF", save_all=True, append_images=[ImageOps.invert(PICTURE)]),
        "tile.tif": tiff(20, 20, PIXELS[:, :SIDE, 0].tobytes() + bytes(8 * SIDE), _322=SIDE, _323=SIDE + 8),
    }


VARIANTS = variants()


def by_pillow(data: bytes) -> np.ndarray:
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


def pixels_of(image: torch.Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).numpy()


@pytest.fixture(params=INSTALLED)
def decoder(request) -> str:
    return request.param


def test_every_decoder_gives_pillows_pixels(decoder):
    for name, data in VARIANTS.items():
        np.testing.assert_array_equal(pixels_of(lk.decode(data, decoder, short_side=8)), by_pillow(data), name)
    assert len({by_pillow(VARIANTS[f"turned {n}.tif"]).tobytes() for n in range(1, 9)}) == 8


# A comment or the padding behind the last row may be lost; each of these cuts takes pixels.
CUTS = {
    f"{name}, {share}": data[: len(data) * share // 100 - 6 * (share == 100)]
    for name, data in VARIANTS.items()
    for share in (5, 30, 60, 100)
    if name not in ("pages.tif", "tile.tif") or share < 60
}


@pytest.mark.parametrize("truncated_is_loaded", [False, True])
def test_a_cut_file_is_an_error_with_its_name(decoder, monkeypatch, truncated_is_loaded):
    """Also for those whose scripts set Pillow's global switch, by which it fills the rest with black."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", truncated_is_loaded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of the metadata
        for name, data in CUTS.items():
            with pytest.raises(lk.DecodeError, match=f"a/{re.escape(name)}: {decoder} cannot decode"):
                lk.decode(data, decoder, key=f"a/{name}")


SIXTEEN_BITS = {
    "gray.tif": encoded(Image.fromarray(GRAY16), "TIFF"),
    "packed.tif": encoded(Image.fromarray(GRAY16), "TIFF", compression="tiff_lzw"),
    "gray.pgm": encoded(Image.fromarray(GRAY16), "PPM"),
    "plain.pgm": ppm("P2", 65535, GRAY16),
}


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_sixteen_bits_keep_their_high_byte_and_a_warning_says_so(decoder, monkeypatch, name):
    monkeypatch.setattr(decode_module, "_has_warned", False)
    with pytest.warns(BitDepthWarning, match=f"a/{name} has 16 bits a channel, of which the high 8 are kept"):
        image = lk.decode(SIXTEEN_BITS[name], decoder, key=f"a/{name}")
    np.testing.assert_array_equal(pixels_of(image), np.repeat(PIXELS[..., :1], 3, 2))


def test_color_of_sixteen_bits_is_pillows_and_twelve_bits_keep_their_high_ones(monkeypatch):
    monkeypatch.setattr(decode_module, "_has_warned", False)
    color = ppm("P6", 65535, PIXELS * np.uint16(257))
    with pytest.warns(BitDepthWarning):
        np.testing.assert_array_equal(pixels_of(lk.decode(color)), PIXELS)
    pairs = PIXELS[..., 0].reshape(-1, 2).astype(np.uint32)
    twelve = (pairs[:, :1] << 16 | pairs[:, 1:] << 4 | 0xF00F).astype(">u4").view(np.uint8).reshape(-1, 4)[:, 1:]
    image = lk.decode(tiff(SIDE + 8, SIDE, twelve.tobytes(), _258=12))
    np.testing.assert_array_equal(pixels_of(image)[..., 0], PIXELS[..., 0])


@pytest.mark.parametrize("name", ["floats.tif", "floats.ppm", "32 bits.tif", "signed.tif"])
def test_what_is_no_photo_is_refused_and_read_by_the_remedy(decoder, name):
    """`convert` would clip it: of floats from 0 to 1 it makes a black picture."""
    dtype = {"floats": np.float32, "32 bits": np.int32, "signed": np.int16}[name.partition(".")[0]]
    values = PIXELS[..., 0].astype(dtype)
    data = encoded(Image.fromarray(values), "PPM" if name.endswith("ppm") else "TIFF")
    with pytest.raises(lk.DecodeError, match=rf"{name}.*floats, signed, or of 32 bits.*np\.asarray\(PIL\.Image\.open"):
        lk.decode(data, decoder, key=name)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), values)


# --- each suffix, by every public name


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Of each suffix, in lower and upper case, a picture in each of two classes, of one color each."""
    root, formats = tmp_path_factory.mktemp("suffixes") / "photos", Image.registered_extensions()
    for number, suffix in enumerate((*IMG_EXTENSIONS, *map(str.upper, IMG_EXTENSIONS))):
        for folder, color in (("cat", "black"), ("dog", "white")):
            path = root / folder / f"{number:02d}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.new("L" if suffix.lower() == ".pgm" else "RGB", (SIDE + number, SIDE), color)
            path.write_bytes(encoded(image, formats[suffix.lower()]))
    return root


def expected_of(root: Path) -> dict[str, np.ndarray]:
    """By torchvision and Pillow, as most trainings read such a folder."""
    paths = [Path(path) for path, _ in ImageFolder(root).samples]
    return {path.relative_to(root).as_posix(): by_pillow(path.read_bytes()) for path in paths}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == sorted(expected)
    for key, pixels in found.items():
        np.testing.assert_array_equal(pixels, expected[key], key)


def packed(root: Path) -> Path:
    with tarfile.open(root.parent / "photos.tar", "w") as tar:
        tar.add(root, "")
    return root.parent / "photos.tar"


def test_every_store_and_decoder_reads_what_image_folder_reads(photos, decoder):
    expected, bytes_by_key = expected_of(photos), {key: (photos / key).read_bytes() for key in expected_of(photos)}
    assert len(expected) == 4 * len(IMG_EXTENSIONS)
    for source in (photos, packed(photos), bytes_by_key):
        store = lk.open_store(source)
        dataset = lk.ImageDataset(store, decoder=decoder)
        assert [store.read(key) for key in dataset.keys] == [bytes_by_key[key] for key in dataset.keys]
        assert dataset.labels.tolist() == [label for _, label in sorted(ImageFolder(photos).samples)]
        images = {key: pixels_of(image) for key, (image, _) in zip(dataset.keys, dataset, strict=True)}
        assert_same(images, expected)


def test_every_loader_and_conversion_reads_them(photos, tmp_path):
    expected = expected_of(photos)
    store = lk.FolderStore(photos)
    images = (np.asarray(image) for image, _ in lk.PILDataset(store))
    assert_same(dict(zip(store.keys(), images, strict=True)), expected)
    pixels = lk.PixelStore.build(store, tmp_path / "pixels", num_workers=1, progress=False)
    assert_same({key: pixels.pixels(number) for number, key in enumerate(pixels.keys)}, expected)
    shards = lk.read_shards(lk.write_shards(store, tmp_path / "shards", engine="threads", progress=False))
    assert_same(dict(zip(store.keys(), (pixels_of(image) for image, _ in shards), strict=True)), expected)
    loader = lk.BatchLoader(store, size=SIDE, resize=SIDE, batch_size=4, num_threads=1, train=False)
    batches = np.concatenate([images.permute(0, 2, 3, 1).numpy() for images, _ in loader])
    middles = {key: image[:, :SIDE] for key, image in expected.items()}  # of one color each
    assert_same(dict(zip(store.keys(), batches, strict=True)), middles)
    sizes = lk.collect_sizes(photos, progress=False).set_index("path")
    assert {key: (row.height, row.width) for key, row in sizes.iterrows()} == {
        key: image.shape[:2] for key, image in expected.items()
    }


def test_a_size_is_that_stored_and_the_orientation_says_how_it_is_turned(tmp_path):
    for name, data in VARIANTS.items():
        (tmp_path / name).write_bytes(data)
    for row in lk.collect_sizes(tmp_path, progress=False).itertuples():
        tag = int(re.search(r"turned (\d)|$", row.path)[1] or 1)
        size = (row.height, row.width) if tag >= 5 else (row.width, row.height)
        assert (row.exif_orientation, *size) == (tag, *by_pillow(VARIANTS[row.path]).shape[1::-1]), row.path


def test_rows_of_a_table_are_named_after_what_their_bytes_begin_with(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [VARIANTS[name] for name in ("rgb.bmp", "rgb.ppm", "gray.pgm", "rgb.tif", "big.tif")]
    parquet.write_table(pyarrow.table({"image": pyarrow.array(rows, pyarrow.binary())}), tmp_path / "x.parquet")
    store = lk.open_store(tmp_path / "x.parquet")
    assert [key.partition(".")[2] for key in list(store.keys())] == ["bmp", "ppm", "ppm", "tif", "tif"]
    for (image, _), data in zip(lk.ImageDataset(store, classes=[]), rows, strict=True):
        np.testing.assert_array_equal(pixels_of(image), by_pillow(data))


# --- the table


def test_what_is_known_of_formats_has_one_home():
    """Elsewhere a module names one format or two, such as what it writes; a second list would be forgotten."""
    assert set(IMAGE_SUFFIXES) == set(IMG_EXTENSIONS)
    assert set(IMAGE_SUFFIXES).isdisjoint(OTHER_IMAGE_SUFFIXES)
    lists = {}
    for path in (REPO / "labkit").rglob("*.py"):
        constants = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        suffixes = {value for value in constants if value in (*IMAGE_SUFFIXES, *OTHER_IMAGE_SUFFIXES)}
        begins = {format_of(value).name for value in constants if isinstance(value, bytes) and format_of(value)}
        if path.name != "image_formats.py" and (len(suffixes) > 2 or len(begins) > 1):
            lists[path.name] = suffixes | begins
    assert lists == {}


def test_a_tile_larger_than_the_limit_is_refused(decoder, monkeypatch):
    packed_zeros = zlib.compress(bytes(1 << 20))
    data = tiff(16, 16, packed_zeros, _259=8, _322=1024, _323=1024)
    assert not lk.decode(data, decoder).any()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1 << 18)
    for read in (lambda: lk.decode(data, decoder), lambda: lk.PILDataset(lk.open_store({"a/b.tif": data}))[0]):
        with pytest.raises(lk.DecodeError, match=r"1024 x 1024 pixels exceed the limit"):
            read()


@pytest.mark.parametrize("change", ["no sizes", "a last size of a whole strip"])
def test_a_tiff_whose_strips_have_no_true_sizes_is_read_unless_it_is_cut(change):
    """As writers of old do; Pillow reads it."""
    pixels = np.random.default_rng(0).integers(0, 255, (37, 53, 3), dtype=np.uint8)
    data = bytearray(encoded(Image.fromarray(pixels), "TIFF"))
    at = data.find(struct.pack("<H", 279))
    if change == "no sizes":
        data[at : at + 2] = struct.pack("<H", 65000)  # a private tag
    else:
        [size] = struct.unpack_from("<I", data, at + 8)
        data[at + 8 : at + 12] = struct.pack("<I", size + 1000)
    assert np.array_equal(lk.decode(bytes(data)).permute(1, 2, 0), pixels)
    with pytest.raises(lk.DecodeError):
        lk.decode(bytes(data[:-500]))
