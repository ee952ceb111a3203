"""Decoders: one contract for all six, whatever the file. The oracle is Pillow alone, and Pillow is checked as well."""

import io
import random
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest
import torch
from packaging.version import Version
from PIL import Image

from labkit import DECODERS, DecodeError, collect_sizes, decode
from labkit.course import conformance, missing_decoders, oracle_files
from labkit.course.oracles import HEIGHT, WIDTH, broken_files, encode_png, exif_of, picture, png_chunk, reference
from labkit.data import decode as decode_module
from tests.image_files import encoded

SCALING = ("pil_draft", "turbojpeg")
LACKING = {"torchcodec"} if Version(version("torchcodec")) < Version("0.16") else set()  # no decode_image before
TRIED = [name for name in DECODERS if name not in LACKING]

# What brings the stored pixels (H, W, 3) upright, by orientation: the EXIF standard's table, in NumPy's words.
UPRIGHT = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: np.rot90(pixels, 2),
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.rot90(pixels, 2).swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels, 1),
}
TURNED_BACK = {**{n: n for n in (1, 2, 3, 4, 5, 7)}, 6: 8, 8: 6}  # the orientation that undoes each


def decoded(data: bytes, decoder: str, **options) -> np.ndarray:
    return decode(data, decoder, **options).permute(1, 2, 0).numpy()


def difference(one: np.ndarray, other: np.ndarray) -> float:
    assert one.shape == other.shape
    return np.abs(one.astype(int) - other).mean()


def shown(name: str) -> np.ndarray:
    """What oracle file `name` shows, straight from the picture, with no file in between."""
    image = picture()
    kinds = {"gray": image.convert("L"), "palette": image.quantize(64), "1-bit": image.convert("1")}
    kind = next((kind for kind in kinds if name.startswith(kind)), None)
    return np.asarray(kinds.get(kind, image).convert("RGB"))


@pytest.fixture(params=TRIED)
def decoder(request) -> str:
    return request.param


def test_nothing_is_missing():
    assert missing_decoders().keys() == LACKING
    assert all("\n" not in why for why in missing_decoders().values())


@pytest.mark.parametrize("name", oracle_files())
def test_the_reference_is_right(name):
    assert difference(reference(oracle_files()[name]), shown(name)) <= (1 if name.endswith(".png") else 12)


@pytest.mark.parametrize("name", oracle_files())
def test_decoders_agree_with_pillow(decoder, name):
    data = oracle_files()[name]
    image = decode(data, decoder)
    assert image.dtype == torch.uint8
    assert image.shape[0] == 3
    assert difference(image.permute(1, 2, 0).numpy(), reference(data)) <= 2


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_jpeg_is_turned_upright(decoder, orientation):
    as_stored = decoded(encoded(picture(), exif=exif_of(1)), decoder)
    turned = decoded(encoded(picture(), exif=exif_of(orientation)), decoder)
    assert np.array_equal(turned, UPRIGHT[orientation](as_stored))


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_a_turned_camera_gives_the_picture_itself(decoder, orientation):
    stored = Image.fromarray(np.ascontiguousarray(UPRIGHT[TURNED_BACK[orientation]](np.asarray(picture()))))
    data = encoded(stored, "PNG", exif=exif_of(orientation))
    assert np.array_equal(decoded(data, decoder), np.asarray(picture()))


XMP = b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/>'


def oddly_turned() -> dict[str, bytes]:
    """The picture stored on its side, which is said elsewhere than in an EXIF block in front of the pixels."""
    side = Image.fromarray(np.ascontiguousarray(UPRIGHT[8](np.asarray(picture()))))
    plain, turned = encoded(side, "PNG"), encoded(side, "PNG", exif=exif_of(6))
    as_text = oracle_files()["exif 6 as text.png"]
    xmp = png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP)
    return {
        "text.png": as_text,
        "text behind the pixels.png": _behind_the_pixels(plain, as_text[33 : as_text.index(b"IDAT") - 4]),
        "eXIf behind the pixels.png": _behind_the_pixels(plain, turned[33 : turned.index(b"IDAT") - 4]),
        "XMP.png": plain[:33] + xmp + plain[33:],
        "XMP behind the pixels.png": _behind_the_pixels(plain, xmp),
        "XMP.jpeg": encoded(side, quality=92, xmp=XMP),
        "XMP.webp": encoded(side, "WEBP", lossless=True, xmp=XMP),
    }


def _behind_the_pixels(png: bytes, chunk: bytes) -> bytes:
    return png[:-12] + chunk + png[-12:]


@pytest.mark.parametrize("name", oddly_turned())
def test_an_orientation_is_found_wherever_pillow_finds_it(decoder, name):
    data = oddly_turned()[name]
    assert reference(data).shape == (HEIGHT, WIDTH, 3)
    assert difference(decoded(data, decoder), reference(data)) <= 2


def test_exif_in_front_of_the_pixels_comes_first(decoder):
    data = encoded(picture(), quality=92, exif=exif_of(1), xmp=XMP)
    assert difference(decoded(data, decoder), reference(data)) <= 2


@pytest.mark.parametrize("image_format", ["WEBP", "PNG"])
def test_an_animation_gives_its_first_picture(decoder, image_format):
    lossless = {"lossless": True} if image_format == "WEBP" else {}
    others = [Image.new("RGB", (WIDTH, HEIGHT))]
    data = encoded(picture(), image_format, save_all=True, append_images=others, **lossless)
    assert Image.open(io.BytesIO(data)).n_frames == 2
    assert difference(decoded(data, decoder), np.asarray(picture())) <= 1


def test_a_phones_mpo_gives_its_first_picture(decoder):
    data = encoded(picture(), "MPO", quality=92, save_all=True, append_images=[Image.new("RGB", (WIDTH, HEIGHT))])
    assert difference(decoded(data, decoder), np.asarray(picture())) <= 12


def test_a_warning_is_no_error(decoder):
    data = oracle_files()["exif 1.jpeg"]
    revision = data.index(b"JFIF") + 5
    odd = data[:revision] + b"\x62" + data[revision + 1 :]  # "unknown JFIF revision number"
    assert np.array_equal(decoded(odd, decoder), decoded(data, decoder))


def test_an_error_behind_a_warning_is_an_error(decoder):
    """libjpeg-turbo reports such an error as a warning; who ignores it gets memory that nothing was decoded into."""
    data = oracle_files()["progressive.jpeg"]
    table = data.rindex(b"\xff\xc4")
    cut_scan, bogus_table = data[: table - 20], data[table : table + 5] + b"\xff" * 16
    with pytest.raises(DecodeError):
        decode(cut_scan + bogus_table + data[table + 21 :], decoder)


def without_end() -> dict[str, bytes]:
    """Files that lack their end and nothing else: most libraries decode them, or some of them."""
    files = oracle_files()
    jpeg, png, webp = files["subsampling 444.jpeg"], files["rgb.png"], files["webp.webp"]
    zeros = jpeg[:-2] + b"\0" * 2000
    thumbnail = b"\xff\xe1" + (len(jpeg) + 2).to_bytes(2, "big") + jpeg
    return {
        "no IEND.png": png[:-12],
        "half an IEND.png": png[:-1],
        "one byte short.webp": webp[:-1],
        "zeros at the end.jpeg": zeros,
        "only the thumbnail ends.jpeg": zeros[:2] + thumbnail + zeros[2:],
    }


@pytest.mark.parametrize("name", [*broken_files(), *without_end()])
def test_broken_files_are_refused_by_name(decoder, name):
    with pytest.raises(DecodeError) as failure:
        decode({**broken_files(), **without_end()}[name], decoder, key=f"folder/{name}")
    assert f"folder/{name}" in str(failure.value)
    assert decoder in str(failure.value)


def sixteen_bits() -> dict[str, bytes]:
    """16-bit PNGs whose low bytes are not their high bytes: the high ones show the picture, the low its negative."""
    gray = np.asarray(picture().convert("L")).astype(np.uint16)
    color = np.asarray(picture()).astype(np.uint16)
    rows = (color * 256 + 255 - color).astype(">u2").reshape(HEIGHT, -1)
    return {
        "gray": encoded(Image.fromarray(gray * 256 + 255 - gray), "PNG"),
        "rgb": encode_png(WIDTH, HEIGHT, 16, 2, b"".join(b"\0" + row.tobytes() for row in rows)),
    }


@pytest.mark.parametrize("kind", sixteen_bits())
def test_the_high_byte_is_kept(decoder, kind):
    expected = picture().convert("L").convert("RGB") if kind == "gray" else picture()
    assert difference(decoded(sixteen_bits()[kind], decoder), np.asarray(expected)) <= 1


def test_too_many_pixels(decoder, monkeypatch):
    monkeypatch.setattr(decode_module, "MAX_PIXELS", WIDTH * HEIGHT)
    decode(oracle_files()["rgb.png"], decoder)
    monkeypatch.setattr(decode_module, "MAX_PIXELS", WIDTH * HEIGHT - 1)
    with pytest.raises(DecodeError, match="exceed the limit"):
        decode(oracle_files()["rgb.png"], decoder)


def test_unknown_decoder():
    with pytest.raises(ValueError, match=", ".join(DECODERS)) as failure:
        decode(oracle_files()["rgb.png"], "abacus")
    assert not isinstance(failure.value, DecodeError)


@pytest.mark.parametrize("orientation", [1, 6])
def test_short_side_shrinks_and_never_enlarges(decoder, orientation):
    data = encoded(picture().resize((1200, 900)), quality=92, exif=exif_of(orientation))
    full = reference(data)
    small = decoded(data, decoder, short_side=200)
    if decoder in SCALING:
        assert 200 <= min(small.shape[:2]) < 450  # 225 is the nearest DCT scale, 2/8
        expected = Image.fromarray(full).resize((small.shape[1], small.shape[0]), Image.Resampling.BOX)
        assert difference(small, np.asarray(expected)) <= 3
    else:
        assert small.shape == full.shape
    for short_side in (899, 900, 901, 5000):
        assert decoded(data, decoder, short_side=short_side).shape == full.shape
    assert decode(oracle_files()["rgb.png"], decoder, short_side=20).shape == (3, HEIGHT, WIDTH)  # not a JPEG


@pytest.fixture
def without_simplejpeg(monkeypatch):
    decode_module.load_decoder.cache_clear()
    monkeypatch.setitem(sys.modules, "simplejpeg", None)  # makes `import simplejpeg` fail
    yield
    decode_module.load_decoder.cache_clear()


def test_a_missing_library_is_named_with_its_remedy(without_simplejpeg):
    with pytest.raises(ImportError, match="pip install simplejpeg"):
        decode(oracle_files()["rgb.png"], "turbojpeg")
    assert missing_decoders().keys() == {"turbojpeg", *LACKING}
    assert "pip install simplejpeg" in missing_decoders()["turbojpeg"]
    assert difference(decoded(oracle_files()["rgb.png"], "cv2"), reference(oracle_files()["rgb.png"])) == 0


@pytest.fixture(params=["0.16.0", "0.17.0+cu130"])
def torchcodec_version(request, monkeypatch) -> str:
    monkeypatch.setattr(decode_module, "version", {"torchcodec": request.param}.get)
    decode_module._torchcodec_writes_alpha.cache_clear()
    yield request.param
    decode_module._torchcodec_writes_alpha.cache_clear()


@pytest.mark.parametrize("name", ["palette.png", "palette transparent.png", "subsampling 444.jpeg"])
def test_an_old_torchcodec_sees_no_transparent_palette(torchcodec_version, name):
    """It would write four channels into three: torchcodec #1731."""
    seen, data = [], oracle_files()[name]
    header = decode_module.open_image(data)
    image = decode_module._decode_torchcodec(lambda data: seen.append(data) or decode(data, "pil"), data, header, None)
    assert difference(image.permute(1, 2, 0).numpy(), reference(data)) <= 2
    is_damaged = torchcodec_version == "0.16.0" and name == "palette transparent.png"
    assert seen == [] if is_damaged else [data]


def test_conformance_frame():
    frame = conformance()
    outcomes = frame.pivot(index="file", columns="decoder", values="outcome")[list(TRIED)]
    assert (outcomes.loc[list(oracle_files())] == "same").all(axis=None)
    assert (outcomes.loc[list(broken_files())] == "refused").all(axis=None)


def test_the_libraries_first_examples_differ():
    frame = conformance(by_default=True)
    assert set(frame.file) == set(oracle_files())  # without the broken files
    outcomes = frame[frame.file == "rgb.png"].set_index("decoder").outcome
    assert (outcomes["pil"], outcomes["cv2"]) == ("same", "differs")  # cv2: BGR


@pytest.mark.exhaustive
def test_no_file_kills_the_process():
    child = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-2000:]
    assert int(child.stdout.split()[0]) > 300 * len(TRIED)


def damaged_files(copies: int = 40):
    """Copies of oracle files, cut somewhere or with a few bytes changed. The same ones every time."""
    rng = random.Random(0)
    for name, data in oracle_files().items():
        if name.startswith("exif") and name != "exif 6.jpeg":
            continue
        for copy in range(copies):
            if copy % 4 == 0:
                yield f"{name}, copy {copy}", data[: rng.randrange(len(data))]
                continue
            damaged = bytearray(data)
            for _ in range(rng.choice((1, 3, 20))):
                damaged[rng.randrange(len(data))] = rng.randrange(256)
            yield f"{name}, copy {copy}", bytes(damaged)


def decode_everything() -> None:
    """Runs in a process of its own. Whatever is no `DecodeError` and no valid image ends it with a traceback."""
    n_decoded = n_refused = 0
    for name, data in [*oracle_files().items(), *broken_files().items(), *damaged_files()]:
        for decoder in TRIED:
            print(f"{name} by {decoder}", file=sys.stderr, flush=True)  # the last line names the killer
            try:
                image = decode(data, decoder, key=name)
            except DecodeError:
                n_refused += 1
                continue
            width, height = Image.open(io.BytesIO(data)).size
            assert image.dtype == torch.uint8
            assert image.shape in ((3, height, width), (3, width, height))
            if image.numel() < 1_000_000:  # larger blocks come fresh from the kernel
                [np.full(image.numel(), 0xAB, np.uint8) for _ in range(8)]  # memory for the next output
            assert torch.equal(image, decode(data, decoder)), "pixels nobody decoded"
            n_decoded += 1
    print(n_decoded + n_refused, "calls:", n_decoded, "decoded,", n_refused, "refused", flush=True)


if __name__ == "__main__":
    decode_everything()


def cut_in_the_scan(**options) -> bytes:
    """A JPEG whose data end after two thirds of the file, with an end mark behind them."""
    data = encoded(Image.fromarray(grainy()), quality=90, **options)
    return data[: len(data) * 2 // 3] + b"\xff\xd9"


def grainy() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_rows": 1}])
def test_a_scan_that_is_cut_is_refused_though_an_end_mark_follows(decoder, options):
    with pytest.raises(DecodeError):
        decode(cut_in_the_scan(**options), decoder)


def test_a_sound_picture_with_a_corner_of_one_color_is_read(decoder):
    pixels = grainy()
    pixels[-32:, -32:] = 255
    data = encoded(Image.fromarray(pixels), quality=90)
    np.testing.assert_array_equal(decoded(data, decoder), reference(data))


@pytest.mark.parametrize("marker", [0x88, 0xC4, 0xC7, 0xDA, 0xFE])
def test_a_marker_within_a_scan_is_refused_by_all_or_by_none(decoder, marker):
    """OpenCV gives the rows in front of it, and gray below."""
    data = encoded(Image.fromarray(grainy()), quality=90)
    middle = len(data) // 2
    broken = data[:middle] + bytes([0xFF, marker]) + data[middle + 2 :]
    with pytest.raises(DecodeError):
        decode(broken, decoder)


@pytest.mark.parametrize("default_image", [False, True])
def test_of_an_animated_png_comes_the_first_picture(decoder, default_image):
    first, second = Image.fromarray(grainy()), Image.fromarray(255 - grainy())
    data = encoded(first, "PNG", save_all=True, append_images=[second, first], default_image=default_image)
    np.testing.assert_array_equal(decoded(data, decoder), np.asarray(first))


BROKEN_CHUNKS = {
    "text with a wrong checksum": png_chunk(b"tEXt", b"Comment\0hi")[:-4] + b"crc.",
    "EXIF with a wrong checksum": png_chunk(b"eXIf", b"II*\0")[:-4] + b"crc.",
    "EXIF that is text": png_chunk(b"eXIf", b"parameters: a cat"),
    "half a size": png_chunk(b"pHYs", b"\0\0"),
    "text that does not inflate": png_chunk(b"zTXt", b"Comment\0\0no zlib"),
}


@pytest.mark.parametrize("name", BROKEN_CHUNKS)
def test_broken_metadata_of_a_png_cost_no_picture(decoder, name, tmp_path):
    data = encoded(Image.fromarray(grainy()), "PNG")
    for at in (33, len(data) - 12):  # in front of the pixels, and behind them
        broken = data[:at] + BROKEN_CHUNKS[name] + data[at:]
        np.testing.assert_array_equal(decoded(broken, decoder), grainy())
        (tmp_path / f"{at}.png").write_bytes(broken)
    sizes = collect_sizes(tmp_path, progress=False)
    assert set(zip(sizes["width"], sizes["height"], strict=True)) == {(WIDTH, HEIGHT)}


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF"])
def test_a_file_of_another_kind_is_told_by_its_kind(decoder, kind):
    with pytest.raises(DecodeError, match=f"it is a {kind}, and not a readable JPEG, PNG or WebP"):
        decode(encoded(picture(), kind), decoder)
