"""Decoding at a reduced size: only what has DCT coefficients is scaled, and no JPEG kills the process.

A crash would end the tests, so every decoder runs in a child process: this file, with what to do as its argument.
"""

import base64
import io
import json
import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
from PIL import Image

import labkit as lk
from labkit import course
from labkit.data.partial_jpeg import LIBRARY_VARIABLE, is_scalable
from labkit.loading.limits import entropy_limit
from tests.image_files import encoded
from tests.lossless_jpeg import lossless_jpeg
from tests.memory_store import MemoryStore
from tests.paths import REPO

HEIGHT, WIDTH = 192, 256
ROWS, COLUMNS = np.mgrid[:HEIGHT, :WIDTH]
PICTURE = np.stack([COLUMNS * 255 // WIDTH, ROWS * 255 // HEIGHT, (ROWS + COLUMNS) * 255 // (HEIGHT + WIDTH)], 2)
TRIED = [name for name in lk.DECODERS if name not in course.missing_decoders()]

# 64 x 48 pixels of libjpeg-turbo 3 with arithmetic coding, sequential and progressive, and 16 x 16 of 12 bits a sample.
ARITHMETIC = """\
/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAUDBAQEAwUEBAQFBQUGBwwIBwcHBw8LCwkMEQ8SEhEPERETFhwXExQaFRERGCEYGh0dHx8fExciJCIe
JBweHx7/2wBDAQUFBQcGBw4ICA4eFBEUHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh7/yQARCAAwAEAD
AREAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/ANzICOTdezcfcCuEyhRZ7gfOt/a8V8h+339iyvb3Oc+1To734gRzCTK2U/tMr72I
uTpKV90w01fl8TG9jxVehqGLPw30FXyNanzeqamk7afa+4NMgn90XlLn/wCfMfDEWxCW+uzMmSiP0a0qYNKi7Xvs7R3Ftt8EKPu2pRN16y52Phoy
cHnzBHWb6L2qfVn+T6Ux1tOH99ui3b0a/Ultlx8a4A6P6jVOwPkuU376e5oaX8how+1wj7+XjGpuWodNzVO3lfYwPvGQKNPB+L+lGn9KL5knLTfI
iWoCQBEP9GFI80xVcTY0eI2vI2BaaOnCw+yyeXnTSZEyJeQ4FySYMdVuxkeIpWSchO+B0qoOcSPgIksHvIH7ZUk4rmrx+yNbULY4/9k="""
ARITHMETIC_PROGRESSIVE = """\
/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAUDBAQEAwUEBAQFBQUGBwwIBwcHBw8LCwkMEQ8SEhEPERETFhwXExQaFRERGCEYGh0dHx8fExciJCIe
JBweHx7/2wBDAQUFBQcGBw4ICA4eFBEUHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh7/ygARCAAwAEAD
AREAAhEBAxEB/8wABgAQARD/2gAMAwEAAhADEAAAAf8AuYh5ogJ1vNEXLLCCmAhbInIu8dQV8o8C9sln7xBw9uVgjyLuEZ0jaYvxfBxeh+13T45L
fK1JsfIDCrmuvJLds2JjuK81I0KAgT/4QyA4/8wABBAF/9oACAEBAAEFAh6dkZernxcThuOJhx81T+IdRv8AIclkli5kzYSlKUpSlKUg/8wABBEF
/9oACAEDAQE/ARe0w3zIHf0v37BDGMYxjGMYxjGMYxjGMYxjGMYxjGMYwP/MAAQRBf/aAAgBAgEBPwF+gjmMVDD/zAAEEAX/2gAIAQEABj8CqP/M
AAQQBf/aAAgBAQABPyENZI07pcWnUT9DHnnVa7vj/9oADAMBAAIAAwAAABC2iEUSFcc8hQagZkfnLLevTtD/zAAEEQX/2gAIAQMBAT8QvGz/zAAE
EQX/2gAIAQIBAT8Q31OI1kkkkkkkkv/MAAQQBf/aAAgBAQABPxCoE3iCK7M8uOdAjoIKMOJ/0H//2Q=="""
TWELVE_BITS = """\
/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4UG1RV19iZ2hnPk1xeXBk
eFxlZ2P/2wBDARESEhgVGC8aGi9jQjhCY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2P/wQARDAAQABAD
AREAAhEBAxEB/8QAFQABAQAAAAAAAAAAAAAAAAAABwr/xAAZEAABBQAAAAAAAAAAAAAAAAAABgcjMqH/xAAYAQADAQEAAAAAAAAAAAAAAAAEBQcG
CP/EABoRAAEFAQAAAAAAAAAAAAAAAAADBAUGITH/2gAMAwEAAhEDEQA/AIf0y2VIMBknYJA2Xmi4mWypBg0SdlvgbLzRvTLZUgwwiTs4IgbLzRbT
LZUgwZpOy3wNl5p//9k="""


@cache
def files() -> dict[str, bytes]:
    """JPEGs of every process of the standard, sound ones and some that no decoder reads."""
    plain = encoded(Image.fromarray(PICTURE.astype(np.uint8)), quality=92)
    frame = plain.index(b"\xff\xc0")
    lossless = lossless_jpeg(PICTURE)
    unsupported = {f"SOF{number}": plain[: frame + 1] + bytes([0xC0 + number]) + plain[frame + 2 :] for number in _RARE}
    return {
        "baseline": plain,
        "progressive": encoded(Image.fromarray(PICTURE.astype(np.uint8)), quality=92, progressive=True),
        "arithmetic": base64.b64decode(ARITHMETIC),
        "arithmetic progressive": base64.b64decode(ARITHMETIC_PROGRESSIVE),
        "12 bits": base64.b64decode(TWELVE_BITS),
        "lossless": lossless,
        "lossless gray": lossless_jpeg(PICTURE[..., :1]),
        "lossless CMYK": lossless_jpeg(PICTURE[..., [0, 1, 2, 2]]),
        "lossless 12 bits": lossless_jpeg(PICTURE * 16, bits=12),
        "lossless 16 bits": lossless_jpeg(PICTURE * 256, bits=16),
        "hierarchical": plain[:2] + b"\xff\xde" + plain[frame + 2 : frame + 21] + plain[2:],
        # A marker without a length: who reads one there skips the lossless frame, and finds the other.
        "lossless behind TEM": _hidden(lossless, plain[frame : frame + 19]),
        **unsupported,
    }


_RARE = (3, 5, 6, 7, 11, 13, 14, 15)
SCALABLE = ("baseline", "progressive", "arithmetic", "arithmetic progressive")


def _hidden(lossless: bytes, other_frame: bytes) -> bytes:
    frame = lossless.index(b"\xff\xc3")
    return lossless[:frame] + b"\xff\x01" + lossless[frame:].ljust(0xFFC3, b"\0") + other_frame + b"\xff\xd9"


def run(*tasks: str, **environment: str) -> dict:
    """What a child process finds in each task; it must not be killed."""
    done = subprocess.run(
        [sys.executable, __file__, *tasks], capture_output=True, text=True, timeout=200, check=False, cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO), **environment},
    )  # fmt: skip
    assert done.returncode == 0, f"ended with {done.returncode}, after: {done.stderr[-600:]}"
    return json.loads(done.stdout)


def by_pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def outcome(decoder: str, data: bytes, short_side: int | None) -> str:
    """Runs in the child: `refused`, or `right` or `wrong` beside Pillow's pixels, and the size."""
    try:
        image = lk.decode(data, decoder, short_side=short_side).permute(1, 2, 0).numpy()
    except lk.DecodeError:
        return "refused"
    expected = by_pillow(data)
    if image.shape != expected.shape:
        resized = Image.fromarray(expected.astype(np.uint8)).resize(image.shape[1::-1], Image.Resampling.BOX)
        expected = np.asarray(resized).astype(int)
    return f"{'right' if np.abs(image - expected).mean() < 3 else 'wrong'} {image.shape[0]}"


def decode_all() -> dict:
    found = {}
    for name, data in files().items():
        for decoder in TRIED:
            for short_side in (None, 20, 96):
                print(name, decoder, short_side, file=sys.stderr, flush=True)  # the last line names the killer
                found[f"{name}, {decoder}, {short_side}"] = outcome(decoder, data, short_side)
    return found


def load_batches() -> dict:
    found = {}
    for name, data in files().items():
        print(name, file=sys.stderr, flush=True)
        loader = lk.BatchLoader(MemoryStore({"a/x.jpg": data}), size=32, batch_size=1, train=False, num_threads=1)
        try:
            found[name] = next(iter(loader))[0].flatten().tolist()
        except lk.DecodeError:
            found[name] = None
    return found


def read_codes() -> dict:
    found = {}
    for name, data in files().items():
        print(name, file=sys.stderr, flush=True)
        try:
            found[name] = sum(entropy_limit(MemoryStore({"a/x.jpg": data}), num_threads=1))
        except lk.DecodeError:
            found[name] = None
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    return run("decode_all", "load_batches", "read_codes")


@pytest.fixture
def decoded(found) -> dict[str, str]:
    return found["decode_all"]


def is_sound(name: str) -> bool:
    try:
        by_pillow(files()[name])
    except Exception:
        return False
    return True


def test_every_jpeg_is_decoded_right_or_refused_at_any_size(decoded):
    assert [case for case, found in decoded.items() if found.startswith("wrong")] == []
    readable = {name for name in files() if is_sound(name)}
    assert readable == {*SCALABLE, "lossless", "lossless gray", "lossless CMYK"}
    assert {case.split(",")[0] for case, found in decoded.items() if found != "refused"} == readable
    for name in (*SCALABLE, "lossless"):
        assert not [case for case, found in decoded.items() if case.startswith(f"{name},") and found == "refused"]


@pytest.mark.parametrize("decoder", ["pil_draft", "turbojpeg"])
def test_what_has_no_coefficients_comes_at_full_size(decoded, decoder):
    assert decoded[f"baseline, {decoder}, 96"] == "right 96"
    assert decoded[f"arithmetic, {decoder}, 20"] in ("right 24", "right 48")
    for name in ("lossless", "lossless gray", "lossless CMYK"):
        assert decoded[f"{name}, {decoder}, 96"] == decoded[f"{name}, {decoder}, None"] == f"right {HEIGHT}"


def test_batches_of_every_jpeg(found):
    without_library = run("load_batches", **{LIBRARY_VARIABLE: "/nowhere/libturbojpeg.so"})
    for batches in (found["load_batches"], without_library["load_batches"]):
        assert {name for name, batch in batches.items() if batch} == {name for name in files() if is_sound(name)}
        for name in ("lossless", "progressive"):
            assert np.abs(np.subtract(batches[name], batches["baseline"])).mean() < 3


def test_codes_of_every_jpeg_are_read(found):
    assert {name for name, count in found["read_codes"].items() if count} >= {
        name for name in files() if is_sound(name)
    }


def test_which_frames_are_scalable():
    assert {name for name, data in files().items() if is_scalable(data)} == set(SCALABLE)
    assert not is_scalable(files()["baseline"][:100])
    assert not is_scalable(encoded(Image.new("RGB", (9, 9)), "PNG"))


@pytest.mark.parametrize("peer", ["PIL draft", "OpenCV reduced"])
def test_a_peer_that_reduces_crops_a_lossless_photo_where_it_said(tmp_path, peer):
    """OpenCV gives a lossless JPEG at full size, whatever it is asked for: crops of an eighth came from a corner."""
    from labkit.peers.adapters.reduced import PEERS_HERE
    from labkit.peers.peer import Work

    pixels = np.full((256, 320, 3), 250)
    pixels[:64, :80] = 0
    for number in range(8):
        (tmp_path / "photos/a").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"photos/a/{number}.jpg").write_bytes(lossless_jpeg(pixels))
    work = Work(tmp_path / "photos", tmp_path / "scratch", batch_size=8, num_workers=0, size=16)
    load = next(each for each in PEERS_HERE if each.name == peer).loader
    images = np.concatenate([np.asarray(next(iter(load(work)))[0]) for _ in range(4)])
    assert (images > images.mean()).mean() > 0.7


if __name__ == "__main__":
    tasks = {"decode_all": decode_all, "load_batches": load_batches, "read_codes": read_codes}
    print(json.dumps({name: tasks[name]() for name in sys.argv[1:]}))
