"""Where the time of `BatchLoader` goes: microseconds of each step for an image, on one thread.

    python -m tests.hardening.steps --record tests/hardening/records/steps.csv

The steps are those of its fillers, called one after the other over the same photos and crops, three times in turn with
the decoding of whole images and the reading of their codes alone. The table has the median of the three.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
import simplejpeg
import torch
import typer

import labkit as lk
from labkit.core import write_atomic
from labkit.data import SCALES, open_decoder
from labkit.measure.stages import StageClock
from labkit.peers.peer import MEAN, STD, Work
from labkit.peers.registry import make_work
from labkit.pipeline.batch_loader.crops import flips, random_crops, uniforms
from labkit.pipeline.batch_loader.output import PixelFormat
from labkit.pipeline.batch_loader.resample import flip_into, resize_into
from tests.hardening.tables import RECORDS

_BATCH, _SIZE = 64, 224
_EIGHTH = {"fastdct": True, "fastupsample": True, "min_height": 1, "min_width": 1}


class Writer:
    """A batch of bytes and one of floats, and the steps that write into them."""

    def __init__(self, clock: StageClock, antialias: bool):
        self._clock, self._antialias = clock, antialias
        self._table = PixelFormat(_SIZE, torch.float32, MEAN, STD, torch.channels_last).table[None]
        self._bytes = np.empty((_BATCH, _SIZE, _SIZE, 3), np.uint8)
        self._floats = np.empty((_BATCH, _SIZE, _SIZE, 3), np.float32)

    def write(self, row: int, pixels: np.ndarray, box: tuple, mirror: bool) -> None:
        with self._clock("resize"):
            resize_into(self._bytes[row], pixels, box, self._antialias)
        with self._clock("flip"):
            if mirror:
                flip_into(self._bytes[row])
        with self._clock("floats"):
            cv2.LUT(self._bytes[row], self._table, dst=self._floats[row])


def draw(clock: StageClock, indices: np.ndarray, sizes: np.ndarray) -> Iterator[tuple[list[int], bool]]:
    with clock("crops"):
        numbers = uniforms(0, 0, indices)
        crops = random_crops(numbers, sizes, (0.08, 1.0), (3 / 4, 4 / 3)).tolist()
        mirrored = flips(numbers, 0.5).tolist()
    return zip(crops, mirrored, strict=True)


def load_photos(clock: StageClock, store: lk.FolderStore, antialias: bool) -> None:
    decoder, writer, keys = open_decoder(), Writer(clock, antialias), list(store.keys())
    for indices in batches(len(keys)):
        with clock("read"):
            files = [store.read(keys[index]) for index in indices]
        with clock("header"):
            sizes = np.array([decoder.header(data) for data in files])
        for row, (data, (crop, mirror)) in enumerate(zip(files, draw(clock, indices, sizes), strict=True)):
            scale = max((scale for scale in SCALES if scale <= min(crop[2:]) // _SIZE), default=1)
            with clock("decode"):
                part = decoder.decode(data, crop, scale)
            writer.write(row, part.pixels, part.box, mirror)


def load_pixels(clock: StageClock, pixels: lk.PixelStore, antialias: bool) -> None:
    writer = Writer(clock, antialias)
    for indices in batches(len(pixels)):
        for row, (index, (crop, mirror)) in enumerate(
            zip(indices.tolist(), draw(clock, indices, pixels.shapes[indices]), strict=True)
        ):
            writer.write(row, pixels.pixels(index), crop, mirror)


def decode_whole(clock: StageClock, store: lk.FolderStore) -> None:
    files = [store.read(key) for key in store.keys()]  # noqa: SIM118
    for step, options in (("decode whole", {}), ("read codes", _EIGHTH)):
        with clock(step):
            for data in files:
                simplejpeg.decode_jpeg(data, "RGB", **options)


def batches(n_images: int) -> list[np.ndarray]:
    return [np.arange(start, min(start + _BATCH, n_images)) for start in range(0, n_images, _BATCH)]


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(1), cv2.setNumThreads(1)
    yield
    torch.set_num_threads(threads[0]), cv2.setNumThreads(threads[1])


def timed_ways(work: Work, folder: Path) -> dict[str, Callable[[StageClock], None]]:
    store = lk.FolderStore(work.root)
    pixels = lk.PixelStore.build(store, folder / "steps.pixels", progress=False)
    kinds = {True: "antialiased", False: "not antialiased"}
    ways: dict[str, Callable] = {"limits": partial(decode_whole, store=store)}
    ways |= {f"JPEG, {name}": partial(load_photos, store=store, antialias=flag) for flag, name in kinds.items()}
    ways |= {f"raw, {name}": partial(load_pixels, pixels=pixels, antialias=flag) for flag, name in kinds.items()}
    return ways


def time_steps(profile: str, rounds: int) -> pd.DataFrame:
    work = make_work(profile)
    n_images, rows = len(lk.FolderStore(work.root)), []
    for _ in range(rounds):
        for way, load in timed_ways(work, work.scratch).items():
            clock = StageClock(time.perf_counter)
            load(clock)
            rows += [{"way": way, "step": step, "us": 1e6 * s / n_images} for step, s in clock.seconds.items()]
    found = pd.DataFrame(rows).groupby(["way", "step"], sort=False)["us"].median().round(1).reset_index()
    return found.assign(profile=profile)


def run(record: Path = RECORDS / "steps.csv", profile: tuple[str, str] = ("imagenet", "camera"), rounds: int = 3):
    """Time each step over the photos of two profiles, and record the medians."""
    with one_thread():
        found = pd.concat([time_steps(name, rounds) for name in profile])
    write_atomic(record, found.to_csv(index=False).encode())
    print(found.to_string(index=False))


if __name__ == "__main__":
    typer.run(run)
