"""Map-style datasets over a store."""

import io
import json
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from PIL import Image
from torch.utils.data import Dataset, default_collate

from labkit.data.buckets import Buckets
from labkit.data.decode import DECODERS, FORMATS, decode, rgb_of, warn_of_lost_bits
from labkit.data.labels import Labeled, labels_of
from labkit.data.stores import Store
from labkit.errors import DecodeError, MissingKeyError
from labkit.util.arguments import require_a, require_callable, require_choice
from labkit.util.files import SharedFile, n_images
from labkit.util.strings import PackedStrings


class Skipped(NamedTuple):
    """Takes the place of an image that could not be decoded or read, until `collate` removes it."""

    key: str
    reason: str


class ImageDataset(Labeled, Dataset):
    """Images of a store with their labels, which are those of torchvision's `ImageFolder`.

    The class of an image is the first folder of its key: `cat/2023/1.jpg` is of class `cat`.

    Args:
        store: Source of the encoded images, or a path or URL, as `lk.open_store` takes it.
        decoder: One of `labkit.DECODERS`.
        buckets: Resize and crop each image to its bucket's shape, before the transform; see `Buckets.crop`.
        transform: Called with the uint8 (3, H, W) tensor; its result replaces the image.
        on_error: `"raise"` passes errors on. `"skip"` leaves out an image that cannot be decoded, or is gone:
            build the loader with `collate_fn=labkit.collate`, and read `skipped` at the end; the keys are also
            printed at exit.
        classes: Names that labels index into, such as `train.classes` for a validation set, which may lack some of
            them. An empty list: the images have no labels, and all get 0. Default: the class folders, sorted.

    Items: `(image, label)`; image uint8 (3, H, W) RGB (or what `transform` made of it), label an int index into
    `classes`.

    Attributes:
        classes: Names of the classes.
        class_to_idx: Class -> label.
        labels: int64 (N,), the label of each image in the order of `keys`; read-only.
        keys: The images' names, a sequence.

    >>> dataset = lk.ImageDataset("photos", transform=lambda image: image[:, :64, :64])
    >>> image, label = dataset[0]
    >>> image.shape, dataset.classes[label]
    (torch.Size([3, 64, 64]), 'astronaut')

    Raises:
        ValueError: an unknown option; a folder that is not in `classes`; without `classes`, images next to the class
            folders, or a root that holds `train` and `val` in place of classes. Where no image lies in a class folder,
            all labels are 0, and a `LabelWarning` says so.

    Taught in: notebooks/03_persistent_workers.ipynb
    """

    def __init__(
        self,
        store: Store | str | os.PathLike,
        *,
        decoder: str = "turbojpeg",
        buckets: Buckets | None = None,
        transform: Callable[[Any], Any] | None = None,  # of a tensor; of a PIL image in `PILDataset`
        on_error: str = "raise",
        classes: Sequence[str] | None = None,
    ):
        if not isinstance(store, Store) or isinstance(store, type):
            from labkit.data.remote import as_store  # with the clients of servers, which local stores do without

            store = as_store(store)
        self.store = store
        self.decoder = require_choice("decoder", decoder, DECODERS)
        self.buckets = require_a((Buckets, type(None)), "buckets", buckets, "an lk.Buckets")
        require_callable("transform", transform)
        self.transform = transform
        self.keys = PackedStrings(store.keys())  # every worker would copy a list, page by page
        self.classes, self.labels = labels_of(self.keys, classes, source=store)
        self._skips = SkipLog() if require_choice("on_error", on_error, ("raise", "skip")) == "skip" else None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[Any, int] | Skipped:
        key = self.keys[index]
        try:
            image = self._decode(self.store.read(key), key)
        except (DecodeError, MissingKeyError, FileNotFoundError) as error:
            if self._skips is None:
                raise
            return self._skips.add(key, str(error))
        if self.buckets is not None:
            image = self.buckets.crop(image)
        return transformed(self.transform, image, key), int(self.labels[index])

    def _decode(self, data: bytes, key: str) -> Any:
        return decode(data, self.decoder, key=key)

    @property
    def skipped(self) -> list[Skipped]:
        """Images left out so far, in this process and in every worker."""
        return self._skips.read() if self._skips else []


class PILDataset(ImageDataset):
    """An `ImageDataset` whose transform gets an RGB PIL image: the data set of a first tutorial.

    As in such code, EXIF orientation is not applied, and truncated files are not detected beforehand. What PIL raises
    for a file that it cannot read is passed on as `DecodeError`.

    >>> image, label = lk.PILDataset(lk.FolderStore("photos"))[0]
    >>> image.mode
    'RGB'
    """

    def __init__(
        self,
        store: Store,
        *,
        transform: Callable[[Image.Image], Any] | None = None,
        on_error: str = "raise",
        classes: Sequence[str] | None = None,
    ):
        super().__init__(store, decoder="pil", transform=transform, on_error=on_error, classes=classes)

    def _decode(self, data: bytes, key: str) -> Image.Image:
        try:
            image = rgb_of(Image.open(io.BytesIO(data), formats=FORMATS))
        except MemoryError:
            raise
        except Exception as error:  # Pillow's plug-ins raise errors of any kind, and so do decompression bombs
            raise DecodeError(f"{key}: PIL cannot decode {len(data)} bytes: {error}") from error
        warn_of_lost_bits(data, key)
        return image


def transformed(transform: Callable[[Any], Any] | None, image: Any, key: str) -> Any:
    """Apply a transform, if there is one. An error as by a wrong kind of image says what kind was given."""
    if transform is None:
        return image
    try:
        return transform(image)
    except (TypeError, AttributeError, OSError) as error:  # OSError: of timm's
        given = f"a uint8 tensor {tuple(image.shape)}" if hasattr(image, "shape") else "a PIL image"
        error.add_note(
            f"transform= was given {given}, of {key}. Transforms of PIL images, such as timm's, go with "
            "lk.PILDataset; those of arrays, such as Albumentations', need a function around them"
        )
        raise


def collate(samples: Sequence[Any]) -> Any:
    """torch's `default_collate` of the samples that were decoded.

    >>> images, labels = lk.collate([(torch.zeros(3, 8, 8), 0), (torch.ones(3, 8, 8), 1)])
    >>> images.shape, labels.tolist()
    (torch.Size([2, 3, 8, 8]), [0, 1])

    Raises:
        DecodeError: every image of the batch was skipped.
    """
    require_a((list, tuple), "samples", samples, "a list of samples")
    kept = [sample for sample in samples if not isinstance(sample, Skipped)]
    if not kept:
        raise DecodeError(f"all {len(samples)} images of a batch were skipped, the first: {samples[0].reason}")
    return default_collate(kept)


class SkipLog:
    """Keys skipped by any process. A file, since workers share nothing else: short appends to one are atomic.

    Each image is noted once: the file grows with the images that cannot be read, not with the epochs.
    """

    def __init__(self) -> None:
        self._file = SharedFile()
        self._noted: set[Skipped] | None = None
        weakref.finalize(self, _report, self._file, os.getpid())

    def add(self, key: str, reason: str) -> Skipped:
        """Note one image, and return its place holder."""
        skipped = Skipped(key, reason)
        if self._noted is None:  # a new worker, which earlier ones may have preceded
            self._noted = set(self.read())
        if skipped not in self._noted:
            self._noted.add(skipped)
            line = json.dumps(skipped) + "\n"  # file names may contain tabs, line breaks, even broken UTF-8
            with open(os.open(self._file.path, os.O_WRONLY | os.O_APPEND), "wb", buffering=0) as file:
                file.write(line.encode())
        return skipped

    def read(self) -> list[Skipped]:
        """What all processes have noted so far."""
        return _read_log(self._file)


def _read_log(file: SharedFile) -> list[Skipped]:
    return list(dict.fromkeys(Skipped(*json.loads(line)) for line in file.path.read_text().splitlines()))


def _report(file: SharedFile, owner: int) -> None:
    if os.getpid() == owner and (skipped := _read_log(file)):  # a forked worker's end is not that of the log
        keys = ", ".join(skip.key for skip in skipped[:10]) + (", ..." if len(skipped) > 10 else "")
        was = "was" if len(skipped) == 1 else "were"
        print(f"labkit: {n_images(len(skipped))} {was} skipped: {keys}", file=sys.stderr)
