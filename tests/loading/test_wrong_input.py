"""Wrong input as new users give it: each is one error that says what was given, what is accepted, or what to do.

Types in place of others are in `tests/hardening/test_wrong_arguments.py`, and what one module alone refuses in its own
tests.
"""

import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import labkit as lk
from tests.memory_store import MemoryStore

KEYS = [f"class{number % 3}/{number:02}.jpg" for number in range(12)]
CLASSES = ["class0", "class1", "class2"]
MASK = np.array([True, False] * 6)
ARGUMENT, TYPE, MISSING, STATE = ValueError, TypeError, FileNotFoundError, RuntimeError


def dataset(**options):
    return lk.ImageDataset("photos", **options)[0]


def batch(source="photos", **options):
    return next(iter(lk.BatchLoader(source, **{"size": 16, "batch_size": 4, "num_threads": 1, **options})))


def loaded(of=None, **options):
    made = lk.make_loader(of or lk.ImageDataset("photos"), num_workers=0, **{"collate_fn": list, **options})
    return next(iter(made))


def pixels(**options):
    return lk.PixelStore("photos.pixels", **options)


def shards(**options):
    return next(iter(lk.read_shards("shards", **options)))


def twice(batches):
    prefetcher = lk.CUDAPrefetcher(batches, "cpu")
    return [list(prefetcher), list(prefetcher)]


OF_PIL = "images that stay PIL's"  # an error of torch, with a note


class Textual(MemoryStore):
    """A store whose files are not read as bytes."""

    def read(self, key):
        return super().read(key).decode("latin-1")


def returns_nothing(image):
    image.clamp(max=9)


NO_PLACE = r" is not a folder of images or tars, .* or a URL of a known scheme: "
NO_RETURN = "and not an image: does it lack a `return`"
NO_FLAG = "must be True or False, got "

PLACES = [
    ("a misspelt folder", "photoss", rf"'photoss'{NO_PLACE}it does not exist \(looked for in /"),
    ("one file", "photos/class0/00.jpg", rf"{NO_PLACE}it is a file\. Name the folder that it lies in"),
    ("pixels", "photos.pixels", rf"{NO_PLACE}it is a file.*lk\.PixelStore\(path\) opens what"),
    ("a wildcard", "photos/*/*.jpg", rf"{NO_PLACE}wildcards are not expanded: name the folder, .*keys="),
    ("a variable", "$DATA/photos", rf"{NO_PLACE}variables are not expanded.*expandvars"),
    ("one slash", "http:/host/photos", rf"{NO_PLACE}a URL begins with its scheme and ://"),
    ("a wrong scheme", "htp://host/photos", rf"{NO_PLACE}fsspec knows no scheme 'htp'"),
]  # fmt: skip
SOURCES = [
    ("a list of files", lambda: batch(["photos/class0/00.jpg"]), TYPE, "got list. Some images .* chosen by keys="),
    ("an ImageFolder", lambda: batch(ImageFolder("photos")), TYPE, "got ImageFolder. Pass .*, its `root`"),
    ("a loader", lambda: batch(DataLoader([1])), TYPE, "images come from a store, .*: got DataLoader"),
    ("a loader in a loader", lambda: loaded(lk.make_loader([1])), TYPE, "Loader is not a map-style .*its `dataset`"),
    ("a pointer of Git LFS", lambda: batch("pointers"), ARGUMENT, r"a/1\.jpg: .*pointer of Git LFS.*`git lfs pull`"),
    ("no bytes, by PIL", lambda: lk.PILDataset("cut")[0], ARGUMENT, r"a/1\.jpg: .*it is an empty file"),
    ("text from a store", lambda: batch(Textual({"a.jpg": b"\xff"}), classes=[]), TYPE,
     r"'a\.jpg' must lead to the bytes of an image file, got str"),
]  # fmt: skip
LABELS = [
    ("a path of labels", lambda: dataset(labels="labels.csv"), TYPE, r"got 'labels\.csv'\. Of a table, pass two"),
    ("labels in no order", lambda: dataset(labels=range(12)), ARGUMENT, "labels is range, which goes by position"),
    ("the same for batches", lambda: batch(labels=range(12)), ARGUMENT, "labels is range, which goes by position"),
    ("keys in a set", lambda: dataset(keys=set(KEYS)), TYPE, "keys must be a list of names of images, .*got set"),
    ("keys with the root", lambda: dataset(keys=["photos/" + KEYS[0]]), ARGUMENT, "no image 'photos/.*names are"),
    ("a mask as keys", lambda: dataset(keys=MASK), TYPE, "keys must be a list of names of images"),
    ("classes in a set", lambda: dataset(classes=set("abc")), ARGUMENT, "classes must be a list of names"),
    ("other classes of pixels", lambda: batch(pixels(), classes=["a"]), lk.LabkitError, "other classes than .*build"),
]  # fmt: skip
FLAGS = [
    *((f"{name} of BatchLoader", lambda name=name: batch(**{name: "False"}), ARGUMENT, f"^{name} {NO_FLAG}'False'")
      for name in ("train", "shuffle", "antialias", "scaled_decoding", "pin_memory", "return_keys")),
    *((f"{name} of make_loader", lambda name=name: loaded(**{name: "no"}), ARGUMENT, f"^{name} {NO_FLAG}'no'")
      for name in ("shuffle", "persistent_workers", "pin_memory", "oversubscribe")),
]  # fmt: skip
ORDERS = [
    ("drop_last of few", lambda: batch(batch_size=64, drop_last=True), STATE, "drop_last leaves out .*batch_size=64"),
    ("a sampler of nothing", lambda: batch(sampler=[]), STATE, "gave no batch in epoch 0: give it at least one index"),
    ("an empty batch", lambda: batch(batch_sampler=[[]]), ARGUMENT, "the batch_sampler gave an empty list"),
    ("the same, collated", lambda: loaded(batch_sampler=[[]], collate_fn=lk.collate), ARGUMENT, "gave an empty list"),
    ("indices for batches", lambda: loaded(batch_sampler=[0, 1]), TYPE, r"give lists of indices, such as \[0, 1, 2\]"),
    ("an index beyond", lambda: batch(sampler=[12]), ARGUMENT, "lk.make_loader takes any index of your data"),
    ("a mask of arrays", lambda: batch(sampler=MASK), TYPE, r"sampler is a mask .*np\.flatnonzero\(mask\)"),
    ("a mask in a list", lambda: batch(sampler=MASK.tolist()), TYPE, "sampler is a mask of True and False"),
    ("a set of indices", lambda: loaded(sampler={1, 2}), TYPE, "sampler is a set, which is no order of indices"),
    ("weights of classes", lambda: batch(sampler=WeightedRandomSampler([1, 2, 3], 12)), ARGUMENT,
     r"has 3 weights for 12 samples: it takes one for each sample, such as np\.asarray\(class_weights\)\["),
]  # fmt: skip
TRANSFORMS = [
    *((f"a class for {name}", lambda call=call: call(transform=v2.RandomCrop), TYPE,
       r"got the class RandomCrop itself: make one of it, RandomCrop\(\.\.\.\)")
      for name, call in {"images": dataset, "pixels": pixels, "shards": shards, "crops": batch}.items()),
    ("no return for images", lambda: dataset(transform=returns_nothing), TYPE, rf"None for .*/00\.jpg, {NO_RETURN}"),
    ("no return for pixels", lambda: pixels(transform=returns_nothing)[0], TYPE, rf"None for image 0, {NO_RETURN}"),
    ("no return for shards", lambda: shards(transform=returns_nothing), TYPE, rf"None for .*00.jpg in .*, {NO_RETURN}"),
    ("no return for batches", lambda: loaded(batch_transform=lambda batch: None), TYPE, "not a batch: does it lack"),
    (OF_PIL, lambda: loaded(lk.PILDataset("photos"), collate_fn=lk.collate), TYPE,
     r"(?s)PIL.*still PIL images: let the transform end with one that makes tensors, as v2\.ToImage\(\)"),
]  # fmt: skip
DEVICES = [
    ("no device", lambda: lk.CUDAPrefetcher([1], None), TYPE, "device must be such as 'cuda', .*got None"),
    ("no loader", lambda: lk.CUDAPrefetcher(None, "cpu"), TYPE, "loader must be a loader, .*got None"),
    ("a used-up generator", lambda: twice(number for number in range(3)), STATE, "a generator, .* and is used up"),
]  # fmt: skip
TABLE = [
    *((name, lambda place=place: batch(place), ARGUMENT, said) for name, place, said in PLACES),
    *SOURCES, *LABELS, *FLAGS, *ORDERS, *TRANSFORMS, *DEVICES,
]  # fmt: skip


@pytest.fixture(scope="module")
def place(pictures, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("wrong")
    shutil.copytree(pictures.root, root / "photos")
    for name in ("pointers/a/1.jpg", "cut/a/1.jpg"):
        (root / name).parent.mkdir(parents=True)
        (root / name).touch()
    (root / "pointers/a/1.jpg").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n")
    lk.PixelStore.build(root / "photos", root / "photos.pixels", short_side=16, engine="threads", progress=False)
    lk.write_shards(root / "photos", root / "shards", num_workers=0, progress=False)
    return root


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "call", "error", "said"), TABLE, ids=[name for name, *_ in TABLE])
def test_a_mistake_is_one_error_that_says_what_to_do(place, monkeypatch, name, call, error, said):
    monkeypatch.chdir(place)
    with pytest.raises(error) as failure:
        call()
    assert re.search(said, "\n".join([str(failure.value), *getattr(failure.value, "__notes__", ())]))
    assert isinstance(failure.value, lk.LabkitError) == (name != OF_PIL)


@pytest.mark.parametrize("sound", [
    lambda: batch("photos//"), lambda: batch(train=np.False_), lambda: batch(shuffle=0),
    lambda: batch(sampler=[True, 2]), lambda: batch(sampler=np.flatnonzero(MASK)),
    lambda: dataset(transform=torch.Tensor.float), lambda: dataset(classes=dict.fromkeys(CLASSES).keys()),
    lambda: loaded(collate_fn=tuple), lambda: list(lk.CUDAPrefetcher(iter([1]), "cpu")),
])  # fmt: skip
def test_what_is_near_a_mistake_is_taken(place, monkeypatch, sound):
    monkeypatch.chdir(place)
    sound()


@pytest.mark.parametrize(("rank", "is_told"), [("2", True), ("-1", True), ("one", True), ("", False), ("1", False)])
def test_ranks_that_cannot_be_are_told(place, monkeypatch, rank, is_told):
    monkeypatch.chdir(place)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    for load in (batch, loaded):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load()
        told = {str(warning.message) for warning in caught if "WORLD_SIZE=2" in str(warning.message)}
        assert bool(told) == is_told
        assert all(f"RANK={rank!r}" in said and "ranks go from 0 to 1" in said for said in told)
