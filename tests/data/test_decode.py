"""lk.decode: six decoders under one contract, whatever the file. The oracle is Pillow alone, and Pillow is checked too.

Some files have ended processes. They are decoded in a child.
"""

import importlib.metadata
import io
import multiprocessing
import random
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packaging.version import Version
from PIL import Image, ImageOps

import labkit as lk
from labkit import course
from labkit.course.oracles import HEIGHT, WIDTH, broken_files, encode_png, exif_of, oracle_files, picture, reference
from labkit.data import decode as decode_module
from labkit.data.decode import load_decoder, missing_decoders
from labkit.data.depth import decode_picture
from labkit.data.partial_jpeg import LIBRARY_VARIABLE, load_library
from tests import jpeg_files, oriented_files
from tests.fresh import fresh_copy
from tests.image_files import encoded
from tests.jpeg_files import SCALABLE, jpeg_of_each_process
from tests.labeled import every_way
from tests.memory_store import MemoryStore
from tests.oriented_files import PIXELS, UPRIGHT, camera_files, turn_of

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow's, of damaged metadata

SCALING = ("pil_draft", "turbojpeg")
LACKING = {"torchcodec"} if Version(importlib.metadata.version("torchcodec")) < Version("0.16") else set()
TRIED = [name for name in lk.DECODERS if name not in LACKING]  # torchcodec had no decode_image before


def decoded(data: bytes, decoder: str, **options) -> np.ndarray:
    return lk.decode(data, decoder, **options).permute(1, 2, 0).numpy()


def difference(one: np.ndarray, other: np.ndarray) -> float:
    return np.abs(one.astype(int) - other).mean() if one.shape == other.shape else np.inf


def grainy() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)


@pytest.fixture(params=TRIED)
def decoder(request) -> str:
    return request.param


def test_the_reference_shows_the_picture_itself():
    image = picture()
    kinds = {"gray": image.convert("L"), "palette": image.quantize(64), "1-bit": image.convert("1")}
    off = {}
    for name, data in oracle_files().items():
        kind = next((kind for kind in kinds if name.startswith(kind)), None)
        off[name] = difference(reference(data), np.asarray(kinds.get(kind, image).convert("RGB")))
    assert [name for name in off if off[name] > (1 if name.endswith(".png") else 12)] == []


def sound_but_odd() -> dict[str, bytes]:
    """A corner of one color, as libjpeg leaves it where a scan is cut; and a header that libjpeg warns of."""
    pixels = grainy()
    pixels[-32:, -32:] = 255
    jpeg = oracle_files()["exif 1.jpeg"]
    revision = jpeg.index(b"JFIF") + 5
    return {
        "a corner of one color.jpeg": encoded(Image.fromarray(pixels), quality=90),
        "an unknown JFIF revision.jpeg": jpeg[:revision] + b"\x62" + jpeg[revision + 1 :],
    }


def test_every_file_has_pillows_pixels(decoder):
    files = {**oracle_files(), **sound_but_odd()}
    images = {name: lk.decode(data, decoder) for name, data in files.items()}
    assert {(image.dtype, len(image)) for image in images.values()} == {(torch.uint8, 3)}
    off = {name: difference(images[name].permute(1, 2, 0).numpy(), reference(data)) for name, data in files.items()}
    assert {name: mean for name, mean in off.items() if mean > 2} == {}


def test_sixteen_bits_keep_their_high_byte(decoder):
    """The high bytes show the picture, the low ones its negative."""
    gray, color = (np.asarray(image).astype(np.uint16) for image in (picture().convert("L"), picture()))
    rows = (color * 256 + 255 - color).astype(">u2").reshape(HEIGHT, -1)
    as_gray = encoded(Image.fromarray(gray * 256 + 255 - gray), "PNG")
    as_color = encode_png(WIDTH, HEIGHT, 16, 2, b"".join(b"\0" + row.tobytes() for row in rows))
    assert difference(decoded(as_gray, decoder), np.stack([gray] * 3, 2)) <= 1
    assert difference(decoded(as_color, decoder), color) <= 1


TWELVE_BITS = np.arange(4096, dtype=np.uint16).reshape(64, 64)


def in_sixteen_bits(root: Path) -> Path:
    (root / "cat").mkdir(parents=True)
    for name in ("1.png", "2.png"):
        (root / "cat" / name).write_bytes(encoded(Image.fromarray(TWELVE_BITS), "PNG"))
    return root


@pytest.mark.filterwarnings("always")
@every_way
def test_bits_that_are_lost_are_told_once_in_a_process(labeled, tmp_path, monkeypatch):
    """12 bits of data in a 16-bit PNG become 16 values: right for a photo, and a loss for anything else."""
    monkeypatch.setattr(decode_module, "_has_warned", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        labeled(in_sixteen_bits(tmp_path / "set"), tmp_path)
    [warning] = [each for each in caught if issubclass(each.category, decode_module.BitDepthWarning)]
    assert re.match(r"cat/1\.png.* has 16 bits a channel, of which the high 8 are kept", str(warning.message))
    assert "np.asarray(PIL.Image.open(io.BytesIO(store.read(key))))" in str(warning.message)


def test_a_filter_refuses_each_image_of_lost_bits(decoder, tmp_path, monkeypatch):
    monkeypatch.setattr(decode_module, "_has_warned", False)
    store = lk.FolderStore(in_sixteen_bits(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error", decode_module.BitDepthWarning)
        for key in ("cat/1.png", "cat/2.png"):
            with pytest.raises(decode_module.BitDepthWarning, match=key):
                lk.decode(store.read(key), decoder, key=key)
    eight = np.asarray(lk.PILDataset(store)[0][0])
    assert np.array_equal(eight, np.repeat((TWELVE_BITS >> 8)[..., None], 3, 2))  # not clipped to white


def test_of_several_pictures_comes_the_first(decoder):
    first = Image.fromarray(grainy())
    others = {"save_all": True, "append_images": [Image.fromarray(255 - grainy()), first]}
    lossless = [encoded(first, "PNG", **others, default_image=default_image) for default_image in (False, True)]
    for data in (*lossless, encoded(first, "WEBP", lossless=True, **others)):
        assert Image.open(io.BytesIO(data)).n_frames > 1
        np.testing.assert_array_equal(decoded(data, decoder), grainy())
    phone = encoded(picture(), "MPO", quality=92, **others)
    assert difference(decoded(phone, decoder), np.asarray(picture())) <= 12


# --- what is damaged


def without_end() -> dict[str, bytes]:
    """Files that lack their end and nothing else: most libraries decode them, or some of them."""
    files = oracle_files()
    jpeg, png = files["subsampling 444.jpeg"], files["rgb.png"]
    zeros = jpeg[:-2] + b"\0" * 2000
    thumbnail = b"\xff\xe1" + (len(jpeg) + 2).to_bytes(2, "big") + jpeg
    return {
        "no IEND.png": png[:-12],
        "half an IEND.png": png[:-1],
        "one byte short.webp": files["webp.webp"][:-1],
        "zeros at the end.jpeg": zeros,
        "only the thumbnail ends.jpeg": zeros[:2] + thumbnail + zeros[2:],
    }


def with_a_broken_scan() -> dict[str, bytes]:
    """JPEGs that end as they should. libjpeg fills what is missing with one color, and OpenCV ignores its errors."""
    kinds = {
        "a sequential": {}, "a progressive": {"progressive": True}, "a restarted": {"restart_marker_rows": 1},
    }  # fmt: skip
    grain = {kind: encoded(Image.fromarray(grainy()), quality=90, **options) for kind, options in kinds.items()}
    plain, progressive = grain["a sequential"], oracle_files()["progressive.jpeg"]
    cut = {f"{kind} scan that is cut.jpeg": data[: len(data) * 2 // 3] + b"\xff\xd9" for kind, data in grain.items()}
    sequential, cmyk = cut["a sequential scan that is cut.jpeg"], encoded(Image.fromarray(grainy()).convert("CMYK"))
    middle, table = len(plain) // 2, progressive.rindex(b"\xff\xc4")
    # libjpeg-turbo reports an error behind a warning as a warning; who ignores it gets memory that nobody wrote to.
    bogus_table = progressive[table : table + 5] + b"\xff" * 16
    return {
        **cut,
        "a CMYK scan that is cut.jpeg": cmyk[: len(cmyk) * 2 // 3] + b"\xff\xd9",
        "a cut scan behind stray bytes, of which libjpeg warns.jpeg": sequential[:20] + b"abc" + sequential[20:],
        **{
            f"marker {marker:X} within a scan.jpeg": plain[:middle] + bytes([0xFF, marker]) + plain[middle + 2 :]
            for marker in (0x88, 0xC4, 0xDA)
        },
        "an error behind a warning.jpeg": progressive[: table - 20] + bogus_table + progressive[table + 21 :],
    }


def with_lost_restarts() -> dict[str, bytes]:
    """JPEGs of which intervals between restart markers are lost or out of turn, of which libjpeg only warns."""
    files = {}
    for kind, options in {"sequential": {}, "progressive": {"progressive": True}}.items():
        whole = encoded(Image.fromarray(grainy()), quality=90, restart_marker_blocks=2, **options)
        starts = [found.start() for found in re.finditer(rb"\xff[\xd0-\xd7]", whole)]
        a, b, c = starts[1:4]
        files[f"{kind}, an interval lost"] = whole[:a] + whole[b:]
        files[f"{kind}, two swapped"] = whole[:a] + whole[b:c] + whole[a:b] + whole[c:]
        files[f"{kind}, a marker lost"] = whole[:a] + whole[a + 2 :]
        if kind == "sequential":
            files["eight intervals lost"] = whole[:a] + whole[starts[9] :]
            files["no frame"] = whole.replace(b"\xff\xc0", b"\xff\xde", 1)
    return {f"{name}.jpeg": data for name, data in files.items()}


DAMAGED = {**broken_files(), **without_end(), **with_a_broken_scan(), **with_lost_restarts()}


def test_a_marker_behind_the_last_interval_is_no_damage(decoder):
    """Some encoders write one; libjpeg skips it."""
    whole = encoded(picture(), quality=92, restart_marker_blocks=2)
    numbers = re.findall(rb"\xff([\xd0-\xd7])", whole)
    more = whole[:-2] + bytes([0xFF, 0xD0 + len(numbers) % 8]) + whole[-2:]
    np.testing.assert_array_equal(decoded(more, decoder), decoded(whole, decoder))


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_by_name(decoder, name):
    with pytest.raises(lk.DecodeError, match=rf"folder/{re.escape(name)}: {decoder} "):
        lk.decode(DAMAGED[name], decoder, key=f"folder/{name}")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (encoded(picture(), "GIF"), "a GIF"), (b"II*\0", "a damaged TIFF"),
        (b"\0\0\0\x1cftypavif", "an AVIF"), (b"\0\0\0\x1cftypheic", "a HEIC"), (b"\n <html>", "a web page"),
        (b"<svg ", "an SVG"), (b"\xff\xd8\xff", "a damaged JPEG"),
        (b"\xff\xd8\xff\xc1\0\x0b\x0c\0\x08\0\x08\1\1\x11\0\xff\xd9", "a JPEG of 12 bits a sample"),
        (b"\x89PNG", "a damaged PNG"),
        (bytes(40), "a file of zeros"), (b"RIFF\0\0\0\0WEBP", "a damaged WebP"),
        (b"\xff\x0a", "a JPEG XL"), (b"\0\0\0\x0cjP  ", "a JPEG 2000"),
        (b"%PDF-1.7", r"unknown bytes that begin with b'%PDF-1.7'"),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_told_by_its_kind(data, kind):
    with pytest.raises(lk.DecodeError, match=f"it is {kind}, and not a readable JPEG, PNG, WebP, BMP, PPM or TIFF"):
        lk.decode(data)


# --- which way is up


@pytest.fixture(scope="module")
def oriented(tmp_path_factory) -> dict[Path, int]:
    """How each of these files has to be turned: as Pillow does, and not at all by metadata that it cannot read."""
    folder = tmp_path_factory.mktemp("oriented") / "a"
    folder.mkdir()
    odd, broken = oriented_files.stated_oddly(), oriented_files.broken()
    turns = {name: turn_of(by_pillow(data)) for name, data in odd.items()}
    assert set(turns.values()) >= {1, 3, 5, 6, 8}
    turns |= {**{name: int(name[0]) for name in camera_files()}, **dict.fromkeys(broken, 1), "by others.jpg": 6}
    for name, data in {**camera_files(), **odd, **broken, "by others.jpg": oriented_files.turned_by_others()}.items():
        (folder / name).write_bytes(data)
    return {folder / name: turn for name, turn in turns.items()}


def by_pillow(data: bytes) -> np.ndarray | None:
    try:
        return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    except Exception:
        return None


def test_every_decoder_turns_as_pillow_does_and_only_moves_pixels(decoder, oriented):
    as_stored = decoded(camera_files()["1.jpeg"], decoder)
    images = {path: decoded(path.read_bytes(), decoder) for path in oriented}
    assert {path: turn_of(pixels) for path, pixels in images.items()} == oriented
    for path, pixels in images.items():
        stored = PIXELS if path.suffix in (".png", ".webp") else as_stored
        assert np.array_equal(pixels, UPRIGHT[oriented[path]](stored)), path.name


@pytest.mark.parametrize("name", oriented_files.broken())
def test_pillow_reads_it_through_other_data_sets_too(name):
    data = oriented_files.broken()[name]
    image, _ = lk.PILDataset(MemoryStore({name: data}), classes=[])[0]
    assert np.array_equal(np.asarray(image), decoded(data, "pil"))
    assert np.array_equal(decode_picture(data, "rgb"), decoded(data, "pil"))


def of_batches(store, path):
    loader = lk.BatchLoader(store, size=32, batch_size=7, train=False, num_threads=1)
    return (image for images, _ in loader for image in images)


def of_pixels(store, path):
    return (image for image, _ in lk.PixelStore.build(store, path, short_side=48, num_workers=1, progress=False))


@pytest.mark.parametrize("images_of", [of_batches, of_pixels])
def test_what_decodes_by_itself_turns_images_as_decode_does(oriented, tmp_path, images_of):
    store = lk.FolderStore(next(iter(oriented)).parents[1])
    found = (turn_of(image.permute(1, 2, 0).numpy()) for image in images_of(store, tmp_path / "x.pixels"))
    assert dict(zip(store.paths(), found, strict=True)) == oriented


def test_sizes_and_buckets_are_turned_as_images_are(oriented):
    root = next(iter(oriented)).parents[1]
    sizes = lk.collect_sizes(root, progress=False)
    height, width, _ = PIXELS.shape
    assert set(zip(sizes["width"], sizes["height"], strict=True)) == {(width, height)}  # as they are stored
    found = {root / path: turn for path, turn in zip(sizes["path"], sizes["exif_orientation"], strict=True)}
    assert found == oriented
    batches = lk.BucketBatchSampler(sizes, 4, buckets=lk.Buckets(((width, height), (height, width))))
    dataset = lk.ImageDataset(root)
    shapes = [{tuple(dataset[index][0].shape) for index in batch} for batch in batches]
    assert {len(each) for each in shapes} == {1}
    assert set.union(*shapes) == {(3, width, height), (3, height, width)}


# --- reduced sizes, and files that have ended processes


@pytest.mark.parametrize("orientation", [1, 6])
def test_short_side_shrinks_and_never_enlarges(decoder, orientation):
    data = encoded(picture().resize((600, 450)), quality=92, exif=exif_of(orientation))
    full = reference(data)
    small = decoded(data, decoder, short_side=100)
    if decoder in SCALING:
        assert 100 <= min(small.shape[:2]) < 225  # 113 is the nearest DCT scale, 2/8
        expected = Image.fromarray(full).resize(small.shape[1::-1], Image.Resampling.BOX)
        assert difference(small, np.asarray(expected)) <= 3
    else:
        assert small.shape == full.shape
    for short_side in (449, 450, 451, 5000):
        assert decoded(data, decoder, short_side=short_side).shape == full.shape
    assert lk.decode(oracle_files()["rgb.png"], decoder, short_side=20).shape == (3, HEIGHT, WIDTH)  # not a JPEG


def in_a_child(find: Callable[[], object]) -> object:
    """What a forked process finds, which a file may kill; the last line on stderr then names that file."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        torch.set_num_threads(1)  # as in a loader's worker: the threads of the parent are not here
        sender.send(find())

    process = context.Process(target=run)
    process.start()
    sender.close()
    with suppress(EOFError):
        found = receiver.recv()
    process.join()
    assert process.exitcode == 0
    return found


@pytest.fixture(scope="module")
def sound() -> set[str]:
    """What Pillow reads."""
    return {name for name, data in jpeg_of_each_process().items() if by_pillow(data) is not None}


def test_every_jpeg_is_decoded_right_or_refused_at_any_size(sound):
    outcomes = in_a_child(decode_all)
    assert sound == {*SCALABLE, "lossless", "lossless gray", "lossless CMYK"}
    assert [case for case, outcome in outcomes.items() if outcome.startswith("wrong")] == []
    assert {name for (name, *_), outcome in outcomes.items() if outcome != "refused"} == sound
    refused = {name for (name, *_), outcome in outcomes.items() if outcome == "refused"}
    assert refused.isdisjoint({*SCALABLE, "lossless"})  # whichever the decoder
    scaled = {case: outcome for case, outcome in outcomes.items() if case[1] in SCALING and case[2] == 20}
    assert {outcome for (name, *_), outcome in scaled.items() if name in SCALABLE} == {"right 24"}
    # What has no coefficients comes at full size.
    assert {outcome for (name, *_), outcome in scaled.items() if name in sound - {*SCALABLE}} == {"right 96"}


@pytest.mark.parametrize("library", [None, "/nowhere/libturbojpeg.so"], ids=["the library found", "without it"])
def test_loaders_read_every_jpeg(sound, monkeypatch, library):
    if library:
        monkeypatch.setenv(LIBRARY_VARIABLE, library)

    def load_batches() -> dict:
        load_library.cache_clear()
        options = {"size": 32, "batch_size": 1, "train": False, "num_threads": 1}
        return of_each_jpeg(lambda store: next(iter(lk.BatchLoader(store, **options)))[0].numpy())

    batches = in_a_child(load_batches)
    assert {name for name, batch in batches.items() if batch is not None} == sound
    for name in ("lossless", "progressive"):
        assert difference(batches[name], batches["baseline"]) < 3


@pytest.mark.exhaustive
def test_no_damaged_file_kills_the_process_or_shows_foreign_memory():
    assert in_a_child(decode_damaged) > 300 * len(TRIED)


# --- libraries, and names


def test_all_decoders_run_here_and_others_are_unknown():
    assert missing_decoders().keys() == LACKING
    assert all("\n" not in why for why in missing_decoders().values())
    with pytest.raises(ValueError, match=", ".join(lk.DECODERS)) as failure:
        lk.decode(oracle_files()["rgb.png"], "abacus")
    assert not isinstance(failure.value, lk.DecodeError)


@pytest.fixture
def looked_up_anew():
    load_decoder.cache_clear()
    yield
    load_decoder.cache_clear()


def test_a_missing_library_is_named_with_its_remedy(looked_up_anew, monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)  # makes `import simplejpeg` fail
    with pytest.raises(ImportError, match="pip install simplejpeg"):
        lk.decode(oracle_files()["rgb.png"], "turbojpeg")
    assert missing_decoders().keys() == {"turbojpeg", *LACKING}
    assert "pip install simplejpeg" in missing_decoders()["turbojpeg"]
    assert difference(decoded(oracle_files()["rgb.png"], "cv2"), reference(oracle_files()["rgb.png"])) == 0


@pytest.mark.parametrize("version", ["0.16.0", "0.17.0+cu130"])
def test_an_old_torchcodec_sees_no_transparent_palette(monkeypatch, version):
    """It would write four channels into three: torchcodec #1731."""
    seen = []
    library = SimpleNamespace(decode_image=lambda data: seen.append(data) or lk.decode(data, "pil"))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", library)
    monkeypatch.setattr(importlib.metadata, "version", {"torchcodec": version}.get)
    decode = fresh_copy(decode_module).decode
    for name in ("palette.png", "palette transparent.png", "subsampling 444.jpeg"):
        image = decode(oracle_files()[name], "torchcodec")
        assert difference(image.permute(1, 2, 0).numpy(), reference(oracle_files()[name])) <= 2
    assert len(seen) == (2 if version == "0.16.0" else 3)
    assert (oracle_files()["palette transparent.png"] in seen) == (version != "0.16.0")


def test_the_table_of_conformance_says_who_is_right_and_who_refuses():
    frame = course.conformance()
    outcomes = frame.pivot(index="file", columns="decoder", values="outcome")[list(TRIED)]
    assert (outcomes.loc[list(oracle_files())] == "same").all(axis=None)
    assert (outcomes.loc[list(broken_files())] == "refused").all(axis=None)
    frame = course.conformance(by_default=True)  # as in the libraries' first examples
    assert set(frame.file) == set(oracle_files())  # without the broken files
    outcomes = frame[frame.file == "rgb.png"].set_index("decoder").outcome
    assert (outcomes["pil"], outcomes["cv2"]) == ("same", "differs")  # cv2: BGR


# --- in the child


def decode_all() -> dict[tuple, str]:
    """By name, decoder and short side: `refused`, or `right` or `wrong` beside Pillow's pixels, and the height."""
    found = {}
    sides = (None, 20, jpeg_files.HEIGHT // 2)
    for (name, data), decoder, short_side in product(jpeg_of_each_process().items(), TRIED, sides):
        case = name, decoder, short_side
        print(*case, file=sys.stderr, flush=True)
        try:
            pixels = decoded(data, decoder, short_side=short_side)
        except lk.DecodeError:
            found[case] = "refused"
            continue
        whole = Image.fromarray(by_pillow(data)).resize(pixels.shape[1::-1], Image.Resampling.BOX)
        found[case] = f"{'right' if difference(pixels, np.asarray(whole)) < 3 else 'wrong'} {len(pixels)}"
    return found


def of_each_jpeg(read) -> dict:
    """What `read` makes of a store of each; None for what is refused."""
    found = {}
    for name, data in jpeg_of_each_process().items():
        print(name, file=sys.stderr, flush=True)
        try:
            found[name] = read(MemoryStore({"a/x.jpg": data}))
        except lk.DecodeError:
            found[name] = None
    return found


def damaged_files(copies: int = 40):
    """Copies of oracle files, cut somewhere or with a few bytes changed. The same ones every time."""
    rng = random.Random(0)
    for name, data in oracle_files().items():
        for copy in range(0 if re.match(r"exif (?!6\.jpeg)", name) else copies):
            damaged = bytearray(data[: rng.randrange(len(data))] if copy % 4 == 0 else data)
            for _ in range(rng.choice((1, 3, 20)) if copy % 4 else 0):
                damaged[rng.randrange(len(data))] = rng.randrange(256)
            yield f"{name}, copy {copy}", bytes(damaged)


def decode_damaged() -> int:
    """How many calls. Whatever is no `DecodeError` and no valid image ends it with a traceback."""
    files = [*oracle_files().items(), *broken_files().items(), *damaged_files()]
    for (name, data), decoder in product(files, TRIED):
        print(f"{name} by {decoder}", file=sys.stderr, flush=True)
        try:
            image = lk.decode(data, decoder, key=name)
        except lk.DecodeError:
            continue
        width, height = Image.open(io.BytesIO(data)).size
        assert image.dtype == torch.uint8
        assert image.shape in ((3, height, width), (3, width, height))
        if image.numel() < 1_000_000:  # larger blocks come fresh from the kernel
            [np.full(image.numel(), 0xAB, np.uint8) for _ in range(8)]  # memory for the next output
        assert torch.equal(image, lk.decode(data, decoder)), "pixels nobody decoded"
    return len(files) * len(TRIED)
