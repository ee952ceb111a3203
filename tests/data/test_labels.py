"""Labels of one's own, and a choice of images: by every way to a batch they are what pandas and NumPy say, or refused.

What they become is the same in data sets, in pixels and in shards, from the file to the batch.
"""

import io
import json
import struct
import tarfile
import warnings
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import webdataset as wds
from PIL import Image
from torch.utils.data import DataLoader

import labkit as lk
from labkit.data.dataset import Skipped
from labkit.data.labels import LabelWarning, labels_of
from tests.labeled import every_way, of_batches, of_pixels, of_shards
from tests.memory_store import MemoryStore
from tests.shards import PICTURE, picture, write
from tests.tars import make_tar

KEYS = ["a/1.png", "a/2.png", "b.c/3.png", "b.c/4.png", "5.png"]
"""Folders of these would be no classes: one has a dot, and one image is in none."""

BECOME = {
    "ints": ([3, 0, 2, 2, 7], np.int64),
    "bools": ([True, False, True, True, False], np.int64),
    "bytes of NumPy": (np.array([3, 0, 2, 2, 255], np.uint8), np.int64),
    "large ints": ([2**40, -1, 0, 1, 2], np.int64),
    "0-d tensors": ([torch.tensor(n) for n in (3, 0, 2, 2, 7)], np.int64),
    "floats": ([0.1, -2.5, 1e-9, 3, float("inf")], np.float32),
    "doubles": (np.linspace(0, 1, 5), np.float32),
    "bfloat16": (torch.linspace(0, 1, 5, dtype=torch.bfloat16), np.float32),
    "vectors of ints": ([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 0]], np.int64),
    "vectors with a gap": (np.array([[1, 0.5], [np.nan, 2], [0, 0], [1, 1], [0.1, 0]]), np.float32),
    "arrays": ([np.full(2, n) for n in range(5)], np.int64),
    "matrices": (np.arange(20.0).reshape(5, 2, 2), np.float32),
}
"""Numbers, and the type of what they become."""


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore({key: picture(number) for number, key in enumerate(KEYS)})


@pytest.fixture(autouse=True)
def _no_warning():
    """Who gives labels is told nothing of folders."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", LabelWarning)
        yield


def assert_same(found, expected) -> None:
    """Of tensors or arrays, type and values; NaN equals NaN."""
    found, expected = (torch.tensor(each) if isinstance(each, np.ndarray) else each for each in (found, expected))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@every_way
@pytest.mark.parametrize("name", BECOME)
def test_numbers_are_those_of_numpy_in_batches_too(store, tmp_path, labeled, name):
    values, dtype = BECOME[name]
    arrays = [np.asarray(torch.as_tensor(value).float() if name == "bfloat16" else value) for value in values]
    expected = np.stack(arrays).astype(dtype)
    found = labeled(store, tmp_path, keys=KEYS, labels=values)
    assert (found.made.classes, found.keys) == ([], KEYS)
    assert_same(found.labels, expected)
    if labeled is not of_shards:
        assert_same(found.made.labels, expected)
        assert not found.made.labels.flags.writeable


@every_way
def test_strings_are_classes_in_their_order_or_in_that_of_a_list(store, tmp_path, labeled):
    values = dict(zip(KEYS, ["cow", "ant", "cow", "bee", "ant"], strict=True))
    _, codes = np.unique([values[key] for key in KEYS], return_inverse=True)
    found = labeled(store, tmp_path / "own", keys=KEYS, labels=values)
    assert found.made.classes == ["ant", "bee", "cow"]
    assert_same(found.labels, codes)
    classes = ["cow", "pig", "bee", "ant"]
    found = labeled(store, tmp_path / "of", labels=values, keys=KEYS, classes=classes)
    assert found.made.classes == classes
    assert [classes[label] for label in found.labels] == [values[key] for key in KEYS]
    with pytest.raises(
        ValueError, match=r"outside the 2 classes that were passed \('ant', 'bee'\): 'cow' \(2 images\)"
    ):
        labeled(store, tmp_path / "few", labels=values, classes=["ant", "bee"])


@every_way
def test_several_names_for_each_image_are_as_many_classes(store, tmp_path, labeled):
    values = [["red", "round"], ["blue", "round"], ["red", "flat"], ["red", "red"], ["flat", "blue"]]
    names, codes = np.unique(values, return_inverse=True)
    for number, given in enumerate((values, np.array(values), list(map(tuple, values)))):
        found = labeled(store, tmp_path / str(number), keys=KEYS, labels=given)
        assert found.made.classes == names.tolist()
        assert_same(found.labels, codes.reshape(5, 2).astype(np.int64))
    other = ["flat", "round", "green", "blue", "red"]
    found = labeled(store, tmp_path / "of", keys=KEYS, labels=values, classes=other)
    assert [[other[label] for label in row] for row in found.labels.tolist()] == values


@every_way
@pytest.mark.parametrize("values", [
    [{}] * 5, [[1], [1, 2], [], [3], [4]], [1, "a", 2, "b", 3], [["a"], ["a", "b"], ["b"], ["a"], ["b"]],
    [[[1, 2, 3, 4]]] * 5, [1j] * 5, [["a", 1]] * 5,
], ids=["dicts", "ragged", "mixed", "ragged names", "boxes", "complex", "names and numbers"])  # fmt: skip
def test_what_is_neither_a_number_nor_a_name_is_refused(store, tmp_path, labeled, values):
    with pytest.raises(
        TypeError, match=r"labels must be numbers or names of classes, .* those of MemoryStore are such"
    ):
        labeled(store, tmp_path, labels=values, keys=KEYS)
    assert list(tmp_path.iterdir()) == []


@every_way
def test_names_of_classes_go_with_classes(store, tmp_path, labeled):
    with pytest.raises(ValueError, match=r"names of classes, such as 'a dog'.* classes=\[\] says .* lk\.read_shards"):
        labeled(store, tmp_path, labels=["a dog", "", "b", "c", "d"], classes=[], keys=KEYS)


@every_way
def test_keys_choose_and_order_and_labels_go_with_them(store, tmp_path, labeled):
    chosen = ["5.png", "a/2.png", "b.c/3.png"]
    for number, keys in enumerate(
        (chosen, tuple(chosen), pd.Series(chosen), np.array(chosen), lk.PackedStrings(chosen))
    ):
        found = labeled(store, tmp_path / str(number), keys=keys, labels=[5, 2, 3])
        assert found.keys == chosen
        assert found.images[:, 0, 0, 0].tolist() == [4, 1, 2]
        assert found.labels.tolist() == [5, 2, 3]
    pictures = {key: picture(number) for number, key in enumerate(("a/1.png", "a/2.png", "b/1.png"))}
    found = labeled(MemoryStore(pictures), tmp_path / "folders", keys=["b/1.png", "a/2.png"])
    assert (found.made.classes, found.labels.tolist()) == (["a", "b"], [1, 0])


@every_way
@pytest.mark.parametrize(("keys", "error", "said"), [
    (["a/1.png", "x.png", "y.png"], ValueError, r"no image 'x\.png', .*\(2 of its 3 are unknown\).*such as '5\.png'"),
    (["a/1.png", "a/2.png", "a/2.png", "a/1.png"], ValueError, r"more than once \(2 of them, the first 'a/1\.png'\)"),
    ([], ValueError, "keys must be a list of names of images.*, got none"),
    ([1, 2], TypeError, r"numbers, the first 1, .*\.astype\(str\) \+ '\.png'; .*dtype=str"),
    (["a/1.png", None], TypeError, "keys must be a list of names of images"),
    ("a/1.png", TypeError, "keys must be a list of names of images.* got str"),
    ({"a/1.png": 1}, TypeError, "keys must be a list of names of images.* got dict"),
    (pd.DataFrame({"image": ["a/1.png"]}), TypeError, "keys must be a list of names of images.* got DataFrame"),
])  # fmt: skip
def test_keys_that_choose_nothing_sure_are_refused(store, tmp_path, labeled, keys, error, said):
    with pytest.raises(error, match=said):
        labeled(store, tmp_path, keys=keys, labels=dict.fromkeys(KEYS, 1))


# --- where labels are found


SOURCES = {
    "dict": lambda series: series.to_dict(), "series": lambda series: series,
    "function": lambda series: lambda key: series[key],
    "names without suffix": lambda series: {key.removesuffix(".png"): value for key, value in series.items()},
}  # fmt: skip


@every_way
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("values", [[50, 40, 30, 20, 10], [[5, 0.5], [4, 0], [3, 1], [2, 0], [1, 0.25]]], ids=str)
def test_labels_are_found_by_name_whatever_order_they_have(store, tmp_path, labeled, source, values):
    series = pd.Series([*values, values[0]], [*KEYS[::-1], "other.png"])
    found = labeled(store, tmp_path, labels=SOURCES[source](series))
    expected = np.array([series[key] for key in found.keys])
    assert_same(found.labels, expected.astype(np.int64 if expected.ndim == 1 else np.float32))


# --- by position


IN_ORDER = {"zebra.jpg": ("zebra", 3), "ant.jpg": ("ant", 1), "10.jpg": ("bee", 2), "9.jpg": ("ant", 0)}
"""Names in an order of their own, with the class of each and the gray of its photo, over 80."""


def photos() -> dict[str, bytes]:
    made = {}
    for key, (_, gray) in IN_ORDER.items():
        Image.new("RGB", (8, 8), (80 * gray,) * 3).save(buffer := io.BytesIO(), "PNG")
        made[key] = buffer.getvalue()
    return made


class OwnStore(MemoryStore):
    """In an order of its own, as that of its mapping."""

    def keys(self):
        return list(self.files)


def rows(found) -> list[tuple[str, int]]:
    """Class and gray of each image."""
    return [
        (found.made.classes[label], image[0, 0, 0].item())
        for image, label in zip(found.images, found.labels, strict=True)
    ]


NAMES = [name for name, _ in IN_ORDER.values()]
EXPECTED = [(name, 80 * gray) for name, gray in IN_ORDER.values()]


@every_way
@pytest.mark.parametrize("given", ["mapping", "server", "store of one's own", "keys"])
def test_a_list_is_in_the_order_that_was_given(server, tmp_path, labeled, given):
    server.files = {f"/p/{key}": data for key, data in photos().items()}
    source = {
        "mapping": photos, "server": lambda: lk.HttpStore(f"{server.url}/p", keys=list(IN_ORDER)),
        "store of one's own": lambda: OwnStore(photos()),
        "keys": lambda: MemoryStore(photos()),
    }[given]()  # fmt: skip
    options = {"keys": list(IN_ORDER)} if given == "keys" else {}
    assert rows(labeled(source, tmp_path, labels=NAMES, **options)) == EXPECTED


@pytest.fixture
def found(tmp_path, server):
    """The photos where nobody gave their order."""
    server.files = {f"/p/{key}": data for key, data in photos().items()}
    server.files["/p/"] = "".join(f'<a href="{key}">x</a>' for key in IN_ORDER).encode()
    (tmp_path / "folder").mkdir()
    for key, data in photos().items():
        (tmp_path / "folder" / key).write_bytes(data)
    make_tar(tmp_path / "x.tar", photos())
    (tmp_path / "tars").mkdir()
    make_tar(tmp_path / "tars" / "x.tar", photos())
    return {
        "folder": tmp_path / "folder", "tar": tmp_path / "x.tar", "tars": tmp_path / "tars",
        "listing": f"{server.url}/p",
    }  # fmt: skip


@every_way
@pytest.mark.parametrize("place", ["folder", "tar", "tars", "listing"])
def test_a_list_is_refused_where_names_were_sorted(found, tmp_path, labeled, place):
    with pytest.raises(ValueError, match=r"labels is list, which goes by position, .* found and sorted.* keys=names"):
        labeled(found[place], tmp_path / "made", labels=NAMES)
    assert not (tmp_path / "made").exists()
    (tmp_path / "made").mkdir()
    assert rows(labeled(found[place], tmp_path / "made", labels=NAMES, keys=list(IN_ORDER))) == EXPECTED


def test_the_order_in_a_pixel_file_is_nobodys(found, tmp_path):
    store = lk.PixelStore.build(found["folder"], tmp_path / "x.pixels", progress=False, classes=[])
    with pytest.raises(ValueError, match=r"labels is list, .* the images in .*x\.pixels were found and sorted"):
        lk.BatchLoader(store, labels=NAMES)
    assert rows(of_batches(store, tmp_path, labels=NAMES, keys=list(IN_ORDER))) == EXPECTED


def test_names_on_a_server_are_given_once(server):
    with pytest.raises(ValueError, match=r"keys= names 1 files more than once, the first 'a\.jpg'"):
        lk.HttpStore(f"{server.url}/p", keys=["b.jpg", "a.jpg", "a.jpg"])


# --- classes that are called by numbers


TWELVE = {f"{name}/{gray}.png": PICTURE for name in range(12) for gray in range(2)}


@every_way
def test_a_number_that_may_be_two_classes_is_refused(tmp_path, labeled):
    store = MemoryStore(TWELVE)
    names = lk.ImageDataset(store).classes
    numbers = {key: int(key.partition("/")[0]) for key in TWELVE}
    said = r"label 2 of .* at that position of classes=, '10', or .* name is '2', .* classes\[label\] .* str\(label\)"
    with pytest.raises(ValueError, match=said):
        labeled(store, tmp_path, labels=numbers, classes=names)
    assert list(tmp_path.iterdir()) == []
    for name, of in (("positions", names.__getitem__), ("names", str)):  # as the error says
        given = {key: of(label) for key, label in numbers.items()}
        found = labeled(store, tmp_path / name, labels=given, classes=names)
        assert [names[label] for label in found.labels] == [given[key] for key in found.keys]


@pytest.mark.parametrize(("classes", "labels"), [
    (["0", "1", "2"], [2, 1, 0]), (["zero", "1", "2"], [0, 1, 2]), (["1", "x", "0"], [[1, 0, 1]] * 3),
    (["2", "7", "9"], [0, 1, 0]),
])  # fmt: skip
def test_numbers_are_positions_where_names_say_no_other(classes, labels):
    found, numbers = labels_of(["a", "b", "c"], classes, labels=labels)
    assert (found, numbers.tolist()) == (classes, labels)


def test_a_store_that_says_what_its_numbers_mean_is_believed(tmp_path):
    """Shards have both numbers and classes; only what a user hands over may be read in two ways."""
    names = lk.ImageDataset(MemoryStore(TWELVE)).classes
    root = write(MemoryStore(TWELVE), tmp_path / "shards")
    dataset = lk.ImageDataset(root)
    assert dataset.classes == names
    assert [names[label] for label in dataset.labels] == [key.partition("/")[0] for key in dataset.keys]
    other = lk.ImageDataset(root, classes=names[::-1])
    assert [other.classes[label] for label in other.labels] == [key.partition("/")[0] for key in other.keys]


# --- where labels are found: sequences


def test_a_sequence_and_rows_without_names_are_in_the_order_of_the_keys(store):
    values = list(range(5))
    for labels in (
        values, tuple(values), np.array(values), torch.tensor(values), pd.Series(values, index=[9, 8, 7, 6, 5]),
        pd.Series(values, dtype="Int64"), lk.PackedStrings("01234"),
    ):  # fmt: skip
        dataset = lk.ImageDataset(store, labels=labels, keys=store.keys())
        assert dataset.labels.tolist() == values
        reverse = lk.ImageDataset(store, labels=labels, keys=store.keys()[::-1])
        assert [image[0, 0, 0].item() for image, _ in reverse] == [image[0, 0, 0].item() for image, _ in dataset][::-1]
        assert reverse.labels.tolist() == values


def test_labels_change_neither_with_what_was_given_nor_with_a_batch(store):
    given = np.arange(5.0)
    options = {"labels": given, "keys": KEYS}
    dataset, loader = lk.ImageDataset(store, **options), lk.BatchLoader(store, size=8, batch_size=2, **options)
    given += 7
    for _, labels in (*dataset, *loader):
        labels += 1
    assert dataset.labels.tolist() == loader.labels.tolist() == [0, 1, 2, 3, 4]
    assert dataset[1][1].dtype == torch.float32
    assert type(lk.ImageDataset(store, labels=range(5), keys=KEYS)[0][1]) is int


def test_a_store_may_have_labels_and_classes_of_its_own(store):
    store.labels, store.classes = [1, 0, 1, 1, 0], ["ant", "bee"]
    dataset = lk.ImageDataset(store, keys=["a/2.png", "5.png"])
    names = dict(zip(store.keys(), ["bee", "ant", "bee", "bee", "ant"], strict=True))
    assert (dataset.classes, dataset.labels.tolist()) == (["ant", "bee"], [1, 1])
    assert [dataset.classes[label] for label in dataset.labels] == [names[key] for key in dataset.keys]
    other = lk.ImageDataset(store, classes=["cow", "bee", "ant"])
    assert other.classes == ["cow", "bee", "ant"]
    assert [other.classes[label] for label in other.labels] == [names[key] for key in other.keys]
    store.labels = [1, 0, -1, None, 0]
    with pytest.raises(ValueError, match=r"2 images of 5 have no label, such as 'a/2\.png'"):
        lk.ImageDataset(store, classes=["ant", "bee"])
    assert lk.ImageDataset(store, labels=range(5)).labels.tolist() == [0, 1, 2, 3, 4]
    assert lk.ImageDataset(store, classes=[]).labels.tolist() == [0] * 5


# --- what is refused


@every_way
@pytest.mark.parametrize(("labels", "said"), [
    ({"a/1.png": 1, "a/2.png": 2}, r"3 images of 5 have no label, such as '5\.png': add .* to labels=, .* by keys="),
    ({"x/1.png": 1}, r"no label for any image of MemoryStore: its names are such as 'x/1\.png', .* '5\.png'"),
    ({}, r"5 images of 5 have no label"),
    ([1, 2, 3], r"labels has 3 labels, and MemoryStore 5 images"),
    ([0.5, float("nan"), 1, 2, 3], r"1 image of 5 has no label, .*'a/1\.png'"),
    (["x", None, "y", "x", "x"], r"1 image of 5 has no label, .*'a/1\.png'"),
    ([[1], None, [2], [3], pd.NA], r"2 images of 5 have no label, .*'a/[12]\.png'"),
    (pd.Series([1, None, 2, 3, 4], sorted(KEYS), dtype="Int64"), r"1 image of 5 has no label, .*'a/1\.png'"),
    (pd.Series([1, 2], index=["a/1.png"] * 2), r"4 images of 5"),
    (pd.Series(range(7), index=[*KEYS, *KEYS[:2]]), r"more than once \(2 of them, the first 'a/1\.png'\).*vector of 0"),
    ([2**63] * 5, r"must fit into 64 bits"),
    ([1, 2, 3, 4, -(2**70)], r"must fit into 64 bits with a sign, got -1180591620717411303424"),
])  # fmt: skip
def test_labels_that_are_missing_or_double_are_counted_and_named(store, tmp_path, labeled, labels, said):
    with pytest.raises(ValueError, match=said):
        labeled(store, tmp_path, labels=labels)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("labels", [5, np.array(5), {1, 2}, iter([1]), b"abc"])
def test_what_is_no_list_of_labels_is_refused(store, labels):
    with pytest.raises(TypeError, match=r"^labels must be a list .*a mapping of keys .*a function of the key; got"):
        lk.ImageDataset(store, labels=labels)


def test_a_table_is_refused(store):
    frame = pd.DataFrame({"image": KEYS, "label": range(5)})
    with pytest.raises(TypeError, match=r'got DataFrame\. Pass its columns: labels=dict\(zip\(frame\["image"\]'):
        lk.ImageDataset(store, labels=frame)


@pytest.mark.parametrize(("labels", "said"), [
    ([0, 1, 2, -1, 0], r"2 images whose label is no number of the 2 .*\(0 to 1\), such as 'b\.c/3\.png' with 2"),
    ([0.5, 1, 1, 1, 1], r"labels of MemoryStore are float32 \(5,\), which cannot index"),
    ([[1, 0, 1]] * 5, r"labels of MemoryStore are int64 \(5, 3\), which cannot index"),
])  # fmt: skip
def test_numbers_that_are_none_of_the_classes_are_refused(store, labels, said):
    with pytest.raises(ValueError, match=said):
        lk.ImageDataset(store, classes=["x", "y"], labels=labels, keys=KEYS)


def test_texts_that_became_classes_are_told():
    keys = [f"{number}.png" for number in range(50)]
    with pytest.warns(LabelWarning, match=r"has 26 different labels in 50 images, .* pass the list of classes= if"):
        classes, _ = labels_of(keys, labels=[str(min(number, 25)) for number in range(50)])
    assert len(classes) == 26
    for labels in ([str(min(number, 24)) for number in range(50)], [str(number) for number in range(20)]):
        labels_of(keys[: len(labels)], labels=labels)  # half of them, and few: tells nothing
    labels_of(keys, [f"{number}" for number in range(50)], labels=[f"{number}" for number in range(50)])


# --- batches


@pytest.mark.parametrize("kind", [lk.ImageDataset, lk.PILDataset])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_and_batches_may_end_with_their_keys(store, kind, num_workers):
    numbers = dict(zip(KEYS, range(5), strict=True))
    options = {"transform": lambda image: torch.tensor(np.asarray(image)[:1].max()), "return_keys": True}
    dataset = kind(store, labels=numbers, **options)
    assert dataset[1][1:] == (numbers[dataset.keys[1]], dataset.keys[1])
    batches = list(lk.make_loader(dataset, lk.LoaderConfig(2, num_workers=num_workers)))
    assert [list(map(type, batch)) for batch in batches] == [[torch.Tensor, torch.Tensor, list]] * 3
    assert [key for _, _, keys in batches for key in keys] == list(dataset.keys)
    assert [label for _, labels, _ in batches for label in labels] == [numbers[key] for key in dataset.keys]
    store.files["a/1.png"] = b"broken"
    skipping = lk.make_loader(
        kind(store, labels=numbers, on_error="skip", **options), lk.LoaderConfig(9, num_workers=0)
    )
    [(_, _, keys)] = skipping
    assert keys == [key for key in dataset.keys if key != "a/1.png"]
    with pytest.raises(TypeError, match="return_keys must be True or False"):
        kind(store, labels=numbers, return_keys=1)


def test_batches_of_other_data_sets_are_torchs(store):
    """Those that are dicts, or hold some, or have fields."""
    pair = lk.collate([({"a": 1, "name": "x"}, 2), ({"a": 3, "name": "y"}, 4)])
    assert pair[0]["a"].tolist() == [1, 3]
    assert (pair[0]["name"], pair[1].tolist()) == (["x", "y"], [2, 4])
    named = lk.collate([Skipped("a", "b"), ("x", torch.ones(1))])
    assert named[0] == ["x"]
    assert lk.collate(["a", "b"]) == ["a", "b"]
    with pytest.raises(RuntimeError, match="equal size"):
        lk.collate([(torch.ones(1), 2), (torch.ones(1),)])


# --- files


def label_column(path: Path) -> tuple[int, list[int], object]:
    """Version, column of labels and block of classes of a pixel file, as its format is documented."""
    data = path.read_bytes()
    version, _, n, index_bytes = struct.unpack_from("<IIQQ", data, 8)
    (class_bytes,) = struct.unpack_from("<Q", data, 92)
    assert zlib.crc32(data[128 : 128 + index_bytes]) == struct.unpack_from("<I", data, 40)[0]
    column = struct.unpack_from(f"<{n}i", data, 136 + 28 * n)
    return version, list(column), json.loads(data[136 + 32 * n :][:class_bytes])


@pytest.mark.parametrize(("labels", "options", "expected"), [
    ([1, 2, 3, 4, 2**31 - 1], {}, (2, [1, 2, 3, 4, 2**31 - 1], [])),
    (list("yxyxx"), {}, (2, [1, 0, 1, 0, 0], ["x", "y"])),
    ([1, 2, 3, 4, 2**31], {}, (3, [0] * 5, {"classes": [], "labels": [1, 2, 3, 4, 2**31], "dtype": "int64"})),
    ([[1, 0]] * 5, {"classes": ["x", "y"]},
     (3, [0] * 5, {"classes": ["x", "y"], "labels": [[1, 0]] * 5, "dtype": "int64"})),
    ([0.5, 1, 2, 3, 4], {}, (3, [0] * 5, {"classes": [], "labels": [0.5, 1, 2, 3, 4], "dtype": "float32"})),
])  # fmt: skip
def test_pixel_files_keep_labels_as_documented(store, tmp_path, labels, options, expected):
    of_pixels(store, tmp_path, labels=labels, keys=KEYS, **options)
    assert label_column(tmp_path / "x.pixels") == expected


@pytest.mark.parametrize("make", [of_pixels, of_shards])
@pytest.mark.parametrize(("before", "after"), [
    ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6]), ([1, 2, 3, 4, 5], [1.0, 2, 3, 4, 5]), ([0.5, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
    ([[1, 0]] * 5, [[1, 0]] * 4 + [[1, 1]]),
])  # fmt: skip
def test_a_rerun_with_other_labels_is_refused_and_one_with_the_same_is_not(store, tmp_path, make, before, after):
    options = {"keys": KEYS, "classes": []}
    make(store, tmp_path, labels=before, **options)
    content = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    make(store, tmp_path, labels=before, **options)
    name = "x.pixels" if make is of_pixels else "shards"
    for refused in ({"labels": after, "keys": KEYS}, {"labels": before[::-1], "keys": KEYS[::-1]}):
        with pytest.raises(ValueError, match=name):
            make(store, tmp_path, classes=[], **refused)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == content


def test_webdataset_reads_what_labels_are_in_shards(store, tmp_path):
    for name, labels, part, expected in [
        ("ints", [3, 1, 4, 1, 5], "cls", [3, 1, 4, 1, 5]),
        ("floats", [0.5, 1, 2, 3, 0.1], "json", [0.5, 1, 2, 3, float(np.float32(0.1))]),
        ("vectors", [[1, 0]] * 5, "json", [[1, 0]] * 5),
    ]:
        root = write(store, tmp_path / name, labels=labels, classes=[], keys=KEYS)
        samples = list(wds.WebDataset(str(root / "shard-000000.tar"), shardshuffle=False).decode())
        assert [sample[part] for sample in samples] == expected
        assert [set(sample) for sample in samples] == [{"__key__", "__url__", "__local_path__", "png", part}] * 5


def test_shards_keep_to_their_limit_with_long_labels(store, tmp_path):
    labels = np.arange(5 * 300).reshape(5, 300)
    root = write(store, tmp_path / "set", labels=labels, max_bytes=20_480)
    sizes = [path.stat().st_size for path in sorted(root.glob("*.tar"))]
    assert sizes == [10_240] * len(sizes) or max(sizes) <= 20_480
    with tarfile.open(root / "shard-000000.tar") as tar:
        assert [info.name for info in tar][:2] == ["5.json", "5.png"]
    assert [label.tolist() for _, label in lk.read_shards(root)] == labels.tolist()


# --- shards of others


def by_webdataset(path: Path, *samples: dict) -> Path:
    with wds.TarWriter(str(path)) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{number:03}", "png": picture(number), **sample})
    return path


@pytest.mark.parametrize(("parts", "expected"), [
    ([{"txt": "a dog", "json": {"url": "u", "width": 2}}, {"txt": "", "json": {}}], ["a dog", ""]),  # img2dataset's
    ([{"json": {"text": "a"}}, {"json": {"text": "b", "n": [1]}}], [{"text": "a"}, {"text": "b", "n": [1]}]),
    ([{"json": 3}, {"json": 4}], torch.tensor([3, 4])),
    ([{"json": 0.1}, {"json": 2.5}], torch.tensor([0.1, 2.5])),
    ([{"json": [0, 1]}, {"json": [1, 1]}], torch.tensor([[0, 1], [1, 1]])),
    ([{"cls": 3, "txt": "three", "json": {}}, {"cls": 4, "txt": "four", "json": {}}], torch.tensor([3, 4])),
])  # fmt: skip
def test_labels_of_other_tools_shards(tmp_path, parts, expected):
    shards = lk.read_shards(by_webdataset(tmp_path / "x.tar", *parts))
    assert shards.classes is None
    [(images, labels)] = DataLoader(shards, batch_size=2, num_workers=1, collate_fn=lk.collate)
    assert images[:, 0, 0, 0].tolist() == [0, 1]
    assert type(labels) is type(expected)
    if isinstance(expected, list):
        assert labels == expected
    else:
        torch.testing.assert_close(labels, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("files", "said"), [
    ({"a.png": PICTURE}, r"one image and a \.cls \(or \.txt, or \.json\) with its label; it has png"),
    ({"a.png": PICTURE, "a.txt": b"\xff"}, r"a\.png in .*x\.tar: its label must be UTF-8, got b'\\xff'"),
    ({"a.png": PICTURE, "a.json": b"{"}, r"a\.png in .*x\.tar: its label must be JSON, .* got b'{'"),
    ({"a.png": PICTURE, "a.json": b"[" * 100_000}, r"its label must be JSON"),
    ({"a.png": PICTURE, "a.json": b"9" * 30}, r"its label must be JSON, with integers of 64 bits, got b'9{20}'"),
    ({"a.png": PICTURE, "a.txt": b"x", "b.json": b"1", "b.png": PICTURE}, r"b\.png .* and a \.txt .* it has json, png"),
])  # fmt: skip
def test_samples_without_a_label_of_their_kind_are_named(tmp_path, files, said):
    with pytest.raises(ValueError, match=said):
        list(lk.read_shards(make_tar(tmp_path / "x.tar", files)))
