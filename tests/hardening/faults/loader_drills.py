"""Drills in which a worker or a thread of a loader fails. Each runs in its own process."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

import labkit as lk
from labkit.app.recording import FolderRecorder
from labkit.measure.recorder import set_recorder
from tests.hardening.faults.drills import Result, describe
from tests.hardening.faults.judge import CLEAR, RIGHT, judge_frame
from tests.hardening.faults.trial import Place

N = 24
Opened = tuple[Callable, Callable]  # what reads all once, and what closes the loader
_LIMIT_S = 60  # for a loader to report the failure, including the start of workers on a busy machine


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
        if index == self.at and (get_worker_info() or not self.number):
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
        self.store, self.keys, self.reads, self.at = store, store.keys, count(1), at

    def read(self, key: str) -> bytes:
        if next(self.reads) == self.at:
            raise OSError(5, "Input/output error", key)
        return self.store.read(key)


def _config(method: str, persistent: bool) -> lk.LoaderConfig:
    options = {"start_method": method, "persistent_workers": persistent}
    return lk.LoaderConfig(batch_size=4, num_workers=2, oversubscribe=True, pin_memory=False, **options)


def _numbers(batches: Any) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


def _open_loader(work: Path, number: int, at: int, config: lk.LoaderConfig, wrap: Callable = iter) -> Opened:
    loader = lk.make_loader(FailingDataset(f"{work}/mark", number, at), config)
    return (lambda: _numbers(wrap(loader))), loader.close


def _open_idle(work: Path, number: int, at: int, config: lk.LoaderConfig) -> Opened:
    """The first pass kills a worker from outside when nobody waits for a batch."""
    loader = lk.make_loader(FailingDataset("", number, -1), config)
    signals = [number]

    def read() -> list[int]:
        found = _numbers(loader)
        if not signals:
            return found
        os.kill(loader._iterator._workers[at % 2].pid, signals.pop())
        time.sleep(0.2)
        return _numbers(loader)

    return read, loader.close


def _open_shards(work: Path, number: int, at: int, config: lk.LoaderConfig) -> Opened:
    """torch's own DataLoader around `read_shards`."""
    dataset = lk.read_shards(f"{work}/src/shards", transform=FailingTransform(f"{work}/mark", number))
    options = {"persistent_workers": config.persistent_workers, "multiprocessing_context": config.start_method}

    def read() -> list[int]:  # with a new loader each time: torch's is unusable after a worker's death
        loader = DataLoader(dataset, batch_size=1, num_workers=2, **options)
        return sorted(int(images[0]) for images, _ in loader)

    return read, lambda: None


LOADERS = {
    "make_loader": _open_loader,
    "make_loader between epochs": _open_idle,
    "CUDAPrefetcher": partial(_open_loader, wrap=partial(lk.CUDAPrefetcher, device="cpu")),
    "DataLoader of shards": _open_shards,
}


def drill_loader(loader: str, method: str, persistent: bool, number: int, at: int, place: Place) -> Result:
    """Read twice: a worker fails in the first pass, which must say so; the second must give all samples in order."""
    read, close = LOADERS[loader](place.work, number, at, _config(method, persistent))
    death = "killed" if number == signal.SIGKILL else signal.Signals(number).name if number else "sample 7"
    errors, words = ("WorkerDied",), (death, "worker")
    is_torchs = loader == "DataLoader of shards"
    if is_torchs:  # torch reports a death by what fails first: waiting, or fetching the batch
        errors = ("RuntimeError", "ConnectionResetError", "EOFError", "FileNotFoundError")
        words += errors[1:]
    result = _judge_failure(
        read, errors if number else ("OSError",), words,
        lambda found: len(found) == 12 if is_torchs else found == list(range(N)),
    )  # fmt: skip
    close()
    return result


def _judge_failure(
    read: Callable, errors: tuple[str, ...], words: tuple[str, ...], is_right: Callable[[Any], bool]
) -> Result:
    """Run `read` twice: it must fail with one of these errors, whose message has one of these words; then be right."""
    start, violations, outcome, message = time.monotonic(), [], CLEAR, ""
    try:
        read()
    except Exception as error:
        message = describe(error)
        if type(error).__name__ not in errors:
            violations.append(f"not one of {errors}: {message[:300]}")
        if not any(word in message for word in words):
            violations.append(f"says none of {words}: {message[:300]}")
        if time.monotonic() - start > _LIMIT_S:
            violations.append(f"took more than {_LIMIT_S} s to say so")
        # torch's own loader ends its persistent workers only when it is collected.
        if "WorkerDied" in errors and (children := multiprocessing.active_children()):
            violations.append(f"{len(children)} workers left after the error")
    else:
        outcome, violations = RIGHT, ["a worker died without an error"]
    if not is_right(read()):
        violations.append("not right after the fault")
    return {"outcome": outcome, "message": message, "violations": violations}


def drill_compare(number: int, at: int, place: Place) -> Result:
    """A worker dies in `compare`, which records no frame; the next one records a whole frame."""
    os.environ["LABKIT_SCALE"] = "ci"
    dataset, out = FailingDataset(f"{place.work}/mark", number, at), place.work / "out"
    set_recorder(FolderRecorder(out))

    def run() -> Any:
        assert not os.listdir(out), "a frame of a run that failed"
        variants = {name: lambda: lk.make_loader(dataset, _config("fork", False)) for name in ("one", "other")}
        return lk.compare(variants, baseline="one", rounds=2, experiment="deadly", progress=False)

    result = _judge_failure(run, ("VariantError",), ("variant",), len)
    result["violations"] += judge_frame(out / "deadly.csv", 2 * 3, "deadly")
    return result


def drill_diagnose(number: int, at: int, place: Place) -> Result:
    """A worker dies in `diagnose`."""
    loader = lk.make_loader(FailingDataset(f"{place.work}/mark", number, at), _config("fork", True))
    run = partial(lk.diagnose, loader, lambda batch: None, batches=2, rounds=1)
    result = _judge_failure(run, ("WorkerDied", "OSError"), ("worker", "sample 7"), lambda found: bool(found.shares))
    loader.close()
    return result


def drill_tune(number: int, at: int, place: Place) -> Result:
    """A worker dies in `tune`."""
    dataset, config = FailingDataset(f"{place.work}/mark", number, at), _config("fork", True)
    run = partial(lk.tune, dataset, lambda batch: None, config=config, budget_s=2, progress=False)
    errors = ("WorkerDied", "VariantError", "OSError")
    return _judge_failure(run, errors, ("worker", "sample 7"), lambda found: not found.frame.empty)


TOOLS = {"compare": drill_compare, "diagnose": drill_diagnose, "tune": drill_tune}


def _images(loader: lk.BatchLoader) -> list[torch.Tensor]:
    loader.set_epoch(0)
    return [images.clone() for images, _ in loader]


def drill_threads(at: int, place: Place) -> Result:
    """A thread of a BatchLoader fails."""
    store, options = lk.FolderStore(place.work / "src" / "photos"), {"size": 16, "batch_size": 2, "num_threads": 2}
    expected = _images(lk.BatchLoader(store, **options))
    read = partial(_images, lk.BatchLoader(FailingStore(store, at), **options))
    result = _judge_failure(
        read, ("OSError",), (".jpg",),
        lambda found: len(found) == len(expected) and all(map(torch.equal, found, expected)),
    )  # fmt: skip
    del read  # the threads of its loader end with it
    gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    if threading.active_count() > 1:
        result["violations"].append(f"{threading.active_count() - 1} threads left")
    return result
