"""Small files that ask for much memory: refused by a stated limit, before it is spent."""

import gzip
import http.server
import io
import re
import struct
import tarfile
import zlib
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin

import labkit as lk
from labkit import course
from labkit.course.oracles import encode_png, png_chunk
from labkit.data import decode
from labkit.data.depth import decode_picture
from labkit.data.extract import extract_tars
from labkit.data.shards_write import read_manifest
from labkit.data.tar_stream import convert_tar
from labkit.errors import ItemErrors, TarError
from labkit.util import arguments as bounds
from labkit.util.arguments import MAX_FILE_VARIABLE, max_file_bytes
from tests.hardening.inputs import image_bytes
from tests.serving import Quiet, serving
from tests.tars import member

BOMB_BYTES = 120_000_000  # that the smallest bombs here stand for; most stand for more
_SPARE_MB = 60  # that a refusal may take
INSTALLED = sorted(set(lk.DECODERS) - decode.missing_decoders().keys())


@pytest.fixture(scope="module", autouse=True)
def _all_is_loaded(tmp_path_factory):
    """Libraries, thread pools and buffers take their memory once; a test that runs alone must not count it."""
    root = tmp_path_factory.mktemp("sound")
    (root / "set" / "a").mkdir(parents=True)
    (root / "set" / "a" / "a.jpg").write_bytes(image_bytes((40, 40), "JPEG"))
    store = lk.FolderStore(root / "set")
    lk.PixelStore.build(store, root / "p", progress=False)
    list(lk.BatchLoader(store, size=8, batch_size=1, num_threads=1))
    lk.collect_sizes(root / "set", progress=False)
    lk.write_shards(store, root / "shards", engine="threads", progress=False)
    list(lk.read_shards(root / "shards"))
    with pytest.raises(OSError, match="gave no complete answer"):
        lk.HttpStore("http://127.0.0.1:9", retries=0).read("a.jpg")


@contextmanager
def little_memory():
    """The block's peak is at most `_SPARE_MB` above what was held before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _kib("VmHWM")
    yield
    assert _kib("VmHWM") - before < _SPARE_MB * 1024


def _kib(name: str) -> int:
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def png_of(width: int, height: int) -> bytes:
    """Whole, but for its pixels: a row of them."""
    return encode_png(width, height, 8, 2, bytes(100))


def jpeg_of(width: int, height: int) -> bytes:
    data = bytearray(image_bytes(kind="JPEG"))
    frame = data.index(struct.pack(">BHH", 8, 12, 16))
    data[frame : frame + 5] = struct.pack(">BHH", 8, height, width)
    return bytes(data)


def webp_of(width: int, height: int) -> bytes:
    data = bytearray(image_bytes(kind="WEBP", lossless=True))
    start = data.index(b"VP8L") + 9
    data[start : start + 4] = struct.pack("<I", (width - 1) | (height - 1) << 14)
    return bytes(data)


IMAGES = {"huge.png": png_of(100_000, 100_000), "wide.png": png_of(2**31 - 1, 1), "huge.webp": webp_of(16_384, 16_384)}
IMAGES["huge.jpg"] = jpeg_of(65_500, 65_500)


@pytest.mark.parametrize("decoder", INSTALLED)
@pytest.mark.parametrize("name", IMAGES)
def test_no_decoder_makes_a_huge_picture(name, decoder):
    lk.decode(image_bytes(kind="JPEG"), decoder)
    with little_memory(), pytest.raises(lk.DecodeError, match=rf"{name}.*(exceed|bomb)"):
        lk.decode(IMAGES[name], decoder, key=name)


def n_not_skipped(store: lk.FolderStore) -> int:
    """Without a reference to the data set, which at its end says on stderr what it has skipped.

    The test's own frame is part of a cycle, by the error that it catches: the line would come in a later test.
    """
    dataset = lk.ImageDataset(store, on_error="skip")
    return sum(dataset[index] is not None for index in range(len(dataset)))


def test_huge_pictures_are_refused_by_whatever_opens_them(tmp_path):
    for name, data in IMAGES.items():
        (tmp_path / "set" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / "a" / name).write_bytes(data)
    (tmp_path / "set" / "a" / "sound.jpg").write_bytes(image_bytes((40, 40), "JPEG"))
    store = lk.FolderStore(tmp_path / "set")
    lk.decode(store.read("a/sound.jpg"))
    with little_memory():
        with pytest.raises(ItemErrors) as failure:
            lk.PixelStore.build(store, tmp_path / "p", progress=False)
        assert set(failure.value.failures) == {f"a/{name}" for name in IMAGES}
        with pytest.raises(lk.DecodeError):
            list(lk.BatchLoader(store, size=8, batch_size=5, num_threads=1))
        assert n_not_skipped(store) >= 1
        frame = lk.collect_sizes(tmp_path / "set", progress=False).set_index("path")
        for data in IMAGES.values():
            with pytest.raises(lk.DecodeError):
                decode_picture(data, "rgb")
    assert frame.loc["a/sound.jpg", "width"] == 40
    assert frame.loc["a/huge.png", "error"]


@pytest.fixture(scope="module")
def packed_zeros() -> bytes:
    return zlib.compress(bytes(BOMB_BYTES), 9)


@pytest.mark.parametrize("decoder", INSTALLED)
@pytest.mark.parametrize("kind", ["zTXt", "iTXt", "iCCP"])
def test_what_a_png_says_beside_its_pixels(packed_zeros, kind, decoder):
    said = {"zTXt": b"a\0\0", "iTXt": b"a\0\1\0\0\0", "iCCP": b"a\0\0"}[kind]
    plain = image_bytes()
    assert lk.decode(plain, decoder).shape == (3, 12, 16)
    data = plain[:33] + png_chunk(kind.encode(), said + packed_zeros) + plain[33:]
    with little_memory(), suppress(lk.DecodeError):
        assert (lk.decode(data, decoder) == lk.decode(plain, decoder)).all()


def test_pictures_are_jpeg_png_or_webp(tmp_path):
    """Pillow would hand Encapsulated PostScript to Ghostscript, which runs it."""
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    assert Image.open(io.BytesIO(eps)).format == "EPS"
    with pytest.raises(lk.DecodeError, match="not a readable JPEG, PNG or WebP"):
        decode_picture(eps, "depth")
    (tmp_path / "a.jpg").write_bytes(eps)
    with pytest.raises(lk.DecodeError, match="cannot identify"):
        lk.PILDataset(lk.FolderStore(tmp_path))[0]
    (tmp_path / "a.jpg").write_bytes(IMAGES["huge.png"])
    with little_memory(), pytest.raises(lk.DecodeError, match="bomb"):
        lk.PILDataset(lk.FolderStore(tmp_path))[0]


def test_text_within_the_limit_does_no_harm():
    about = PngImagePlugin.PngInfo()
    about.add_text("a", "b" * 500_000, zip=True)
    assert lk.decode(image_bytes(pnginfo=about), "pil").shape == (3, 12, 16)


# Tars.


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    return member(name, kind=kind, size=size)[0].tobuf(tarfile.GNU_FORMAT)


@cache
def gzipped_zeros() -> bytes:
    return gzip.compress(bytes(BOMB_BYTES), 1)


def written(path: Path, *parts: bytes) -> Path:
    path.write_bytes(b"".join(parts))
    return path


def extract(path: Path) -> None:
    extract_tars(path, path.parent / "out", progress=False)


def convert(path: Path) -> None:
    convert_tar(path, path.parent / "converted.tar", progress=False)


def list_tar(path: Path) -> None:
    lk.TarStore(path).keys()


def read_samples(path: Path) -> None:
    list(lk.read_shards(path).samples())


def assert_refused(path: Path, said: str, *readers: Callable[[Path], object]) -> None:
    with little_memory():
        for read in readers:
            with pytest.raises(ItemErrors if read is extract else TarError, match=said):
                read(path)


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
@pytest.mark.parametrize("size", [-512, -1024, -1 << 60])
def test_a_size_below_zero(tmp_path, kind, size):
    """With -512 the next header is the same one again, for ever."""
    path = written(tmp_path / "x.tar", header("a.jpg", 0), header("b.jpg", size, kind), bytes(5000))
    assert_refused(path, "cut or damaged", extract, read_samples, list_tar)


def test_a_member_as_large_as_eight_exabytes(tmp_path):
    path = written(tmp_path / "x.tar", header("a.jpg", 8 * 10**18), bytes(10_000))
    assert_refused(path, "cut or damaged", list_tar)
    assert_refused(path, rf"8000000000000000000 bytes.*{MAX_FILE_VARIABLE}", read_samples)
    with little_memory(), pytest.raises((OSError, ItemErrors)):
        extract(path)


def test_a_large_member_of_a_compressed_shard(tmp_path, monkeypatch):
    packed = gzip.compress(header("a.jpg", BOMB_BYTES)), gzipped_zeros(), gzip.compress(bytes(1024))
    path = written(tmp_path / "x.tar.gz", *packed)
    monkeypatch.setenv(MAX_FILE_VARIABLE, "100")
    assert_refused(path, f"{BOMB_BYTES} bytes, over the limit of 100000000", read_samples)
    with little_memory():
        convert(path)


@pytest.mark.parametrize("value", ["0", "-1", "many", "nan", "inf"])
def test_the_limit_is_a_number(monkeypatch, value):
    monkeypatch.setenv(MAX_FILE_VARIABLE, value)
    with pytest.raises(ValueError, match=MAX_FILE_VARIABLE):
        max_file_bytes()


# Indices, headers, lists.


DEEP = "[" * 100_000


def test_lists_nested_deep(tmp_path, recorded_frames):
    with pytest.raises(ValueError, match="is not a manifest"):
        read_manifest(DEEP.encode(), "x")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "manifest.json").write_text(DEEP)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        lk.make_photos(tmp_path / "set", 1, progress=False)
    (tmp_path / "set" / "a.png").write_bytes(image_bytes())
    with course.serve_folder(tmp_path / "set") as url:
        assert list(lk.HttpStore(url).keys()) == ["a.png"]
    (tmp_path / "predictions").mkdir()
    (tmp_path / "predictions" / "x.json").write_text(DEEP)
    with pytest.raises(ValueError, match="holds no predictions"):
        course.score()


# Bodies over HTTP.


class Bodies(Quiet, http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        body = gzipped_zeros() if self.path == "/packed" else bytes(1000)
        length = 10**15 if self.path == "/long" else len(body)
        if self.path == "/packed":
            self.send_header("Content-Encoding", "gzip")
        if self.path != "/endless":  # HTTP/1.0: a body without a length ends with the connection
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)
        with suppress(OSError):
            while self.path == "/endless":
                self.wfile.write(bytes(1 << 20))


@pytest.fixture
def bodies():
    with serving(Bodies) as port:
        yield f"http://127.0.0.1:{port}"


def test_a_body_that_is_packed_unasked_stays_packed(bodies):
    with little_memory():
        assert lk.HttpStore(bodies).read("packed") == gzipped_zeros()


def test_the_limits_are_what_the_documentation_says():
    assert "1024 MB" in bounds.max_file_bytes.__doc__
    assert max_file_bytes() == 1_024_000_000
