"""Labels: those of torchvision's `ImageFolder`, where an image's class is the first folder of its key, or one's own.

A label is the number of its class in alphabetical order, or in a list of classes that is handed over. Labels of one's
own may be numbers to predict, too, or several for each image.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from numbers import Integral
from typing import Any

import numpy as np

from labkit.data.image_formats import IMAGE_SUFFIXES
from labkit.data.stores import HasSizes, Store, folders_without_image
from labkit.errors import ArgumentError, WrongTypeError
from labkit.util.arguments import kind_of
from labkit.util.files import first_folder, n_images
from labkit.util.process import warn_caller
from labkit.util.strings import PackedStrings

_SPLIT = re.compile(r"(train(ing)?|val(id(ation)?)?|test(ing)?)[-_]?\d*", re.IGNORECASE)  # COCO: train2017
_OF_PHOTOS = re.compile(r"(images?|imgs?|photos?|pictures?|rgb)", re.IGNORECASE)
_OF_TARGETS = re.compile(r"(masks?|labels?|annotations?|segmentations?|depths?)", re.IGNORECASE)
_MAX_NAMED = 5


class LabelWarning(UserWarning):
    """All images have label 0, or many have a class of their own."""


class Labeled:
    """What has labels.

    Attributes:
        classes: Names of the classes that labels index into; empty where they are something else.
        labels: The label of each image, in the order of `keys`. Class numbers and other integers: int64 (N,). Floats:
            float32 (N,). Several for each image: (N, K) of these. All read-only.
    """

    classes: list[str]
    labels: np.ndarray

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The label of each class, as `ImageFolder` has it."""
        return {name: label for label, name in enumerate(self.classes)}


def labeled(
    source: Any, keys: Iterable[str] | None, classes: Sequence[str] | None, labels: Any
) -> tuple[PackedStrings, list[str], np.ndarray]:
    """What the arguments `keys`, `classes` and `labels` of `ImageDataset` mean, wherever they are taken.

    Returns:
        The names of the images to use; the classes and labels of these, as `Labeled` has them.
    """
    chosen = chosen_keys(source, keys)
    is_sorted = keys is None and getattr(source, "sorts_keys", False)  # of a store of the user's, the order is, too
    return chosen, *labels_of(chosen, classes, labels=labels, source=source, is_sorted=is_sorted)


def chosen_keys(store: Any, keys: Iterable[str] | None = None) -> PackedStrings:
    """The names of a store's images; with `keys`, these alone, in their order.

    Raises:
        TypeError: `keys` are no strings.
        ValueError: some are not in the store, or there twice, or there are none; says how many, and the first.
    """
    there = store.keys if isinstance(store.keys, Sequence) else store.keys()  # of a PixelStore, or a store
    if keys is None:
        return PackedStrings(there)
    what = 'keys must be a list of names of images, such as frame["image"]'
    # A table would give its columns' names, and a set another order in each process.
    if isinstance(keys, str | bytes | Mapping | set | frozenset) or hasattr(keys, "columns"):
        raise WrongTypeError(f"{what}, got {kind_of(keys)}")
    try:
        names: list[Any] = list(keys)  # whatever the caller has
        if numbers := [name for name in names if isinstance(name, Integral)]:
            raise WrongTypeError(
                f"got numbers, the first {numbers[0]}, and names are such as {there[0]!r}: make them, as by "
                f'frame["id"].astype(str) + {os.path.splitext(there[0])[1]!r}; pd.read_csv(..., dtype=str) keeps 007'
            )
        chosen = PackedStrings(names)
    except TypeError as error:
        raise WrongTypeError(f"{what}: {error}") from None
    if not names:
        raise ArgumentError(f"{what}, got none: leave keys= out to use all images")
    known = set(there)
    unknown = [key for key in names if key not in known]
    if unknown:
        raise ArgumentError(
            f"{_name_of(store)} has no image {unknown[0]!r}, which keys= names ({len(unknown)} of its {len(names)} "
            f"are unknown): names are those in keys() of the store, such as {there[0]!r}"
        )
    if len(set(names)) < len(names):
        twice = [key for key, times in Counter(names).items() if times > 1]
        raise ArgumentError(
            f"keys= names images more than once ({len(twice)} of them, the first {twice[0]!r}): name each once, and "
            "let a sampler draw some more often"
        )
    return chosen


def sizes_of(store: Store, keys: Iterable[str]) -> list[int] | None:
    """Bytes of some images; None if the store does not know them."""
    if not isinstance(store, HasSizes):
        return None
    sizes = dict(zip(store.keys(), store.sizes().tolist(), strict=True))
    return [sizes[key] for key in keys]


def labels_of(
    keys: Sequence[str],
    classes: Sequence[str] | None = None,
    *,
    labels: Any = None,
    source: Any = "the set",
    is_sorted: bool = False,
) -> tuple[list[str], np.ndarray]:
    """The classes of a set of images, and each image's label.

    Args:
        keys: Paths under the root, with `/` between their parts.
        classes: Names that labels index into, such as those of the training set for its validation set. An empty list:
            there are none, and without `labels`, all images get 0. Default: the strings among `labels`, or the first
            folders, in alphabetical order.
        labels: The labels, in place of the folders: numbers or names of classes, one for each image or K for each.
            A mapping of keys to these; names of other images are ignored, and if no key is there, keys without their
            suffix are looked for. Or a function of the key. Or a sequence, or an array, with one row for each key.
            A pandas Series is a mapping if its index holds strings, else a sequence. Default: those of the source, if
            it has `labels`; else the folders.
        source: Where the keys are from, for messages: a store, or a name.
        is_sorted: Nobody gave the keys in this order: they were found, and sorted. A sequence of labels is refused.

    Returns:
        `classes` as a list, empty where labels are no classes; and the labels, as `Labeled` has them.

    Raises:
        TypeError, ValueError: `labels` or `classes` are of another kind; an image has no label; a label is not in
            `classes`. Or without `labels`: a folder is not in `classes`; or, without `classes`, images lie next to the
            class folders, a folder has no image, or these are train, val and the like. Each says how many images are
            concerned, and the remedy.
    """
    name = _name_of(source)
    names = None if classes is None else checked_classes(classes)
    if labels is None and names != [] and (own := _labels_of_source(source)) is not None:
        found, of_own = _own_labels(name, source, own, names)
        return _label(name, keys, of_own, _values_for(name, keys, found), may_be_names=of_own is names)
    if labels is not None:
        return _label(name, keys, names, _values_for(name, keys, labels, is_sorted))
    folders, numbers = number_names(map(first_folder, keys), len(keys))
    if names is None:
        _check_tree(name, keys, folders, numbers)
        _check_folders(name, folders, source)
        names = folders
    elif names:
        numbers = _numbered_as(name, names, folders, numbers)
    else:
        numbers = np.zeros_like(numbers)
    numbers.setflags(write=False)
    return names, numbers


def labels_at(labels: np.ndarray, indices: Sequence[int] | np.ndarray) -> Any:
    """The labels of some images, as a batch has them: a tensor (n, ...)."""
    from torch import from_numpy  # here: who only writes files does without torch

    return from_numpy(labels[np.asarray(indices, np.int64)])


def chosen_labels(labels: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The labels of some images of a set, as those of a set of their own."""
    chosen = labels[rows]
    chosen.setflags(write=False)
    return chosen


def label_at(labels: Any, index: int) -> Any:
    """One image's label: an int; a float32 or int64 tensor where labels are floats or vectors; or what else a list has.

    Only the samples of shards have labels that are no numbers: a text, or what JSON holds.
    """
    if not isinstance(labels, np.ndarray):
        return labels[index]
    if labels.ndim == 1 and labels.dtype == np.int64:
        return int(labels[index])
    from torch import tensor

    return tensor(labels[index])


def _labels_of_source(source: Any) -> Any:
    # No getattr with a default: it would take an error within a property for a source without labels.
    return source.labels if hasattr(type(source), "labels") or "labels" in getattr(source, "__dict__", ()) else None


def _name_of(source: Any) -> str:
    if isinstance(source, str):
        return source
    return str(getattr(source, "name", None) or getattr(source, "path", type(source).__name__))


def number_names(names: Iterable[str], count_of_images: int) -> tuple[list[str], np.ndarray]:
    """The sorted names of the images' classes, and the number of each image's class: int64 (count_of_images,)."""
    numbers: dict[str, int] = defaultdict(count().__next__)  # in the order in which they come
    numbered = np.fromiter((numbers[name] for name in names), np.int64, count_of_images)
    ordered = sorted(numbers)
    return ordered, np.argsort([numbers[name] for name in ordered])[numbered]


def checked_classes(classes: Sequence[str]) -> list[str]:
    """A list of classes; ValueError if it is not one, or names a class twice."""
    # A set has another order in each process.
    is_list = isinstance(classes, Iterable) and not isinstance(classes, str | bytes | Mapping | set | frozenset)
    names = list(classes) if is_list else []
    if not is_list or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"classes must be a list of names, such as `train.classes`, got {classes!r}")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(f"classes names {twice!r} more than once: a label must stand for one class")
    return names


def check_same_classes(
    place: str, found: Sequence[str], asked: Sequence[str], remedy: str, *, error: type[ValueError] = ArgumentError
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
    elif _are_kinds(folders) or (all(map(_SPLIT.fullmatch, folders)) and _is_nested(keys)):
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


def _check_folders(name: str, folders: list[str], source: Any) -> None:
    """Refuse folders without an image beside those of classes, as ImageFolder does."""
    if folders == [""] or not (others := folders_without_image(source)):
        return
    found = []
    for folder, counts in others.items():
        held = ", ".join(f"{number} {suffix or 'without suffix'}" for suffix, number in counts.most_common())
        found.append(f"{folder!r} ({held or 'no file'})")
    shown = ", ".join(found[:_MAX_NAMED]) + ", ..." * (len(found) > _MAX_NAMED)
    raise ArgumentError(
        f"{name} has folders in which there is no image that labkit reads ({', '.join(IMAGE_SUFFIXES)}), beside those "
        f"of {len(folders)} classes: {shown}. Without them, the classes behind would get other numbers: "
        "convert the images in them, or move these folders away; or pass the classes that there are, as classes="
        f"{folders!r:.500}. If labels are not used, pass classes=[]"
    )


def _are_kinds(folders: list[str]) -> bool:
    """Whether the folders are those of photos and of what belongs to them, such as `images` and `masks`."""
    kinds = [0 if _OF_PHOTOS.fullmatch(folder) else 1 if _OF_TARGETS.fullmatch(folder) else 2 for folder in folders]
    return {*kinds} == {0, 1}


def _is_nested(keys: Sequence[str]) -> bool:
    return any(key.count("/") > 1 for key in keys)


def _numbered_as(
    name: str, classes: list[str], found: list[str], labels: np.ndarray, *, is_own: bool = False
) -> np.ndarray:
    """Labels that index into `classes` in place of the names that were found."""
    numbers = {name: number for number, name in enumerate(classes)}
    counts = np.bincount(labels, minlength=len(found))
    unknown = [
        f"{repr(each) if each or is_own else 'no folder'} ({n_images(number)})"
        for each, number in zip(found, counts.tolist(), strict=True)
        if each not in numbers
    ]
    if unknown:
        remedy = (
            "has every label, or leave these images out by keys="
            if is_own
            else "has every folder, or move these images away"
        )
        raise ArgumentError(
            f"{name} has images outside the {len(classes)} classes that were passed ({_listed(classes)}): "
            f"{', '.join(unknown[:_MAX_NAMED])}{', ...' * (len(unknown) > _MAX_NAMED)}. Pass a list that {remedy}"
        )
    return np.array([numbers[each] for each in found], np.int64)[labels]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_MAX_NAMED])) + (", ..." if len(names) > _MAX_NAMED else "")


# Labels of one's own: found for each key, then made what they become.

_KINDS = (
    "labels must be a list or an array with one label for each image, a mapping of keys to labels, or a function of "
    "the key"
)
_TABLE = 'frame = pd.read_csv(path, dtype={"image": str}), labels=dict(zip(frame["image"], frame["label"]))'
_MANY_CLASSES = 20


def _own_labels(
    name: str, source: Any, labels: Any, names: list[str] | None
) -> tuple[dict[str, Any], list[str] | None]:
    """The labels that a source has by itself, by its keys, and the classes that they then index into."""
    own = list(getattr(source, "classes", None) or [])
    if own and names and any(np.ndim(label) for label in labels):
        check_same_classes(name, own, names, "leave classes= out, or pass labels=, too")
    elif own and names:  # other numbers; -1 is none, as in test sets
        labels = [None if label is None or not 0 <= label < len(own) else own[label] for label in labels]
        own = names
    return dict(zip(source.keys(), labels, strict=True)), own or names


def _label(
    name: str, keys: Sequence[str], names: list[str] | None, values: Any, *, may_be_names: bool = True
) -> tuple[list[str], np.ndarray]:
    """Classes and labels of a set whose labels are given. `may_be_names`: numbers may stand for classes so named."""
    values = typed_labels(values)
    if isinstance(values, np.ndarray):  # in a vector, NaN stands for one unknown number
        missing = np.flatnonzero(np.isnan(values)).tolist() if values.ndim == 1 else []
    else:
        missing = [row for row, value in enumerate(values) if _is_missing(value)]
    if missing:
        raise _lacks_labels(name, keys, missing)
    if isinstance(values, np.ndarray):
        _check_range(name, keys, names, values, may_be_names)
        values.setflags(write=False)
        return names or [], values
    rows = [[value] if isinstance(value, str) else value for value in values]
    width = len(rows[0]) if rows and hasattr(rows[0], "__len__") else 0

    def is_of_names(row: Any) -> bool:
        is_row = isinstance(row, list | tuple | np.ndarray) and len(row) == width
        return is_row and all(isinstance(each, str) for each in row)

    odd = next((value for value, row in zip(values, rows, strict=True) if not is_of_names(row)), None)
    if odd is not None or not width:
        raise WrongTypeError(
            f"labels must be numbers or names of classes, one for each image or as many for each: those of {name} are "
            f"such as {odd!r:.100}. Where the number of classes differs, make it a vector of 0 "
            "and 1; read what else belongs to an image, such as boxes, in a data set of your own, by its key"
        )
    if names == []:
        raise ArgumentError(
            f"labels that are strings are names of classes, such as {values[0]!r:.100} in {name}, and classes=[] says "
            "that there are none: leave it out. Texts are what lk.read_shards gives of .txt members"
        )
    found, numbers = number_names((each for row in rows for each in row), len(rows) * width)
    if names is None:
        names = found
        if len(found) > max(_MANY_CLASSES, len(numbers) / 2):
            warn_caller(
                f"{name} has {len(found)} different labels in {n_images(len(values))}, such as {found[0]!r:.100}, and "
                "each is a class: pass the list of classes= if that is right. Texts go to a training by "
                "lk.read_shards, or by a data set of your own",
                LabelWarning,
            )
    else:
        numbers = _numbered_as(name, names, found, numbers, is_own=True)
    numbers = numbers if isinstance(values[0], str) else numbers.reshape(-1, width)
    numbers.setflags(write=False)
    return names, numbers


def typed_labels(values: Any) -> Any:
    """Labels as `Labeled` has them: an array if they are numbers or vectors of one length, else a sequence.

    Args:
        values: An array with a row for each image, or a list with an item for each.
    """
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
        values = list(values)
        kinds = set(map(type, values))
        if values and all(issubclass(kind, str) for kind in kinds):
            return PackedStrings(values)  # every worker would copy a list, page by page
        if kinds <= {bool, int, float}:
            array = _numbers_in(values)
            if array is None:
                raise _too_large(max(values, key=abs))
        else:
            rows: list[Any] = [_numbers_in(value) for value in values]
            is_even = all(row is not None and row.ndim < 2 and row.shape == rows[0].shape for row in rows)
            array = np.stack(rows) if is_even else None
        if array is None:
            return values
        values = array
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    if values.dtype == np.uint64 and len(values) and values.max() > np.iinfo(np.int64).max:
        raise _too_large(values.max())
    return values.astype(np.int64)  # a copy, which may be made read-only


def _too_large(label: int) -> ArgumentError:
    return ArgumentError(f"labels that are integers must fit into 64 bits with a sign, got {label!s:.40}")


def _numbers_in(value: Any) -> np.ndarray | None:
    """A number, or a list, array or tensor of them, as an array; None if it is something else."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value  # NumPy has no bfloat16
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    return array if array.dtype.kind in "biuf" else None


def _is_missing(value: Any) -> bool:
    is_nan = isinstance(value, float | np.floating) and value != value
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")  # of pandas


def _lacks_labels(name: str, keys: Sequence[str], missing: list[int]) -> ArgumentError:
    has = "has" if len(missing) == 1 else "have"
    return ArgumentError(
        f"{name}: {n_images(len(missing))} of {len(keys)} {has} no label, such as {keys[missing[0]]!r}: add "
        "what is missing to labels=, or use only some images, by keys="
    )


def _check_range(
    name: str, keys: Sequence[str], names: list[str] | None, labels: np.ndarray, may_be_names: bool
) -> None:
    """Refuse numbers that cannot index into the classes that were passed, or may mean two of them."""
    if not names or labels.shape[1:] == (len(names),):  # each column is one of the classes
        return
    if labels.dtype != np.int64 or (labels.ndim > 1 and may_be_names):  # K names for each are sure, K numbers are not
        raise ArgumentError(
            f"{len(names)} classes were passed ({_listed(names)}), and the labels of {name} are {labels.dtype} "
            f"{labels.shape}, which cannot index into them: leave classes= out"
        )
    outside = np.argwhere((labels < 0) | (labels >= len(names)))
    if len(outside):
        raise ArgumentError(
            f"{name} has {n_images(len({row for row, *_ in outside.tolist()}))} whose label is no number of the "
            f"{len(names)} classes that were passed (0 to {len(names) - 1}), such as {keys[outside[0][0]]!r} with "
            f"{labels[tuple(outside[0])]}: pass all, and number them from 0"
        )
    if not may_be_names:
        return
    places = {each: place for place, each in enumerate(names)}
    for label in np.unique(labels).tolist():
        if (place := places.get(str(label), label)) != label:
            raise ArgumentError(
                f"label {label} of {name} may be the class at that position of classes=, {names[label]!r}, or the "
                f"class whose name is {str(label)!r}, at position {place}: pass names in place of numbers, by "
                "classes[label] for each if they are positions, or by str(label) if they are names"
            )


def _values_for(name: str, keys: Sequence[str], labels: Any, is_sorted: bool = False) -> Any:
    """The label of each key: an array with as many rows, or a list."""
    if isinstance(labels, Mapping):
        return _values_by_name(name, keys, list(map(str, labels)), list(labels.values()))
    if isinstance(labels, str | os.PathLike):
        raise WrongTypeError(f"{_KINDS}; got {os.fspath(labels)!r:.100}. Of a table, pass two columns: {_TABLE}")
    if getattr(labels, "ndim", 1) == 2 and hasattr(labels, "iloc"):
        raise WrongTypeError(
            f'{_KINDS}; got DataFrame. Pass its columns: labels=dict(zip(frame["image"], frame["label"])), or for '
            'several numbers dict(zip(frame["image"], frame[["a", "b"]].to_numpy()))'
        )
    kind = kind_of(labels)
    if hasattr(labels, "iloc"):  # a Series
        if len(labels) and all(isinstance(each, str) for each in labels.index):
            return _values_by_name(name, keys, list(labels.index), labels.to_numpy())
        labels = labels.to_numpy()
    elif callable(labels) and not hasattr(labels, "__len__"):
        return [labels(key) for key in keys]
    if isinstance(labels, bytes | set | frozenset) or not hasattr(labels, "__len__") or not getattr(labels, "ndim", 1):
        raise WrongTypeError(f"{_KINDS}; got {kind}")
    values = _numbers_in(labels) if hasattr(labels, "ndim") else None  # an array or a tensor
    values = labels if values is None else values
    if len(values) != len(keys):
        raise ArgumentError(
            f"labels has {len(values)} labels, and {name} {n_images(len(keys))}: a sequence has one for each, in the "
            "order of keys=; a mapping may have more"
        )
    if is_sorted and len(keys) > 1:
        raise ArgumentError(
            f"labels is {kind}, which goes by position, and the names of the images in {name} were found "
            "and sorted, which may be another order than that of the labels: pass keys=names, too, with the name of "
            "each label's image, or labels=dict(zip(names, labels))"
        )
    return values


def _values_by_name(name: str, keys: Sequence[str], names: list[str], values: Any) -> Any:
    rows: dict[str, int] = {}
    repeated = {each for row, each in enumerate(names) if rows.setdefault(each, row) != row}
    found = list(keys)
    if not any(key in rows for key in found):
        found = [os.path.splitext(key)[0] for key in found]
    missing = [row for row, each in enumerate(found) if each not in rows]
    if len(missing) == len(found) and names:
        raise ArgumentError(
            f"labels= has no label for any image of {name}: its names are such as {names[0]!r}, and those of the "
            f"images such as {keys[0]!r}; make them the same, but for the suffix"
        )
    if missing:
        raise _lacks_labels(name, keys, missing)
    if twice := [each for each in found if each in repeated]:
        raise ArgumentError(
            f"labels= names images more than once ({len(twice)} of them, the first {twice[0]!r}): give each one label, "
            "such as a vector of 0 and 1 where it may have several classes"
        )
    positions = [rows[each] for each in found]
    return values[positions] if isinstance(values, np.ndarray) else [values[position] for position in positions]
