"""Images decoded and resized once, then read as raw pixels from one memory-mapped file."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from labkit.core.mapping import map_items
from labkit.data.labels import warn_of_innermost_folders, warn_of_no_classes
from labkit.data.pixels.format import LABELED_SINCE, REBUILD, PixelError
from labkit.data.pixels.mapped import PixelMap
from labkit.data.stores import Store

__all__ = ["PixelError", "PixelStore"]

_MAX_NAMED = 10


class PixelStore(PixelMap, Dataset):
    """Raw RGB images and their labels in one file, as `PixelStore.build` writes it.

    Nothing is decoded: reading an image is a look-up and, in `pixels`, not even a copy. The price is disk space,
    H x W x 3 bytes per image, and detail: what the resize took away is gone for every epoch. While images come from a
    disk, those out of order are asked for before they are touched; else the kernel would read all around them, too.

    Args:
        path: The file. Its index is read now; its pixels are mapped into memory on first use, in each process.
        transform: Called with the uint8 (3, H, W) tensor; its result replaces the image.

    Items: `(image, label)`; image uint8 (3, H, W) RGB (or what `transform` made of it), a copy that may be written to;
    its strides are channels-last, as those of `decode`. Label: an int index into `classes`.
    Images have different sizes: for batches, let the transform crop.

    Attributes:
        path: The file. The kernel does not evict what a process has mapped and touched: for a cold read, `evict` it
            before the store that reads it is opened, with all earlier ones gone.
        keys: Names of the images, a sequence.
        shapes: int32 (N, 2), height and width of each image.
        classes: Names of the classes, as `build` made them. A file that an earlier version of labkit built keeps its
            labels; where these are not those that `build` gives now, a `LabelWarning` says so.
        class_to_idx: Class -> label.
        labels: int64 (N,), the label of each image; read-only.

    Raises:
        FileNotFoundError: no such file.
        PixelError: foreign, cut or damaged, or of a newer version; names the file and the remedy. Only `verify`, which
            reads all pixels, finds damaged ones. A later cut is noticed before each image is read; if the file is cut
            within those microseconds, the process ends (SIGBUS), as with any mapped file.

    The format is documented in `labkit.data.pixels.format`. Taught in: notebooks/11b_raw_pixels.ipynb
    """

    def __init__(self, path: str | os.PathLike, *, transform: Callable[[Tensor], Any] | None = None):
        super().__init__(path)
        self.transform = transform
        self._tell_of_labels()

    def _tell_of_labels(self) -> None:
        """Warn of labels that are all 0, or of an earlier version. Only here: workers, too, open the file again."""
        if self.classes == [""]:
            warn_of_no_classes(str(self.path), len(self))
        elif self.head.version < LABELED_SINCE:
            first = [key.partition("/")[0] for key in self.keys]
            if [self.classes[label] for label in self.labels] != first:
                warn_of_innermost_folders(str(self.path))

    @classmethod
    def build(
        cls,
        source: Store | str | os.PathLike,
        path: str | os.PathLike,
        *,
        short_side: int = 256,
        decoder: str = "turbojpeg",
        classes: Sequence[str] | None = None,
        engine: str = "threads",
        num_workers: int | None = None,
        address: str | None = None,
        progress: bool = True,
    ) -> "PixelStore":
        """Decode all images of a store, resize them, and write their pixels to one file.

        Each is decoded at full size, EXIF orientation applied, and resized with antialiasing as torchvision v2's
        `Resize(short_side)` does. An image whose shorter side is smaller keeps its size: enlarging it would add no
        detail, and a training loader's crop resizes what it takes anyway.

        The file gets its name only when it is whole. Until then finished parts are in `<path>.parts`, so that a rerun
        after an interruption or a kill makes what is missing; this needs disk space for the pixels twice. The same
        images and settings give the same bytes, for any engine and number of workers. A file of the same keys, file
        sizes and settings is returned as it is; an image replaced by another one of the same size is not noticed.

        Args:
            source: A store, or the path or URL of one, for `open_store`.
            path: The file to write; missing folders are made.
            short_side: Pixels.
            decoder: One of `labkit.DECODERS`.
            classes: Names that labels index into, as for `ImageDataset`. The file keeps them, and the labels.
            engine, num_workers, address: As in `labkit.map_items`. Threads are as fast as processes here, and start
                at once: decoders and resizing release the GIL.
            progress: Show a live bar.

        Raises:
            PixelError: something else is at `path`, or the same pixels with other classes, or the source holds no
                image; names the file and the remedy.
            ItemErrors: images could not be read or decoded; has their keys. No file is written, but the parts without
                such images are kept for a rerun.
            ValueError: unknown decoder or engine, `short_side` below 1, or folders that cannot be classes, as for
                `ImageDataset`.

        Source: H x W x 3 bytes in row order, the layout that NumPy and OpenCV read.
        Taught in: notebooks/11b_raw_pixels.ipynb
        """
        from labkit.data.pixels.build import build_pixels  # a loader's workers only read: they never need it

        options = {"engine": engine, "num_workers": num_workers, "address": address, "progress": progress}
        build_pixels(source, path, short_side, decoder, classes, options)
        return cls(path)

    def __repr__(self) -> str:
        return f"PixelStore({self.path.name!r}, {len(self)} images)"

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = torch.from_numpy(self.copy_of(index)).permute(2, 0, 1)
        return (self.transform(image) if self.transform else image), int(self.labels[index])

    def verify(self, *, progress: bool = True) -> None:
        """Read all pixels and check their checksums.

        Raises:
            PixelError: some are damaged; names the images and the remedy.
        """
        sound = map_items(
            self.is_sound, range(len(self)), engine="threads", progress=progress, description="verify", unit="image"
        )
        damaged = [self.keys[position] for position, is_sound in enumerate(sound) if not is_sound]
        if damaged:
            named = ", ".join(damaged[:_MAX_NAMED]) + (", ..." if len(damaged) > _MAX_NAMED else "")
            raise PixelError(f"{self.path} is damaged in {len(damaged)} of {len(self)} images ({named}): {REBUILD}")
