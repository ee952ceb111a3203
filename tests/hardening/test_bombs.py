"""Small files that ask for much memory, or for ever: refused by a stated limit, before it is spent."""

import gzip
import io
import re
import struct
import tarfile
import zlib
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

import labkit as lk
from labkit.course.oracles import encode_png, png_chunk
from labkit.data.decode import missing_decoders
from labkit.data.depth import decode_picture
from labkit.data.extract import extract_tars
from labkit.data.tar_stream import convert_tar
from labkit.errors import ItemErrors, TarError
from labkit.util.arguments import MAX_FILE_VARIABLE, max_file_bytes
from tests.hardening.inputs import fix_tar, image_bytes
from tests.image_files import tiff
from tests.scripted_server import Handler, serve_script
from tests.tars import member

BOMB_BYTES = 120_000_000  # that the smallest bombs here stand for; most stand for more
SPARE_MB = 60  # that a refusal may take
INSTALLED = sorted(set(lk.DECODERS) - missing_decoders().keys())


@pytest.fixture(scope="module", autouse=True)
def _all_is_loaded(tmp_path_factory):
    """Libraries, thread pools and buffers take their memory once; a test that runs alone must not count it."""
    root = tmp_path_factory.mktemp("sound")
    (root / "set" / "a").mkdir(parents=True)
    (root / "set" / "a" / "a.jpg").write_bytes(image_bytes((40, 40), "JPEG"))
    store = lk.FolderStore(root / "set")
    lk.PixelStore.build(store, root / "p", num_workers=0, progress=False)
    list(lk.BatchLoader(store, size=8, batch_size=1, num_threads=1))
    lk.collect_sizes(root / "set", progress=False)
    lk.write_shards(store, root / "shards", classes=[], engine="threads", progress=False)
    list(lk.read_shards(root / "shards"))
    with pytest.raises(OSError, match="gave no complete answer"):
        lk.HttpStore("http://127.0.0.1:9", retries=0).read("a.jpg")


@contextmanager
def little_memory():
    """The block's peak is at most `SPARE_MB` above what was held before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_kib()
    yield
    assert peak_kib() - before < SPARE_MB * 1024


@cache
def gzipped_zeros() -> bytes:
    return gzip.compress(bytes(BOMB_BYTES), 1)


def peak_kib() -> int:
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


# Pictures.


def jpeg_of(width: int, height: int) -> bytes:
    return image_bytes(kind="JPEG").replace(struct.pack(">BHH", 8, 12, 16), struct.pack(">BHH", 8, height, width))


def webp_of(width: int, height: int) -> bytes:
    data = bytearray(image_bytes(kind="WEBP", lossless=True))
    start = data.index(b"VP8L") + 9
    data[start : start + 4] = struct.pack("<I", (width - 1) | (height - 1) << 14)
    return bytes(data)


# Whole, but for their pixels: of PNGs there is a row.
IMAGES = {
    "huge.png": encode_png(100_000, 100_000, 8, 2, bytes(100)), "wide.png": encode_png(2**31 - 1, 1, 8, 2, bytes(100)),
    "huge.webp": webp_of(16_384, 16_384), "huge.jpg": jpeg_of(65_500, 65_500),
    "huge.bmp": image_bytes(kind="BMP").replace(struct.pack("<ii", 16, 12), struct.pack("<ii", 100_000, 100_000)),
    "huge.ppm": image_bytes(kind="PPM").replace(b"16 12", b"100000 100000"), "huge.pgm": b"P2 100000 100000 255 1 2 3",
    "huge.tif": tiff(100_000, 100_000, bytes(100)), "a tile.tif": tiff(16, 12, bytes(100), _322=65_536, _323=65_536),
}  # fmt: skip


@pytest.mark.parametrize("decoder", INSTALLED)
@pytest.mark.parametrize("pillows_limit", [Image.MAX_IMAGE_PIXELS, 1 << 20])
def test_no_decoder_makes_a_huge_picture(monkeypatch, decoder, pillows_limit):
    lk.decode(image_bytes(kind="JPEG"), decoder)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillows_limit)
    for name, data in IMAGES.items():
        with little_memory(), pytest.raises(lk.DecodeError, match=rf"{name}.*(exceed|bomb)"):
            lk.decode(data, decoder, key=name)


def n_not_skipped(store: lk.FolderStore) -> int:
    """Without a reference to the data set, which at its end says on stderr what it has skipped.

    The test's own frame is part of a cycle, by the error that it catches: the line would come in a later test.
    """
    dataset = lk.ImageDataset(store, on_error="skip")
    return sum(dataset[index] is not None for index in range(len(dataset)))


def test_huge_pictures_are_refused_by_whatever_opens_them(tmp_path):
    (tmp_path / "set" / "a").mkdir(parents=True)
    for name, data in {**IMAGES, "sound.jpg": image_bytes((40, 40), "JPEG")}.items():
        (tmp_path / "set" / "a" / name).write_bytes(data)
    store = lk.FolderStore(tmp_path / "set")
    lk.decode(store.read("a/sound.jpg"))
    with little_memory():
        with pytest.raises(ItemErrors) as failure:
            lk.PixelStore.build(store, tmp_path / "p", num_workers=0, progress=False)
        assert set(failure.value.failures) == {f"a/{name}" for name in IMAGES}
        with pytest.raises(lk.DecodeError):
            list(lk.BatchLoader(store, size=8, batch_size=5, num_threads=1))
        assert n_not_skipped(store) >= 1
        frame = lk.collect_sizes(tmp_path / "set", progress=False).set_index("path")
        for data in IMAGES.values():
            with pytest.raises(lk.DecodeError):
                decode_picture(data, "rgb")
        with pytest.raises(lk.DecodeError, match="bomb"):
            lk.PILDataset(store)[store.keys().index("a/huge.png")]
    assert frame.loc["a/sound.jpg", "width"] == 40
    assert frame.loc["a/huge.png", "error"]


@pytest.fixture(scope="module")
def packed_zeros() -> bytes:
    return zlib.compress(bytes(BOMB_BYTES), 9)


@pytest.mark.parametrize("decoder", INSTALLED)
def test_what_a_png_says_beside_its_pixels_is_not_unpacked(packed_zeros, decoder):
    plain = image_bytes()
    expected = lk.decode(plain, decoder)
    assert expected.shape == (3, 12, 16)
    for kind, said in {b"zTXt": b"a\0\0", b"iTXt": b"a\0\1\0\0\0", b"iCCP": b"a\0\0"}.items():
        data = plain[:33] + png_chunk(kind, said + packed_zeros) + plain[33:]
        with little_memory(), suppress(lk.DecodeError):
            assert (lk.decode(data, decoder) == expected).all()


def test_what_runs_a_program_is_no_picture(tmp_path):
    """Pillow would hand Encapsulated PostScript to Ghostscript, which runs it."""
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    assert Image.open(io.BytesIO(eps)).format == "EPS"
    (tmp_path / "a.jpg").write_bytes(eps)
    for read in (lambda: decode_picture(eps, "depth"), lambda: lk.PILDataset(lk.FolderStore(tmp_path))[0]):
        with pytest.raises(lk.DecodeError, match=r"unknown bytes .* not a readable JPEG"):
            read()


# Tars.

READERS = {
    "extract": lambda path: extract_tars(path, path.parent / "out", engine="threads", progress=False),
    "samples": lambda path: list(lk.read_shards(path).samples()),
    "keys": lambda path: lk.TarStore(path).keys(),
}


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    return member(name, kind=kind, size=size)[0].tobuf(tarfile.GNU_FORMAT)


def assert_refused(path: Path, said: str, *readers: str) -> None:
    for reader in readers or READERS:
        with little_memory(), pytest.raises((ItemErrors, TarError), match=said):
            READERS[reader](path)


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
@pytest.mark.parametrize("size", [-512, -1 << 60])
def test_a_size_below_zero_is_damage(tmp_path, kind, size):
    """With -512 the next header is the same one again, for ever."""
    (tmp_path / "x.tar").write_bytes(header("a.jpg", 0) + header("b.jpg", size, kind) + bytes(5000))
    assert_refused(tmp_path / "x.tar", "cut or damaged")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
@pytest.mark.parametrize("before", [b"", header("a.jpg", 0)], ids=["first", "second"])
def test_a_name_or_attributes_of_a_size_that_no_memory_holds_are_damage(tmp_path, kind, before):
    (tmp_path / "x.tar").write_bytes(before + header("b.jpg", 1 << 42, kind) + bytes(5000))
    assert_refused(tmp_path / "x.tar", "it states 4398046511104 bytes of name or attributes")


def test_a_header_that_tarfile_does_not_read_is_damage(tmp_path):
    """Its checksum is right and its mode is none: `tarfile` takes that for the end."""
    bad = fix_tar(header("b.jpg", 0).replace(b"0000644", b"000x644"))
    (tmp_path / "x.tar").write_bytes(header("a.jpg", 0) + bad + bytes(1024))
    assert_refused(tmp_path / "x.tar", r"the header at byte 512 cannot be read: .*last whole member is 'a\.jpg'")


def test_a_member_as_large_as_eight_exabytes_is_refused(tmp_path):
    (tmp_path / "x.tar").write_bytes(header("a.jpg", 8 * 10**18) + bytes(10_000))
    assert_refused(tmp_path / "x.tar", "cut or damaged", "keys")
    assert_refused(tmp_path / "x.tar", rf"8000000000000000000 bytes.*{MAX_FILE_VARIABLE}", "samples")
    with little_memory(), pytest.raises((OSError, ItemErrors)):
        READERS["extract"](tmp_path / "x.tar")


def test_a_large_packed_member_is_refused_and_converted_in_pieces(tmp_path, monkeypatch):
    parts = gzip.compress(header("a.jpg", BOMB_BYTES)), gzipped_zeros(), gzip.compress(bytes(1024))
    (tmp_path / "x.tar.gz").write_bytes(b"".join(parts))
    monkeypatch.setenv(MAX_FILE_VARIABLE, "100")
    assert_refused(tmp_path / "x.tar.gz", f"{BOMB_BYTES} bytes, over the limit of 100000000", "samples")
    with little_memory():
        convert_tar(tmp_path / "x.tar.gz", tmp_path / "converted.tar", progress=False)


def test_the_limit_is_a_number_of_megabytes(monkeypatch):
    assert max_file_bytes() == 1_024_000_000
    for value in ("0", "many", "inf"):
        monkeypatch.setenv(MAX_FILE_VARIABLE, value)
        with pytest.raises(ValueError, match=MAX_FILE_VARIABLE):
            max_file_bytes()


# Bodies over HTTP.


class Packing(Handler):
    def do_GET(self):
        self.say(200, gzipped_zeros(), Content_Encoding="gzip")


def test_a_body_that_is_packed_unasked_stays_packed():
    expected = gzipped_zeros()
    with serve_script(Packing) as server, little_memory():
        assert lk.HttpStore(server.url).read("packed") == expected
