"""What measures a loader changes nothing of a training: beside the same training, which nothing measured."""

import contextlib
import io
import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import labkit as lk
from labkit.errors import LabkitError
from tests.loaders import Numbers, loader_of

FORK = {"multiprocessing_context": "fork", "num_workers": 1}


class ShufflesItsList(Sampler):
    def __init__(self, n_samples):
        self.indices, self.draw = list(range(n_samples)), random.Random(3)

    def __iter__(self):
        self.draw.shuffle(self.indices)
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


class Drawing(Numbers):
    """Its transform draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.parts = [{"noise": np.random.default_rng(5)}]

    def __getitem__(self, index):
        return torch.cat([super().__getitem__(index), torch.tensor([self.parts[0]["noise"].random()])])


class Streamed(IterableDataset):
    def __iter__(self):
        return (torch.rand(3) for _ in range(12))


class Wrapped:
    """As others wrap a loader, with a count of epochs of its own."""

    def __init__(self, loader):
        self.dataloader, self.epoch = loader, 0

    def __iter__(self):
        self.epoch += 1
        yield from ((self.epoch, batch) for batch in self.dataloader)

    def __len__(self):
        return len(self.dataloader)


def distributed(data):
    return DistributedSampler(data, num_replicas=2, rank=1, seed=4)


def batches_of(photos, **options):
    return lk.BatchLoader(lk.FolderStore(photos), size=16, batch_size=2, seed=7, num_threads=1, **options)


LOADERS = {
    "torch": lambda photos: DataLoader(Numbers(), 2, shuffle=True),
    "torch, a generator": lambda photos: DataLoader(Numbers(), 2, shuffle=True, generator=torch.Generator()),
    "torch, a sampler's generator": lambda photos: DataLoader(
        Numbers(), 2, sampler=RandomSampler(Numbers(), replacement=True, generator=torch.Generator())
    ),
    "torch, a sampler of its own": lambda photos: DataLoader(Numbers(), 2, sampler=ShufflesItsList(12)),
    "torch, a drawing data set": lambda photos: DataLoader(Drawing(), 2),
    "torch, a stream": lambda photos: DataLoader(Streamed(), 2),
    "torch, DistributedSampler": lambda photos: DataLoader(Numbers(24), 2, sampler=distributed(Numbers(24))),
    "torch, workers": lambda photos: DataLoader(Numbers(), 2, shuffle=True, **FORK),
    "torch, workers that stay": lambda photos: DataLoader(Numbers(), 2, shuffle=True, persistent_workers=True, **FORK),
    "torch, wrapped": lambda photos: Wrapped(DataLoader(Numbers(), 2, shuffle=True)),
    "torchdata": lambda photos: StatefulDataLoader(Numbers(), 2, shuffle=True),
    "torchdata, workers that stay": lambda photos: StatefulDataLoader(
        Numbers(), 2, shuffle=True, persistent_workers=True, **FORK
    ),
    "make_loader": lambda photos: loader_of(batch_size=2, shuffle=True),
    "make_loader, workers": lambda photos: loader_of(num_workers=1, start_method="fork", batch_size=2, shuffle=True),
    "make_loader, a generator": lambda photos: loader_of(
        batch_size=2, sampler=RandomSampler(Numbers(), generator=torch.Generator())
    ),
    "make_loader, DistributedSampler": lambda photos: loader_of(
        Numbers(24), batch_size=2, sampler=distributed(Numbers(24))
    ),
    "BatchLoader": batches_of,
    "CUDAPrefetcher, torch": lambda photos: lk.CUDAPrefetcher(DataLoader(Numbers(), 2, shuffle=True), "cpu"),
    "CUDAPrefetcher, make_loader": lambda photos: lk.CUDAPrefetcher(loader_of(batch_size=2, shuffle=True), "cpu"),
    "CUDAPrefetcher, BatchLoader": lambda photos: lk.CUDAPrefetcher(batches_of(photos), "cpu"),
    "CUDAPrefetcher, read_shards": lambda photos: lk.CUDAPrefetcher(shards(photos), "cpu"),
    "read_shards": lambda photos: shards(photos),
    "read_shards, workers that stay": lambda photos: shards(photos, persistent_workers=True, **FORK),
}  # fmt: skip


def shards(photos, **options):
    folder = photos.parent / f"{photos.name}-shards"
    if not folder.exists():
        lk.write_shards(lk.FolderStore(photos), folder, max_count=4)
    return DataLoader(lk.read_shards(folder, shuffle=True, shuffle_buffer=4, transform=small), 2, **options)


def small(image):
    return image[:, :4, :4]


class Broken(Exception):
    pass


def step(batch):
    torch.rand(random.randrange(1, 5) + np.random.randint(3))


def fails(error):
    def fail(batch):
        step(batch)
        raise error

    return fail


def diagnose(loader, do=step):
    lk.diagnose(loader, do, batches=3, rounds=1, limit_s=1)


def compare(loader, do=step):
    with_step = lk.with_step(loader, do)
    variants = {"plain": lambda: loader, "step": lambda: with_step, "pass": lambda: lk.whole_pass(with_step)}
    lk.compare(variants, baseline="plain", rounds=1, progress=False, count=lambda batch: 1)


MEASURES = {
    "diagnose": diagnose,
    "diagnose, which fails": lambda loader: diagnose(loader, fails(Broken())),
    "diagnose, interrupted": lambda loader: diagnose(loader, fails(KeyboardInterrupt())),
    "compare": compare,
    "compare, which fails": lambda loader: compare(loader, fails(Broken())),
    "compare, interrupted": lambda loader: compare(loader, fails(KeyboardInterrupt())),
    "ReplayLoader": lambda loader: lk.ReplayLoader(loader, 3),
    "ReplayLoader of too few": lambda loader: lk.ReplayLoader(loader, 99),
    "tune": lambda loader: lk.tune(
        Numbers(), step, config=lk.LoaderConfig(2, 0), num_workers=[], budget_s=0.01, progress=False
    ),
}  # fmt: skip
N_EPOCHS = 3


def told(batch):
    found = io.BytesIO()
    torch.save(batch, found)
    return found.getvalue()


def trained(make, measure=lambda loader: None):
    """All that a training sees, its states and draws, with measurements before it, in a pass, and between passes.

    The loop is the guide's, also for loaders that count no epochs.
    """
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    loader = make()
    found, state = [], getattr(loader, "state_dict", dict)
    stateful = not isinstance(loader, StatefulDataLoader)  # asking that one begins a pass
    measure(loader)
    counts = isinstance(getattr(loader, "epoch", None), int) and not isinstance(loader, Wrapped)
    for epoch in range(loader.epoch if counts else 0, N_EPOCHS):
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            found.append((epoch, told(batch), torch.rand(2).tolist(), random.random(), np.random.random()))
            found.append(told(state()) if stateful else None)
            if number == epoch:
                measure(loader)
                found.append(told(state()))
        measure(loader)
        found.append(told(state()) if stateful else None)
    if hasattr(loader, "close"):
        loader.close()
    if getattr(loader, "persistent_workers", False) and getattr(loader, "_iterator", None) is not None:
        loader._iterator._shutdown_workers()  # torch has no other way to end them now
    return found


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.usefixtures("unsampled")
def test_a_training_goes_as_it_would_have_without_the_measurement(kind, first_photos):
    """One measurement after the other."""
    measures = itertools.cycle(MEASURES)
    for _ in range([*LOADERS].index(kind)):  # each loader has another one first
        next(measures)

    def measured(loader):
        with contextlib.suppress(Broken, KeyboardInterrupt, LabkitError):
            MEASURES[next(measures)](loader)

    photos = first_photos(12)
    without, with_it = (trained(lambda: LOADERS[kind](photos), how) for how in (lambda loader: None, measured))
    assert len(without) > N_EPOCHS
    assert with_it == without
