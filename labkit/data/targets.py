"""What an image has beside its label, and what is cropped, resized and mirrored with it: masks, maps, boxes, points.

A data set gets them whole, as torchvision's `tv_tensors`; a loader that crops gets what its crop shows, as v2's
transforms give it. For masks that is "nearest", which copies the pixel under the upper left corner of each new one, as
OpenCV does. "Nearest exact" takes that under the center, half a new pixel further: v2 uses it in no crop.
"""

import io
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import default_collate

from labkit.data.decode import PNG_SIGNATURE, load_pixels, open_image, orientation_of
from labkit.data.stores import FolderStore, Store
from labkit.errors import ArgumentError, DecodeError, MissingKeyError, WrongTypeError
from labkit.util.arguments import require_a, require_choice, require_flag, require_int
from labkit.util.files import is_hidden, n_images
from labkit.util.process import warn_caller

Size = tuple[int, int]  # height and width in pixels
Box = tuple[float, float, float, float]  # top, left, height and width in pixels of the upright photo


class _Crop(NamedTuple):
    """Arguments of `Target.crop`."""

    size: Size
    box: Box
    out_size: Size
    mirror: bool
    whole: bool

    def along(self, axis: int) -> tuple[float, float, int, int]:
        """Along height or width: where the crop starts and its length, the new pixels, and the photo's."""
        return self.box[axis], self.box[axis + 2], self.out_size[axis], self.size[axis]

    def moved(self, points: np.ndarray) -> np.ndarray:
        """Points (..., 2), x and y in the photo, as places in the resized crop; float32."""
        top, left, height, width = self.box
        return ((points - (left, top)) * (self.out_size[1] / width, self.out_size[0] / height)).astype(np.float32)


class Target(ABC):
    """What belongs to each image of a set. Its methods may be called by many threads at once."""

    kind: ClassVar[str]  # for messages
    is_array: ClassVar[bool] = False  # whether `stack` makes one tensor
    _remedy: ClassVar[str]

    @abstractmethod
    def check(self, keys: Sequence[str]) -> None:
        """Raise ArgumentError if one of these images has no such target: counts them, and names the first."""

    def read(self, key: str, size: Size, *, photo: bytes = b"") -> Any:
        """The whole target, as a tv_tensor.

        Args:
            key: Name of the image.
            size: Of the upright photo.
            photo: Its encoded bytes, which tell how EXIF turns it, and so a mask of the size before turning.
        """
        return self._whole(self._load(key, size, photo), size)

    def crop(
        self, key: str, size: Size, box: Box, out_size: Size, mirror: bool, *, photo: bytes = b"", whole: bool = False,
        out: Any = None,
    ) -> Any:  # fmt: skip
        """What a crop shows of the target: an array, or a dict of arrays.

        Args:
            key, size, photo: As for `read`.
            box: The crop. Fractions of a pixel count, and it may reach beyond the photo.
            out_size: What the crop is resized to.
            mirror: Left and right, after that.
            whole: The photo is resized as a whole, and then cropped or padded, at whole pixels of that, as for
                validation. Else it is cropped first.
            out: For masks and maps, an array to write into: of the same type, or for masks one that holds it.
        """
        return self._cut(self._load(key, size, photo), _Crop(size, box, out_size, mirror, whole), out)

    @abstractmethod
    def stack(self, values: Sequence[Any]) -> Any:
        """What a batch has of these crops."""

    @abstractmethod
    def _load(self, key: str, size: Size, photo: bytes) -> Any: ...

    @abstractmethod
    def _whole(self, loaded: Any, size: Size) -> Any: ...

    @abstractmethod
    def _cut(self, loaded: Any, crop: _Crop, out: Any) -> Any: ...

    def _refuse(self, missing: Sequence[str], keys: Sequence[str], where: str) -> None:
        if missing:
            raise ArgumentError(
                f"{len(missing)} of {n_images(len(keys))} have no {self.kind}, the first {missing[0]!r}: looked for "
                f"that name{where}. {self._remedy}, or pass keys= with the images that have one"
            )


def checked_targets(targets: Any, keys: Sequence[str]) -> dict[str, Target]:
    """`targets` as a dict, if it maps names to targets, and each image has each of them; else an error of labkit."""
    example = 'a dict of targets by name, such as {"mask": lk.Masks("masks")}'
    for name, target in require_a(Mapping, "targets", targets, example).items():
        require_a(Target, f"targets[{name!r}]", target, "lk.Masks, lk.Maps, lk.Boxes or lk.Keypoints")
        if not isinstance(name, str) or name == "label":
            raise ArgumentError(f"targets are named by strings other than 'label', which is the class: got {name!r}")
        target.check(keys)
    return dict(targets)


def collate_targets(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Targets of a batch by name: tensors (N, ...); lists of boxes, of uneven points, and of labels without numbers."""
    from torchvision import tv_tensors

    batch: dict[str, Any] = {name: [sample[name] for sample in samples] for name in samples[0]}
    for name, values in batch.items():
        is_number = isinstance(values[0], int | Tensor) and not isinstance(values[0], tv_tensors.BoundingBoxes)
        is_uneven = isinstance(values[0], tv_tensors.KeyPoints) and len({value.shape for value in values}) > 1
        if is_number and not is_uneven:
            batch[name] = default_collate(values)
    return batch


def _stem(key: str) -> str:
    return os.path.splitext(key)[0]


def _tails(key: str) -> Iterator[str]:
    """The key without its first folder, without its first two, and so on."""
    while "/" in key:
        yield (key := key.partition("/")[2])


class _Pictures(Target):
    """Targets in files that are named like the photos."""

    _remedy = "Name each like its photo; the suffix may be another"
    _accepted: ClassVar[str]

    is_array = True

    def __init__(self, source: Any):
        self._store = self._opened(source)
        names = self._store.keys()
        self._suffixes = list(Counter(os.path.splitext(name)[1] for name in names))

    def _opened(self, source: Any) -> Store:
        from labkit.data.remote import as_store  # with the clients of servers, which folders do without

        return as_store(source)

    def check(self, keys: Sequence[str]) -> None:
        names = self._store.keys()
        whole, stems = set(names), Counter(map(_stem, names))
        by_stem = [key for key in keys if key not in whole]
        own = Counter(_stem(key) for key in keys if key in whole)
        if twins := [key for key in keys if key in whole and own[_stem(key)] > 1]:
            one, other, *_ = sorted(key for key in twins if _stem(key) == _stem(twins[0]))
            warn_caller(
                f"{one!r} and {other!r} are photos here, and both are in {self._store!r}, too. If that is the photos' "
                f"folder, each is its own {self.kind}: move the {self.kind}s to another one, or open it twice, as by "
                f"lk.FolderStore(root, ignore={os.path.splitext(other)[1]!r}) for the photos",
                UserWarning,
            )
        where = f" in {self._store!r}, with the suffixes {', '.join(self._suffixes)}, too"
        missing = [key for key in by_stem if not stems[_stem(key)]]
        if among := next((key for key in missing if any(tail in whole for tail in _tails(key))), None):
            where += f". {among!r} seems to be a {self.kind} itself: open the folder of the photos alone"
        self._refuse(missing, keys, where)
        if several := [key for key in by_stem if stems[_stem(key)] > 1]:
            found = ", ".join(repr(name) for name in names if _stem(name) == _stem(several[0]))
            raise ArgumentError(
                f"{len(several)} of {n_images(len(keys))} have more than one {self.kind} in {self._store!r}, the first "
                f"{several[0]!r}: {found}. Leave one of them there"
            )

    def _load(self, key: str, size: Size, photo: bytes) -> np.ndarray:
        """The pixels, upright; the last axes are height and width."""
        name, data = self._file(key)
        try:
            pixels = self._decoded(data, size)
        except MemoryError:
            raise
        except Exception as error:  # Pillow's plug-ins raise errors of any kind
            raise DecodeError(f"{name}: {len(data)} bytes cannot be read as a {self.kind}: {error}") from error
        found = pixels.shape[-2:]
        orientation = orientation_of(photo, open_image(photo)) if photo and found != size else 1
        if orientation >= 5 and found == size[::-1]:  # height and width change places; then axes are flipped
            return np.flip(pixels.swapaxes(-2, -1), {5: (), 6: (-1,), 7: (-2, -1), 8: (-2,)}[orientation])
        if found != size:
            before = f", or {size[1]} x {size[0]} before EXIF turns it" if orientation >= 5 else ""
            raise ArgumentError(
                f"{name}: this {self.kind} has {found[0]} x {found[1]} pixels (height x width), and its photo {key!r} "
                f"has {size[0]} x {size[1]}{before}: make the {self.kind} again at the photo's size"
            )
        return pixels

    def _file(self, key: str) -> tuple[str, bytes]:
        stem, suffix = os.path.splitext(key)
        for other in sorted(self._suffixes, key=lambda one: one != suffix):  # its own name first, if it can be there
            try:
                return stem + other, self._store.read(stem + other)
            except KeyError as error:
                cause = error
        raise MissingKeyError(f"{key!r} has no {self.kind} in {self._store!r}") from cause

    @abstractmethod
    def _decoded(self, data: bytes, size: Size) -> np.ndarray: ...

    def _picture(self, data: bytes, modes: str) -> np.ndarray:
        """The pixels as they are stored, if Pillow gives them one of these modes."""
        image = open_image(data)
        n_bits = data[24] if data.startswith(PNG_SIGNATURE) else 8
        if image.mode not in modes.split() or (image.mode == "RGB" and n_bits > 8):  # of which Pillow keeps 8
            raise ArgumentError(f"it has {n_bits}-bit {image.mode} pixels, and {self._accepted}")
        pixels = np.asarray(load_pixels(data, image))
        if image.mode == "L" and n_bits < 8:
            pixels = pixels // (255 // (2**n_bits - 1))  # Pillow spreads the values over 0 to 255
        return pixels.astype(np.uint8) if pixels.dtype == bool else pixels

    def stack(self, values: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(values))


class Masks(_Pictures):
    """Masks: for each pixel of a photo the number of its class or object.

    They are read as they are stored, never as colors: a palette's indices, the 8 or 16 bits of gray, 0 and 1 for black
    and white. Resizing mixes no values.

    Args:
        source: A store of masks, or a path or URL, as `lk.open_store` takes it. Each has the name of its photo, or the
            same with another suffix: `cat/1.png` for `cat/1.jpg`.
        ignore_index: The value outside of the photo, where a crop reaches beyond it; 0 to 255.

    A mask has the size of its upright photo. Where EXIF turns a photo by a quarter, it may have the size before that,
    and is turned likewise.

    In an `ImageDataset`: `tv_tensors.Mask` (H, W), uint8, or int32 where there are 16 bits. In batches: (N, H, W).

    >>> dataset = lk.ImageDataset("photos", targets={"mask": lk.Masks("masks")})  # doctest: +SKIP
    >>> dataset[0][1]["mask"].shape  # doctest: +SKIP
    torch.Size([375, 500])

    Raises:
        ValueError: images without a mask; counts them. Of items: a mask of another size, or of colors.
    """

    kind = "mask"
    _accepted = (
        "a mask has one number a pixel: turn its colors into the numbers of classes, and save these as a PNG of gray "
        "(8 or 16 bits) or with a palette"
    )

    def __init__(self, source: Any, *, ignore_index: int = 0):
        super().__init__(source)
        self.ignore_index = require_int("ignore_index", ignore_index, 0)
        if ignore_index > 255:
            raise ArgumentError(f"ignore_index must be from 0 to 255, which a mask of 8 bits holds, got {ignore_index}")

    def check(self, keys: Sequence[str]) -> None:
        super().check(keys)
        may_be_jpegs = any(suffix.lower() in (".jpg", ".jpeg") for suffix in self._suffixes)
        if may_be_jpegs and len(keys) and self._file(keys[0])[1].startswith(b"\xff\xd8"):
            warn_caller(
                f"{self._store!r} holds masks as JPEGs, which change the numbers of classes wherever two meet: make "
                "them again as PNGs",
                UserWarning,
            )

    def _decoded(self, data: bytes, size: Size) -> np.ndarray:
        return self._picture(data, "1 L P I I;16")

    def _whole(self, loaded: np.ndarray, size: Size) -> Any:
        from torchvision import tv_tensors  # which loaders without targets do without

        return tv_tensors.Mask(torch.from_numpy(loaded.astype(_mask_dtype(loaded), order="C")))

    def _cut(self, loaded: np.ndarray, crop: _Crop, out: Any) -> np.ndarray:
        if out is None:
            out = np.empty(crop.out_size, _mask_dtype(loaded))
        (rows, ys), (columns, xs) = (_nearest(*crop.along(axis), crop.whole) for axis in (0, 1))
        target = (out[:, ::-1] if crop.mirror else out)[rows, columns]
        if target.size < out.size:
            out.fill(self.ignore_index)
        np.copyto(target, loaded.take(ys, 0).take(xs, 1), casting="safe")
        return out


def _mask_dtype(pixels: np.ndarray) -> type:
    return np.uint8 if pixels.dtype == np.uint8 else np.int32  # torch does little with uint16


def _nearest(start: float, length: float, n: int, size: int, whole: bool) -> tuple[slice, np.ndarray]:
    """Which of `n` new pixels along an axis show the photo, and the pixel that each of these copies.

    torch multiplies in float32, and so does this, since a product just below a whole number makes a pixel's difference.
    """
    step, places = np.float32(length / n), np.arange(n, dtype=np.float32)
    if whole:
        places += round(start * n / length)
        chosen, within = (places * step).astype(np.int64), (places >= 0) & (places < round(size * n / length))
    else:
        chosen = np.floor(start + np.floor(places * step)).astype(np.int64)
        within = (chosen >= 0) & (chosen < size)
    inside = np.flatnonzero(within)
    shown = slice(inside[0], inside[-1] + 1) if len(inside) else slice(0)
    return shown, chosen[shown].clip(0, size - 1)


class Maps(_Pictures):
    """Maps: measurements for each pixel of a photo, such as depths or normals, as float32 and not scaled.

    They come from PNG (gray of 8 or 16 bits, RGB of 8), or in a folder from `.npy`: (H, W), (C, H, W) or (H, W, C).
    They are resized like images, bilinearly with antialiasing, which mixes neighbors. Where 0 means "not measured",
    read a PNG by `lk.Masks`, which does not.

    Args:
        source: As of `lk.Masks`, and so are names and sizes.

    In an `ImageDataset`: `tv_tensors.Image` (C, H, W), which v2's transforms of colors change, too: give these the
    photo alone. In batches: (N, C, H, W), 0 outside of the photo.

    >>> dataset = lk.ImageDataset("photos", targets={"depth": lk.Maps("depth")})  # doctest: +SKIP
    >>> dataset[0][1]["depth"].shape  # doctest: +SKIP
    torch.Size([1, 375, 500])

    Raises:
        ValueError: images without a map; counts them. Of items: a map of another size, or of another kind.
    """

    kind = "map"
    _accepted = "a map is gray, or RGB of 8 bits: save others as float32 by np.save"

    def _opened(self, source: Any) -> Store:
        is_folder = isinstance(source, str | os.PathLike) and Path(source).is_dir()
        return _MapFolder(source) if is_folder else super()._opened(source)

    def _decoded(self, data: bytes, size: Size) -> np.ndarray:
        is_array = data.startswith(b"\x93NUMPY")
        pixels = np.load(io.BytesIO(data), allow_pickle=False) if is_array else self._picture(data, "1 L I I;16 RGB")
        if pixels.dtype.kind not in "buif" or pixels.ndim not in (2, 3):
            raise ArgumentError(
                f"it holds {pixels.dtype} of shape {pixels.shape}, and a map numbers (H, W) or (C, H, W)"
            )
        planes = pixels if pixels.ndim == 3 else pixels[None]
        if planes.shape[-2:] not in (size, size[::-1]) and planes.shape[:2] in (size, size[::-1]):
            planes = np.moveaxis(planes, -1, 0)
        return planes.astype(np.float32, order="C")

    def _whole(self, loaded: np.ndarray, size: Size) -> Any:
        from torchvision import tv_tensors

        return tv_tensors.Image(torch.from_numpy(np.ascontiguousarray(loaded)))

    def _cut(self, loaded: np.ndarray, crop: _Crop, out: Any) -> np.ndarray:
        if out is None:
            out = np.empty((len(loaded), *crop.out_size), np.float32)
        (rows, top, bottom), (columns, left, right) = (_shown(*crop.along(axis)) for axis in (0, 1))
        target = (out[..., ::-1] if crop.mirror else out)[:, rows, columns]
        if target.size < out.size:
            out.fill(0)
        if target.size:
            target[...] = _resized(loaded, (left, top, right, bottom), target.shape[1:], crop.whole)
        return out


class _MapFolder(FolderStore):
    """A folder whose arrays count as images."""

    def _list_keys(self) -> Iterator[str]:
        yield from super()._list_keys()
        yield from (name for name in self._list_files() if name.endswith(".npy") and not is_hidden(name))


def _shown(start: float, length: float, n: int, size: int) -> tuple[slice, float, float]:
    """Which of `n` new pixels along an axis show the photo, rounded to whole ones, and from where to where in it."""
    first, last = max(0, round(-start * n / length)), min(n, round((size - start) * n / length))
    return slice(first, max(first, last)), round(max(start, 0), 6), round(min(start + length, size), 6)


def _resized(pixels: np.ndarray, corners: Box, out_size: Size, whole: bool) -> np.ndarray:
    """The part (left, top, right, bottom) of `pixels`, float32 (C, H, W), resized.

    It is cut out first, unless the photo is resized as a whole. Then pixels around the part count, too, as they do for
    Pillow's `box`.
    """
    is_all = corners == (0, 0, pixels.shape[2], pixels.shape[1])
    if is_all or (all(corner % 1 == 0 for corner in corners) and not whole):
        left, top, right, bottom = map(int, corners)
        part = torch.from_numpy(np.ascontiguousarray(pixels[:, top:bottom, left:right]))
        return interpolate(part[None], out_size, mode="bilinear", antialias=True)[0].numpy()
    bilinear, planes = Image.Resampling.BILINEAR, map(Image.fromarray, np.ascontiguousarray(pixels))
    return np.stack([np.asarray(plane.resize(out_size[::-1], bilinear, corners)) for plane in planes])


class _Rows(Target):
    """Targets of a few numbers each: for every image rows (n, columns), all kept in one array."""

    _remedy = "Give an image without any an empty list"
    _columns: ClassVar[tuple[str, ...]]

    def _keep(self, keys: Sequence[str], counts: np.ndarray, rows: np.ndarray) -> None:
        if strangers := [key for key in keys if not isinstance(key, str)]:
            raise WrongTypeError(f"{self.kind} belong to images by their names, got {strangers[0]!r:.100} as a name")
        self._spans = dict(
            zip(keys, zip((np.cumsum(counts) - counts).tolist(), counts.tolist(), strict=True), strict=True)
        )
        self._rows = rows

    def _of_mapping(self, values: Any) -> tuple[list[str], np.ndarray, np.ndarray]:
        """The keys, the number of rows of each, and all rows, float32."""
        n_columns, arrays = len(self._columns), []
        accepted = "a dict of arrays by the names of images, or a DataFrame"
        for key, value in require_a(Mapping, "values", values, accepted).items():
            try:
                array = np.asarray(value, np.float32)
                arrays.append(array.reshape(0, n_columns) if array.shape == (0,) else array)
            except (TypeError, ValueError):  # ragged, or no numbers
                arrays.append(np.empty((), np.float32))
            if arrays[-1].ndim != 2 or arrays[-1].shape[1] != n_columns:
                raise ArgumentError(
                    f"{self.kind} of an image are numbers of shape (n, {n_columns}), {', '.join(self._columns)} of "
                    f"each: {key!r} has {value!r:.100}"
                )
        counts = np.fromiter(map(len, arrays), np.int64, len(arrays))
        return list(values), counts, np.concatenate([np.empty((0, n_columns), np.float32), *arrays])

    def _of_frame(self, frame: Any, *more: str) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
        """The same of a DataFrame, whose rows may come in any order, and their order here."""
        least, columns = 1 + len(self._columns), ["the image's name", *self._columns, *more]
        found = tuple(str(name).lower() for name in frame.columns)
        is_mixed_up = set(self._columns) <= set(found) and found[1:least] != self._columns
        if is_mixed_up or not least <= len(frame.columns) <= len(columns):
            raise ArgumentError(
                f"a DataFrame of {self.kind} has the columns {', '.join(columns)}, in this order and under any names, "
                f"got {', '.join(map(str, frame.columns))}: choose them, as by frame[['image', 'x', ...]]"
            )
        numbers, names = frame.iloc[:, 0].factorize(use_na_sentinel=False)
        order = np.argsort(numbers, kind="stable")
        try:
            rows = frame.iloc[:, 1:least].to_numpy(np.float32)[order]
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"{', '.join(self._columns)} of {self.kind} must be numbers, and the image's name comes first: {error}"
            ) from error
        return list(names), np.bincount(numbers, minlength=len(names)), rows, order

    def check(self, keys: Sequence[str]) -> None:
        missing = [key for key in keys if key not in self._spans and _stem(key) not in self._spans]
        self._refuse(missing, keys, ", and for the same without suffix")

    def _load(self, key: str, size: Size, photo: bytes) -> slice:
        """Where the rows of an image are among all."""
        span = self._spans.get(key) or self._spans.get(_stem(key))
        if span is None:
            raise MissingKeyError(f"{key!r} has no {self.kind}")
        return slice(span[0], sum(span))


class Boxes(_Rows):
    """Boxes around the objects in a photo, with their labels.

    Args:
        values: Name of an image -> (n, 4) in pixels of the upright photo; `[]` for a photo without objects. Or a pandas
            DataFrame with a row for each box: the image's name, four numbers and, if there are labels, the label. A
            photo without objects has one row there, without numbers. Names may lack the suffix.
        format: What the four numbers are, in torchvision's words: `"xyxy"`, `"xywh"` (as in COCO) or `"cxcywh"`.
        labels: Name of an image -> a label for each of its boxes.
        keep_empty: Keep boxes of which a crop shows nothing, so that a box has the same place in each crop.

    In an `ImageDataset`: `tv_tensors.BoundingBoxes` (n, 4), xyxy; with labels, a dict of these as "boxes" and of
    "labels" (n,). In batches: for each image a dict of "boxes", float32 (n, 4), xyxy in pixels of the crop and clipped
    to it, and of "labels". These are int64 if all are whole numbers, float32 if all are numbers, else lists.

    >>> boxes = lk.Boxes({"astronaut/000000": [[10, 20, 50, 40]]}, labels={"astronaut/000000": [7]})
    >>> boxes.read("astronaut/000000.jpg", (100, 200))["labels"]
    tensor([7])

    Raises:
        ValueError: images that are not named; counts them. Values that are not (n, 4), or all from 0 to 1 as shares of
            a photo are; boxes that end before they begin, or not one label for each box.
    """

    kind, _columns = "boxes", ("x1", "y1", "x2", "y2")

    def __init__(self, values: Any, *, format: str = "xyxy", labels: Any = None, keep_empty: bool = False):
        require_choice("format", format, ("xyxy", "xywh", "cxcywh"))
        self._keep_empty, self._labels = require_flag("keep_empty", keep_empty), None
        if hasattr(values, "iloc"):
            keys, counts, rows, order = self._of_frame(values, "a label, or not")
            owners, filled = np.repeat(np.arange(len(keys)), counts), ~np.isnan(rows).all(1)
            counts, rows = np.bincount(owners[filled], minlength=len(keys)), rows[filled]
            if len(values.columns) > 1 + len(self._columns):
                self._labels = _as_labels(values.iloc[:, -1].to_numpy()[order][filled])
        else:
            keys, counts, rows = self._of_mapping(values)
        _refuse_shares(self.kind, keys, rows)
        rows[:, :2] -= rows[:, 2:] / 2 if format == "cxcywh" else 0
        rows[:, 2:] += 0 if format == "xyxy" else rows[:, :2]
        self._keep(keys, counts, rows)
        if len(
            wrong := np.flatnonzero(~((rows[:, :2] <= rows[:, 2:]) & np.isfinite(rows[:, 2:] - rows[:, :2])).all(1))
        ):
            key = keys[int(np.searchsorted(np.cumsum(counts), wrong[0], side="right"))]
            raise ArgumentError(
                f"{len(wrong)} of {len(rows)} boxes end before they begin, or are not finite, the first of {key!r}: "
                f"{rows[wrong[0]].tolist()} as xyxy. Is format={format!r} right?"
            )
        if labels is not None and self._labels is not None:
            raise ArgumentError("labels were given twice, by labels= and by the DataFrame's last column")
        if labels is not None:
            self._labels = self._labels_of(keys, counts.tolist(), labels)

    def _labels_of(self, keys: Sequence[str], counts: Sequence[int], labels: Any) -> np.ndarray:
        require_a(Mapping, "labels", labels, "a dict by the names of images; those of a DataFrame are its last column")
        parts = [np.asarray(labels.get(key, ())) for key in keys]
        for key, count, part in zip(keys, counts, parts, strict=True):
            if part.shape != (count,):
                raise ArgumentError(
                    f"{key!r} has {count} boxes, and labels of shape {part.shape}: give each box a label"
                )
        return _as_labels(np.concatenate([part for part in parts if len(part)] or [np.empty(0, np.int64)]))

    def _whole(self, loaded: slice, size: Size) -> Any:
        from torchvision import tv_tensors

        boxes = tv_tensors.BoundingBoxes(torch.from_numpy(self._rows[loaded].copy()), format="XYXY", canvas_size=size)
        return boxes if self._labels is None else {"boxes": boxes, "labels": _unpacked(self._labels[loaded].copy())}

    def _cut(self, loaded: slice, crop: _Crop, out: Any) -> dict[str, np.ndarray]:
        top, left, height, width = crop.box
        first = np.maximum((left, top), 0)  # of what the crop shows of the photo
        last = np.maximum(np.minimum((left + width, top + height), crop.size[::-1]), first)
        corners = crop.moved(self._rows[loaded].reshape(-1, 2, 2).clip(first, last))
        if crop.mirror:
            corners[..., 0] = crop.out_size[1] - corners[:, ::-1, 0]
        kept = np.full(len(corners), True) if self._keep_empty else (corners[:, 0] < corners[:, 1]).all(1)
        boxes = {"boxes": corners.reshape(-1, 4)[kept]}
        return boxes if self._labels is None else boxes | {"labels": self._labels[loaded][kept]}

    def stack(self, values: Sequence[dict[str, np.ndarray]]) -> list[dict[str, Any]]:
        return [{name: _unpacked(array) for name, array in value.items()} for value in values]


class Keypoints(_Rows):
    """Points in a photo, such as the joints of a person.

    Args:
        values: Name of an image -> (n, 2), x and y in pixels of the upright photo. Or a pandas DataFrame with a row for
            each point: the image's name, x and y. Names may lack the suffix, and NaN stays NaN.

    In an `ImageDataset`: `tv_tensors.KeyPoints` (n, 2). In batches, in pixels of the crop: float32 (N, n, 2) if all
    images have equally many, else a list of (n, 2). None is removed or clipped: those outside of the crop have places
    outside. Mirroring keeps their order (a left hand shows where a right one would), and x becomes width - 1 - x, as
    for v2.

    >>> points = lk.Keypoints({"astronaut/000000.jpg": [[10, 20], [50, 40]]})
    >>> points.read("astronaut/000000.jpg", (100, 200)).shape
    torch.Size([2, 2])

    Raises:
        ValueError: images that are not named; counts them. Values that are not (n, 2), or all from 0 to 1.
    """

    kind, _columns = "points", ("x", "y")

    def __init__(self, values: Any):
        keys, counts, rows = self._of_frame(values)[:3] if hasattr(values, "iloc") else self._of_mapping(values)
        _refuse_shares(self.kind, keys, rows)
        self._keep(keys, counts, rows)
        self._are_as_many = len(np.unique(counts)) == 1

    def _whole(self, loaded: slice, size: Size) -> Any:
        from torchvision import tv_tensors

        return tv_tensors.KeyPoints(torch.from_numpy(self._rows[loaded].copy()), canvas_size=size)

    def _cut(self, loaded: slice, crop: _Crop, out: Any) -> np.ndarray:
        points = crop.moved(self._rows[loaded])
        if crop.mirror:
            points[:, 0] = crop.out_size[1] - 1 - points[:, 0]
        return points

    def stack(self, values: Sequence[np.ndarray]) -> Tensor | list[Tensor]:
        return torch.from_numpy(np.stack(values)) if self._are_as_many else list(map(torch.from_numpy, values))


def _refuse_shares(kind: str, keys: Sequence[str], rows: np.ndarray) -> None:
    """Refuse numbers from 0 to 1, as YOLO's: taken for pixels, they would all lie in the first one."""
    if len(rows) and (rows >= 0).all() and (rows <= 1).all() and (rows % 1).any():
        raise ArgumentError(
            f"{kind} are in pixels of the upright photo, and all of these are from 0 to 1, as shares of its width and "
            f"height are, the first of {keys[0]!r}: {rows[0].tolist()}. Multiply them by both"
        )


def _as_labels(labels: np.ndarray) -> np.ndarray:
    """int64 of whole numbers, which a DataFrame with gaps holds as floats; float32 of others; else as they are."""
    if labels.dtype.kind in "biu" or (labels.dtype.kind == "f" and (labels % 1 == 0).all()):
        return labels.astype(np.int64)
    return labels.astype(np.float32) if labels.dtype.kind == "f" else labels


def _unpacked(labels: np.ndarray) -> Tensor | list[Any]:
    return torch.from_numpy(labels) if labels.dtype.kind in "if" else labels.tolist()
