"""Judges of the exercises that build what reads from storage: an index, a shuffle buffer, depth in meters."""

import bz2
import gzip
import io
import lzma
import random
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from labkit.course.exercises import _expect

_BLOCK_BYTES = 512  # of a tar
_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


def index_of_tar(index: Callable[[str], Mapping[str, tuple[int, int]]]) -> None:
    """Judge `index(path)`: name -> (offset, size) of each file's bytes in a tar; a compressed tar is refused."""
    cat, dog, _ = names = ("cat/0.jpg", "dog/0.jpg", "dog/1.jpg")
    with _written_tar(zip(names, (1024, 1536, 512), strict=True)) as (path, right):
        _judge_places(index(path), right)
    with _written_tar(zip(names, (700, 300, 513), strict=True)) as (path, right):
        _judge_odd_sizes(index, path, right)
    with _written_tar([(cat, 512), (dog, 512), (cat, 1024)]) as (path, right):
        found = index(path)
        is_first = tuple(found[cat]) == (_BLOCK_BYTES, 512)
        _expect(not is_first, f"{cat!r} is in the tar twice, and the first was indexed; the last one counts")
        _judge_places(found, right)
    with _written_tar([("cat/" + 120 * "0", 512), (dog, 512)]) as (path, right):
        try:
            is_right = {name: tuple(place) for name, place in index(path).items()} == right
        except Exception:  # what was read as a header is none
            is_right = False
        _expect(
            is_right,
            "a file with a name of 124 characters is not found: more blocks than its header come before its bytes, "
            "which hold the name; `tarfile` gives where the bytes begin as `offset_data`",
        )
    for compression in ("gz", "bz2", "xz"):
        with _written_tar([(cat, 700), (dog, 300)], compression) as (path, _):
            try:
                index(path)
                is_refused = False
            except Exception:
                is_refused = True
        _expect(
            is_refused,
            f"a compressed tar was indexed (.{compression}), but its bytes are not at those places: "
            'mode "r:" of `tarfile` refuses every compression',
        )


@contextmanager
def _written_tar(
    files: Iterable[tuple[str, int]], compression: str = ""
) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Path of a tar with files of these names and sizes, and name -> (offset, size), of which the last one counts."""
    contents = [(name, random.Random(number).randbytes(size)) for number, (name, size) in enumerate(files)]
    with tempfile.TemporaryDirectory(prefix="labkit-exercise-") as folder:
        path, written = Path(folder, "photos.tar"), io.BytesIO()
        with tarfile.open(fileobj=written, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for name, content in contents:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        data = written.getvalue()
        path.write_bytes(_COMPRESS[compression](data))
        yield str(path), {name: (data.index(content), len(content)) for name, content in contents}


def _judge_places(found: Any, right: Mapping[str, tuple[int, int]]) -> None:
    _expect(isinstance(found, Mapping), f"a {type(found).__name__} is no dictionary of name -> (offset, size)")
    is_last_part = set(found) != set(right) and set(found) == {Path(name).name for name in right}
    _expect(not is_last_part, "the names are without their folders, where two files may have the same last part")
    _expect(set(found) == set(right), f"the tar holds {sorted(right)}, the index {sorted(found)}")
    for name, place in right.items():
        shown = f"{name!r} gave {found[name]!r}"
        is_pair = isinstance(found[name], tuple | list) and len(found[name]) == 2
        _expect(is_pair, f"{shown}; (offset, size) was asked for")
        offset, size = found[name]
        _expect((size, offset) != place, f"{shown}, which is (size, offset); (offset, size) was asked for")
        is_header = offset == place[0] - _BLOCK_BYTES
        _expect(not is_header, f"{shown}, but there its header begins; the bytes follow {_BLOCK_BYTES} later")
        _expect((offset, size) == place, f"{shown}; {place} is right")


def _judge_odd_sizes(index: Callable[[str], Any], path: str, right: Mapping[str, tuple[int, int]]) -> None:
    try:
        found = {name: tuple(place) for name, place in index(path).items()}
    except Exception:  # what was read as a header is none
        found = {}
    rounded = {name: (offset, -(-size // _BLOCK_BYTES) * _BLOCK_BYTES) for name, (offset, size) in right.items()}
    _expect(found != rounded, "the sizes are rounded up to 512; each file's own size was asked for")
    _expect(
        found == right,
        "files are not found after one whose size is no multiple of 512: round it up to get to the next header",
    )


def shuffle_buffer(shuffled: Callable[[Iterable[int], int, int], Iterable[int]]) -> None:
    """Judge `shuffled(samples, buffer, seed)`: each sample once, in an order drawn from a buffer by the seed."""
    n, buffer = 400, 40
    came: list[int] = []
    n_held = []
    with _watched_generators() as is_changed:
        samples = _Counted(range(n))
        try:
            for sample in shuffled(samples, buffer, 0):
                n_held.append(samples.n_taken - len(came))
                came.append(sample)
        except TypeError as error:
            is_of_stream = _Counted.__name__ in str(error)
            _expect(not is_of_stream, f"{error}: a stream has no length and no places; take its samples by `for`")
            raise
        again, other = (list(shuffled(iter(range(n)), buffer, seed)) for seed in (0, 1))
        uses_global = is_changed()
    _expect(
        not came or n_held[0] < n,
        f"all {n} samples were read before the first one came; a stream may not fit in memory",
    )
    n_lost = n - len(set(came))
    _expect(not n_lost, f"{n_lost} of {n} samples were lost: what is in the buffer at the end has to come too")
    _expect(len(came) == n, f"{len(came) - n} samples came twice")
    _judge_held(n_held, n, buffer)
    _expect(came != list(range(n)), "the order is that of the stream: draw which sample leaves")
    _expect(
        not uses_global,
        "it draws from a global generator, and so changes what others draw: make your own, `random.Random(seed)`",
    )
    _expect(again == came, "the same seed gave another order: make the generator in the function, from the seed")
    n_next = sum(later == sample + 1 for sample, later in pairwise(came[:-buffer]))
    is_mixed = n_next < (n - buffer) / 2
    _expect(is_mixed, "each draw takes the same place: make the generator once, before the loop, not at each draw")
    _expect(other != came, "seeds 0 and 1 gave the same order")
    _judge_short_stream(shuffled, buffer)


def _judge_held(n_held: list[int], n: int, buffer: int) -> None:
    """Judge how many of n samples were held at each one that left, that one included."""
    most = max(n_held)
    _expect(most >= buffer, f"the buffer of {buffer} samples never held more than {most}: fill it first")
    _expect(most <= buffer + 1, f"{most} samples were held at a time, with a buffer of {buffer}")  # and the new one
    least = min(held for n_before, held in enumerate(n_held) if n_before + held < n)  # while the stream lasts
    _expect(
        least >= buffer,
        f"only {least} of {buffer} samples were held before the stream ended: a buffer that is emptied and filled again"
        " mixes within chunks only; replace each sample that leaves by the next one",
    )


def _judge_short_stream(shuffled: Callable[[Iterable[int], int, int], Iterable[int]], buffer: int) -> None:
    n = buffer // 2
    what = f"a stream of {n} samples, fewer than the buffer of {buffer},"
    try:
        came = list(shuffled(iter(range(n)), buffer, 0))
    except Exception as error:
        told = f"{what} raised {type(error).__name__}: {error}"
        raise AssertionError(f"{told}; it may end while the buffer is filled") from error
    _expect(sorted(came) == list(range(n)), f"{what} gave {len(came)}")
    _expect(came != list(range(n)), f"{what} came in its own order: what is held at the end has to be shuffled too")


class _Counted:
    """A stream that counts what was taken from it."""

    def __init__(self, samples: Iterable[int]):
        self._samples, self.n_taken = iter(samples), 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        sample = next(self._samples)
        self.n_taken += 1
        return sample


@contextmanager
def _watched_generators() -> Iterator[Callable[[], bool]]:
    """Whether a global generator has been used since, of Python, NumPy or torch; all are as before afterwards."""

    def states() -> tuple[Any, Any, Any]:
        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    before = states()
    try:
        yield lambda: repr(states()[:2]) != repr(before[:2]) or not torch.equal(states()[2], before[2])
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def depth_in_meters(depth_m: Callable[[bytes], tuple[Any, Any]]) -> None:
    """Judge `depth_m(png)`: meters of a PNG of 16-bit millimeters, and which pixels are valid, that is, not 0."""
    millimeters = np.random.default_rng(0).integers(1, 65_536, (48, 64)).astype(np.uint16)
    millimeters[:8, :8] = 0
    known, file = millimeters > 0, io.BytesIO()
    Image.fromarray(millimeters).save(file, "png")
    found = depth_m(file.getvalue())
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    _expect(is_pair, "a pair was asked for: the depth in meters, and the mask of valid pixels")
    meters, valid = (
        np.squeeze(np.asarray(part.float() if getattr(part, "dtype", None) is torch.bfloat16 else part))
        for part in found
    )
    for name, part in (("the depth", meters), ("the mask", valid)):
        _expect(part.shape == known.shape, f"{name} has shape {part.shape}; the picture has {known.shape}")
    shown, right = meters[known].astype(np.float64), millimeters[known] / 1000
    is_whole = np.array_equal(shown, right // 1)
    _expect(not is_whole, "all depths are whole meters: divide as floats, not as integers")
    n_depths = len(np.unique(shown))
    _expect(n_depths > 256, f"it gives only {n_depths} different depths: the PNG has 16 bits and was read with 8")
    _expect((shown >= 0).all(), "some depths are negative: int16 ends at 32,767 mm, and the PNG's uint16 at 65,535")
    is_coarse = np.allclose(shown, right, rtol=2**-7) and not np.allclose(shown, right, atol=1e-3, rtol=0)
    coarse = f"depths are off by up to {1000 * np.abs(shown - right).max():.0f} mm: float16 and bfloat16 are too coarse"
    _expect(not is_coarse, f"{coarse} for millimeters, and float32 is not")
    _expect(np.allclose(shown, right, atol=1e-3), f"{millimeters[known][0]} mm came as {shown[0]:.6g} m")
    _expect(valid.dtype == bool, f"the mask is {valid.dtype}; bool was asked for")
    _expect(not valid[~known].any(), "pixels of 0 are valid in the mask, but 0 says that the depth is unknown")
    _expect(valid[known].all(), f"{(~valid[known]).sum()} pixels of known depth are not valid in the mask")
