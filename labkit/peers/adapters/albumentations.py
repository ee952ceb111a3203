"""Albumentations over OpenCV, in a DataLoader."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from labkit.peers.adapters.torchvision import fast_settings
from labkit.peers.peer import JPEG_FILES, Peer, Work, labelled_photos
from labkit.pipeline import import_albumentations


class _Photos:
    """Map-style data set of (uint8 tensor, label)."""

    def __init__(self, work: Work):
        albumentations = import_albumentations()
        from albumentations.pytorch import ToTensorV2

        photos = labelled_photos(work)
        self.paths, self.labels = [str(path) for path, _ in photos], [label for _, label in photos]
        size = (work.size, work.size)
        self.transform = albumentations.Compose(
            [
                albumentations.RandomResizedCrop(size=size, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)),
                albumentations.HorizontalFlip(p=0.5),
                ToTensorV2(),
            ]
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import cv2

        image = cv2.imread(self.paths[index], cv2.IMREAD_COLOR_RGB)
        return self.transform(image=image)["image"], self.labels[index]


def _start_worker(_: int) -> None:
    import cv2
    from torch.utils.data import get_worker_info

    cv2.setNumThreads(0)  # the workers are the parallelism
    worker = get_worker_info()
    worker.dataset.transform.set_random_seed(worker.seed % 2**32)  # else all workers draw the same


@lru_cache(maxsize=1)
def _loader(work: Work) -> Iterable:
    from torch.utils.data import DataLoader

    return DataLoader(_Photos(work), shuffle=True, worker_init_fn=_start_worker, **fast_settings(work))


PEERS_HERE = (
    Peer(
        name="Albumentations",
        source=JPEG_FILES,
        antialias=False,
        install="python -m pip install albumentations",
        modules=("albumentations", "cv2"),
        loader=_loader,
        note="decodes and resizes with OpenCV, bilinear, which does not antialias",
    ),
)
