"""Judges of the exercises that build what reads from storage: an index, a shuffle buffer, depth in meters."""

import gzip
import io
import random
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from labkit.course.exercises import _expect, global_generators

_BLOCK_BYTES = 512  # of a tar


def index_of_tar(index: Callable[[str], Mapping[str, tuple[int, int]]]) -> None:
    """Judge `index(path)`: name -> (offset, size) of each file's bytes in a tar; a compressed tar is refused."""
    cat, dog = "cat/0.jpg", "dog/0.jpg"
    whole = "a file's own size counts; rounded up to 512 it leads to the next header"
    long = "a name of 124 characters takes blocks of its own; `tarfile` gives where the bytes begin as `offset_data`"
    with tempfile.TemporaryDirectory(prefix="labkit-exercise-") as folder:
        path = Path(folder, "photos.tar")
        for files, hint in (
            ([(cat, 1024), (dog, 1536), ("dog/1.jpg", 512)], "(offset, size) was asked for"),
            ([(cat, 700), (dog, 300), ("dog/1.jpg", 513)], whole),
            ([(cat, 512), (dog, 512), (cat, 1024)], f"{cat!r} is in the tar twice; the last one counts"),
            ([("cat/" + 120 * "0", 512), (dog, 512)], long),
        ):
            right = _written_tar(path, files)
            _judge_places(index(str(path)), right, hint)
        path.write_bytes(gzip.compress(path.read_bytes()))
        try:
            index(str(path))
        except Exception:
            return
    raise AssertionError(
        "a compressed tar was indexed, but its bytes are not at those places: "
        'mode "r:" of `tarfile` refuses every compression'
    )


def _written_tar(path: Path, files: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Write a tar with files of these names and sizes, and return name -> (offset, size), of which the last counts."""
    contents = [(name, random.Random(number).randbytes(size)) for number, (name, size) in enumerate(files)]
    with tarfile.open(path, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in contents:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    data = path.read_bytes()
    return {name: (data.index(content), len(content)) for name, content in contents}


def _judge_places(found: Any, right: Mapping[str, tuple[int, int]], hint: str) -> None:
    _expect(isinstance(found, Mapping), f"a {type(found).__name__} is no dictionary of name -> (offset, size)")
    _expect(set(found) == set(right), f"the tar holds {sorted(right)}, the index {sorted(found)}: {hint}")
    for name, place in right.items():
        shown = f"{name!r} gave {found[name]!r}"
        is_pair = isinstance(found[name], tuple | list) and len(found[name]) == 2
        _expect(is_pair, f"{shown}; (offset, size) was asked for")
        is_header = found[name][0] == place[0] - _BLOCK_BYTES
        _expect(not is_header, f"{shown}, but there its header begins; the bytes follow {_BLOCK_BYTES} later")
        _expect(tuple(found[name]) == place, f"{shown}; {place} is right: {hint}")


def shuffle_buffer(shuffled: Callable[[Iterable[int], int, int], Iterable[int]]) -> None:
    """Judge `shuffled(samples, buffer, seed)`: each sample once, in an order drawn from a buffer by the seed."""
    n, buffer = 400, 40
    came: list[int] = []
    n_held = []
    before = global_generators()
    samples = _Counted(range(n))
    for sample in shuffled(samples, buffer, 0):
        n_held.append(samples.n_taken - len(came))
        came.append(sample)
    again, other = (list(shuffled(iter(range(n)), buffer, seed)) for seed in (0, 1))
    uses_global = global_generators() != before
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
    short = list(range(buffer // 2))
    came = list(shuffled(iter(short), buffer, 0))
    what = f"a stream of {len(short)} samples, fewer than the buffer of {buffer},"
    _expect(sorted(came) == short, f"{what} gave {len(came)}")
    _expect(came != short, f"{what} came in its own order: what is held at the end has to be shuffled too")


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


def depth_in_meters(depth_m: Callable[[bytes], tuple[Any, Any]]) -> None:
    """Judge `depth_m(png)`: meters of a PNG of 16-bit millimeters, and which pixels are valid, that is, not 0."""
    millimeters = np.random.default_rng(0).integers(1, 65_536, (48, 64)).astype(np.uint16)
    millimeters[:8, :8] = 0
    known, file = millimeters > 0, io.BytesIO()
    Image.fromarray(millimeters).save(file, "png")
    found = depth_m(file.getvalue())
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    _expect(is_pair, "a pair was asked for: the depth in meters, and the mask of valid pixels")
    meters, valid = (np.squeeze(np.asarray(part)) for part in found)
    for name, part in (("the depth", meters), ("the mask", valid)):
        _expect(part.shape == known.shape, f"{name} has shape {part.shape}; the picture has {known.shape}")
    shown, right = meters[known].astype(np.float64), millimeters[known] / 1000
    n_depths = len(np.unique(shown))
    _expect(n_depths > 256, f"it gives only {n_depths} different depths: the PNG has 16 bits and was read with fewer")
    error_mm = 1000 * np.abs(shown - right).max()
    told = "divide as floats of 32 bits; int16 ends at 32,767 and float16 is too coarse for millimeters"
    _expect(error_mm <= 1, f"{millimeters[known][0]} mm came as {shown[0]:.6g} m, others are off more: {told}")
    _expect(valid.dtype == bool, f"the mask is {valid.dtype}; bool was asked for")
    _expect(not valid[~known].any(), "pixels of 0 are valid in the mask, but 0 says that the depth is unknown")
    _expect(valid[known].all(), f"{(~valid[known]).sum()} pixels of known depth are not valid in the mask")
