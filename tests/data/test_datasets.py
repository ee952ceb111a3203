"""Datasets: items and labels, and what becomes of images that do not decode, with workers and without."""

import gc
import shutil
import subprocess
import sys
import traceback
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from labkit import (
    BatchLoader,
    Buckets,
    DecodeError,
    FolderStore,
    ImageDataset,
    LoaderConfig,
    PackedStrings,
    PILDataset,
    TarStore,
    collate,
    collect_sizes,
    decode,
    make_loader,
    make_photos,
)
from labkit.course.oracles import broken_files, oracle_files, reference
from labkit.data.dataset import Skipped
from labkit.data.labels import labels_of

WORKERS = [0, 2]


@pytest.fixture(scope="module", autouse=True)
def _what_was_skipped_is_reported_here():
    """Data sets report it when they are collected as garbage, which must not be amid another test's output."""
    yield
    gc.collect()


@pytest.fixture
def root(tmp_path) -> Path:
    """Six whole images in three folders."""
    data = oracle_files()["rgb.png"]
    for key in ("cat/1.png", "cat/2.png", "dog/1.png", "dog/deeper/1.png", "dog/2.png", "emu/1.png"):
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(data)
    return tmp_path


@pytest.fixture
def damaged(root) -> Path:
    """The same with three broken images among them, one under a name that is hard to log."""
    for key in ("cat/bad.jpg", "dog/tab\tand\u2028line\nbreak.jpg", "ape/worse.jpg"):
        (root / key).parent.mkdir(exist_ok=True)
        (root / key).write_bytes(broken_files()["truncated at 50%.jpeg"])
    return root


def assert_fails(loader: DataLoader, said: str) -> None:
    with pytest.raises(DecodeError, match=said) as failure:
        list(loader)
    # The exception holds the iterator in a cycle. Left to the garbage collector, torch waits 5 s for each worker.
    traceback.clear_frames(failure.tb)


def test_items_and_labels(root):
    dataset = ImageDataset(FolderStore(root))
    assert dataset.classes == ["cat", "dog", "emu"]
    assert len(dataset) == 6
    expected = torch.from_numpy(reference(oracle_files()["rgb.png"]).copy()).permute(2, 0, 1)
    for index, key in enumerate(dataset.keys):
        image, label = dataset[index]
        assert image.dtype == torch.uint8
        assert torch.equal(image, expected)
        assert dataset.classes[label] == Path(key).parts[0]


@pytest.mark.parametrize("kind", [FolderStore, TarStore])
def test_names_are_kept_once(root, tmp_path_factory, kind):
    """By store, data set and loader together: a million names are tens of megabytes, sent to every spawned worker."""
    archive = shutil.make_archive(tmp_path_factory.mktemp("tar") / "x", "tar", root)
    store = TarStore(archive) if kind is TarStore else FolderStore(root)
    dataset, loader = ImageDataset(store), BatchLoader(store)
    for keys in (dataset.keys, loader.keys):
        assert all(np.shares_memory(*pair) for pair in zip(keys.arrays(), store.keys().arrays(), strict=True))


def test_labels_take_a_number_for_each_name():
    keys = PackedStrings(f"{'train/' * (number % 2)}n{number % 997:08}/{number}.jpg" for number in range(30_000))
    tracemalloc.start()
    classes, labels = labels_of(keys)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    folders = [Path(key).parts[0] for key in keys]
    assert classes == sorted(set(folders))
    assert [classes[label] for label in labels] == folders
    assert labels.dtype == np.int64
    assert peak < 40 * len(keys)  # two arrays, and some keys at a time; a folder's name takes 58 bytes


def test_transform(root):
    dataset = ImageDataset(FolderStore(root), transform=lambda image: image[0].float().mean())
    assert dataset[0][0] == ImageDataset(FolderStore(root))[0][0][0].float().mean()


def test_an_error_of_the_transform_is_not_skipped(root):
    def refuse(image):
        raise DecodeError("from the transform")

    with pytest.raises(DecodeError, match="from the transform"):
        ImageDataset(FolderStore(root), transform=refuse, on_error="skip")[0]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_raise_names_the_key(damaged, num_workers):
    loader = DataLoader(ImageDataset(FolderStore(damaged)), batch_size=4, num_workers=num_workers)
    assert_fails(loader, r"ape/worse\.jpg")


@pytest.mark.parametrize(("num_workers", "method", "epochs"), [(0, None, 3), (2, None, 3), (2, "spawn", 1)])
def test_skip_leaves_out_and_remembers(damaged, num_workers, method, epochs):
    dataset, whole = ImageDataset(FolderStore(damaged), on_error="skip"), decode(oracle_files()["rgb.png"])
    labels_of_whole = [label for key, label in zip(dataset.keys, dataset.labels, strict=True) if key.endswith("png")]
    options = {"num_workers": num_workers, "multiprocessing_context": method, "collate_fn": collate}
    loader = DataLoader(dataset, batch_size=4, **options)
    noted = []
    for _ in range(epochs):
        images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
        assert torch.equal(images, torch.stack([whole] * 6))
        assert labels.tolist() == labels_of_whole
        assert {damaged / skip.key for skip in dataset.skipped} == set(damaged.glob("*/*.jpg"))
        noted.append(dataset._skips.path.read_text())
    assert noted == noted[:1] * epochs  # later epochs add nothing
    assert len(noted[0].splitlines()) == 3
    assert all(repr(skip.key)[1:-1] in repr(skip.reason) for skip in dataset.skipped)


def test_nothing_skipped(root):
    assert ImageDataset(FolderStore(root), on_error="skip").skipped == []
    assert ImageDataset(FolderStore(root)).skipped == []


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_batch_of_nothing_raises(damaged, num_workers):
    dataset = ImageDataset(FolderStore(damaged / "ape"), on_error="skip")
    assert_fails(DataLoader(dataset, num_workers=num_workers, collate_fn=collate), r"all 1 images .*worse\.jpg")


@pytest.mark.parametrize("option", [{"on_error": "ignore"}, {"on_error": ""}, {"on_error": None}, {"decoder": "x"}])
def test_unknown_options_are_refused_at_once(root, option):
    with pytest.raises(ValueError, match=r"on_error must be one of raise, skip|decoder must be one of pil, .* got 'x'"):
        ImageDataset(FolderStore(root), **option)


REPORTING = """
import os, sys
from torch.utils.data import DataLoader
from labkit import FolderStore, ImageDataset, collate

if __name__ == "__main__":
    dataset = ImageDataset(FolderStore(sys.argv[1]), on_error="skip")
    list(DataLoader(dataset, batch_size=9, num_workers=2, collate_fn=collate))
    if child := os.fork():
        os.waitpid(child, 0)  # it ends as any script does, but the log is not its own to report and remove
        assert len(dataset.skipped) == 3
        print(dataset._skips.path)
"""


@pytest.mark.slow
def test_skips_are_reported_once_at_exit(damaged):
    child = subprocess.run(
        [sys.executable, "-c", REPORTING, str(damaged)], capture_output=True, text=True, check=True, timeout=120
    )
    assert child.stderr.count("labkit: 3 images were skipped: ") == 1
    assert "cat/bad.jpg" in child.stderr
    assert "ape/worse.jpg" in child.stderr
    assert not Path(child.stdout.strip()).exists()  # the log is gone, too


def test_pil_datasets_hand_over_what_pil_reads(root):
    dataset = PILDataset(FolderStore(root), transform=lambda image: (image.mode, image.size))
    with Image.open(root / "cat/1.png") as image:
        assert dataset[0] == (("RGB", image.size), dataset.classes.index("cat"))
    assert len(dataset) == 6


@pytest.mark.parametrize("data", [b"plain text", b""])
def test_pil_datasets_name_what_they_cannot_read(tmp_path, data):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat/bad.jpg").write_bytes(data)
    with pytest.raises(DecodeError, match=r"cat/bad\.jpg: PIL cannot decode"):
        PILDataset(FolderStore(tmp_path))[0]
    skipping = PILDataset(FolderStore(tmp_path), on_error="skip")
    assert skipping[0].key == "cat/bad.jpg"


class TestBuckets:
    def test_images_are_cropped_to_their_bucket_before_the_transform(self, photo_set):
        store = FolderStore(photo_set)
        buckets = Buckets.fit(collect_sizes(photo_set), 128, step=16, min_side=64)
        dataset = ImageDataset(store, buckets=buckets, transform=lambda image: (image, image.shape))
        plain = ImageDataset(store)
        for index in range(len(store)):
            (image, shape), label = dataset[index]
            whole, expected_label = plain[index]
            width, height = buckets.shapes[int(buckets.select([whole.shape[2]], [whole.shape[1]])[0])]
            assert shape == image.shape == (3, height, width)
            assert torch.equal(image, buckets.crop(whole))
            assert label == expected_label
        assert len({dataset[index][0][1] for index in range(len(store))}) > 1

    def test_what_was_skipped_is_not_cropped(self, damaged):
        dataset = ImageDataset(FolderStore(damaged), buckets=Buckets(((32, 32),)), on_error="skip")
        items = [dataset[index] for index in range(len(dataset))]
        assert sum(isinstance(item, Skipped) for item in items) == 3
        assert {item[0].shape for item in items if not isinstance(item, Skipped)} == {(3, 32, 32)}


@pytest.mark.parametrize("make", [
    lambda store: BatchLoader(store, size=32, batch_size=8, on_error="skip"),
    lambda store: make_loader(ImageDataset(store, on_error="skip", transform=lambda x: x[:, :8, :8]),
                                 LoaderConfig(batch_size=8, num_workers=0)),
])  # fmt: skip
def test_skip_also_leaves_out_what_is_gone(tmp_path, make):
    make_photos(tmp_path, 4, progress=False)
    (tmp_path / "cat").mkdir(exist_ok=True)
    (tmp_path / "cat" / "dead.jpg").symlink_to("nowhere.jpg")
    store = FolderStore(tmp_path)
    gone = store.keys()[0]
    (tmp_path / gone).unlink()
    loader = make(store)
    assert sum(len(images) for images, _ in loader) == len(store.keys()) - 2
    skipped = (loader if hasattr(loader, "skipped") else loader.dataset).skipped
    assert {key for key, _ in skipped} == {gone, "cat/dead.jpg"}
