"""The checks of the exercises in notebooks 08 to 11b: shards, Marigold's storage, image sizes, decoding once."""

import hashlib
import random
import tarfile
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit.data.sizes import upright_sizes
from labkit.teach.exercises import exercise, expect, frame_exercise, number_exercise

number_exercise("08.1", "A number, in hours.", 1_280_000 * 0.030 / 16 / 3600)
frame_exercise("08.3", "A frame from lk.compare of at least two ways to store or read the same images.", speedup=1.2)
number_exercise("08b.1", "A whole number of samples.", 1000, tolerance=0)
number_exercise("08b.3", "A number, in seconds.", 20_000 * 110e3 / 100e6)
frame_exercise("08b.4", "A frame from lk.compare of at least two buffers over your own shards.")
number_exercise("09.1", "A number, in minutes.", 107_770 * 8e-3 / 60)  # files, seconds a seek
number_exercise("09.2", "A whole number of scans.", 2 * 10, tolerance=0)
number_exercise("09.3", "A number: the old time over the new.", 4.0 / (4.0 - 0.1), tolerance=0.002)
frame_exercise("09.5", "A frame from lk.compare.", speedup=1.2)
number_exercise("10.1", "A number, in files per second.", 254 * 906 / 136)
number_exercise("10.4", "A number, in percent.", 100 * (1 - (1500 / 1000) / (640 / 384)))
number_exercise("10b.1", "A number, in seconds.", 20_000 * 2 * 8e-3)
frame_exercise("10b.3", "A frame from lk.compare with at least five rounds that count.", rounds=5, widest=0.2)
number_exercise("11.1", "A whole number of epochs.", 4, tolerance=0)
number_exercise("11.2", "A number: pixels a side after, over pixels a side before.", 224 / (0.08 * 256 * 341) ** 0.5)
frame_exercise("11.3", "A frame from lk.compare of at least two preparations of the same photos.", speedup=1.2)
number_exercise("11b.1", "A number, in GB.", 1_281_167 * 256 * 341 * 3 / 1e9)
number_exercise("11b.3", "A number of crops per second.", 1e6 / 12)


@exercise("08.2")
def check_sample_key(answer: Any) -> None:
    """A function of a member's name that returns its sample's key."""
    names = {
        "dog/a.jpg": "dog/a", "dog/a.cls": "dog/a", "v1.0/dog/a.seg.png": "v1.0/dog/a", "a.b.c": "a",
        "v1.0/a.jpg": "v1.0/a",
    }  # fmt: skip
    for name, key in names.items():
        found = answer(name)
        expect(found == key, f"{name!r} belongs to the sample {key!r}; it returned {found!r}")


@exercise("08.4")
def check_own_shards(answer: Any) -> None:
    """A pair: your store, such as lk.FolderStore("path/to/photos"), and the folder of its shards."""
    store, folder = answer
    shards = sorted(Path(folder).rglob("*.tar"))
    expect(shards, f"no file in {folder} ends in .tar")
    packed = Counter(_digest(data) for shard in shards for data in _members(shard))
    keys = store.keys()
    photos = {key: _digest(store.read(key)) for key in keys}
    stored = Counter(photos.values())  # files of a folder may be equal
    missing = [key for key, digest in photos.items() if packed[digest] < stored[digest]]
    examples = f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
    expect(not missing, f"{len(missing)} of {len(photos)} photos are not in the shards, byte for byte: {examples}")
    again = [key for key, digest in photos.items() if packed[digest] > stored[digest]]
    expect(not again, f"{len(again)} of {len(photos)} photos are in the shards more than once: {', '.join(again[:3])}")


def _members(shard: Path) -> Iterator[bytes]:
    with tarfile.open(shard) as tar:
        for member in tar:
            file = tar.extractfile(member)  # None for a folder
            if file is not None:
                yield file.read()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


@exercise("08b.2")
def check_shard_split(answer: Any) -> None:
    """A function of (shards, rank, world_size, worker, num_workers) that returns a list of shards."""
    for n_shards, world_size, num_workers in product((1, 3, 7, 16), (1, 2, 3), (1, 2, 4)):
        shards = [f"shard-{number:06d}.tar" for number in range(n_shards)]
        readers = product(range(world_size), range(num_workers))
        parts = [list(answer(list(shards), rank, world_size, worker, num_workers)) for rank, worker in readers]
        where = f"of {n_shards} shards on {world_size} ranks x {num_workers} workers"
        read = sorted(shard for part in parts for shard in part)
        n_unread, most = len(set(shards) - set(read)), max(read.count(shard) for shard in shards)
        expect(read == shards, f"{where}, {n_unread} are never read, and one is read {most} times")
        sizes = [len(part) for part in parts]
        uneven = f"{where}, one reader gets {max(sizes)} and another {min(sizes)}"
        expect(max(sizes) - min(sizes) <= 1, uneven)


@exercise("09.4")
def check_mirrored_columns(answer: Any) -> None:
    """A function of (width, new_width) that returns a list of column numbers."""
    for width, new_width in ((1024, 640), (8, 8), (9, 4), (6, 12)):
        expected = [width - 1 - (2 * column + 1) * width // (2 * new_width) for column in range(new_width)]
        found = [int(column) for column in answer(width, new_width)]
        expect(len(found) == new_width, f"for {width} -> {new_width} it returned {len(found)} columns")
        for column in range(new_width):
            wrong = f"column {column} is {found[column]} instead of {expected[column]}"
            expect(found[column] == expected[column], f"for {width} -> {new_width}, {wrong}")


_MODELS = ("sd", "sdxl", "sd3", "flux", "hi", "lumina", "anima")

# Kind of name that a wrong answer misreads -> such names, and what they state.
_NAMES: dict[str, list[tuple[str, tuple[str, int, int] | None]]] = {
    **{f"the caches of {model}": [(f"cat_0512x0768_{model}.npz", ("cat", 512, 768))] for model in _MODELS},
    "stems with _ in them": [("my_cat_2_0512x0768_sd.npz", ("my_cat_2", 512, 768))],
    "stems that look like a size": [("cat_0001x0002_0512x0768_sd.npz", ("cat_0001x0002", 512, 768))],
    "sizes above 9999": [("cat_12000x0768_sd.npz", ("cat", 12_000, 768))],
    "caches of text encoders": [
        ("cat_te_outputs.npz", None), ("cat_flux_te.npz", None), ("cat_0512x0768_sd3_te.npz", None),
    ],
    "caches without a size": [("cat.npz", None), ("cat_sd.npz", None)],
    "files that are not caches": [
        ("cat_0512x0768.jpg", None), ("cat_0512x0768_sd.npz.part", None), ("cat_0512x_sd.npz", None),
    ],
    "unknown models": [("cat_0512x0768_vae.npz", None)],
}  # fmt: skip


@exercise("10.2")
def check_name_reader(answer: Any) -> None:
    """A function of a name that returns (stem, width, height) or None."""
    for what, names in _NAMES.items():
        for name, expected in names:
            found = answer(name)
            is_right = found is None if expected is None else found is not None and tuple(found) == expected
            expect(is_right, f"{what}: {name!r} should give {expected!r}; it gave {found!r}")


def _cache(stem: str, width: int = 5, height: int = 6, model: str = "sd") -> str:
    return f"{stem}_{width:04}x{height:04}_{model}.npz"


# Case -> images, caches, and the sizes that they settle.
_CHAIN = {
    "plain names": (["a.png", "b.jpg"], [_cache("a"), _cache("b", 7, 8, "sdxl")], {"a.png": (5, 6), "b.jpg": (7, 8)}),
    "sd-scripts issue 1770, `-` before `_`": (
        ["beach_towel.png", "beach_towel-crop.png"],
        [_cache("beach_towel"), _cache("beach_towel-crop", 7, 8)],
        {"beach_towel.png": (5, 6), "beach_towel-crop.png": (7, 8)},
    ),
    "no cache, beside a longer name": (["a.png", "ab.png"], [_cache("ab")], {"ab.png": (5, 6)}),
    "no cache, beside a longer name with `_`": (["a.png", "a_b.png"], [_cache("a_b")], {"a_b.png": (5, 6)}),
    "brackets and stars": (["[x]*.png"], [_cache("[x]*")], {"[x]*.png": (5, 6)}),
    "dots in the stem": (["a.b.png", "a.png"], [_cache("a.b")], {"a.b.png": (5, 6)}),
    "a text encoder's cache": (["a.png"], ["a_sd3_te.npz", "a_te_outputs.npz", "a.npz"], {}),
    "caches that agree": (["a.png"], [_cache("a"), _cache("a", model="sdxl")], {"a.png": (5, 6)}),
    "caches that disagree": (["a.png"], [_cache("a"), _cache("a", 7, 8, "sdxl")], {}),
    "two images of one stem": (["a.png", "a.jpg"], [_cache("a")], {}),
    "a cache without an image": (["b.png"], [_cache("a")], {}),
}


@exercise("10.3")
def check_size_lookup(answer: Any) -> None:
    """A function of (images, caches) that returns {image: (width, height)}."""
    for done, (what, (images, caches, expected)) in enumerate(_CHAIN.items()):
        for seed in range(3):  # the answer must not rely on an order
            shuffled = [random.Random(seed).sample(names, len(names)) for names in (images, caches)]
            found = {image: tuple(size) for image, size in answer(*shuffled).items()}
            where = f"folder {done + 1} of {len(_CHAIN)}, {what}"
            expect(found == expected, f"{where}: it returned {found} instead of {expected}")


@exercise("10.5")
def check_own_buckets(answer: Any) -> None:
    """(sizes, sampler): lk.collect_sizes of your photos, and an lk.BucketBatchSampler of them."""
    sizes, sampler = answer
    upright = np.stack(upright_sizes(sizes), 1)
    shapes = np.array(sampler.buckets.shapes)[sampler.buckets.select(*upright.T)]
    cropped = 1 - float((shapes.prod(1) / sampler.buckets.resized(*upright.T).prod(1)).mean())
    one_square = 1 - float((upright.min(1) / upright.max(1)).mean())
    most = max(0.05, one_square / 2)
    advice = f"at most {most:.1%} is right: choose a smaller step or other shapes"
    expect(cropped <= most, f"{cropped:.1%} of the pixels are cropped away, by one square {one_square:.1%}; {advice}")
    batches = list(sampler)
    given = {index for batch in batches for index in batch}
    expect(given <= set(sizes.index), "the sampler is of other images: make it from the same frame")
    held = len(given) / len(sizes)
    expect(held >= 0.8, f"an epoch holds only {held:.0%} of the photos: use a smaller batch_size or another remainder")
    full = len(given) / (len(batches) * sampler.batch_size)
    expect(full >= 0.8, f"the photos fill only {full:.0%} of the batches: use a smaller batch_size or fewer shapes")


_PNG_START = b"\x89PNG\r\n\x1a\n" + b"\x00\x00\x00\rIHDR"


@exercise("10b.2")
def check_png_size(answer: Any) -> None:
    """A function of bytes that returns (width, height) or None."""
    for width, height in ((640, 480), (480, 640), (70_000, 1)):
        data = _PNG_START + width.to_bytes(4) + height.to_bytes(4) + bytes(9)
        found = answer(data)
        expect(found is not None and tuple(found) == (width, height), f"a PNG of {width} x {height}: it gave {found!r}")
    jpeg = b"\xff\xd8\xff\xe0" + bytes(40)
    others = {"a JPEG": jpeg, "no bytes": b"", "a PNG that ends within its height": data[:22],
              "a PNG whose first byte is damaged": b"\x00" + data[1:]}  # fmt: skip
    for what, begin in others.items():
        found = answer(begin)
        expect(found is None, f"{what} has no size; it gave {found!r}")


@exercise("11b.2")
def check_crop_view(answer: Any) -> None:
    """A function of (memory, start, shape, box) that returns uint8 (height, width, 3)."""
    first, second = (np.arange(size, dtype=np.uint8) for size in (5 * 7 * 3, 6 * 4 * 3))
    memory = np.concatenate([first, second[::-1]])
    for start, shape, photo in ((0, (5, 7), first), (first.size, (6, 4), second[::-1])):
        whole = photo.reshape(*shape, 3)
        for top, left, height, width in ((0, 0, *shape), (1, 2, 3, 2), (4, 0, 1, 4)):
            found = answer(memory, start, shape, (top, left, height, width))
            crop = f"the box {(top, left, height, width)} of the photo {shape} at {start}"
            expect(found.shape == (height, width, 3), f"{crop} has shape {found.shape}")
            same = np.array_equal(found, whole[top : top + height, left : left + width])
            expect(same, f"{crop} has the wrong pixels")
            expect(np.shares_memory(found, memory), f"{crop} was copied")


@exercise("11b.4")
def check_own_gigabytes(answer: Any) -> None:
    """A pair: the frame that lk.collect_sizes gives for your photos, and a number, in GB."""
    sizes, found_gb = answer
    is_sizes = isinstance(sizes, pd.DataFrame) and {"width", "height"} <= set(sizes)
    expect(is_sizes, f"a {type(sizes).__name__} is not a frame from lk.collect_sizes")
    sides = sizes[["width", "height"]].dropna().to_numpy(float)
    expect(len(sides), "it states the size of no photo")
    shrunk = sides * np.minimum(1, 256 / sides.min(axis=1, keepdims=True))
    expected_gb = 3 * shrunk.prod(axis=1).sum() / 1e9
    ratio = float(found_gb) / expected_gb
    wrong = f"{float(found_gb):g} GB is {ratio:.2f} times the right value for these {len(sides)} photos"
    expect(abs(ratio - 1) <= 0.01, wrong)  # the longer side is rounded to whole pixels
