"""FFCV: a file in its own format, read by compiled threads.

Source: https://docs.ffcv.io/performance_guide.html and the ImageNet example at https://github.com/libffcv/ffcv-imagenet
(written at a short side of 256 where pixels are raw; compiled crop, flip and normalization).
"""

import pickle
import subprocess
import sys
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit.data.dataset import ImageDataset
from labkit.data.pixels import PixelStore
from labkit.data.stores import FolderStore
from labkit.errors import ArgumentError
from labkit.peers.peer import JPEG_PACKED, MEAN, RAW_PIXELS, STD, Peer, Work, pip_peer, prepare_once

_MIN_PAGE_SIZE = 8 * 2**20  # FFCV's default


def _prepare(work: Work, mode: str) -> Path:
    return prepare_once(work, f"ffcv-{mode}", partial(_write_in_fresh_process, work, mode)) / "photos.beton"


def _write_in_fresh_process(work: Work, mode: str, folder: Path) -> None:
    """FFCV's writer forks, and would hang in a process with threads of OpenCV, torch or another loader."""
    load_and_call = "import pickle, sys; pickle.load(sys.stdin.buffer)()"
    job = pickle.dumps(partial(_write, work, mode, folder))
    done = subprocess.run([sys.executable, "-c", load_and_call], input=job, capture_output=True)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["the writer ended without a message"]
        raise ArgumentError(f"cannot convert {work.root} to FFCV's {mode} format: {lines[-1]}")


def _write(work: Work, mode: str, folder: Path) -> None:
    torch.set_num_threads(1)
    photos, pixel_file = FolderStore(work.root), folder / "pixels"
    if mode == "jpg":
        pictures = _Pictures(ImageDataset(photos))
    else:  # FFCV's max_resolution limits the longer side; a PixelStore limits the shorter one
        pixels = PixelStore.build(photos, pixel_file, short_side=work.short_side, engine="threads", progress=False)
        pictures = _Pictures(pixels)
    _write_beton(pictures, mode, folder / "photos.beton", work)
    pixel_file.unlink(missing_ok=True)


def _write_beton(pictures: "_Pictures", mode: str, path: Path, work: Work) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    # Decode everything here first: the writer hangs when one of its processes raises, or a picture exceeds a page.
    largest = max(pictures[index][0].nbytes for index in range(len(pictures)))
    fields = {"image": RGBImageField(write_mode=mode), "label": IntField()}
    page_size = max(_MIN_PAGE_SIZE, 1 << (largest - 1).bit_length())
    writer = DatasetWriter(str(path), fields, page_size=page_size, num_workers=max(1, work.num_workers))
    writer.from_indexed_dataset(pictures)


class _Pictures:
    """Samples as FFCV's writer takes them: a uint8 array (H, W, 3) and a label."""

    def __init__(self, dataset: ImageDataset | PixelStore):
        self._dataset: Any = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image, label = self._dataset[int(index)]
        return np.ascontiguousarray(image.permute(1, 2, 0).numpy()), label


@lru_cache(maxsize=2)  # compiling takes seconds
def _loader(work: Work, mode: str) -> Iterable:
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage

    crop = RandomResizedCropRGBImageDecoder((work.size, work.size), scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))
    floats = [NormalizeImage(255 * np.array(MEAN), 255 * np.array(STD), np.float32)] * work.is_float
    image_steps = [crop, RandomHorizontalFlip(), *floats, ToTensor(), ToTorchImage()]
    return Loader(
        str(_prepare(work, mode)),
        batch_size=work.batch_size,
        num_workers=max(1, work.num_workers),
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        seed=work.seed,
        pipelines={"image": image_steps, "label": [IntDecoder(), ToTensor(), Squeeze(1)]},
    )


def _make_peer(mode: str, source: str, note: str) -> Peer:
    return pip_peer(
        f"FFCV {mode}",
        "ffcv",
        debian="libturbojpeg0-dev libopencv-dev pkg-config",
        source=source,
        decoder="libjpeg-turbo",
        loader=partial(_loader, mode=mode),
        prepare=partial(_prepare, mode=mode),
        published="plots, https://docs.ffcv.io/benchmarks.html: ahead of DataLoader, WebDataset and DALI on ImageNet "
        "in memory; its JPEGs are smaller than ours, or mixed with pixels",
        note=f"{note}; shrinks with OpenCV's INTER_AREA, a mean of source pixels; reuses the memory of a batch for a "
        "later one; crops follow no seed",
    )


PEERS_HERE = (
    _make_peer("jpg", JPEG_PACKED, "re-encodes photos (quality 90, chroma 4:2:0), and decodes them with the fast DCT"),
    _make_peer("raw", RAW_PIXELS, "the pixels of a PixelStore, resized once"),
)
