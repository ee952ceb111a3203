"""Data sets: items, labels as torchvision's `ImageFolder` has them, and what becomes of images that cannot be read.

Where labels are not `ImageFolder`'s, an error or a warning says so; so do the pixels, shards and loaders made of them.
"""

import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from ast import literal_eval
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor

import labkit as lk
from labkit import course
from labkit.course.oracles import broken_files, oracle_files, reference
from labkit.data.labels import LabelWarning
from tests.image_files import encoded, write_pictures
from tests.labeled import WAYS, of_data_set, of_pixels, of_shards
from tests.paths import run_script, times


@pytest.fixture(scope="module", autouse=True)
def _what_was_skipped_is_reported_here():
    """Data sets report it when they are collected as garbage, which must not be amid another test's output."""
    yield
    gc.collect()


def stored(root: Path, *names: str) -> lk.FolderStore:
    return lk.FolderStore(write_pictures(root, *names))


# --- items, and images that cannot be read


@pytest.fixture
def root(tmp_path) -> Path:
    """Six whole images in three folders."""
    for key in ("cat/1.png", "cat/2.png", "dog/1.png", "dog/deeper/1.png", "dog/2.png", "emu/1.png"):
        (tmp_path / "set" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / key).write_bytes(oracle_files()["rgb.png"])
    return tmp_path / "set"


@pytest.fixture
def damaged(root) -> Path:
    """The same with three broken images among them, one under a name that is hard to log."""
    for key in ("cat/bad.jpg", "dog/tab\tand\u2028line\nbreak.jpg", "ape/worse.jpg"):
        (root / key).parent.mkdir(exist_ok=True)
        (root / key).write_bytes(broken_files()["truncated at 50%.jpeg"])
    return root


def test_an_item_is_the_decoded_image_and_its_label(root):
    dataset = lk.ImageDataset(lk.FolderStore(root))
    dark = lk.ImageDataset(lk.FolderStore(root), transform=lambda image: image[0].float().mean())
    expected = torch.from_numpy(reference(oracle_files()["rgb.png"]).copy()).permute(2, 0, 1)
    assert dataset.classes == ["cat", "dog", "emu"]
    assert len(dataset) == len(dataset.keys) == 6
    for index, key in enumerate(dataset.keys):
        image, label = dataset[index]
        assert image.dtype == torch.uint8
        assert torch.equal(image, expected)
        assert dataset.classes[label] == Path(key).parts[0]
        assert dark[index] == (expected[0].float().mean(), label)


def test_pil_data_sets_hand_over_what_pil_reads(root):
    (root / "cat/3.jpg").write_bytes(b"plain text")
    (root / "cat/4.jpg").touch()
    (root / "cat/5.jpg").write_bytes(encoded(Image.new("RGB", (9, 9)), "GIF"))
    options = {"transform": lambda image: (image.mode, image.size)}
    dataset = lk.PILDataset(lk.FolderStore(root), **options)
    skipping = lk.PILDataset(lk.FolderStore(root), on_error="skip", **options)
    with Image.open(root / "cat/1.png") as image:
        assert dataset[0] == skipping[0] == (("RGB", image.size), dataset.classes.index("cat"))
    for index in (2, 3):
        with pytest.raises(lk.DecodeError, match=rf"cat/{index + 1}\.jpg: PIL cannot decode"):
            dataset[index]
        assert skipping[index].key == dataset.keys[index]
    with pytest.raises(lk.DecodeError, match=r"cat/5\.jpg: PIL cannot decode .*: it is a GIF, and not a readable JPEG"):
        dataset[4]


def assert_fails(loader: DataLoader, said: str) -> None:
    with pytest.raises(lk.DecodeError, match=said) as failure:
        list(loader)
    # The exception holds the iterator in a cycle. Left to the garbage collector, torch waits 5 s for each worker.
    traceback.clear_frames(failure.tb)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_names_the_image_and_skipping_needs_one_to_be_left(damaged, num_workers):
    assert_fails(DataLoader(lk.ImageDataset(damaged), batch_size=4, num_workers=num_workers), r"ape/worse\.jpg")
    nothing = lk.ImageDataset(lk.FolderStore(damaged / "ape"), on_error="skip", classes=[])
    loader = DataLoader(nothing, num_workers=num_workers, collate_fn=lk.collate)
    assert_fails(loader, r"all 1 images .*worse\.jpg")


@pytest.mark.parametrize(("num_workers", "method", "epochs"), [(0, None, 3), (2, None, 3), (2, "forkserver", 1)])
def test_what_is_skipped_is_left_out_and_listed_once(damaged, num_workers, method, epochs):
    whole = lk.decode(oracle_files()["rgb.png"])
    dataset = lk.ImageDataset(lk.FolderStore(damaged), on_error="skip")
    labels_of_whole = [label for key, label in zip(dataset.keys, dataset.labels, strict=True) if key.endswith("png")]
    options = {"num_workers": num_workers, "multiprocessing_context": method, "collate_fn": lk.collate}
    loader = DataLoader(dataset, batch_size=4, **options)
    for _ in range(epochs):
        images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
        assert torch.equal(images, torch.stack([whole] * 6))
        assert labels.tolist() == labels_of_whole
        assert sorted(damaged / skip.key for skip in dataset.skipped) == sorted(damaged.glob("*/*.jpg"))
    assert all(repr(skip.key)[1:-1] in repr(skip.reason) for skip in dataset.skipped)


def test_neither_whole_images_nor_errors_of_a_transform_are_skipped(root):
    def refuse(image):
        raise lk.DecodeError("from the transform")

    assert lk.ImageDataset(root, on_error="skip").skipped == lk.ImageDataset(root).skipped == []
    with pytest.raises(lk.DecodeError, match="from the transform"):
        lk.ImageDataset(root, transform=refuse, on_error="skip")[0]


@pytest.mark.parametrize("make", [
    lambda store: lk.BatchLoader(store, size=32, batch_size=8, on_error="skip"),
    lambda store: lk.make_loader(lk.ImageDataset(store, on_error="skip"), lk.LoaderConfig(8, num_workers=0)),
])  # fmt: skip
def test_what_is_gone_is_skipped_too(root, make):
    (root / "dog/dead.png").symlink_to("nowhere.png")
    store = lk.FolderStore(root)
    assert len(store) == 7
    (root / "cat/1.png").unlink()
    loader = make(store)
    assert sum(len(images) for images, _ in loader) == 5
    skipped = (loader if hasattr(loader, "skipped") else loader.dataset).skipped
    assert {key for key, _ in skipped} == {"cat/1.png", "dog/dead.png"}


REPORTING = """
import os, sys, tempfile
from pathlib import Path
import labkit as lk
from torch.utils.data import DataLoader

if __name__ == "__main__":
    tempfile.tempdir = sys.argv[2]
    dataset = lk.ImageDataset(lk.FolderStore(sys.argv[1]), on_error="skip")
    list(DataLoader(dataset, batch_size=9, num_workers=2, collate_fn=lk.collate))
    if child := os.fork():
        os.waitpid(child, 0)  # it ends as any script does, but the log is not its own to report and remove
        assert len(dataset.skipped) == 3
"""


@pytest.mark.exhaustive
def test_what_was_skipped_is_reported_once_at_exit(damaged):
    with tempfile.TemporaryDirectory(prefix="skips-") as logs:  # short: it holds sockets of the workers, too
        command = [sys.executable, "-c", REPORTING, damaged, logs]
        child = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        assert child.stderr.count("labkit: 3 images were skipped: ") == 1
        assert "cat/bad.jpg" in child.stderr
        assert "ape/worse.jpg" in child.stderr
        assert os.listdir(logs) == []


def test_images_are_cropped_to_their_bucket_before_the_transform(first_photos):
    store = lk.FolderStore(first_photos(8))
    buckets = lk.Buckets.fit(lk.collect_sizes(store.root, progress=False), 128, step=16, min_side=64)
    dataset = lk.ImageDataset(store, buckets=buckets, transform=lambda image: (image, image.shape))
    shapes = set()
    for index, (whole, expected_label) in enumerate(lk.ImageDataset(store)):
        (image, shape), label = dataset[index]
        width, height = buckets.shapes[int(buckets.select([whole.shape[2]], [whole.shape[1]])[0])]
        assert shape == image.shape == (3, height, width)
        assert torch.equal(image, buckets.crop(whole))
        assert label == expected_label
        shapes.add(shape)
    assert len(shapes) > 1


def test_an_error_of_a_transform_says_what_it_was_given(root, tmp_path):
    """Such as torchvision's first transforms, and timm's, on a tensor: their own error speaks of modes."""
    store = lk.FolderStore(root)
    pixels, shards = (made(store, tmp_path).made for made in (of_pixels, of_shards))
    pixels.transform = shards.transform = ToTensor()
    for item in (lambda: lk.ImageDataset(root, transform=ToTensor())[0], lambda: pixels[0], lambda: next(iter(shards))):
        with pytest.raises(TypeError) as failure:
            item()
        assert "given a uint8 tensor (3, " in failure.value.__notes__[0]
        assert "lk.PILDataset" in failure.value.__notes__[0]
    with pytest.raises(AttributeError) as failure:
        lk.PILDataset(store, transform=lambda image: image.float())[0]
    assert "given a PIL image" in failure.value.__notes__[0]


@pytest.mark.parametrize("kind", [lk.FolderStore, lk.TarStore])
def test_names_are_kept_once(root, tmp_path, kind):
    """By store, data set and loader together: a million names are tens of megabytes, sent to every spawned worker."""
    store = kind(root if kind is lk.FolderStore else shutil.make_archive(tmp_path / "x", "tar", root))
    for keys in (lk.ImageDataset(store).keys, lk.BatchLoader(store).keys):
        assert all(np.shares_memory(*pair) for pair in zip(keys.arrays(), store.keys().arrays(), strict=True))


# --- labels, by every way to them


NESTED = (
    "cat/2023/1.png", "cat/2024/2.png", "cat/3.PNG", "dog/a/b/4.png", "dog/5.JPG", "a b/6.jpeg", "Zebra/7.webp",
    "\xe9meu/8.jpg", "2024/9.png", "10/10.png", "9/11.png",
)  # fmt: skip


def by_key(keys, labels) -> dict[str, int]:
    return dict(zip(keys, map(int, labels), strict=True))


def of_a_tar(store, scratch, **options):
    archive = shutil.make_archive(scratch / "images", "tar", store.root)
    return of_data_set(lk.TarStore(archive), scratch, **options)


every_way = pytest.mark.parametrize("labeled", [*WAYS, of_a_tar])


def of_image_folder(root: Path) -> tuple[list[str], dict[str, int]]:
    """The oracle."""
    folder = ImageFolder(root)
    return folder.classes, {Path(path).relative_to(root).as_posix(): label for path, label in folder.samples}


@every_way
def test_labels_and_classes_are_those_of_image_folder(tmp_path, labeled):
    store = stored(tmp_path / "set", *NESTED)
    found = labeled(store, tmp_path)
    assert (found.made.classes, found.by_key) == of_image_folder(store.root)
    if labeled is not of_shards:
        assert found.made.class_to_idx == ImageFolder(store.root).class_to_idx


@every_way
def test_a_set_may_have_the_numbers_of_another_and_lack_some_classes(tmp_path, labeled):
    classes = ["emu", "dog", "pig", "cat"]  # in any order
    store = stored(tmp_path / "val", "cat/1.png", "cat/a/2.png", "dog/3.png")
    found = labeled(store, tmp_path, classes=classes)
    assert (found.made.classes, found.by_key) == (classes, {"cat/1.png": 3, "cat/a/2.png": 3, "dog/3.png": 1})
    others = stored(tmp_path / "others", "cat/1.png", "cow/1.png", "cow/a/2.png", "hen/1.png")
    with pytest.raises(ValueError, match=r"4 classes .*'emu', 'dog', .*: 'cow' \(2 images\), 'hen' \(1 image\)"):
        labeled(others, tmp_path, classes=classes)


@every_way
def test_images_beside_class_folders_are_refused_or_have_no_labels(tmp_path, labeled):
    store = stored(tmp_path / "set", "cat/a/1.png", "dog/1.png", "top.png", "zoo.png")
    assert len(ImageFolder(store.root)) == 2  # it leaves them out
    with pytest.raises(ValueError, match=r"2 images of 4, such as 'top.png', next to the class folders \('cat', 'd"):
        labeled(store, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = labeled(store, tmp_path, classes=[])
    assert (found.made.classes, found.by_key) == ([], dict.fromkeys(store.keys(), 0))


@every_way
def test_a_set_without_class_folders_is_told_where_labkit_was_called(tmp_path, labeled):
    store = stored(tmp_path / "set", "1.png", "2.png")
    with pytest.warns(LabelWarning, match=r"2 images, and none lies in a class folder.*classes=\[\]") as told:
        found = labeled(store, tmp_path)
    assert found.by_key == {"1.png": 0, "2.png": 0}
    assert {Path(each.filename).parent.name for each in told} == {"tests"}
    if labeled is of_pixels:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pickle.loads(pickle.dumps(found.made))  # a worker opens the file again, and tells nothing again


@pytest.mark.parametrize(
    "names",
    [
        ("train/cat/1.png", "train/dog/1.png", "val/cat/1.png"),
        ("Training/cat/1.png", "TEST/cat/1.png", "validation/dog/1.png"),
        ("train/cat/1.png", "train/dog/1.png", "test/1.png"),
        ("train/cat/1.png", "train/dog/1.png"),
        ("train2017/cat/1.png", "train2017/dog/1.png", "val_2017/cat/1.png"),
        ("Images/cat/1.png", "masks/cat/1.png", "depth/cat/1.png"),
    ],
)
def test_a_root_of_train_and_val_or_of_photos_and_masks_is_refused(tmp_path, names):
    store = stored(tmp_path, *names)
    with pytest.raises(ValueError, match=r"holds the parts of a data set \(.*open each by itself \(root/"):
        lk.ImageDataset(store)
    folders = sorted({name.partition("/")[0] for name in names})
    part = tmp_path / folders[-1]
    assert lk.ImageDataset(part).classes == ImageFolder(part).classes
    assert of_data_set(store, tmp_path, classes=folders).by_key == of_image_folder(tmp_path)[1]  # if asked for


def test_odd_trees_have_the_labels_of_image_folder_too(tmp_path):
    """Trains, and tests of blood; one folder above all; a link to a folder; and what systems keep for themselves."""
    named = stored(tmp_path / "named", "train/1.png", "train/2.png", "test/1.png", "masks/1.png")
    assert of_data_set(named, tmp_path).by_key == of_image_folder(named.root)[1]
    single = stored(tmp_path / "single", "photos/cat/1.png", "photos/dog/1.png")
    with pytest.warns(LabelWarning, match="all in one folder, 'photos', so all labels are 0.*make it the root"):
        assert lk.ImageDataset(single).classes == ImageFolder(single.root).classes
    linked = stored(tmp_path / "linked", "cat/1.png")
    (linked.root / "dog").symlink_to("cat")
    assert of_data_set(lk.FolderStore(linked.root), tmp_path).by_key == of_image_folder(linked.root)[1]
    kept = ("@eaDir/1.png/thumb.jpg", "cat/@eaDir/1.png/thumb.jpg", "__MACOSX/cat/1.png", "#recycle/emu/1.png",
            "lost+found/1.png", "$RECYCLE.BIN/1.png", ".ipynb_checkpoints/1.png")  # fmt: skip
    store = stored(tmp_path / "kept", "cat/1.png", "dog/1.png", *kept)
    for labeled in (of_data_set, of_a_tar):
        assert labeled(store, tmp_path).by_key == {"cat/1.png": 0, "dog/1.png": 1}
    assert list(lk.collect_sizes(store.root, progress=False)["path"]) == ["cat/1.png", "dog/1.png"]


def test_a_class_that_is_named_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^classes names 'cat' more than once"):
        lk.ImageDataset(stored(tmp_path, "cat/1.png"), classes=["cat", "cat"])


# --- numbers that would shift: the first class that differs is named


@pytest.mark.parametrize("make", [of_pixels, of_shards])
def test_a_rerun_with_other_classes_is_refused(tmp_path, make):
    store = stored(tmp_path / "set", "cat/1.png", "dog/1.png")
    make(store, tmp_path)
    before = times(tmp_path)
    said = r"other classes than those asked for \(2 and 3\): the class of label 1 is 'dog' there, and 'cow' in what"
    with pytest.raises(ValueError, match=said):
        make(store, tmp_path, classes=["cat", "cow", "dog"])
    with pytest.raises(ValueError, match=r"\(2 and 3\): the class of label 2 is missing there, and 'emu' in what"):
        make(store, tmp_path, classes=["cat", "dog", "emu"])
    make(store, tmp_path, classes=["cat", "dog"])
    assert times(tmp_path) == before


@pytest.mark.parametrize("make", [
    lambda store, classes: lk.BatchLoader(store, size=8, batch_size=2, classes=classes),
    lambda store, classes: lk.make_loader(lk.ImageDataset(store, classes=classes), lk.LoaderConfig(2, num_workers=0)),
])  # fmt: skip
def test_a_state_of_other_classes_is_refused(tmp_path, make):
    store = stored(tmp_path, "cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png")
    begun = make(store, None)
    next(iter(begun))
    state = json.loads(json.dumps(begun.state_dict()))
    with pytest.raises(ValueError, match=r"state has other classes .*label 0 is 'cat' there, and 'ant' in what"):
        make(store, ["ant", "cat", "dog"]).load_state_dict(state)
    resumed = make(store, ["cat", "dog"])
    resumed.load_state_dict(state)
    assert len(list(resumed)) == 1


# --- files that labkit does not read, and links


OTHERS = (".avif", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jxl", ".pbm", ".pnm")


def test_every_store_counts_what_it_would_leave_out(tmp_path):
    """Two that labkit reads, and of each other format one, of GIF two more."""
    root = stored(tmp_path / "set", "cat/a.png", "dog/b.JPG").root
    for name in ("notes.txt", *(f"cat/{number}{suffix}" for number, suffix in enumerate((*OTHERS, ".GIF", ".gif")))):
        (root / name).touch()
    archive = shutil.make_archive(tmp_path / "x", "tar", root)
    with course.serve_folder(root) as url:
        for place in (root, archive, url, f"file://{root}"):
            with pytest.raises(ValueError, match=r"12 images with suffixes .*\(3 \.gif, 1 \.\w+, ") as failure:
                lk.open_store(place).keys()
            with pytest.raises(ValueError, match=r" 3 images with suffixes .*\(3 \.gif;"):
                lk.open_store(place, ignore=set(OTHERS) - {".gif"}).keys()
            named = literal_eval(str(failure.value).rpartition("ignore=")[2].removesuffix(")"))  # it can be pasted
            assert lk.open_store(place, ignore=named).keys() == ["cat/a.png", "dog/b.JPG"]
            assert lk.open_store(place, ignore=[*named, ".jpg"]).keys() == ["cat/a.png"]
    assert len(lk.collect_sizes(root)) == 14
    assert len(lk.collect_sizes(root, ignore=OTHERS)) == 2
    options = [word for suffix in OTHERS for word in ("--ignore", suffix)]
    for script, target in (("make_shards", "shards"), ("make_pixels", "x.pixels"), ("collect_sizes", "x.csv")):
        done = run_script(script, root, tmp_path / target, *options)
        assert done.exit_code == 0, done.output
    assert len(list(lk.read_shards(tmp_path / "shards"))) == len(lk.PixelStore(tmp_path / "x.pixels")) == 2
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 3


def test_links_in_a_circle_cost_no_image_and_one_to_nothing_is_named(tmp_path):
    root = stored(tmp_path / "set", "cat/1.png", "cat/deep/2.png", "dog/3.png").root
    links = {"cat/up": "..", "cat/itself": "itself", "dog/here": ".", "cat/deep/2.lnk.png": "2.png"}
    for link, target in links.items():
        (root / link).symlink_to(target)
    expected = ["cat/1.png", "cat/deep/2.lnk.png", "cat/deep/2.png", "dog/3.png"]
    sizes = lk.collect_sizes(root)
    assert lk.FolderStore(root).keys() == expected
    assert list(zip(sizes["path"], sizes["error"], strict=True)) == [(key, "") for key in expected]
    (root / "cat/gone.png").symlink_to("nowhere.png")
    store, sizes = lk.FolderStore(root), lk.collect_sizes(root).set_index("path")
    assert list(sizes.index) == store.keys()
    assert sizes["error"]["cat/gone.png"] == "not a file, or a broken link"
    with pytest.raises(KeyError, match=r"cat/gone\.png"):
        store.read("cat/gone.png")
    for build in (of_pixels, of_shards):
        with pytest.raises(FileNotFoundError, match=r"'cat/gone\.png' under .* is a link to nothing: restore"):
            build(store, tmp_path)
