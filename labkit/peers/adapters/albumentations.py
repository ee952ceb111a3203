"""Albumentations over OpenCV, in a DataLoader.

Source: https://albumentations.ai/docs/ (the PyTorch guide: read with OpenCV as RGB, end with `ToTensorV2`).
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import get_worker_info

from labkit.loading.augment import import_albumentations
from labkit.peers.adapters.torchvision import folder_loader
from labkit.peers.peer import AREA, MEAN, RATIO, STD, Work, pip_peer


class _Transform:
    """The work by Albumentations, called as torchvision calls a transform."""

    def __init__(self, work: Work):
        albumentations = import_albumentations()
        from albumentations.pytorch import ToTensorV2

        floats = [albumentations.Normalize(MEAN, STD)] * work.is_float
        steps = [albumentations.HorizontalFlip(p=0.5), *floats, ToTensorV2()]
        crop = albumentations.RandomResizedCrop((work.size, work.size), AREA, RATIO)
        self.steps = albumentations.Compose([crop, *steps])

    def __call__(self, image: np.ndarray) -> Tensor:
        return self.steps(image=image)["image"]


def _read_rgb(path: str) -> np.ndarray | None:
    import cv2

    return cv2.imread(path, cv2.IMREAD_COLOR_RGB)


def _start_worker(_: int) -> None:
    import cv2

    cv2.setNumThreads(0)  # the workers are the parallelism
    worker: Any = get_worker_info()  # of a worker it is not None, and its data set is ours
    worker.dataset.transform.steps.set_random_seed(worker.seed % 2**32)  # else all workers draw the same


@lru_cache(maxsize=1)
def _loader(work: Work) -> Iterable:
    return folder_loader(work, _Transform(work), loader=_read_rgb, worker_init_fn=_start_worker)


PEERS_HERE = (
    pip_peer(
        "Albumentations",
        "albumentations",
        modules=("albumentations", "cv2"),
        antialias=False,
        loader=_loader,
        decoder="OpenCV",
        note="decodes and resizes with OpenCV, bilinear, which does not antialias",
    ),
)
