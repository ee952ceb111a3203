"""Whoever does what a message of the loaders' advises gets what it promises: each is followed to its end."""

import concurrent.futures
import functools
import multiprocessing
import operator
import re
import sys
import threading
import warnings
from functools import partial

import cloudpickle
import fsspec
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, WeightedRandomSampler
from torchvision import transforms as v1
from torchvision.transforms import v2

import labkit as lk
from labkit.loading.samplers import LoaderWarning
from tests.loaders import Numbers, indices, loader_of, same
from tests.serving import QuietFolder, serving

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spawned workers cannot import a test file

MASK = np.arange(12) % 3 == 0
CROP = v2.RandomResizedCrop(16, antialias=True)


def told(call) -> str:
    """The message of a call that fails, with its notes."""
    with pytest.raises(Exception) as caught:
        call()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def n_images(loader) -> int:
    return sum(len(labels) for _, labels in loader)


def batch(source, **options):
    return lk.BatchLoader(source, size=32, batch_size=4, **options)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


class Shared(list):
    """The indices that this rank loads, which says so."""

    rank, num_replicas = 1, 2


class Locked:
    """A transform that holds what cannot be copied, or makes it where it is first used."""

    def __init__(self, lock=None):
        self.lock = lock

    def __call__(self, image):
        self.lock = self.lock or threading.Lock()
        with self.lock:
            return 255 - image

    def __getstate__(self):
        return {"lock": self.lock}


class ByName(Numbers):
    """Takes names, and objects of which no draw can depend."""

    def __getitem__(self, index):
        return super().__getitem__(int(str(index)))


ADVICE = [  # a name; what is done, with a store of 12 images; the words of the advice; what it says, which works
    ("iterable", lambda s: lk.make_loader(Stream()), "use torch's DataLoader for iterable ones",
     lambda s: sum(DataLoader(Stream())) == 66),
    ("a loader", lambda s: lk.make_loader(loader_of()), "and of a loader its `dataset`",
     lambda s: indices(loader_of(loader_of().dataset)) == list(range(12))),
    ("a number as config", lambda s: lk.make_loader(Numbers(), 5), "such as lk.LoaderConfig(batch_size=5)",
     lambda s: [len(lk.make_loader(Numbers(), **o)) for o in ({"config": lk.LoaderConfig(batch_size=5)},
                                                              {"batch_size": 5})] == [3, 3]),
    ("config and settings", lambda s: lk.make_loader(Numbers(), lk.LoaderConfig(), seed=1), "not both",
     lambda s: lk.make_loader(Numbers(), lk.LoaderConfig(seed=1)).seed == lk.make_loader(Numbers(), seed=1).seed == 1),
    ("order twice", lambda s: loader_of(sampler=[1], shuffle=True), "leave out one of them",
     lambda s: indices(loader_of(sampler=[1])) == [1] and sorted(indices(loader_of(shuffle=True))) == [*range(12)]),
    ("batches twice", lambda s: loader_of(batch_sampler=[[1]], shuffle=True), "leave out one",
     lambda s: indices(loader_of(batch_sampler=[[1]])) == [1]),
    ("a set", lambda s: loader_of(sampler={3, 1}), "give a list",
     lambda s: indices(loader_of(sampler=[3, 1])) == [3, 1]),
    ("a mask", lambda s: loader_of(sampler=MASK), "give the indices, such as np.flatnonzero(mask)",
     lambda s: all(indices(loader_of(sampler=np.flatnonzero(mask))) == [0, 3, 6, 9]
                   for mask in (MASK, MASK.tolist(), torch.tensor(MASK), pd.Series(MASK)))),
    ("a generator", lambda s: loader_of(sampler=iter([2, 1])), "Give a list, or an object whose __iter__ starts",
     lambda s: [indices(loader) for loader in [loader_of(sampler=[2, 1])] for _ in range(2)] == [[2, 1]] * 2),
    ("flat batches", lambda s: list(loader_of(batch_sampler=[0, 1])), "give lists of indices, such as [0, 1, 2]",
     lambda s: indices(loader_of(batch_sampler=[[0, 1, 2]])) == [0, 1, 2]),
    ("weights of classes", lambda s: loader_of(lk.ImageDataset(s), sampler=WeightedRandomSampler([1.0, 1, 0], 30)),
     "such as np.asarray(class_weights)[dataset.labels]", lambda s: weighted(s)),
    ("indices of objects", lambda s: list(loader_of(ByName(), sampler=[object()])), "look it up under a number or name",
     lambda s: indices(loader_of(ByName(), sampler=["3", 4])) == [3, 4]),
    ("an index out of range", lambda s: list(batch(s, sampler=["x"])), "lk.make_loader takes any index of your data",
     lambda s: indices(loader_of(ByName(), sampler=["3"])) == [3] and n_images(batch(s, sampler=range(12))) == 12),
    ("mean alone", lambda s: batch(s, mean=(0.5,) * 3), "pass both mean and std, or neither",
     lambda s: n_images(batch(s)) == 12),
    ("mean of bytes", lambda s: batch(s, mean=(0.5,) * 3, std=(0.5,) * 3), "pass dtype=torch.float32, torch.float16 or",
     lambda s: all(next(iter(batch(s, mean=(0.5,) * 3, std=(0.5,) * 3, dtype=dtype)))[0].dtype == dtype
                   for dtype in (torch.float32, torch.float16, torch.bfloat16))),
    ("crops of a number", lambda s: batch(s, crops=5), "(size, scale, number), as (224, (0.25, 1), 2)",
     lambda s: len(next(iter(batch(s, crops=[(224, (0.25, 1), 2)])))[0]) == 2),
    ("crops without training", lambda s: batch(s, crops=[(32, (0.25, 1), 2)], train=False), "train=False, which takes",
     lambda s: n_images(batch(s, train=False)) == 12),
    ("resize while training", lambda s: batch(s, resize=40), "goes with train=False",
     lambda s: n_images(batch(s, resize=40, train=False)) == 12),
    ("interpolation", lambda s: batch(s, interpolation="bicubic", antialias=False), "needs antialias=True",
     lambda s: n_images(batch(s, interpolation="bicubic", antialias=True)) == 12),
    ("a lock", lambda s: batch(s, transform=Locked(threading.Lock())), "open files, locks and connections where they",
     lambda s: n_images(lk.BatchLoader(s, size=32, transform=declared(Locked()))) == 12),
    ("PIL's", lambda s: list(batch(s, transform=declared(v1.Compose([v1.ToTensor()])))), "lk.PILDataset and lk.make_",
     lambda s: n_images(loader_of(lk.PILDataset(s, transform=v1.Compose([v1.CenterCrop(16), v1.ToTensor()])))) == 12),
    ("several sizes", lambda s: list(loader_of(lk.ImageDataset(s))), "transform=torchvision.transforms.v2.RandomResiz",
     lambda s: n_images(loader_of(lk.ImageDataset(s, transform=CROP))) == n_images(batch(s)) == 12),
    ("images of PIL", lambda s: list(loader_of(lk.PILDataset(s), collate_fn=lk.collate)), "as v2.ToImage()",
     lambda s: n_images(loader_of(lk.PILDataset(s, transform=v2.Compose([CROP, v2.ToImage()])))) == 12),
    ("a used-up generator", lambda s: [list(p) for p in [lk.CUDAPrefetcher(iter([1]), "cpu")] for _ in range(2)],
     "or wrap a new one for each epoch", lambda s: [list(lk.CUDAPrefetcher(iter([1]), "cpu"))] * 2 == [[1], [1]]),
    ("one rank of none", lambda s: lk.BucketBatchSampler(sizes_of(s), 2, rank=0), "must be given together",
     lambda s: len(lk.BucketBatchSampler(sizes_of(s), 2, rank=0, world_size=1)) > 0),
    ("rows without numbers", lambda s: lk.BucketBatchSampler(sizes_of(s).set_index("path", drop=False), 2),
     "sizes.reset_index(drop=True)", lambda s: n_images(bucketed(s, sizes_of(s).reset_index(drop=True))) == 12),
]  # fmt: skip


def sizes_of(store) -> pd.DataFrame:
    return lk.collect_sizes(store.root, caches=False, progress=False)


def bucketed(store, sizes):
    sampler = lk.BucketBatchSampler(sizes, 2)
    return loader_of(lk.ImageDataset(store, buckets=sampler.buckets), batch_sampler=sampler)


def declared(transform):
    transform.draws_globally = False
    return transform


def weighted(store) -> bool:
    dataset, seen = lk.ImageDataset(store, transform=CROP), []
    for class_weights in ([1.0, 1, 0], torch.tensor([1.0, 1, 0]), np.array([1.0, 1, 0])):
        sampler = WeightedRandomSampler(np.asarray(class_weights)[dataset.labels], 30)
        seen.append({int(label) for _, labels in loader_of(dataset, sampler=sampler) for label in labels})
    return seen == [{0, 1}] * 3


@pytest.mark.parametrize(("mistake", "advice", "follow"), [row[1:] for row in ADVICE], ids=[row[0] for row in ADVICE])
def test_what_a_message_says_works(pictures, mistake, advice, follow):
    assert advice in told(lambda: mistake(pictures))
    assert follow(pictures)


# Frames of sizes.


@pytest.mark.parametrize("kind", ["other order", "more rows", "fewer rows", "part", "part of a part"])
def test_rows_of_other_images_are_numbered_by_the_line_that_is_named(pictures, kind):
    sizes = sizes_of(pictures)
    dataset = lk.ImageDataset(
        pictures, buckets=lk.Buckets.fit(sizes), keys=list(pictures.keys())[: 12 - (kind == "more rows")]
    )
    if kind == "other order":
        sizes = sizes[::-1].reset_index(drop=True)
    if kind == "fewer rows":
        sizes = sizes[4:].reset_index(drop=True)
    if kind == "part":
        dataset = Subset(dataset, [7, 3, 5])
    if kind == "part of a part":
        dataset = Subset(Subset(dataset, [7, 3, 5, 1]), [2, 0])
    said = told(lambda: lk.make_loader(dataset, batch_sampler=lk.BucketBatchSampler(sizes, 2)))
    line = re.search(r"numbers = .*map\(numbers\)\)", said)[0]
    names = {"dataset": dataset, "sizes": sizes}
    exec(line, names)  # noqa: S102
    sampler = lk.BucketBatchSampler(names["sizes"], 2, buckets=lk.Buckets.fit(sizes_of(pictures)))
    loader = loader_of(dataset, batch_sampler=sampler)
    assert n_images(loader) == len(names["sizes"]) == min(len(dataset), len(sizes))


def test_rows_beyond_a_data_set_without_keys_are_left_out_as_is_said(pictures):
    sizes = sizes_of(pictures)
    said = told(lambda: loader_of([0] * 9, batch_sampler=lk.BucketBatchSampler(sizes, 2)))
    left = eval(re.search(r"sizes\[.*\]", said)[0], {"sizes": sizes})  # noqa: S307
    assert sum(map(len, loader_of([0] * 9, batch_sampler=lk.BucketBatchSampler(left, 2)))) == 9


@pytest.mark.parametrize("n_ranks", [5, 7, 11, 13])
def test_ranks_that_cannot_share_the_batches_are_told_what_can(pictures, n_ranks):
    def sampler(batch_size=1, n_ranks=n_ranks):
        return lk.BucketBatchSampler(sizes_of(pictures), batch_size, rank=n_ranks - 1, world_size=n_ranks)

    said = told(sampler)
    assert "another number of ranks" in said
    assert len(list(sampler(n_ranks=2))) > 0
    assert ("a larger batch_size" in said) == (n_ranks <= 12)
    if n_ranks <= 12:
        assert len(list(sampler(batch_size=12))) > 0


# Draws.


class Adds:
    def __init__(self):
        self.draw = getattr

    def add(self, image):
        return self.draw(image, "clamp")(max=99)

    __call__ = add


def by_name(image):
    return getattr(image, "clamp")(max=99)  # noqa: B009 - whose name is no code


@pytest.mark.parametrize("name", ["function", "object", "bound method", "builtin", "partial"])
def test_what_draws_nothing_is_taken_once_it_says_so(pictures, name):
    transform = {
        "function": by_name, "object": Adds(), "bound method": Adds().add, "builtin": operator.attrgetter("data"),
        "partial": functools.partial(Adds().add),
    }[name]  # fmt: skip
    said = told(lambda: batch(pictures, transform=transform))
    assert "set transform.draws_globally = False" in said
    assert re.search("by `[^`]*get", said)
    if name in ("bound method", "builtin"):
        assert "wrap any other, such as a bound method or a builtin, in a function" in said
        method = transform
        transform = lambda image: method(image)  # noqa: E731
    transform.draws_globally = False
    assert n_images(batch(pictures, transform=transform)) == 12


OWN_RNG = """
import numpy as np
RNG = np.random.default_rng(0)

def shared(image):
    return image ^ int(RNG.integers(0, 255))

class Own:
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, image):
        return image ^ int(self.rng.integers(0, 255))
"""


@pytest.mark.parametrize("is_declared", [False, True])
def test_a_generator_of_a_module_becomes_an_attribute_or_goes_to_workers(pictures, tmp_path, monkeypatch, is_declared):
    (tmp_path / "with_rng.py").write_text(OWN_RNG)
    monkeypatch.syspath_prepend(tmp_path)
    import with_rng

    if is_declared:
        with_rng.shared.draws_globally = False
    said = told(lambda: batch(pictures, transform=with_rng.shared))
    assert "make the generator an attribute of the transform, and set transform.draws_globally = False" in said
    own = declared(with_rng.Own())
    epochs = [[images for images, _ in batch(pictures, transform=own, num_threads=n)] for n in (1, 3)]
    assert same(*epochs)
    assert "give it to lk.ImageDataset(source, transform=transform) and lk.make_loader" in said
    dataset = lk.ImageDataset(pictures, transform=v2.Compose([v2.CenterCrop(16), with_rng.shared]))
    assert same(*(list(loader_of(dataset, n, start_method="fork" if n else None)) for n in (0, 1)))
    del sys.modules["with_rng"]


# Workers.


class Remote:
    """Files of a server, by fsspec: of a file system that it holds, or of one that it asks for each time."""

    def __init__(self, url, is_held):
        self.url, self.files = url, fsspec.filesystem("http") if is_held else None

    def __len__(self):
        return 4

    def __getitem__(self, index):
        files = self.files or fsspec.filesystem("http")
        return torch.frombuffer(bytearray(files.cat_file(f"{self.url}/{index}")), dtype=torch.uint8)


def test_a_file_system_of_fsspec_works_in_forked_workers_as_the_note_says(tmp_path):
    for number in range(4):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 9)
    expected = [[number] * 9 for number in range(4)]
    with serving(partial(QuietFolder, directory=tmp_path)) as port:
        held, asked = (Remote(f"http://127.0.0.1:{port}", is_held) for is_held in (True, False))
        said = told(lambda: list(loader_of(held, 1, start_method="fork")))
        assert "This class is not fork-safe" in said
        assert "call fsspec.filesystem(...) within __getitem__" in said
        assert asked[0].tolist() == [0] * 9  # a look before the workers start
        assert rows_of(loader_of(asked, 2, start_method="fork")) == expected
        assert "or pass LoaderConfig(start_method='spawn')" in said
        assert rows_of(loader_of(held, 1, start_method="spawn")) == expected


def rows_of(loader) -> list[list[int]]:
    return [row for each in loader for row in each.tolist()]


def test_what_cannot_be_sent_is_opened_in_the_worker():
    class Opens(Numbers):
        lock = None

        def __getitem__(self, index):
            self.lock = self.lock or threading.Lock()
            with self.lock:
                return super().__getitem__(index)

    held = Opens()
    held.lock = threading.Lock()
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        said = told(lambda: list(loader_of(held, 1, start_method="spawn")))
    assert "open those where they are first used" in said
    assert indices(loader_of(Opens(), 1, start_method="spawn")) == list(range(12))


def counted_in_a_child() -> int:
    return len(list(loader_of(Numbers(), num_workers=1, start_method="fork")))


def test_a_daemonic_process_loads_alone_and_an_executors_has_workers():
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        with pytest.raises(lk.LabkitError) as caught:
            pool.apply(counted_in_a_child)
        assert "use concurrent.futures.ProcessPoolExecutor, whose processes can" in str(caught.value)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        assert executor.submit(counted_in_a_child).result() == 3


def test_more_workers_than_cores_are_kept_as_the_warning_says():
    n = lk.usable_cores() + 1
    with pytest.warns(LoaderWarning, match=r"LoaderConfig\(oversubscribe=True\) keeps them"):
        assert lk.make_loader(Numbers(), lk.LoaderConfig(num_workers=n)).num_workers == n - 1
    assert lk.make_loader(Numbers(), lk.LoaderConfig(num_workers=n, oversubscribe=True)).num_workers == n


def test_samples_are_shared_out_among_ranks_in_each_of_the_ways_that_are_named(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(LoaderWarning, match="such as torch's DistributedSampler, or leave the sampler out.* attributes"):
        list(loader_of(sampler=[1, 3, 5]))
    own = (
        {"sampler": DistributedSampler(range(12), 2, 1, shuffle=False)},
        {},
        {"sampler": Shared([1, 3, 5])},
    )
    with warnings.catch_warnings(action="error"):
        assert [indices(loader_of(**options)) for options in own] == [[1, 3, 5, 7, 9, 11]] * 2 + [[1, 3, 5]]


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_without_an_accelerator_the_cpu_is_taken(device):
    if torch.device(device).type == getattr(torch.accelerator.current_accelerator(), "type", None):
        pytest.skip(f"has {device}")
    assert "pass device='cpu'" in told(lambda: lk.CUDAPrefetcher([torch.ones(1)], device))
    assert list(lk.CUDAPrefetcher([torch.ones(1)], device="cpu")) == [torch.ones(1)]
