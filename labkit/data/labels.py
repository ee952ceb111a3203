"""Labels as torchvision's `ImageFolder` makes them: an image's class is the first folder of its key.

A label is the number of its class in alphabetical order, or in a list of classes that is handed over.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from labkit.errors import ArgumentError
from labkit.util.files import n_images
from labkit.util.process import warn_caller

_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}
_MAX_NAMED = 5


class LabelWarning(UserWarning):
    """All images have label 0."""


class Labeled:
    """What has labels.

    Attributes:
        classes: Their names, which labels index into.
        labels: int64 (N,), the label of each image; read-only.
    """

    classes: list[str]
    labels: np.ndarray

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The label of each class, as `ImageFolder` has it."""
        return {name: label for label, name in enumerate(self.classes)}


def labels_of(
    keys: Sequence[str], classes: Sequence[str] | None = None, *, source: Any = "the set"
) -> tuple[list[str], np.ndarray]:
    """The classes of a set of images, and each image's label.

    Args:
        keys: Paths under the root, with `/` between their parts.
        classes: Names that labels shall index into, such as those of the training set for its validation set. An empty
            list: images without labels, which all get 0. Default: the first folders, in alphabetical order.
        source: Where the keys are from, for messages: a store, or a name.

    Returns:
        `classes` as a list, and the labels, int64 (len(keys),), read-only.

    Raises:
        ValueError: a folder is not in `classes`; or, without `classes`, images lie next to the class folders, or the
            class folders are train, val and the like. Each says how many images are concerned, and the remedy.
    """
    name = source if isinstance(source, str) else getattr(source, "name", type(source).__name__)
    folders, labels = number_folders(map(_first_folder, keys), len(keys))
    if classes is None:
        _check_tree(name, keys, folders, labels)
        classes = folders
    else:
        classes = checked_classes(classes)
        labels = _numbered_as(name, classes, folders, labels)
    labels.setflags(write=False)
    return classes, labels


def _first_folder(key: str) -> str:
    folder, slash, _ = key.lstrip("/").partition("/")  # an object's name may begin with slashes
    return folder if slash else ""


def number_folders(folders: Iterable[str], count_of_images: int) -> tuple[list[str], np.ndarray]:
    """The sorted names of the images' folders, and the number of each image's folder: int64 (count_of_images,)."""
    numbers: dict[str, int] = defaultdict(count().__next__)  # in the order in which they come
    numbered = np.fromiter((numbers[folder] for folder in folders), np.int64, count_of_images)
    names = sorted(numbers)
    return names, np.argsort([numbers[name] for name in names])[numbered]


def checked_classes(classes: Sequence[str]) -> list[str]:
    """A list of classes; ValueError if it is not one, or names a class twice."""
    is_list = isinstance(classes, Iterable) and not isinstance(classes, str | bytes | Mapping)
    names = list(classes) if is_list else []
    if not is_list or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"classes must be a list of names, such as `train.classes`, got {classes!r}")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(f"classes names {twice!r} more than once: a label must stand for one class")
    return names


def check_same_classes(
    place: str, found: Sequence[str], asked: Sequence[str], remedy: str, *, error: type[ValueError] = ValueError
) -> None:
    """Raise `error` where labels index into other classes than those asked for; it names the first that differs."""
    found, asked = list(found), list(asked)
    if found == asked:
        return
    label = next((label for label, pair in enumerate(zip(found, asked, strict=False)) if pair[0] != pair[1]), None)
    if label is None:
        label = min(len(found), len(asked))
    there, here = (repr(names[label]) if label < len(names) else "missing" for names in (found, asked))
    raise error(
        f"{place} has other classes than those asked for ({len(found)} and {len(asked)}): the class of label {label} "
        f"is {there} there, and {here} in what was asked for: {remedy}"
    )


def warn_of_no_classes(name: str, number: int) -> None:
    """Say that no image of a set lies in a class folder."""
    warn_caller(
        f"{name} has {n_images(number)}, and none lies in a class folder, so all labels are 0: sort the images into "
        "folders, such as root/cat/1.jpg, or pass classes=[] if labels are not used",
        LabelWarning,
    )


def _check_tree(name: str, keys: Sequence[str], folders: list[str], labels: np.ndarray) -> None:
    """Refuse folders that cannot be classes, and tell of labels that are all 0."""
    if folders == [""]:
        warn_of_no_classes(name, len(keys))
    elif "" in folders:
        outside = np.flatnonzero(labels == folders.index(""))
        raise ArgumentError(
            f"{name} has {n_images(len(outside))} of {len(keys)}, such as {keys[outside[0]]!r}, next to the class "
            f"folders ({_listed(folders[1:])}) and in none of them: move them into one, or away (torchvision's "
            "ImageFolder would leave them out in silence), or pass classes=[] if labels are not used"
        )
    elif all(folder.casefold() in _SPLITS for folder in folders) and _is_nested(keys):
        raise ArgumentError(
            f"{name} holds the parts of a data set ({_listed(folders)}), whose classes are the folders below: open "
            f"each by itself ({', '.join(f'root/{folder}' for folder in folders)}). If these are the classes, pass "
            f"classes={folders!r}; if labels are not used, classes=[]"
        )
    elif len(folders) == 1 and _is_nested(keys):
        warn_caller(
            f"{name} has {n_images(len(keys))}, all in one folder, {folders[0]!r}, so all labels are 0, as with "
            f"torchvision's ImageFolder. If the folders in it are the classes, make it the root; else pass "
            f"classes={folders!r}",
            LabelWarning,
        )


def _is_nested(keys: Sequence[str]) -> bool:
    return any(key.count("/") > 1 for key in keys)


def _numbered_as(name: str, classes: list[str], folders: list[str], labels: np.ndarray) -> np.ndarray:
    """Labels that index into `classes` in place of `folders`."""
    if not classes:
        return np.zeros_like(labels)
    numbers = {name: number for number, name in enumerate(classes)}
    counts = np.bincount(labels, minlength=len(folders))
    unknown = [
        f"{repr(folder) if folder else 'no folder'} ({n_images(number)})"
        for folder, number in zip(folders, counts.tolist(), strict=True)
        if folder not in numbers
    ]
    if unknown:
        raise ArgumentError(
            f"{name} has images outside the {len(classes)} classes that were passed ({_listed(classes)}): "
            f"{', '.join(unknown)}. Pass a list that has every folder, or move these images away"
        )
    return np.array([numbers[folder] for folder in folders], np.int64)[labels]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_MAX_NAMED])) + (", ..." if len(names) > _MAX_NAMED else "")
