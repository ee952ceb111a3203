"""Data sets, stores and loaders for tests of loading, and scripts whose processes can be counted."""

import contextlib
import dataclasses
import gc
import io
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import numpy as np
import psutil
import torch
from PIL import Image
from torch.utils.data import Dataset
from tqdm import TMonitor

import labkit as lk
from labkit.util.process import PerProcess

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spawned workers cannot import it


def no_action(index: int) -> None:
    pass


class Numbers(Dataset):
    """Items are (index, a draw of each library that a transform may use); `action(index)` comes first."""

    def __init__(self, n_samples: int = 12, action: Callable[[int], object] = no_action):
        self.action, self.n_samples, self.transform = action, n_samples, None
        self.keys = [f"key-{index}" for index in range(n_samples)]

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        self.action(index)
        item = torch.tensor([float(index), torch.rand(()).item(), random.random(), np.random.random()])
        return self.transform(item) if self.transform else item


def loader_of(dataset=None, num_workers: int = 0, **options):
    """`make_loader` with batches of four; options are its own, and those of `LoaderConfig`."""
    names = {field.name for field in dataclasses.fields(lk.LoaderConfig)} & options.keys()
    settings = {"batch_size": 4, "oversubscribe": True, **{name: options.pop(name) for name in names}}
    config = lk.LoaderConfig(num_workers=num_workers, **settings)
    return lk.make_loader(Numbers() if dataset is None else dataset, config, **options)


def count_repeats(batches) -> int:
    """Samples of tensors that equal an earlier one bit for bit: draws that came from the same stream."""
    samples = [sample.contiguous().numpy().tobytes() for batch in batches for sample in batch]
    return len(samples) - len(set(samples))


def rows(loader) -> list[tuple]:
    """All samples of a pass."""
    return [tuple(row) for batch in loader for row in batch.tolist()]


def indices(loader) -> list[int]:
    return [int(row[0]) for row in rows(loader)]


def same(one, other) -> bool:
    """Whether two batches, or lists of them, are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def solid(red: int) -> bytes:
    """A small image file of one color, which names it."""
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), (red, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def red(image: torch.Tensor) -> int:
    """What the color of a solid image says."""
    return int(image[0, 0, 0])


def firsts(samples: list[tuple]) -> list:
    """A batch of images without their labels."""
    return [first for first, _ in samples]


def store_that_reads(store, read: Callable[[str], bytes]):
    """A store of the same keys whose reads are `read(key)`."""
    return SimpleNamespace(keys=store.keys, read=read)


class MeetingStore:
    """Reads of each process meet `n_at_a_time`, the first `n_meetings` times; `notes` lists what was read.

    A read that would begin only after another ends breaks their meeting, after 20 s.
    """

    def __init__(self, store, n_at_a_time: int, n_meetings: int, notes: Path):
        self.store, self.notes, self.n_reads = store, notes, n_at_a_time * n_meetings
        self.meeting = PerProcess(partial(threading.Barrier, n_at_a_time, timeout=20))
        self.count = PerProcess(itertools.count)

    def keys(self):
        return self.store.keys()

    def read(self, key: str) -> bytes:
        if next(self.count()) < self.n_reads:
            self.meeting().wait()
        with open(self.notes, "a") as file:
            file.write(f"{key}\n")
        return self.store.read(key)


def session_of(leader: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def new_threads(before: list[threading.Thread]) -> list[threading.Thread]:
    """Threads since then, but for tqdm's own monitor, which it starts and ends as bars come and go."""
    gc.collect()  # those of a loader end on their own, once it is gone
    return [one for one in threading.enumerate() if one not in before and not isinstance(one, TMonitor)]


@contextlib.contextmanager
def script_in_session(path: Path, code: str, *arguments: object) -> Iterator[subprocess.Popen]:
    """Run a script in a session of its own, up to the "now" that it prints; in the end kill what is left of it."""
    path.write_text(code)
    child = subprocess.Popen(
        [sys.executable, str(path), *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert child.stdout.readline() == "now\n", child.stderr.read()
        yield child
    finally:
        for pid in session_of(child.pid):
            os.kill(pid, signal.SIGKILL)
        child.communicate()
