"""FFCV: a file of its own, read by compiled threads."""

import pickle
import subprocess
import sys
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit.data import ImageDataset
from labkit.data.pixels import PixelStore
from labkit.data.stores import FolderStore
from labkit.peers.peer import JPEG_PACKED, RAW_PIXELS, Peer, Work, prepare_once

_LEAST_PAGE = 8 * 2**20  # FFCV's own default


def _prepare(work: Work, mode: str) -> Path:
    return prepare_once(work, f"ffcv-{mode}", partial(_write_elsewhere, work, mode)) / "photos.beton"


def _write_elsewhere(work: Work, mode: str, folder: Path) -> None:
    """In a fresh process: FFCV's writer forks, which hangs where threads of OpenCV, torch or another loader live."""
    load_and_call = "import pickle, sys; pickle.load(sys.stdin.buffer)()"
    job = pickle.dumps(partial(_write, work, mode, folder))
    done = subprocess.run([sys.executable, "-c", load_and_call], input=job, capture_output=True)
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["it died without a word"]
        raise ValueError(f"FFCV's {mode} format cannot be made of {work.root}: {words[-1]}")


def _write(work: Work, mode: str, folder: Path) -> None:
    torch.set_num_threads(1)
    photos, temporary = FolderStore(work.root), folder / "pixels"
    if mode == "jpg":
        _write_beton(_Pictures(ImageDataset(photos)), mode, folder / "photos.beton", work)
        return
    # FFCV's own max_resolution bounds the longer side. This way its pixels are those of a PixelStore.
    pixels = PixelStore.build(photos, temporary, short_side=work.short_side, engine="threads", progress=False)
    _write_beton(_Pictures(pixels), mode, folder / "photos.beton", work)
    temporary.unlink()


def _write_beton(pictures: "_Pictures", mode: str, path: Path, work: Work) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    # Here, since what a process of the writer raises is lost, and the writer waits for it for ever. So would it for a
    # picture that is larger than a page.
    largest = max(pictures[index][0].nbytes for index in range(len(pictures)))
    fields = {"image": RGBImageField(write_mode=mode), "label": IntField()}
    page_size = max(_LEAST_PAGE, 1 << (largest - 1).bit_length())
    writer = DatasetWriter(str(path), fields, page_size=page_size, num_workers=max(1, work.num_workers))
    writer.from_indexed_dataset(pictures)


class _Pictures:
    """What FFCV's writer asks for: uint8 (H, W, 3) and a label."""

    def __init__(self, dataset: ImageDataset | PixelStore):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image, label = self._dataset[int(index)]
        return np.ascontiguousarray(image.permute(1, 2, 0).numpy()), label


@lru_cache(maxsize=2)  # compiling takes seconds
def _loader(work: Work, mode: str) -> Iterable:
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage

    crop = RandomResizedCropRGBImageDecoder((work.size, work.size), scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))
    steps: dict[str, list[Any]] = {
        "image": [crop, RandomHorizontalFlip(), ToTensor(), ToTorchImage()],
        "label": [IntDecoder(), ToTensor(), Squeeze(1)],
    }
    return Loader(
        str(_prepare(work, mode)),
        batch_size=work.batch_size,
        num_workers=max(1, work.num_workers),
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        seed=work.seed,
        pipelines=steps,
    )


def _peer(mode: str, source: str, note: str) -> Peer:
    return Peer(
        name=f"FFCV {mode}",
        source=source,
        antialias=True,
        install="apt-get install libturbojpeg0-dev libopencv-dev pkg-config && python -m pip install ffcv",
        modules=("ffcv",),
        loader=partial(_loader, mode=mode),
        prepare=partial(_prepare, mode=mode),
        note=f"{note}; shrinks by OpenCV's INTER_AREA, a mean of source pixels; a batch's memory is used again for a "
        "later one; crops follow from no seed",
    )


PEERS_HERE = (
    _peer(
        "jpg", JPEG_PACKED, "its writer encodes photos anew (quality 90, chroma 4:2:0), and it decodes by the fast DCT"
    ),
    _peer("raw", RAW_PIXELS, "the pixels of a PixelStore, resized once"),
)
