"""Drills in which a worker or a thread of a loader fails. Each runs in its own process."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import labkit as lk
from labkit.lab.recording import FolderRecorder
from labkit.measure import set_recorder
from tests.hardening.faults.drills import describe, print_result
from tests.hardening.faults.judge import CLEAR, RIGHT, judge_frame

N = 24
_LIMIT_S = 60  # for a loader to report the failure, including the start of workers on a busy machine
_NOT_RIGHT = "not right after the fault"


def _fail_once(mark: str, number: int) -> None:
    """Kill this process by a signal, or raise OSError for number 0; only the first call in any process does."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    if not number:
        raise OSError("the disk of sample 7 is gone")
    os.kill(os.getpid(), number)
    time.sleep(1)


class FailingDataset(Dataset):
    """Numbers; the worker that loads number `at` first fails."""

    def __init__(self, mark: str, number: int, at: int):
        self.mark, self.number, self.at = mark, number, at

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        in_worker = torch.utils.data.get_worker_info() is not None
        if index == self.at and (in_worker or not self.number):
            _fail_once(self.mark, self.number)
        return torch.full((64,), index)


class FailingTransform:
    """Gives a checksum of the image; the first worker that gets to its third image fails."""

    def __init__(self, mark: str, number: int):
        self.mark, self.number, self.calls = mark, number, 0

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            _fail_once(self.mark, self.number)
        return image.long().sum()


class FailingStore:
    """A store whose `at`-th read fails, in whichever thread."""

    def __init__(self, store: Any, at: int):
        self.store, self.left, self.lock = store, at, threading.Lock()

    def keys(self) -> Any:
        return self.store.keys()

    def read(self, key: str) -> bytes:
        with self.lock:
            self.left -= 1
            fails = self.left == 0
        if fails:
            raise OSError(5, "Input/output error", key)
        return self.store.read(key)


def _config(method: str, persistent: bool) -> lk.LoaderConfig:
    return lk.LoaderConfig(
        batch_size=4, num_workers=2, start_method=method, persistent_workers=persistent, oversubscribe=True,
        pin_memory=False,
    )  # fmt: skip


def _numbers(batches: Any) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


def _open_loader(work: Path, number: int, at: int, method: str, persistent: bool) -> tuple[Callable, Callable]:
    loader = lk.make_loader(FailingDataset(f"{work}/mark", number, at), _config(method, persistent))
    return (lambda: _numbers(loader)), loader.close


def _open_prefetcher(work: Path, number: int, at: int, method: str, persistent: bool) -> tuple[Callable, Callable]:
    loader = lk.make_loader(FailingDataset(f"{work}/mark", number, at), _config(method, persistent))
    return (lambda: _numbers(lk.CUDAPrefetcher(loader, "cpu"))), loader.close


def _open_idle(work: Path, number: int, at: int, method: str, persistent: bool) -> tuple[Callable, Callable]:
    """The first pass kills a worker from outside when nobody waits for a batch."""
    loader = lk.make_loader(FailingDataset("", number, -1), _config(method, True))
    signals = [number or signal.SIGKILL]

    def read() -> list[int]:
        found = _numbers(loader)
        if not signals:
            return found
        os.kill(loader._iterator._workers[at % 2].pid, signals.pop())
        time.sleep(0.2)
        return _numbers(loader)

    return read, loader.close


def _open_shards(work: Path, number: int, at: int, method: str, persistent: bool) -> tuple[Callable, Callable]:
    """torch's own DataLoader around `read_shards`."""
    dataset = lk.read_shards(f"{work}/src/shards", transform=FailingTransform(f"{work}/mark", number))
    options = {"persistent_workers": persistent, "multiprocessing_context": method}

    def read() -> list[int]:  # with a new loader each time: torch's is unusable after a worker's death
        loader = DataLoader(dataset, batch_size=1, num_workers=2, **options)
        return sorted(int(images[0]) for images, _ in loader)

    return read, lambda: None


LOADERS = {
    "make_loader": _open_loader,
    "make_loader between epochs": _open_idle,
    "CUDAPrefetcher": _open_prefetcher,
    "DataLoader of shards": _open_shards,
}


def drill_loader(loader: str, method: str, persistent: bool, number: int, at: int, work: Path) -> None:
    """Read twice: a worker fails in the first pass, which must say so; the second must give all samples in order."""
    read, close = LOADERS[loader](work, number, at, method, persistent)
    word = "killed" if number == signal.SIGKILL else signal.Signals(number).name if number else "sample 7"
    errors, words = ("WorkerDied",), (word, "worker")
    if loader == "DataLoader of shards":  # torch reports a death by what fails first: waiting, or fetching the batch
        errors = ("RuntimeError", "ConnectionResetError", "EOFError", "FileNotFoundError")
        words += errors[1:]
    result = _judge_failure(read, errors if number else ("OSError",), words)
    again = read()
    if len(again) != 12 if loader == "DataLoader of shards" else again != list(range(N)):
        result["violations"].append(_NOT_RIGHT)
    close()
    print_result(result)


def _judge_failure(read: Callable, errors: tuple[str, ...], words: tuple[str, ...]) -> dict[str, Any]:
    start = time.monotonic()
    try:
        read()
    except Exception as error:
        message = describe(error)
        violations = [] if type(error).__name__ in errors else [f"not one of {errors}: {message[:300]}"]
        if not any(word in message for word in words):
            violations.append(f"says none of {words}: {message[:300]}")
        if time.monotonic() - start > _LIMIT_S:
            violations.append(f"took more than {_LIMIT_S} s to say so")
        # torch's own loader ends its persistent workers only when it is collected.
        if "WorkerDied" in errors and (children := multiprocessing.active_children()):
            violations.append(f"{len(children)} workers left after the error")
        return {"outcome": CLEAR, "message": message, "violations": violations}
    return {"outcome": RIGHT, "message": "", "violations": ["a worker died without an error"]}


def drill_compare(number: int, at: int, work: Path) -> None:
    """A worker dies in `compare`, which records no frame; the next one records a whole frame."""
    os.environ["LABKIT_SCALE"] = "ci"
    set_recorder(FolderRecorder(f"{work}/out"))
    dataset = FailingDataset(f"{work}/mark", number, at)

    def run() -> Any:
        variants = {name: lambda: lk.make_loader(dataset, _config("fork", False)) for name in ("one", "other")}
        return lk.compare(variants, baseline="one", rounds=2, experiment="deadly", progress=False)

    result = _judge_failure(run, ("VariantError",), ("variant",))
    if os.listdir(work / "out"):
        result["violations"].append("a frame of a run that failed")
    run()
    result["violations"] += judge_frame(work / "out" / "deadly.csv", 2 * 3, "deadly")
    print_result(result)


def drill_diagnose(number: int, at: int, work: Path) -> None:
    """A worker dies in `diagnose`."""
    loader = lk.make_loader(FailingDataset(f"{work}/mark", number, at), _config("fork", True))
    run = partial(lk.diagnose, loader, lambda batch: None, batches=2, rounds=1)
    result = _judge_failure(run, ("WorkerDied", "OSError"), ("worker", "sample 7"))
    if not run().shares:
        result["violations"].append(_NOT_RIGHT)
    loader.close()
    print_result(result)


def drill_tune(number: int, at: int, work: Path) -> None:
    """A worker dies in `tune`."""
    dataset, config = FailingDataset(f"{work}/mark", number, at), _config("fork", True)
    run = partial(lk.tune, dataset, lambda batch: None, config=config, budget_s=2, progress=False)
    result = _judge_failure(run, ("WorkerDied", "VariantError", "OSError"), ("worker", "sample 7"))
    if run().frame.empty:
        result["violations"].append(_NOT_RIGHT)
    print_result(result)


TOOLS = {"compare": drill_compare, "diagnose": drill_diagnose, "tune": drill_tune}


def drill_threads(at: int, work: Path) -> None:
    """A thread of a BatchLoader fails."""
    store = lk.FolderStore(work / "src" / "photos")
    expected = [images.clone() for images, _ in lk.BatchLoader(store, size=16, batch_size=2, num_threads=2)]
    loader = lk.BatchLoader(FailingStore(store, at), size=16, batch_size=2, num_threads=2)
    result = _judge_failure(partial(list, loader), ("OSError",), (".jpg",))
    loader.set_epoch(0)
    found = [images.clone() for images, _ in loader]
    if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
        result["violations"].append(_NOT_RIGHT)
    del loader  # its threads end with it
    gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    if threading.active_count() > 1:
        result["violations"].append(f"{threading.active_count() - 1} threads left")
    print_result(result)
