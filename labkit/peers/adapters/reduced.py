"""Pillow and OpenCV with the JPEG decoder's own reduction: decode at 1/2, 1/4 or 1/8 where the crop allows it.

Sources: https://pillow.readthedocs.io/en/stable/reference/Image.html (`Image.draft`), and
https://docs.opencv.org/4.x/d8/d6a/group__imgcodecs__flags.html (`IMREAD_REDUCED_COLOR_2`, `_4`, `_8`).
The crop is drawn from the size in the header, by torchvision's own `get_params`, before anything is decoded.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from labkit.data.partial_jpeg import is_scalable
from labkit.errors import ArgumentError
from labkit.peers.adapters.torchvision import folder_loader, output_steps
from labkit.peers.peer import AREA, RATIO, Work, pip_peer

_REDUCTIONS = (8, 4, 2)


class DrawnCrops:
    """The work on a file's path, with the crop drawn before `decode(path, header, box, size, reduction)` is called.

    It gives uint8 pixels (size, size, 3).
    """

    def __init__(self, work: Work, decode: Callable[..., np.ndarray]):
        from torchvision.transforms import v2

        self._size, self._decode = work.size, decode
        self._finish = v2.Compose([v2.RandomHorizontalFlip(), *output_steps(work)])

    def __call__(self, path: str) -> Tensor:
        from torchvision.transforms import RandomResizedCrop

        with Image.open(path) as header:  # reads no pixels
            box = RandomResizedCrop.get_params(header, scale=AREA, ratio=RATIO)
            reduction = next((number for number in _REDUCTIONS if min(box[2:]) >= number * self._size), 1)
            if reduction > 1 and not is_scalable(Path(path).read_bytes()):
                reduction = 1
            pixels = self._decode(path, header, box, self._size, reduction)
        return self._finish(torch.from_numpy(pixels).permute(2, 0, 1))


def _decode_by_draft(path: str, image: Any, box: tuple[int, int, int, int], size: int, reduction: int) -> np.ndarray:
    width = image.width
    if reduction > 1:
        image.draft("RGB", tuple(side // reduction for side in image.size))
    top, left, height, width = (side * image.width / width for side in box)
    corners = (left, top, min(left + width, image.width), min(top + height, image.height))
    image = image if image.mode == "RGB" else image.convert("RGB")
    return np.array(image.resize((size, size), Image.Resampling.BILINEAR, box=corners))


def _decode_by_opencv(path: str, header: Any, box: tuple[int, int, int, int], size: int, reduction: int) -> np.ndarray:
    import cv2

    flag = getattr(cv2, f"IMREAD_REDUCED_COLOR_{reduction}") if reduction > 1 else cv2.IMREAD_COLOR
    image = cv2.imread(path, flag | cv2.IMREAD_IGNORE_ORIENTATION)
    if image is None:
        raise ArgumentError(f"OpenCV cannot decode {path}")
    top, left, height, width = (side // reduction for side in box)
    resized = cv2.resize(image[top : top + height, left : left + width], (size, size), interpolation=cv2.INTER_LINEAR)
    return cv2.cvtColor(resized, cv2.COLOR_BGR2RGB)


def _start_worker(_: int) -> None:
    import cv2

    cv2.setNumThreads(0)  # the workers are the parallelism


@lru_cache(maxsize=1)
def _load_by_draft(work: Work) -> Iterable:
    return folder_loader(work, DrawnCrops(work, _decode_by_draft), loader=str)


@lru_cache(maxsize=1)
def _load_by_opencv(work: Work) -> Iterable:
    crops = DrawnCrops(work, _decode_by_opencv)
    return folder_loader(work, crops, loader=str, worker_init_fn=_start_worker)


PEERS_HERE = (
    pip_peer(
        "PIL draft",
        "pillow",
        modules=("PIL",),
        loader=_load_by_draft,
        scaled=True,
        note="decodes at 1/2, 1/4 or 1/8 where the crop is as many times as large as the output; ignores EXIF "
        "orientation",
    ),
    pip_peer(
        "OpenCV reduced",
        "opencv-python-headless",
        modules=("cv2",),
        antialias=False,
        loader=_load_by_opencv,
        scaled=True,
        note="as PIL draft, with IMREAD_REDUCED_COLOR_* and OpenCV's bilinear; crops have whole reduced pixels; "
        "ignores EXIF orientation",
    ),
)
