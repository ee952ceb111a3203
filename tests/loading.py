"""Data sets and loaders for tests of workers, and scripts whose processes can be counted."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import psutil
import torch
from torch.utils.data import Dataset

import labkit as lk

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spawned workers cannot import it


class Numbers(Dataset):
    """Items are their index; `action(index)` comes first."""

    def __init__(self, n_samples: int = 12, action=lambda index: None):
        self.action, self.n_samples = action, n_samples
        self.keys = [f"key-{index}" for index in range(n_samples)]

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        self.action(index)
        return torch.tensor([index])


def config(num_workers: int = 2, **settings) -> lk.LoaderConfig:
    return lk.LoaderConfig(**{"batch_size": 4, "num_workers": num_workers, "oversubscribe": True, **settings})


def indices(loader) -> list[int]:
    return [index for batch in loader for index in batch.flatten().tolist()]


def session_of(leader: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def eventually(condition, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


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
