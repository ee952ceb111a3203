"""Labels of one's own, and a choice of images: by every way to a batch they are what pandas and NumPy say, or refused.

What they become is the same in data sets, in pixels and in shards, from the file to the batch.
"""

import json
import re
import struct
import tarfile
import warnings
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import webdataset as wds
from torch.utils.data import DataLoader

import labkit as lk
from labkit.data.dataset import Skipped
from labkit.data.labels import LabelWarning, chosen_keys, label_at, labels_at, labels_of
from labkit.errors import PixelError
from tests.memory_store import MemoryStore
from tests.shards import PICTURE, picture, write
from tests.tars import make_tar

KEYS = ["a/1.png", "a/2.png", "b.c/3.png", "b.c/4.png", "5.png"]
"""Folders of these would be no classes: one has a dot, and one image is in none."""

DICTS = [{"tags": ["x"], "boxes": [[1, 2, 3, 4]]}, {"tags": []}, {}, {"tags": None}, {"n": 1.5}]

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


def in_order(store: MemoryStore) -> list[str]:
    return store.keys()


# --- by every way


def of_data_set(store, scratch, kind=lk.ImageDataset, **options):
    """Classes, keys, labels, and the batch of all labels."""
    dataset = kind(store, **options)
    images, labels = next(iter(lk.make_loader(dataset, lk.LoaderConfig(99, num_workers=0))))
    assert len(images) == len(labels) == len(dataset)
    return dataset.classes, list(dataset.keys), dataset.labels, labels


def of_pil_data_set(store, scratch, **options):
    to_tensor = lambda image: torch.tensor(image.size)  # noqa: E731
    return of_data_set(store, scratch, partial(lk.PILDataset, transform=to_tensor), **options)


def of_pixels(store, scratch, **options):
    path = scratch / "x.pixels"
    made = lk.PixelStore.build(store, path, engine="threads", num_workers=1, progress=False, **options)
    again = lk.PixelStore(path)
    assert (again.classes, repr(again.labels), list(again.keys)) == (made.classes, repr(made.labels), list(made.keys))
    images, labels = lk.collate(list(again))
    assert len(images) == len(again)
    return again.classes, list(again.keys), again.labels, labels


def of_shards(store, scratch, **options):
    shards = lk.read_shards(write(store, scratch / "shards", **options))
    keys = [store_key_of(sample) for sample in shards.samples()]
    images, labels = next(iter(DataLoader(shards, batch_size=99, collate_fn=lk.collate)))
    assert len(images) == len(keys)
    return shards.classes, keys, None, labels


def store_key_of(sample) -> str:
    return f"{sample['__key__']}.png"


every_way = pytest.mark.parametrize("labeled", [of_data_set, of_pil_data_set, of_pixels, of_shards])


def assert_same(found, expected) -> None:
    """Of tensors or arrays, type and values; NaN equals NaN."""
    found, expected = (torch.tensor(each) if isinstance(each, np.ndarray) else each for each in (found, expected))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@every_way
@pytest.mark.parametrize("name", BECOME)
def test_numbers_are_those_of_numpy_in_batches_too(store, tmp_path, labeled, name):
    values, dtype = BECOME[name]
    expected = np.stack(
        [np.asarray(torch.as_tensor(value).float() if name == "bfloat16" else value) for value in values]
    )
    expected = dict(zip(KEYS, expected.astype(dtype), strict=True))
    classes, keys, labels, batch = labeled(store, tmp_path, keys=KEYS, labels=values)
    assert (classes, keys) == ([], KEYS)
    assert_same(batch, np.stack([expected[key] for key in keys]))
    if labels is not None:
        assert_same(labels, batch)
        assert not labels.flags.writeable


@every_way
def test_strings_are_classes_in_their_order_or_in_that_of_a_list(store, tmp_path, labeled):
    values = dict(zip(KEYS, ["cow", "ant", "cow", "bee", "ant"], strict=True))
    _, codes = np.unique([values[key] for key in KEYS], return_inverse=True)
    classes, keys, _, batch = labeled(store, tmp_path / "own", keys=KEYS, labels=values)
    assert (classes, keys) == (["ant", "bee", "cow"], KEYS)
    assert_same(batch, codes)
    classes, _, _, batch = labeled(
        store, tmp_path / "of", labels=values, keys=KEYS, classes=["cow", "pig", "bee", "ant"]
    )
    assert classes == ["cow", "pig", "bee", "ant"]
    assert [classes[label] for label in batch] == [values[key] for key in KEYS]
    with pytest.raises(
        ValueError, match=r"outside the 2 classes that were passed \('ant', 'bee'\): 'cow' \(2 images\)"
    ):
        labeled(store, tmp_path / "few", labels=values, classes=["ant", "bee"])


@every_way
@pytest.mark.parametrize("values", [
    ["a dog", "", "日本 \U0001f600", "NaN", "a\nb"], DICTS, [[1], [1, 2], [], [3], [4]], [1, "a", 2, "b", 3],
    [[[1, 2, 3, 4]], [[5, 6, 7, 8]], [[1, 1, 2, 2]], [[0, 0, 1, 1]], [[3, 3, 4, 4]]],
], ids=["captions", "dicts", "ragged", "mixed", "boxes"])  # fmt: skip
def test_captions_and_all_else_stay_what_they_are(store, tmp_path, labeled, values):
    classes, keys, labels, batch = labeled(store, tmp_path, labels=values, classes=[], keys=KEYS)
    assert (classes, keys) == ([], KEYS)
    assert isinstance(batch, list)
    assert batch == values
    if labels is not None:
        assert list(labels) == values
        # Of a list of captions, each forked worker would have a copy before long.
        assert isinstance(labels, lk.PackedStrings) == all(isinstance(value, str) for value in values)


@every_way
def test_keys_choose_and_order_and_labels_go_with_them(store, tmp_path, labeled):
    chosen = ["5.png", "a/2.png", "b.c/3.png"]
    for number, keys in enumerate(
        (chosen, tuple(chosen), pd.Series(chosen), np.array(chosen), lk.PackedStrings(chosen))
    ):
        _, found, _, batch = labeled(store, tmp_path / str(number), keys=keys, labels=[5, 2, 3])
        assert found == chosen
        assert batch.tolist() == [5, 2, 3]
    pictures = {key: picture(number) for number, key in enumerate(("a/1.png", "a/2.png", "b/1.png"))}
    classes, _, _, batch = labeled(MemoryStore(pictures), tmp_path / "folders", keys=["b/1.png", "a/2.png"])
    assert (classes, batch.tolist()) == (["a", "b"], [1, 0])


@every_way
@pytest.mark.parametrize(("keys", "error", "said"), [
    (["a/1.png", "x.png", "y.png"], ValueError, r"no image 'x\.png', .*\(2 of its 3 are unknown\).*such as '5\.png'"),
    (["a/1.png", "a/2.png", "a/2.png", "a/1.png"], ValueError, r"more than once \(2 of them, the first 'a/1\.png'\)"),
    ([], ValueError, "keys must be a list of names of images.*, got none"),
    ([1, 2], TypeError, r"numbers, the first 1, .*\.astype\(str\) \+ '\.png'; .*dtype=str"),
    (pd.Series([7, 8]), TypeError, r"numbers, the first 7, and names are such as '5\.png'"),
    (["a/1.png", None], TypeError, "keys must be a list of names of images"),
    (5, TypeError, "keys must be a list of names of images"),
    ("a/1.png", TypeError, "keys must be a list of names of images.* got str"),
    ({"a/1.png": 1}, TypeError, "keys must be a list of names of images.* got dict"),
    (pd.DataFrame({"image": ["a/1.png"]}), TypeError, "keys must be a list of names of images.* got DataFrame"),
])  # fmt: skip
def test_keys_that_choose_nothing_sure_are_refused(store, tmp_path, labeled, keys, error, said):
    with pytest.raises(error, match=said):
        labeled(store, tmp_path, keys=keys, labels=dict.fromkeys(KEYS, 1))


def test_a_split_by_a_table_is_two_columns(store):
    frame = pd.DataFrame({"image": KEYS, "label": list("xyzxy"), "part": ["train", "val"] * 2 + ["train"]})
    train, val = (frame[frame["part"] == part] for part in ("train", "val"))
    dataset = lk.ImageDataset(store, keys=train["image"], labels=train["label"])
    assert [(dataset.classes[label]) for _, label in dataset] == train["label"].tolist()
    rest = lk.ImageDataset(store, keys=val["image"], labels=val["label"], classes=dataset.classes)
    assert [dataset.classes[label] for _, label in rest] == val["label"].tolist()
    assert [image[0, 0, 0].item() for image, _ in rest] == [1, 3]  # the pictures of these names


# --- where labels are found


def table(**columns) -> pd.DataFrame:
    return pd.DataFrame({"image": KEYS[::-1] + ["other.png"], **columns})


SCALARS, VECTORS = [50, 40, 30, 20, 10, 99], {"u": [5, 4, 3, 2, 1, 9], "v": [0.5, 0, 1, 0, 0.25, 9]}


def saved(frame: pd.DataFrame, path: Path, **options) -> Path:
    (frame.to_csv if path.suffix == ".csv" else frame.to_parquet)(path, index=False, **options)
    return path


SOURCES = {
    "dict": lambda folder, frame: dict(
        zip(frame["image"], frame.drop(columns="image").to_numpy().squeeze(), strict=True)
    ),
    "series or frame": lambda folder, frame: frame.set_index("image").squeeze(axis=1),
    "frame": lambda folder, frame: frame.set_index("image"),
    "frame with names": lambda folder, frame: frame,
    "csv": lambda folder, frame: saved(frame, folder / "labels.csv"),
    "path as text": lambda folder, frame: str(saved(frame, folder / "LABELS.csv")),
    "csv with a mark": lambda folder, frame: saved(frame, folder / "mark.csv", encoding="utf-8-sig"),
    "parquet": lambda folder, frame: saved(frame, folder / "labels.parquet"),
    "names without suffix": lambda folder, frame: saved(
        frame.assign(image=frame["image"].str.removesuffix(".png")), folder / "kaggle.csv"
    ),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("columns", [{"label": SCALARS}, VECTORS], ids=["scalars", "vectors"])
def test_labels_are_found_by_name_whatever_order_they_have(store, tmp_path, source, columns):
    frame = table(**columns)
    dataset = lk.ImageDataset(store, labels=SOURCES[source](tmp_path, frame))
    expected = frame.set_index("image").loc[list(dataset.keys)].to_numpy().squeeze()
    assert_same(dataset.labels, expected.astype(np.int64 if "label" in columns else np.float32))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_file_may_name_classes_none_and_images_by_numbers(tmp_path, suffix):
    names = ["001", "1", "02"]
    store = MemoryStore({f"{name}.png": PICTURE for name in names})
    path = saved(pd.DataFrame({"id": names, "label": ["None", "NA", "x"]}), tmp_path / f"x{suffix}")
    dataset = lk.ImageDataset(store, labels=path)
    assert {key: dataset.classes[label] for key, label in zip(dataset.keys, dataset.labels, strict=True)} == {
        "001.png": "None", "1.png": "NA", "02.png": "x",
    }  # fmt: skip


def test_a_parquet_file_may_hold_lists_and_numbers_as_names(tmp_path):
    store = MemoryStore({f"{name}.png": PICTURE for name in range(3)})
    path = saved(pd.DataFrame({"id": range(3), "of": [[1, 0], [0, 1], [1, 1]]}), tmp_path / "x.parquet")
    assert lk.ImageDataset(store, labels=path).labels.tolist() == [[1, 0], [0, 1], [1, 1]]


def test_a_sequence_and_rows_without_names_are_in_the_order_of_the_keys(store):
    values = list(range(5))
    for labels in (
        values, tuple(values), np.array(values), torch.tensor(values), pd.Series(values, index=[9, 8, 7, 6, 5]),
        pd.DataFrame({"label": values}), pd.Series(values, dtype="Int64"), lk.PackedStrings("01234"),
    ):  # fmt: skip
        dataset = lk.ImageDataset(store, labels=labels, keys=in_order(store))
        assert dataset.labels.tolist() == values
        reverse = lk.ImageDataset(store, labels=labels, keys=in_order(store)[::-1])
        assert [image[0, 0, 0].item() for image, _ in reverse] == [image[0, 0, 0].item() for image, _ in dataset][::-1]
        assert reverse.labels.tolist() == values


def test_what_was_given_may_be_changed_and_the_labels_may_not(store):
    given = np.arange(5)
    dataset = lk.ImageDataset(store, labels=given)
    given[:] = 7
    assert dataset.labels.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="read-only"):
        dataset.labels[0] = 1
    _, label = lk.ImageDataset(store, labels=np.ones((5, 2)))[0]
    label += 1  # of a sample: a tensor of its own
    assert type(lk.ImageDataset(store, labels=given)[0][1]) is int


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
    ([{}, {}, pd.NA, {}, None], r"2 images of 5 have no label, .*'a/2\.png'"),
    (pd.Series(range(5)), r"Series whose index does not name the images, .* pass keys=frame\[.image.\], too"),
    (pd.DataFrame({"label": range(5)}), r"DataFrame whose index does not name the images"),
    (pd.Series([1, None, 2, 3, 4], sorted(KEYS), dtype="Int64"), r"1 image of 5 has no label, .*'a/1\.png'"),
    (pd.Series([1, 2], index=["a/1.png"] * 2), r"4 images of 5"),
    (pd.Series(range(7), index=[*KEYS, *KEYS[:2]]), r"more than once \(2 of them, the first 'a/1\.png'\).*groupby"),
    (pd.DataFrame({"image": KEYS, "a": 1, "b": list("xyzxy")}), r"2 columns besides .* \('a', 'b'\), and only numbers"),
    ([2**63] * 5, r"must fit into 64 bits"),
    ([1, 2, 3, 4, -(2**70)], r"must fit into 64 bits with a sign, got -1180591620717411303424"),
])  # fmt: skip
def test_labels_that_are_missing_or_double_are_counted_and_named(store, tmp_path, labeled, labels, said):
    with pytest.raises(ValueError, match=said):
        labeled(store, tmp_path, labels=labels)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("labels", [5, np.array(5), {1, 2}, iter([1]), b"abc", lambda key: 1])
def test_what_is_no_list_of_labels_is_refused(store, labels):
    with pytest.raises(
        TypeError, match=r"^labels must be a sequence .*a mapping of keys .*\.csv or \.parquet file .* got"
    ):
        lk.ImageDataset(store, labels=labels)


@pytest.mark.parametrize(("text", "said"), [
    ("image,label\na/1,x\na/2,\nb.c/3,x\nb.c/4,x\n5,x", r"1 image of 5 has no label, .*'a/2\.png'"),
    ("image,label\na/1,1\na/2,NA\nb.c/3,1\nb.c/4,1\n5,1", r"1 image of 5 has no label, .*'a/2\.png'"),
    ("image\na/1", r"labels\.csv must have a column of images' names and one of labels, between commas: it has 1"),
    ("", r"labels\.csv cannot be read as a table: "),
    (",image,label\n0,a/1,x\n1,a/2,y", r"without a name.*index=False\), .*usecols=\['image', 'label'\]"),
    (b"image,label\n\xff\xfe,1".decode("latin-1"), "labels= has no label for any image"),
])  # fmt: skip
def test_files_that_lack_labels_are_refused(store, tmp_path, text, said):
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(ValueError, match=said):
        lk.ImageDataset(store, labels=tmp_path / "labels.csv")


def test_an_index_without_a_name_may_be_the_images_or_left_out(store, tmp_path):
    frame = pd.DataFrame({"image": KEYS, "label": list("xyzxy")})
    frame.to_csv(tmp_path / "rows.csv")
    frame.set_index("image").rename_axis(None).to_csv(tmp_path / "names.csv")
    rows = pd.read_csv(tmp_path / "rows.csv", usecols=["image", "label"])  # as the error above says
    for labels in (rows, tmp_path / "names.csv"):
        dataset = lk.ImageDataset(store, keys=KEYS, labels=labels)
        assert dataset.labels.tolist() == [0, 1, 2, 0, 1]


def test_paths_that_are_no_table_are_refused(store, tmp_path):
    (tmp_path / "labels.tsv").write_text("image\tlabel\na/1\t1\n")
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    for name, error, said in [
        ("labels.tsv", ValueError, r"got .*labels\.tsv: read it with pandas"),
        ("x.parquet", ValueError, r"x\.parquet cannot be read as a table"),
        ("", IsADirectoryError, "is a folder: name the file of labels"),
        ("gone.csv", FileNotFoundError, r"gone\.csv does not exist"),
    ]:
        with pytest.raises(error, match=said):
            lk.ImageDataset(store, labels=tmp_path / name)


@pytest.mark.parametrize(("labels", "said"), [
    ([0, 1, 2, -1, 0], r"2 images whose label is no number of the 2 .*\(0 to 1\), such as 'b\.c/3\.png' with 2"),
    ([0.5, 1, 1, 1, 1], r"labels of MemoryStore are float32 \(5,\), which cannot index"),
    ([[1, 0, 1]] * 5, r"labels of MemoryStore are int64 \(5, 3\), which cannot index"),
    (DICTS, "those of MemoryStore are neither"),
])  # fmt: skip
def test_numbers_that_are_none_of_the_classes_are_refused(store, labels, said):
    with pytest.raises(ValueError, match=said):
        lk.ImageDataset(store, classes=["x", "y"], labels=labels, keys=KEYS)


def test_numbers_of_classes_may_come_with_their_names(store):
    dataset = lk.ImageDataset(store, classes=["x", "y"], labels=[0, 1, 1, 0, 1])
    assert (dataset.classes, dataset.class_to_idx, dataset.labels.tolist()) == (
        ["x", "y"],
        {"x": 0, "y": 1},
        [0, 1, 1, 0, 1],
    )
    several = lk.ImageDataset(store, classes=["x", "y"], labels=[[1, 0]] * 5)
    assert (several.classes, several.labels.shape) == (["x", "y"], (5, 2))


def test_captions_that_became_classes_are_told():
    keys = [f"{number}.png" for number in range(50)]
    with pytest.warns(LabelWarning, match=r"has 26 different labels in 50 images, .*captions\? Pass classes=\[\]"):
        classes, _ = labels_of(keys, labels=[str(min(number, 25)) for number in range(50)])
    assert len(classes) == 26
    for labels in ([str(min(number, 24)) for number in range(50)], [str(number) for number in range(20)]):
        labels_of(keys[: len(labels)], labels=labels)  # half of them, and few: tells nothing
    labels_of(keys, [f"{number}" for number in range(50)], labels=[f"{number}" for number in range(50)])
    labels_of(keys, [], labels=[f"{number}" for number in range(50)])


# --- batches


@pytest.mark.parametrize("kind", [lk.ImageDataset, lk.PILDataset])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_and_batches_may_end_with_their_keys(store, kind, num_workers):
    captions = dict(zip(KEYS, "abcde", strict=True))
    options = {"transform": lambda image: torch.tensor(np.asarray(image)[:1].max()), "return_keys": True}
    dataset = kind(store, labels=captions, classes=[], **options)
    assert dataset[1][1:] == (captions[dataset.keys[1]], dataset.keys[1])
    batches = list(lk.make_loader(dataset, lk.LoaderConfig(2, num_workers=num_workers)))
    assert [list(map(type, batch)) for batch in batches] == [[torch.Tensor, list, list]] * 3
    assert [key for _, _, keys in batches for key in keys] == list(dataset.keys)
    assert [label for _, labels, _ in batches for label in labels] == [captions[key] for key in dataset.keys]
    store.files["a/1.png"] = b"broken"
    skipping = lk.make_loader(
        kind(store, labels=captions, on_error="skip", **options), lk.LoaderConfig(9, num_workers=0)
    )
    [(_, _, keys)] = skipping
    assert keys == [key for key in dataset.keys if key != "a/1.png"]
    with pytest.raises(TypeError, match="return_keys must be True or False"):
        kind(store, labels=captions, return_keys=1)


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


def test_labels_of_a_batch_are_its_own():
    _, labels = labels_of(KEYS, labels=np.arange(5.0))
    batch = labels_at(labels, [4, 0, 0])
    batch += 1
    assert (batch.dtype, batch.tolist(), labels.tolist()) == (torch.float32, [5, 1, 1], [0, 1, 2, 3, 4])
    assert labels_at(labels, np.array([], np.int64)).shape == (0,)
    assert labels_at(list("abc"), np.array([2, 0])) == ["c", "a"]
    assert label_at(labels, 1).dtype == torch.float32


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
    (list("abcde"), {"classes": []}, (3, [0] * 5, {"classes": [], "labels": list("abcde")})),
    (DICTS, {}, (3, [0] * 5, {"classes": [], "labels": DICTS})),
])  # fmt: skip
def test_pixel_files_keep_labels_as_documented(store, tmp_path, labels, options, expected):
    of_pixels(store, tmp_path, labels=labels, keys=KEYS, **options)
    assert label_column(tmp_path / "x.pixels") == expected


def test_files_of_folders_and_of_the_same_labels_of_ones_own_are_one(tmp_path):
    store = MemoryStore({key: picture(number) for number, key in enumerate(("a/1.png", "a/2.png", "b/1.png"))})
    folders = {key: key[0] for key in store.files}
    for name, options in (("default", {}), ("own", {"labels": folders, "keys": list(folders)})):
        of_pixels(store, tmp_path / name, **options)
        of_shards(store, tmp_path / name, **options)
    found = [
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.*") if path.is_file()}
        for name in ("default", "own")
    ]
    assert found[0] == found[1]
    assert set(found[0]) == {"x.pixels", "manifest.json", "shard-000000.tar"}


@pytest.mark.parametrize("make", [of_pixels, of_shards])
@pytest.mark.parametrize(("before", "after"), [
    ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6]), ([1, 2, 3, 4, 5], [1.0, 2, 3, 4, 5]), (list("12345"), [1, 2, 3, 4, 5]),
    ([[1, 0]] * 5, [[1, 0]] * 4 + [[1, 1]]), (DICTS, DICTS[:-1] + [{"n": 2}]), (list("abcde"), list("abcdf")),
])  # fmt: skip
def test_a_rerun_with_other_labels_is_refused_and_one_with_the_same_is_not(store, tmp_path, make, before, after):
    options = {"keys": KEYS, "classes": []}
    make(store, tmp_path, labels=before, **options)
    content = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    make(store, tmp_path, labels=before, **options)
    name = "x.pixels" if make is of_pixels else "shards"
    with pytest.raises(ValueError, match=name) as failure:
        make(store, tmp_path, labels=after, **options)
    if make is of_pixels:
        assert isinstance(failure.value, PixelError)
        assert re.search(
            r"has [15] labels that are not those asked for \(of (5|a/1)\.png, .* in place of", str(failure.value)
        )
    with pytest.raises(ValueError):
        make(store, tmp_path, labels=before[::-1], keys=KEYS[::-1], classes=[])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == content


@pytest.mark.parametrize("make", [of_pixels, of_shards])
@pytest.mark.parametrize("label", [object(), {"x": {1, 2}}, {(1, 2): 3}, 1j])
def test_labels_that_json_does_not_hold_are_refused_before_the_work(store, tmp_path, make, label):
    with pytest.raises(TypeError, match="labels that files keep must be numbers, strings, or lists or dicts of these"):
        make(store, tmp_path, labels=[label] * 5)
    assert list(tmp_path.iterdir()) == []


def test_arrays_within_labels_are_kept_as_lists(store, tmp_path):
    labels = [{"boxes": np.ones((1, 4), np.float32), "n": np.int64(3), "mask": torch.zeros(2)}] * 5
    expected = [{"boxes": [[1.0] * 4], "n": 3, "mask": [0.0, 0.0]}] * 5
    for make in (of_pixels, of_shards):
        assert make(store, tmp_path, labels=labels)[3] == expected


def test_webdataset_reads_what_labels_are_in_shards(store, tmp_path):
    for name, labels, part, expected in [
        ("ints", [3, 1, 4, 1, 5], "cls", [3, 1, 4, 1, 5]),
        ("captions", ["a dog", "é", "", "x.y", "a\nb"], "txt", ["a dog", "é", "", "x.y", "a\nb"]),
        ("floats", [0.5, 1, 2, 3, 0.1], "json", [0.5, 1, 2, 3, float(np.float32(0.1))]),
        ("vectors", [[1, 0]] * 5, "json", [[1, 0]] * 5),
        ("dicts", DICTS, "json", DICTS),
    ]:
        root = write(store, tmp_path / name, labels=labels, classes=[], keys=KEYS)
        samples = list(wds.WebDataset(str(root / "shard-000000.tar"), shardshuffle=False).decode())
        assert [sample[part] for sample in samples] == expected
        assert [set(sample) for sample in samples] == [{"__key__", "__url__", "__local_path__", "png", part}] * 5


def test_shards_keep_to_their_limit_with_long_labels(store, tmp_path):
    labels = ["x" * (700 * number) for number in range(5)]
    root = write(store, tmp_path / "set", labels=labels, classes=[], max_bytes=20_480)
    sizes = [path.stat().st_size for path in sorted(root.glob("*.tar"))]
    assert sizes == [10_240] * len(sizes) or max(sizes) <= 20_480
    with tarfile.open(root / "shard-000000.tar") as tar:
        assert [info.name for info in tar][:2] == ["5.txt", "5.png"]
    assert [label for _, label in lk.read_shards(root)] == labels


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
@pytest.mark.parametrize("num_workers", [0, 1])
def test_labels_of_other_tools_shards(tmp_path, parts, expected, num_workers):
    shards = lk.read_shards(by_webdataset(tmp_path / "x.tar", *parts))
    assert shards.classes is None
    loader = DataLoader(shards, batch_size=2, num_workers=num_workers, collate_fn=lk.collate)
    for _ in range(2):
        [(images, labels)] = loader
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


def test_a_manifest_says_what_labels_are(store, tmp_path):
    root = write(store, tmp_path / "set", labels=[[1, 2]] * 4 + [[3]], keys=KEYS)
    assert json.loads((root / "manifest.json").read_text())["labels"] == "objects"
    assert [label for _, label in lk.read_shards(root)] == [[1, 2]] * 4 + [[3]]
    text = (root / "manifest.json").read_text()
    (root / "manifest.json").write_text(text.replace('"objects"', '"unheard of"'))
    with pytest.raises(ValueError, match=r"manifest\.json is not a manifest of shards"):
        lk.read_shards(root)


def test_chosen_keys_share_their_memory_with_the_stores(tmp_path):
    store = lk.FolderStore(lk.make_photos(tmp_path / "photos", 2, progress=False))
    for mine, theirs in zip(chosen_keys(store).arrays(), store.keys().arrays(), strict=True):
        assert np.shares_memory(mine, theirs)
