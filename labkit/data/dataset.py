"""Map-style datasets over a store."""

import json
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from PIL import Image
from torch.utils.data import Dataset, default_collate

from labkit.data.buckets import Buckets
from labkit.data.decode import DECODERS, PixelLimit, decode, load_rgb, open_any, warn_of_lost_bits
from labkit.data.image_formats import opened_format
from labkit.data.labels import Labeled, label_at, labeled
from labkit.data.stores import Store, read_bytes
from labkit.errors import ArgumentError, DecodeError, MissingKeyError, NothingLeft, WrongTypeError
from labkit.util.arguments import require_a, require_callable, require_choice
from labkit.util.files import SharedFile, n_images


class Skipped(NamedTuple):
    """Takes the place of an image that could not be decoded or read, until `collate` removes it."""

    key: str
    reason: str


class Unstacked(tuple):
    """A sample whose label goes into a list of the batch as it is, where torch would take it apart: see `collate`."""

    __slots__ = ()


class ImageDataset(Labeled, Dataset):
    """Images of a store with their labels: your own, or those of torchvision's `ImageFolder`.

    With the latter, the class of an image is the first folder of its key: `cat/2023/1.jpg` is of class `cat`.

    Args:
        store: Source of the encoded images, or a path or URL, as `lk.open_store` takes it.
        decoder: One of `labkit.DECODERS`.
        buckets: Resize and crop each image to its bucket's shape, before the transform; see `Buckets.crop`.
        transform: Called with the uint8 (3, H, W) tensor; its result replaces the image.
        on_error: `"raise"` passes errors on. `"skip"` leaves out an image that cannot be decoded, or is gone:
            build the loader with `collate_fn=labkit.collate`, and read `skipped` at the end; the keys are also
            printed at exit.
        classes: Names that labels index into, such as `train.classes` for a validation set, which may lack some of
            them. An empty list: labels are not used, and without `labels`, all are 0. Default: the strings among
            `labels`, or the class folders, sorted.
        labels: One label for each image, or K for each. Strings are names of classes. Integers are positions in
            `classes`, if these are given, whatever the classes are called; a number that is also the name of a class
            at another position is refused. Floats are numbers to predict. K numbers for each are several classes or
            numbers at once, where NaN may stand for one that is unknown; K strings are K classes. They are given

            - by name: a mapping of keys to labels, such as a dict, or a pandas Series whose index holds the names.
              Names of other images are ignored, and if no image is there by its name, names without suffix are looked
              for;
            - by a function of the key;
            - by position: a list, an array, or a Series without names, in an order that you gave, which is that of
              `keys`; else of the mapping that holds the images, of `HttpStore(keys=)`, of a table's rows, or of the
              `keys()` of a store of your own. The names in a folder, a tar, a listing or a pixel file were found and
              sorted: there, a list needs `keys`.

            Default: the labels that the store has by itself, as shards do; else the class folders.
        keys: The names of the images to use, in this order, such as those of one part of a split. Default: all.
        return_keys: Items end with the image's key.

    Items: `(image, label)`, or `(image, label, key)`; image uint8 (3, H, W) RGB (or what `transform` made of it); label
    an int; for floats a float32 tensor (), for K labels a float32 or int64 tensor (K,).

    Attributes:
        classes: Names of the classes; empty where labels are none, or are numbers and no names were given.
        class_to_idx: Class -> label.
        labels: The label of each image in the order of `keys`: int64 or float32, (N,) or (N, K), read-only.
        keys: The images' names, a sequence.

    >>> dataset = lk.ImageDataset("photos", transform=lambda image: image[:, :64, :64])
    >>> image, label = dataset[0]
    >>> image.shape, dataset.classes[label]
    (torch.Size([3, 64, 64]), 'astronaut')
    >>> rated = lk.ImageDataset("photos", labels={key: len(key) / 10 for key in dataset.keys}, return_keys=True)
    >>> images, ratings, keys = next(iter(lk.make_loader(rated, lk.LoaderConfig(batch_size=1, num_workers=0))))
    >>> ratings.dtype, keys == rated.keys[:1]
    (torch.float32, True)

    Raises:
        TypeError: `labels` or `keys` are of a kind that is not accepted.
        ValueError: an unknown option; a key that the store lacks, or that `keys` has twice; an image without a label;
            a label or folder that is not in `classes`; without `labels` and `classes`, images next to the class
            folders, a folder without an image, or a root that holds `train` and `val` in place of classes; labels by
            position where nobody gave an order. Where no image lies in a class folder, all labels are 0, and a
            `LabelWarning` says so.

    Taught in: notebooks/03_persistent_workers.ipynb
    """

    def __init__(
        self,
        store: Any,
        *,
        decoder: str = "turbojpeg",
        buckets: Buckets | None = None,
        transform: Callable[[Any], Any] | None = None,  # of a tensor; of a PIL image in `PILDataset`
        on_error: str = "raise",
        classes: Sequence[str] | None = None,
        labels: Any = None,
        keys: Iterable[str] | None = None,
        return_keys: bool = False,
    ):
        if not isinstance(store, Store) or isinstance(store, type):
            from labkit.data.remote import as_store  # with the clients of servers, which local stores do without

            store = as_store(store)
        self.store = store
        self.decoder = require_choice("decoder", decoder, DECODERS)
        self.buckets = require_a((Buckets, type(None)), "buckets", buckets, "an lk.Buckets")
        require_callable("transform", transform)
        self.transform = transform
        self.keys, self.classes, self.labels = labeled(store, keys, classes, labels)
        self.return_keys = require_a(bool, "return_keys", return_keys, "True or False")
        self._pixel_limit = PixelLimit()
        self._skips = SkipLog() if require_choice("on_error", on_error, ("raise", "skip")) == "skip" else None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if not hasattr(index, "__index__"):  # a slice would give several keys
            raise WrongTypeError(f"an index must be an integer from 0 to {len(self) - 1}, got {index!r:.100}")
        key = self.keys[index]
        try:
            image = self._decode(read_bytes(self.store, key), key)
        except (DecodeError, MissingKeyError, FileNotFoundError) as error:
            if self._skips is None:
                raise
            return self._skips.add(key, str(error))
        if self.buckets is not None:
            image = self.buckets.crop(image)
        image = transformed(self.transform, image, key)
        return sample_of(image, self.labels, index, key if self.return_keys else None)

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
        labels: Any = None,
        keys: Iterable[str] | None = None,
        return_keys: bool = False,
    ):
        super().__init__(
            store, decoder="pil", transform=transform, on_error=on_error, classes=classes, labels=labels, keys=keys,
            return_keys=return_keys,
        )  # fmt: skip

    def _decode(self, data: bytes, key: str) -> Image.Image:
        try:
            header = open_any(data)
            bits = opened_format(header).sample_bits(data, header)
            image = load_rgb(data, header)
        except MemoryError:
            raise
        except Exception as error:  # Pillow's plug-ins raise errors of any kind, and so do decompression bombs
            raise DecodeError(f"{key}: PIL cannot decode {len(data)} bytes: {error}") from error
        warn_of_lost_bits(bits, key)
        return image


def transformed(transform: Callable[..., Any] | None, image: Any, key: str) -> Any:
    """Apply a transform, if there is one. An error as by a wrong kind of image says what kind was given."""
    if transform is None:
        return image
    try:
        result = transform(image)
    except (TypeError, AttributeError, KeyError, OSError) as error:  # KeyError: of Albumentations'; OSError: of timm's
        given = f"a uint8 tensor {tuple(image.shape)}" if hasattr(image, "shape") else "a PIL image"
        error.add_note(
            f"transform= was given {given}, of {key}. Transforms of PIL images, such as timm's, go with "
            "lk.PILDataset; those of arrays, such as Albumentations', need a function around them"
        )
        raise
    if result is None:
        raise WrongTypeError(f"transform= returned None for {key}, and not an image: does it lack a `return`?")
    return result


def sample_of(image: Any, labels: Any, index: int, key: str | None = None) -> tuple[Any, ...]:
    """An image with its label among `labels`, and with its key if there is one."""
    sample = (image, label_at(labels, index)) + (() if key is None else (key,))
    return Unstacked(sample) if isinstance(labels, list) else sample


def collate(samples: Sequence[Any]) -> Any:
    """torch's `default_collate` of the samples that were decoded, but that labels which are no numbers become a list.

    So do keys, and the texts of `lk.read_shards`. torch would make a tuple of them, one dict of labels that are dicts,
    and an error of lists of several lengths.

    >>> images, labels, keys = lk.collate([(torch.zeros(3, 8, 8), 0, "a.jpg"), (torch.ones(3, 8, 8), 1, "b.jpg")])
    >>> images.shape, labels.tolist(), keys
    (torch.Size([2, 3, 8, 8]), [0, 1], ['a.jpg', 'b.jpg'])

    Raises:
        DecodeError: every image of the batch was skipped.
    """
    require_a((list, tuple), "samples", samples, "a list of samples")
    kept = [sample for sample in samples if not isinstance(sample, Skipped)]
    if not samples:
        raise ArgumentError("a batch needs at least one sample: the batch_sampler gave an empty list of indices")
    if not kept:
        raise NothingLeft(f"all {len(samples)} images of a batch were skipped, the first: {samples[0].reason}")
    is_unstacked = any(isinstance(sample, Unstacked) for sample in kept)
    has_text = type(kept[0]) is tuple and any(isinstance(part, str) for part in kept[0])
    if not is_unstacked and not has_text:
        return default_collate(kept)
    columns = map(list, zip(*kept, strict=True))
    return [
        parts if isinstance(parts[0], str) or (is_unstacked and number == 1) else default_collate(parts)
        for number, parts in enumerate(columns)
    ]


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
