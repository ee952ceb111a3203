"""Images decoded and resized once, then read as raw pixels from one memory-mapped file."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from labkit.core import PackedStrings
from labkit.core.mapping import map_items
from labkit.data.pixels.format import REBUILD, PixelError
from labkit.data.pixels.mapped import PixelMap
from labkit.data.stores import Store

__all__ = ["PixelError", "PixelStore"]

_MOST_NAMED = 10


class PixelStore(Dataset):
    """Raw RGB images in one file, as `PixelStore.build` writes it; an image's label is its folder.

    Nothing is decoded: reading an image is a look-up and, in `pixels`, not even a copy. The price is room on the disk,
    H x W x 3 bytes an image, and detail: what the resize took away is gone for every epoch.

    Args:
        path: The file. Its index is read now; its pixels are mapped into memory on first use, in each process.
        transform: Called with the uint8 (3, H, W) tensor; its result takes the image's place.

    Items: `(image, label)`; image uint8 (3, H, W) RGB (or what `transform` made of it), a copy that may be written to;
    its strides are channels-last, as those of `decode`. Label: an int index into `classes`, the sorted folder names.
    Images have different sizes: for batches, let the transform crop.

    Attributes:
        path: The file. The kernel does not evict what a process has mapped and touched: for a cold read, `evict` it
            before the store that reads it is opened, with all earlier ones gone.

    Raises:
        FileNotFoundError: no such file.
        PixelError: foreign, cut or damaged, or of a newer version; names the file and the remedy. Damaged pixels are
            found by `verify` alone, which reads them all. A file that is cut later is found before each image is read;
            cut within those microseconds, it ends the process (SIGBUS), as any mapped file does.

    The format is documented in `labkit.data.pixels.format`. Taught in: notebooks/11_resize_once.ipynb
    """

    def __init__(self, path: str | os.PathLike, *, transform: Callable[[Tensor], Any] | None = None):
        self._map = PixelMap(path)
        self.path = self._map.path
        self.transform = transform

    @classmethod
    def build(
        cls,
        source: Store | str | os.PathLike,
        path: str | os.PathLike,
        *,
        short_side: int = 256,
        decoder: str = "turbojpeg",
        engine: str = "threads",
        num_workers: int | None = None,
        address: str | None = None,
        progress: bool = True,
    ) -> "PixelStore":
        """Decode all images of a store, resize them, and write their pixels to one file.

        Each is decoded at full size, EXIF orientation applied, and resized with antialiasing as torchvision v2's
        `Resize(short_side)` does it. One whose shorter side is smaller keeps its size: enlarging would cost room and
        blur for no detail, and the crop of a training loader resizes what it takes in any case.

        The file has its name only when it is whole. Until then finished parts lie in `<path>.parts`, so that a rerun
        after an interruption, or a kill, makes what is missing; the disk needs room for the pixels twice. The same
        images and settings give the same bytes, for any engine and number of workers. A store that is there already,
        of the same keys, file sizes and settings, is returned as it is; that an image was replaced by another one of
        the same size in bytes is not noticed.

        Args:
            source: A store, or the path or URL of one, for `open_store`.
            path: The file to write; missing folders are made.
            short_side: Pixels.
            decoder: One of `labkit.DECODERS`.
            engine, num_workers, address: As in `labkit.map_items`. Threads do as much as processes here, and need no
                time to start: decoders and resizing release the GIL.
            progress: Show a live bar.

        Raises:
            PixelError: something else is at `path`, or the source holds no image; names the file and the remedy.
            ItemErrors: images could not be read or decoded; has their keys. No file is written, but the parts without
                such images are kept for a rerun.
            ValueError: unknown decoder or engine, or `short_side` below 1.

        Source: H x W x 3 bytes a pixel row after row, the layout that NumPy and OpenCV read.
        Taught in: notebooks/11_resize_once.ipynb
        """
        from labkit.data.pixels.build import build_pixels  # here, since a loader's workers only read

        build_pixels(
            source, path, short_side=short_side, decoder=decoder, engine=engine, num_workers=num_workers,
            address=address, progress=progress,
        )  # fmt: skip
        return cls(path)

    def __repr__(self) -> str:
        return f"PixelStore({self.path.name!r}, {len(self)} images)"

    def __len__(self) -> int:
        return len(self._map)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = torch.from_numpy(self.pixels(index).copy()).permute(2, 0, 1)
        return (self.transform(image) if self.transform else image), int(self.labels[index])

    @property
    def keys(self) -> PackedStrings:
        """Names of the images, a sequence."""
        return self._map.index.keys

    @property
    def shapes(self) -> np.ndarray:
        """int32 (N, 2), height and width of each image."""
        return self._map.index.shapes

    @property
    def classes(self) -> list[str]:
        """Sorted folder names."""
        return self._map.classes

    @property
    def labels(self) -> np.ndarray:
        """int64 (N,), of each image."""
        return self._map.labels

    def pixels(self, index: int) -> np.ndarray:
        """One image, uint8 (H, W, 3) RGB: a read-only view of the file, at a multiple of 64 bytes, nothing copied."""
        return self._map.pixels(index)

    def verify(self, *, progress: bool = True) -> None:
        """Read all pixels and check their checksums.

        Raises:
            PixelError: some are damaged; names the images and the remedy.
        """
        options = {"progress": progress, "description": "verify", "unit": "image"}
        sound = map_items(self._map.is_sound, range(len(self)), engine="threads", **options)
        damaged = [self.keys[position] for position, is_sound in enumerate(sound) if not is_sound]
        if damaged:
            named = ", ".join(damaged[:_MOST_NAMED]) + (", ..." if len(damaged) > _MOST_NAMED else "")
            raise PixelError(f"{self.path} is damaged in {len(damaged)} of {len(self)} images ({named}): {REBUILD}")
