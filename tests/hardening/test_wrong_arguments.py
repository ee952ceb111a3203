"""What a user may pass by mistake to each public function, and what it is told: an error in the user's words.

Such an error names what was given and what is accepted. One from Python or another library names neither.
"""

import functools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import urllib3

import labkit as lk
from labkit.data.extract import extract_tars
from labkit.loading.augment import Recipe
from labkit.measure.frames import load_frame
from tests.paths import contents

NO_SOURCES = {"a class": lk.FolderStore, "a wrong path": "nowhere", "a text": "note.txt", "a URL": "foo://x/y"}
NO_TARGETS = {"a number": 5, "a URL": "https://host/x"}


def first(batches):
    return next(iter(batches))


def store():
    return lk.FolderStore("photos")


def dataset(**options):
    return lk.ImageDataset("photos", **options)


def loader(**options):
    return first(lk.make_loader(dataset(), lk.LoaderConfig(num_workers=0), **{"collate_fn": list, **options}))


def batch(**options):
    return first(lk.BatchLoader("photos", size=16, **options))


@functools.cache
def sizes():
    return lk.collect_sizes("photos", progress=False)


READERS = {
    "FolderStore": lambda value: lk.FolderStore(value).keys(),
    "open_store": lambda value: lk.open_store(value).keys(),
    "HttpStore": lambda value: lk.HttpStore(value, retries=0).keys(),
    "ObjectStore": lambda value: lk.ObjectStore(value).keys(),
    "TarStore": lambda value: lk.TarStore(value).keys(),
    "ImageDataset": lambda value: lk.ImageDataset(value)[0],
    "PILDataset": lambda value: lk.PILDataset(value)[0],
    "BatchLoader": lambda value: first(lk.BatchLoader(value)),
    "PixelStore": lambda value: lk.PixelStore(value)[0],
    "PixelStore.build": lambda value: lk.PixelStore.build(value, "built.pixels", progress=False),
    "write_shards": lambda value: lk.write_shards(value, "written", progress=False, num_workers=0),
    "read_shards": lambda value: first(lk.read_shards(value)),
    "extract_tars": lambda value: extract_tars(value, "extracted", progress=False),
    "collect_sizes": lambda value: lk.collect_sizes(value, progress=False),
    "DepthPairs": lambda value: lk.DepthPairs(value, "pairs.txt"),
    "plan": lambda value: lk.plan(value, cores_per_node=8, cpu_ms_per_image=2),
    "load_frame": lambda value: load_frame(value),
    "make_loader": lambda value: first(lk.make_loader(value)),
}
WRITERS = {
    "PixelStore.build": lambda value: lk.PixelStore.build("photos", value, progress=False),
    "write_shards": lambda value: lk.write_shards(store(), value, progress=False, num_workers=0),
    "extract_tars": lambda value: extract_tars("photos.tar", value, progress=False),
    "make_photos": lambda value: lk.make_photos(value, 1, progress=False),
}
TAKE_FUNCTIONS = {
    "ImageDataset": lambda value: dataset(transform=value)[0],
    "PixelStore": lambda value: lk.PixelStore("photos.pixels", transform=value)[0],
    "read_shards": lambda value: lk.read_shards("shards", transform=value),
    "make_loader, collate_fn": lambda value: loader(collate_fn=value),
    "make_loader, batch_transform": lambda value: loader(batch_transform=value),
    "with_step": lambda value: list(lk.with_step([1], value)),
    "map_items": lambda value: lk.map_items(value, [1], num_workers=0, progress=False),
    "compare": lambda value: lk.compare({"a": value}, baseline="a", rounds=1, progress=False),
}
OTHERS = {
    "a key": (lambda value: store().read(value), [5, None, b"a.jpg"]),
    "an index of images": (lambda value: dataset()[value], ["a", None, 1.5, (1, 2)]),
    "an index of pixels": (lambda value: lk.PixelStore("photos.pixels")[value], ["a", None, 1.5, (1, 2)]),
    "keys of a server": (lambda value: lk.HttpStore("http://127.0.0.1:9/", keys=value), [5, "a.jpg", b"a.jpg"]),
    "suffixes": (lambda value: lk.FolderStore("photos", ignore=value), ["gif", ["*.gif"]]),
    "classes": (lambda value: dataset(classes=value), [5, "cat", {"cat": 0}, [1]]),
    "buckets": (lambda value: dataset(buckets=value), [(512, 512)]),
    "buckets of a sampler": (lambda value: lk.BucketBatchSampler(sizes(), 4, buckets=value), [(512, 512)]),
    "shapes": (lambda value: lk.Buckets(value), [[512, 512]]),
    "a frame of sizes": (lambda value: lk.Buckets.fit(value), ["photos"]),
    "a frame of runs": (lambda value: lk.summarize(value), ["runs.csv"]),
    "a frame to conclude": (lambda value: lk.conclude(value), ["runs.csv"]),
    "a frame to plot": (lambda value: lk.plot_speedup(value), ["runs.csv"]),
    "stages to plot": (lambda value: lk.plot_stalls(value), ["runs.csv"]),
    "variants": (lambda value: lk.compare(value, baseline="a"), [[1], {}]),
    "an iterable": (lambda value: list(lk.with_step(value, print)), [5]),
    "a whole pass": (lambda value: list(lk.whole_pass(value)), [5]),
    "items": (lambda value: lk.map_items(str, value, progress=False), [5]),
    "timeit's result": (lambda value: lk.from_timeit(value, "a", 1), [5]),
    "a timer's result": (lambda value: lk.from_timer(value, "a", 1), [5]),
    "samples": (lambda value: lk.collate(value), [5, None, "a", {}]),
    "strings": (lambda value: lk.PackedStrings(value), [[1]]),
    "encoded data": (lambda value: lk.decode(value), [5, None, "a.jpg", Path("a.jpg"), b"", b"text"]),
    "a recipe": (lambda value: lk.make_augment(value), ["bright"]),
    "a recipe's size": (lambda value: Recipe(size=value), [(224, 224)]),
    "a config": (lambda value: lk.make_loader(dataset(), value), [{"batch_size": 4}]),
    "a sampler": (lambda value: loader(sampler=value), [5, "abc", lk.FolderStore]),
    "a batch sampler": (lambda value: loader(batch_sampler=value), [5, "abc", [1, 2]]),
    "a sampler of a BatchLoader": (lambda value: batch(sampler=value), [5, "abc", ["a.jpg"], [10**6], [(0, 224)]]),
    "a mean": (lambda value: batch(dtype=torch.float32, mean=value, std=(1, 1, 1)), [(124, 116, 104)]),
    "a range": (lambda value: batch(scale=value), [(0.5, 0.1)]),
    "a size": (lambda value: batch(batch_size=value), [True]),
    "a budget": (lambda value: lk.compare({"a": lambda: [1]}, baseline="a", budget_s=value), [float("nan")]),
}
TABLE = [
    *((f"{name} of {kind}", call, value) for name, call in READERS.items() for kind, value in NO_SOURCES.items()),
    *((f"{name} to {kind}", call, value) for name, call in WRITERS.items() for kind, value in NO_TARGETS.items()),
    *((f"{name} by a text", call, "resize") for name, call in TAKE_FUNCTIONS.items()),
    *((f"{name}: {value!r:.30}", call, value) for name, (call, values) in OTHERS.items() for value in values),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("place")
    lk.make_photos(root / "photos", 9, progress=False)
    (root / "note.txt").write_text("hello\n")
    (root / "pairs.txt").write_text("a.png b.png\n")
    lk.PixelStore.build(root / "photos", root / "photos.pixels", short_side=16, progress=False)
    lk.write_shards(root / "photos", root / "shards", progress=False, num_workers=0)
    next((root / "shards").glob("*.tar")).rename(root / "photos.tar")
    lk.write_shards(root / "photos", root / "shards", progress=False, num_workers=0)
    return root


@pytest.fixture(autouse=True)
def _no_wait_between_requests(monkeypatch):
    monkeypatch.setattr(urllib3.Retry, "sleep", lambda *about: None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "call", "value"), TABLE, ids=[name for name, _, _ in TABLE])
def test_a_mistake_is_told_in_the_users_words(place, monkeypatch, name, call, value):
    monkeypatch.chdir(place)
    before = sorted(os.listdir())
    with pytest.raises(lk.LabkitError) as failure:
        call(value)
    said = str(failure.value)
    assert "object has no attribute" not in said
    assert "Errno" not in said
    assert sorted(os.listdir()) == before  # and nothing was made


SEEDED = {
    "BatchLoader": lambda seed: batch(seed=seed)[0].tolist(),
    "LoaderConfig": lambda seed: [
        images.tolist()
        for images, _ in lk.make_loader(dataset(transform=corner), num_workers=0, seed=seed, shuffle=True)
    ],
    "BucketBatchSampler": lambda seed: first(lk.BucketBatchSampler(sizes(), 4, seed=seed)),
    "read_shards": lambda seed: [
        label for _, label in lk.read_shards("shards", shuffle=True, shuffle_buffer=8, seed=seed)
    ],
    "write_shards": lambda seed: contents(
        lk.write_shards("photos", f"shards of {seed!r}", seed=seed, num_workers=0, progress=False)
    ),
    "make_photos": lambda seed: contents(lk.make_photos(f"photos of {seed!r}", 1, seed=seed, progress=False)),
}  # fmt: skip


def corner(image):
    return image[:, :4, :4]


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_is_an_integer_of_64_bits_of_any_kind(place, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    for made in ("photos", "shards"):
        os.symlink(place / made, made)
    assert SEEDED[name](3) == SEEDED[name](np.uint8(3))
    SEEDED[name](2**64 - 1)
    for wrong in ("0", True, 2**64):
        with pytest.raises(ValueError, match=r"^seed must be an integer from -2\*\*63 to 2\*\*64 - 1, got "):
            SEEDED[name](wrong)


def test_no_secret_of_a_mistaken_value_is_shown():
    for call in (lk.FolderStore, lk.TarStore, lk.open_store, lambda value: lk.make_photos(value, 1)):
        with pytest.raises(lk.LabkitError) as failure:
            call(["https://user:secret@host/x?signature=secret"])
        assert "secret" not in str(failure.value)
    with pytest.raises(ValueError, match="got a URL: https://host/x") as failure:
        lk.make_photos("https://user:secret@host/x?signature=secret", 1)
    assert "secret" not in str(failure.value)
