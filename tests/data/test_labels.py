"""Labels and classes are those of torchvision's `ImageFolder`, or an error or a warning says how they are not."""

import json
import os
import subprocess
import sys
import tarfile
import warnings
from ast import literal_eval
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

import labkit as lk
from labkit import course
from labkit.data.labels import LabelWarning
from labkit.peers.peer import labelled_photos
from labkit.peers.registry import Work
from tests.memory_store import MemoryStore
from tests.paths import run_script

NESTED = (
    "cat/2023/1.png", "cat/2024/2.png", "cat/3.PNG", "dog/a/b/4.png", "dog/5.JPG", "a b/6.jpeg", "Zebra/7.webp",
    "\xe9meu/8.jpg", "2024/9.png",
)  # fmt: skip
QUIET = {"engine": "threads", "num_workers": 1, "progress": False}


def write_images(root: Path, *names: str) -> Path:
    """Pictures of one color, each in the format of its suffix."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        image = Image.new("RGB", (20, 16), (number, 40, 90))
        image.save(root / name, Image.registered_extensions().get(Path(name).suffix.lower(), "PNG"))
    return root


def by_key(keys, labels) -> dict[str, int]:
    return dict(zip(keys, map(int, labels), strict=True))


def of_data_set(root, scratch, kind=lk.ImageDataset, **options):
    dataset = kind(lk.FolderStore(root), **options)
    assert [label for _, label in dataset] == dataset.labels.tolist()
    return dataset, by_key(dataset.keys, dataset.labels)


def of_pil_data_set(root, scratch, **options):
    return of_data_set(root, scratch, lk.PILDataset, **options)


def of_a_tar(root, scratch, **options):
    with tarfile.open(scratch / "images.tar", "w") as tar:
        tar.add(root, ".")
    dataset = lk.ImageDataset(lk.TarStore(scratch / "images.tar"), **options)
    return dataset, by_key(dataset.keys, dataset.labels)


def of_batches(root, scratch, **options):
    source = root if isinstance(root, lk.PixelStore) else lk.FolderStore(root)
    loader = lk.BatchLoader(source, size=8, batch_size=2, train=False, num_threads=1, **options)
    labels = [label for _, labels in loader for label in labels.tolist()]
    assert labels == loader.labels.tolist()
    return loader, by_key(loader.keys, labels)


def of_pixels(root, scratch, **options):
    store = lk.PixelStore.build(root, scratch / "images.pixels", **QUIET, **options)
    again = lk.PixelStore(store.path)
    assert (again.classes, again.labels.tolist()) == (store.classes, store.labels.tolist())
    return again, by_key(again.keys, (label for _, label in again))


def of_pixels_in_batches(root, scratch, **options):
    return of_batches(of_pixels(root, scratch, **options)[0], scratch)


def of_shards(root, scratch, **options):
    """The names of samples are not those of the images where these have dots: of the same number, then."""
    lk.write_shards(lk.FolderStore(root), scratch / "shards", **QUIET, **options)
    shards = lk.read_shards(scratch / "shards")
    return shards, by_key(lk.FolderStore(root).keys(), (int(sample["cls"]) for sample in shards.samples()))


WAYS = [of_data_set, of_pil_data_set, of_a_tar, of_batches, of_pixels, of_pixels_in_batches, of_shards]
every_way = pytest.mark.parametrize("labeled", WAYS)


def of_image_folder(root: Path) -> tuple[list[str], dict[str, int]]:
    """The oracle."""
    folder = ImageFolder(root)
    return folder.classes, {Path(path).relative_to(root).as_posix(): label for path, label in folder.samples}


@every_way
def test_labels_and_classes_are_those_of_image_folder(tmp_path, labeled):
    root = write_images(tmp_path / "set", *NESTED)
    found, labels = labeled(root, tmp_path)
    assert (found.classes, labels) == of_image_folder(root)
    if labeled is not of_shards:
        assert found.class_to_idx == ImageFolder(root).class_to_idx
        assert found.labels.dtype == np.int64
        with pytest.raises(ValueError, match="read-only"):
            found.labels[0] = 1


def test_the_loaders_that_labkit_is_compared_with_get_the_same_labels(tmp_path):
    root = write_images(tmp_path / "set", *NESTED)
    found = {path.relative_to(root).as_posix(): label for path, label in labelled_photos(Work(root, tmp_path))}
    assert found == of_image_folder(root)[1]


class TestClassesOfAnotherSet:
    @every_way
    def test_a_set_that_lacks_a_class_has_the_numbers_of_the_other(self, tmp_path, labeled):
        train = lk.ImageDataset(lk.FolderStore(write_images(tmp_path / "train", *NESTED)))
        names = [name for name in NESTED if not name.startswith(("cat", "Zebra"))]
        found, labels = labeled(write_images(tmp_path / "val", *names), tmp_path, classes=train.classes)
        assert found.classes == train.classes
        numbers = by_key(train.keys, train.labels)
        assert labels == {name: numbers[name] for name in names}

    @every_way
    def test_a_folder_that_is_none_of_them_is_named_and_counted(self, tmp_path, labeled):
        root = write_images(tmp_path / "val", "cat/1.png", "cow/1.png", "cow/a/2.png", "pig/1.png")
        with pytest.raises(ValueError, match=r"'cow' \(2 images\), 'pig' \(1 image\)") as failure:
            labeled(root, tmp_path, classes=["cat", "dog"])
        assert "'cat', 'dog'" in str(failure.value)

    @every_way
    def test_they_may_have_another_order(self, tmp_path, labeled):
        root = write_images(tmp_path / "set", "cat/1.png", "dog/1.png")
        found, labels = labeled(root, tmp_path, classes=("dog", "emu", "cat"))
        assert found.classes == ["dog", "emu", "cat"]
        assert labels == {"cat/1.png": 2, "dog/1.png": 0}

    @pytest.mark.parametrize("classes", ["cat", [1, 2], ["cat", "cat"], [None]])
    def test_what_is_no_list_of_names_is_refused(self, tmp_path, classes):
        with pytest.raises(ValueError, match=r"^classes (must be a list of names|names 'cat' more than once)"):
            lk.ImageDataset(lk.FolderStore(write_images(tmp_path, "cat/1.png")), classes=classes)

    @every_way
    def test_images_without_labels_are_said_by_an_empty_list(self, tmp_path, labeled):
        root = write_images(tmp_path / "set", "top.png", "train/cat/1.png", "val/cat/1.png")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found, labels = labeled(root, tmp_path, classes=[])
        assert found.classes == []
        assert set(labels.values()) == {0}


class TestFoldersThatAreNoClasses:
    @every_way
    def test_a_folder_without_class_folders_is_told(self, tmp_path, labeled):
        root = write_images(tmp_path / "set", "1.png", "2.png")
        with pytest.raises(FileNotFoundError, match="Couldn't find any class folder"):
            ImageFolder(root)
        with pytest.warns(LabelWarning, match=r"2 images, and none lies in a class folder.*classes=\[\]") as told:
            _, labels = labeled(root, tmp_path)
        assert labels == {"1.png": 0, "2.png": 0}
        assert {each.filename for each in told} == {__file__}  # the line that called labkit

    @every_way
    def test_images_beside_class_folders_are_refused_and_counted(self, tmp_path, labeled):
        root = write_images(tmp_path / "set", "cat/1.png", "dog/1.png", "top.png", "zoo.png")
        assert len(ImageFolder(root)) == 2  # it leaves them out
        with pytest.raises(ValueError, match=r"2 images of 4, such as 'top.png', beside the class folders \('cat', 'd"):
            labeled(root, tmp_path)

    @every_way
    @pytest.mark.parametrize(
        "names",
        [
            ("train/cat/1.png", "train/dog/1.png", "val/cat/1.png"),
            ("Training/cat/1.png", "TEST/cat/1.png", "validation/dog/1.png"),
            ("train/cat/1.png", "train/dog/1.png", "test/1.png"),
            ("train/cat/1.png", "train/dog/1.png"),
        ],
    )
    def test_a_root_of_train_and_val_is_refused(self, tmp_path, labeled, names):
        root = write_images(tmp_path / "set", *names)
        with pytest.raises(ValueError, match=r"holds the parts of a data set \(.*open each by itself \(root/"):
            labeled(root, tmp_path)
        part = root / names[0].partition("/")[0]
        assert labeled(part, tmp_path)[0].classes == ImageFolder(part).classes

    @every_way
    def test_classes_may_be_named_train_and_test(self, tmp_path, labeled):
        """Trains, and tests of blood."""
        root = write_images(tmp_path / "set", "train/1.png", "train/2.png", "test/1.png")
        found, labels = labeled(root, tmp_path)
        assert (found.classes, labels) == of_image_folder(root)

    def test_classes_that_are_asked_for_are_classes(self, tmp_path):
        root = write_images(tmp_path / "set", "train/steam/1.png", "test/1.png")
        found, labels = of_data_set(root, tmp_path, classes=["test", "train"])
        assert (found.classes, labels) == of_image_folder(root)

    @every_way
    def test_one_folder_above_all_classes_is_told(self, tmp_path, labeled):
        root = write_images(tmp_path / "set", "photos/cat/1.png", "photos/dog/1.png")
        with pytest.warns(LabelWarning, match="all in one folder, 'photos', so all labels are 0.*make it the root"):
            found, labels = labeled(root, tmp_path)
        assert (found.classes, labels) == of_image_folder(root)

    @every_way
    def test_what_systems_keep_for_themselves_is_no_class(self, tmp_path, labeled):
        names = ("cat/1.png", "dog/1.png")
        root = write_images(
            tmp_path / "set", *names, "@eaDir/1.png/thumb.jpg", "cat/@eaDir/1.png/thumb.jpg", "__MACOSX/cat/1.png",
            "#recycle/emu/1.png", "$RECYCLE.BIN/1.png", ".ipynb_checkpoints/1.png",
        )  # fmt: skip
        found, labels = labeled(root, tmp_path)
        assert found.classes == ["cat", "dog"]
        assert set(labels) == set(names)
        assert list(lk.collect_sizes(root)["path"]) == list(names)

    def test_workers_that_open_a_pixel_file_again_do_not_tell_again(self, tmp_path):
        with pytest.warns(LabelWarning):
            lk.PixelStore.build(write_images(tmp_path / "set", "1.png", "2.png"), tmp_path / "x.pixels", **QUIET)
        script = """
import sys, labkit as lk
from torch.utils.data import DataLoader
if __name__ == "__main__":
    store = lk.PixelStore(sys.argv[1])
    print(len(list(DataLoader(store, num_workers=1, multiprocessing_context="spawn"))))
"""
        (tmp_path / "read.py").write_text(script)
        command = [sys.executable, "-W", "always", tmp_path / "read.py", tmp_path / "x.pixels"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        assert done.stdout == "2\n"
        assert done.stderr.count("LabelWarning: ") == 1


OTHERS = (".avif", ".bmp", ".gif", ".heic", ".jp2", ".jxl", ".pgm", ".ppm", ".tif", ".tiff", ".jfif")


class TestSuffixes:
    @pytest.mark.parametrize("suffix", [*IMG_EXTENSIONS, *(suffix.upper() for suffix in IMG_EXTENSIONS)])
    def test_each_suffix_of_image_folder_is_read_or_counted(self, tmp_path, suffix):
        root = write_images(tmp_path, "cat/1.png", f"cat/2{suffix}", f"dog/3{suffix}")
        assert len(ImageFolder(root)) == 3
        try:
            assert len(lk.FolderStore(root)) == 3
        except ValueError as error:
            assert f"2 images with suffixes that labkit does not read (2 {suffix.lower()};" in str(error)  # noqa: PT017

    @pytest.fixture
    def mixed(self, tmp_path) -> Path:
        """Two that labkit reads, and of each other format one, of GIF two more."""
        names = [f"cat/{number}{suffix}" for number, suffix in enumerate((*OTHERS, ".GIF", ".gif"))]
        for name in ("notes.txt", *names):
            (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "set" / name).touch()
        return write_images(tmp_path / "set", "cat/a.png", "dog/b.JPG")

    @pytest.mark.parametrize("kind", ["folder", "tar", "http", "object"])
    def test_every_store_counts_what_it_would_leave_out(self, mixed, kind):
        with tarfile.open(mixed.parent / "x.tar", "w") as tar:
            tar.add(mixed, ".")
        with course.serve_folder(mixed) as url:
            place = {"folder": mixed, "tar": mixed.parent / "x.tar", "http": url, "object": f"file://{mixed}"}[kind]
            with pytest.raises(ValueError, match=r"13 images with suffixes .*\(3 \.gif, 1 \.\w+, ") as failure:
                lk.open_store(place).keys()
            with pytest.raises(ValueError, match=r" 3 images with suffixes .*\(3 \.gif;"):
                lk.open_store(place, ignore=set(OTHERS) - {".gif"}).keys()
            named = literal_eval(str(failure.value).rpartition("ignore=")[2])  # the remedy can be pasted
            assert lk.open_store(place, ignore=named).keys() == ["cat/a.png", "dog/b.JPG"]
            assert lk.open_store(place, ignore=[*named, ".jpg"]).keys() == ["cat/a.png"]

    def test_sizes_have_a_row_for_each_image_that_the_store_has_or_names(self, mixed):
        assert len(lk.collect_sizes(mixed)) == 15
        assert list(lk.collect_sizes(mixed, ignore=OTHERS)["path"]) == lk.FolderStore(mixed, ignore=OTHERS).keys()
        assert set(lk.collect_sizes(mixed, ignore=set(OTHERS) - {".gif"})["path"].str.lower().str[-4:]) == {
            ".png", ".jpg", ".gif",
        }  # fmt: skip

    def test_buckets_of_a_folder_with_other_formats(self, mixed):
        """The example of the page on storage."""
        sizes = lk.collect_sizes(mixed, ignore=OTHERS)
        buckets = lk.Buckets.fit(sizes, 64, step=8, min_side=8)
        batches = lk.BucketBatchSampler(sizes, 2, buckets=buckets, seed=0)
        dataset = lk.ImageDataset(lk.FolderStore(mixed, ignore=OTHERS), buckets=buckets)
        assert sum(len(labels) for _, labels in lk.make_loader(dataset, batch_sampler=batches)) == 2

    @pytest.mark.parametrize("ignore", [".gif", (".GIF",), [".gif"]])
    def test_what_is_ignored_may_be_one_suffix_in_any_case(self, tmp_path, ignore):
        root = write_images(tmp_path, "cat/1.png", "cat/2.gif", "cat/3.GIF")
        assert lk.FolderStore(root, ignore=ignore).keys() == ["cat/1.png"]

    @pytest.mark.parametrize("ignore", ["gif", ("*.gif",), [""], [1], (".",)])
    def test_what_is_no_suffix_is_refused(self, tmp_path, ignore):
        for look in (lk.FolderStore, lk.open_store, lk.collect_sizes):
            with pytest.raises(ValueError, match=r"ignore takes suffixes, such as ignore=\('.gif', '.bmp'\), got"):
                look(tmp_path, ignore=ignore)

    def test_scripts_leave_out_what_they_are_told_to(self, mixed, tmp_path):
        options = [word for suffix in OTHERS for word in ("--ignore", suffix)]
        for script, target in (("make_shards", "shards"), ("make_pixels", "x.pixels"), ("collect_sizes", "x.csv")):
            done = run_script(script, mixed, tmp_path / target, *options)
            assert done.exit_code == 0, done.output
        assert len(list(lk.read_shards(tmp_path / "shards"))) == len(lk.PixelStore(tmp_path / "x.pixels")) == 2
        assert len((tmp_path / "x.csv").read_text().splitlines()) == 3
        refused = run_script("make_shards", mixed, tmp_path / "other")
        assert refused.exit_code == 2
        assert "13 images with suffixes" in refused.output


class TestLinks:
    def test_links_in_a_circle_cost_no_image(self, tmp_path):
        root = write_images(tmp_path, "cat/1.png", "cat/deep/2.png", "dog/3.png")
        (root / "cat/up").symlink_to("..")
        (root / "cat/itself").symlink_to("itself")
        (root / "dog/here").symlink_to(".")
        (root / "cat/deep/2.png.lnk.png").symlink_to("2.png")
        expected = ["cat/1.png", "cat/deep/2.png", "cat/deep/2.png.lnk.png", "dog/3.png"]
        assert lk.FolderStore(root).keys() == expected
        assert list(lk.collect_sizes(root)["path"]) == expected
        assert list(lk.collect_sizes(root)["error"]) == [""] * 4

    def test_a_folder_may_be_a_link_to_one_beside_it(self, tmp_path):
        root = write_images(tmp_path, "cat/1.png")
        (root / "dog").symlink_to("cat")
        assert of_data_set(root, tmp_path)[1] == of_image_folder(root)[1]

    def test_a_link_to_nothing_is_named(self, tmp_path):
        root = write_images(tmp_path / "set", "cat/1.png", "dog/2.png")
        (root / "cat/gone.png").symlink_to("nowhere.png")
        store = lk.FolderStore(root)
        sizes = lk.collect_sizes(root).set_index("path")
        assert list(sizes.index) == store.keys()
        assert sizes["error"]["cat/gone.png"] == "not a file, or a broken link"
        with pytest.raises(KeyError, match=r"cat/gone\.png"):
            store.read("cat/gone.png")
        for build in (of_pixels, of_shards):
            with pytest.raises(FileNotFoundError, match=r"'cat/gone\.png' under .* is a link to nothing: restore"):
                build(root, tmp_path)

    def test_folders_may_be_deep(self, deep_key, tmp_path):
        assert lk.FolderStore(tmp_path).keys() == [deep_key]
        assert list(lk.collect_sizes(tmp_path)["path"]) == [deep_key]

    @pytest.fixture
    def deep_key(self, tmp_path):
        """An image below more folders than Python's limit of recursion, which the standard library cannot remove."""
        names = ["a"] * 1500
        at = os.open(tmp_path, os.O_RDONLY)
        for name in names:
            os.mkdir(name, dir_fd=at)
            above, at = at, os.open(name, os.O_RDONLY, dir_fd=at)
            os.close(above)
        os.close(at)
        key = "/".join([*names, "1.png"])
        Image.new("RGB", (2, 2)).save(tmp_path / key)
        yield key
        subprocess.run(["rm", "-rf", tmp_path / "a"], check=True)


class TestNumbersThatWouldShift:
    """What was made with other classes is refused, and the first class that differs is named."""

    @pytest.mark.parametrize("make", [of_pixels, of_shards])
    def test_a_rerun_with_other_classes_is_refused(self, tmp_path, make):
        root = write_images(tmp_path / "set", "cat/1.png", "dog/1.png")
        make(root, tmp_path)
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        said = r"other classes than those asked for \(2 and 3\): the class of label 1 is 'dog' there, and 'cow' in what"
        with pytest.raises(ValueError, match=said):
            make(root, tmp_path, classes=["cat", "cow", "dog"])
        with pytest.raises(ValueError, match=r"\(2 and 3\): the class of label 2 is missing there, and 'emu' in what"):
            make(root, tmp_path, classes=["cat", "dog", "emu"])
        make(root, tmp_path, classes=["cat", "dog"])
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before

    def test_pixels_that_were_built_with_other_classes_are_refused(self, tmp_path):
        train = lk.ImageDataset(lk.FolderStore(write_images(tmp_path / "train", "cat/1.png", "cow/1.png", "dog/1.png")))
        root = write_images(tmp_path / "val", "cat/1.png", "dog/1.png")
        pixels, _ = of_pixels(root, tmp_path)
        with pytest.raises(ValueError, match=r"label 1 is 'dog' there, and 'cow' in what was asked for: build"):
            lk.BatchLoader(pixels, classes=train.classes)
        again = lk.PixelStore.build(root, tmp_path / "again.pixels", classes=train.classes, **QUIET)
        assert lk.BatchLoader(again, classes=train.classes).labels.tolist() == [0, 2]

    def test_pixels_do_not_depend_on_classes(self, tmp_path):
        root = write_images(tmp_path / "set", "cat/1.png", "dog/1.png")
        one = lk.PixelStore.build(root, tmp_path / "one.pixels", **QUIET)
        other = lk.PixelStore.build(root, tmp_path / "other.pixels", classes=["dog", "cat"], **QUIET)
        assert [one.pixels(index).tobytes() for index in (0, 1)] == [other.pixels(index).tobytes() for index in (0, 1)]

    @pytest.mark.parametrize("kind", ["threads", "workers"])
    def test_a_state_of_other_classes_is_refused(self, tmp_path, kind):
        store = lk.FolderStore(write_images(tmp_path, "cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"))

        def loader(classes):
            if kind == "threads":
                return lk.BatchLoader(store, size=8, batch_size=2, classes=classes)
            return lk.make_loader(lk.ImageDataset(store, classes=classes), lk.LoaderConfig(batch_size=2, num_workers=0))

        begun = loader(None)
        next(iter(begun))
        state = json.loads(json.dumps(begun.state_dict()))
        with pytest.raises(ValueError, match=r"state has other classes .*label 0 is 'cat' there, and 'ant' in what"):
            loader(["ant", "cat", "dog"]).load_state_dict(state)
        resumed = loader(["cat", "dog"])
        resumed.load_state_dict(state)
        assert len(list(resumed)) == 1

    def test_a_data_set_of_others_may_name_a_class_twice(self):
        """As ImageNet does."""
        dataset = TensorDataset(torch.arange(8))
        dataset.classes = ["crane", "maillot", "crane"]
        begun, resumed = (lk.make_loader(dataset, lk.LoaderConfig(batch_size=2, num_workers=0)) for _ in range(2))
        next(iter(begun))
        resumed.load_state_dict(begun.state_dict())
        assert len(list(resumed)) == 3


def test_own_stores_are_told_by_their_class(tmp_path):
    data = write_images(tmp_path, "1.png").joinpath("1.png").read_bytes()
    with pytest.warns(LabelWarning, match="^MemoryStore has 1 image, and none lies"):
        lk.ImageDataset(MemoryStore({"1.png": data}))
