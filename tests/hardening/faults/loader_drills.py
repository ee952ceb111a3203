"""A worker, or a thread, of every loader fails: each drill runs in a process of its own."""

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
from torch.utils.data import Dataset

from tests.hardening.faults.drills import CLEAR, RIGHT, tell

N = 24
_LONG_S = 60  # starting workers included, on a busy machine


class Deadly(Dataset):
    """Numbers; who loads number `at` first kills itself by a signal, or raises OSError for signal 0."""

    def __init__(self, mark: str, number: int, at: int):
        self.mark, self.number, self.at = mark, number, at

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        in_worker = torch.utils.data.get_worker_info() is not None
        if index == self.at and (in_worker or not self.number) and _first(self.mark):
            if not self.number:
                raise OSError("the disk of sample 7 is gone")
            os.kill(os.getpid(), self.number)
            time.sleep(1)
        return torch.full((64,), index)


def _first(mark: str) -> bool:
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _config(method: str, persistent: bool) -> Any:
    from labkit import LoaderConfig

    return LoaderConfig(
        batch_size=4, num_workers=2, start_method=method, persistent_workers=persistent, oversubscribe=True,
        pin_memory=False,
    )  # fmt: skip


def _numbers(batches: Any) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


def _make_loader(work: Path, number: int, at: int, method: str, persistent: bool) -> tuple[Callable, Callable]:
    from labkit import make_loader

    loader = make_loader(Deadly(f"{work}/mark", number, at), _config(method, persistent))
    return (lambda: _numbers(loader)), loader.close


def _prefetcher(work: Path, number: int, at: int, method: str, persistent: bool) -> tuple[Callable, Callable]:
    from labkit import CUDAPrefetcher, make_loader

    loader = make_loader(Deadly(f"{work}/mark", number, at), _config(method, persistent))
    return (lambda: _numbers(CUDAPrefetcher(loader, "cpu"))), loader.close


def _between_epochs(work: Path, number: int, at: int, method: str, persistent: bool) -> tuple[Callable, Callable]:
    """The worker is killed from outside, by the system say, while nobody waits for a batch."""
    from labkit import make_loader

    loader = make_loader(Deadly(f"{work}/mark", number, -1), _config(method, True))

    def read() -> list[int]:
        found = _numbers(loader)
        if _first(f"{work}/mark"):
            os.kill(loader._iterator._workers[at % 2].pid, number or signal.SIGKILL)
            time.sleep(0.2)
            return _numbers(loader)
        return found

    return read, loader.close


def _shards(work: Path, number: int, at: int, method: str, persistent: bool) -> tuple[Callable, Callable]:
    """torch's own DataLoader around `read_shards`."""
    from torch.utils.data import DataLoader

    from labkit import read_shards

    dataset = read_shards(f"{work}/src/shards", transform=Dying(f"{work}/mark", number))
    options = {"persistent_workers": persistent, "multiprocessing_context": method}

    def read() -> list[int]:  # a new one each time: torch's is of no more use after a worker's death
        loader = DataLoader(dataset, batch_size=1, num_workers=2, **options)
        return sorted(int(images[0]) for images, _ in loader)

    return read, lambda: None


class Dying:
    """A transform that gives a checksum of the image, and is deadly once."""

    def __init__(self, mark: str, number: int):
        self.mark, self.number, self.calls = mark, number, 0

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3 and _first(self.mark):
            if not self.number:
                raise OSError("the disk of sample 7 is gone")
            os.kill(os.getpid(), self.number)
            time.sleep(1)
        return image.long().sum()


LOADERS = {
    "make_loader": _make_loader,
    "make_loader between epochs": _between_epochs,
    "CUDAPrefetcher": _prefetcher,
    "DataLoader of shards": _shards,
}


def drill_loader(loader: str, method: str, persistent: bool, number: int, at: int, work: Path) -> None:
    """One pass in which a worker fails, and one after it: an error that says so, then all samples in their order."""
    read, close = LOADERS[loader](work, number, at, method, persistent)
    named = "killed" if number == signal.SIGKILL else signal.Signals(number).name if number else "sample 7"
    # Of torch's own loader the dead are told by what fails first: the wait for them, or the fetch of their last batch.
    torchs = ("RuntimeError", "ConnectionResetError", "EOFError", "FileNotFoundError")
    died, said = (torchs, (*torchs[1:],)) if loader == "DataLoader of shards" else (("WorkerDied",), ())
    result = _seen(read, died if number else ("OSError",), (named, "worker", *said))
    again = read()
    wanted = list(range(N))
    if loader != "DataLoader of shards" and again != wanted:
        result["violations"].append("not right after the fault")
    if loader == "DataLoader of shards" and len(again) != 12:
        result["violations"].append("not right after the fault")
    close()
    tell(result)


def _seen(read: Callable, errors: tuple[str, ...], words: tuple[str, ...]) -> dict[str, Any]:
    start = time.monotonic()
    try:
        read()
    except Exception as error:
        message = f"{type(error).__name__}: {error}" + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        wrong = [] if type(error).__name__ in errors else [f"not one of {errors}: {message[:300]}"]
        if not any(word in message for word in words):
            wrong.append(f"says none of {words}: {message[:300]}")
        if time.monotonic() - start > _LONG_S:
            wrong.append(f"took more than {_LONG_S} s to say so")
        # torch's own loader ends its persistent workers when it is forgotten.
        if "WorkerDied" in errors and (children := multiprocessing.active_children()):
            wrong.append(f"{len(children)} workers left after the error")
        return {"outcome": CLEAR, "message": message, "violations": wrong}
    return {"outcome": RIGHT, "message": "", "violations": ["a worker died, and nobody said so"]}


def drill_compare(number: int, at: int, work: Path) -> None:
    """A worker dies within `compare`: no frame; then a whole one."""
    import labkit as lk
    from labkit.lab.recording import FolderRecorder
    from labkit.measure import set_recorder
    from tests.hardening.faults.judge import wrong_frame

    os.environ["LABKIT_SCALE"] = "ci"
    set_recorder(FolderRecorder(f"{work}/out"))
    dataset = Deadly(f"{work}/mark", number, at)

    def run() -> Any:
        variants = {name: lambda: lk.make_loader(dataset, _config("fork", False)) for name in ("one", "other")}
        return lk.compare(variants, baseline="one", rounds=2, experiment="deadly", progress=False)

    result = _seen(run, ("VariantError",), ("variant",))
    if os.listdir(work / "out"):
        result["violations"].append("a frame of a run that failed")
    run()
    result["violations"] += wrong_frame(work / "out" / "deadly.csv", 2 * 3, "deadly")
    tell(result)


def drill_diagnose(number: int, at: int, work: Path) -> None:
    """A worker dies within `diagnose`."""
    import labkit as lk

    loader = lk.make_loader(Deadly(f"{work}/mark", number, at), _config("fork", True))
    run = lambda: lk.diagnose(loader, lambda batch: None, batches=2, rounds=1)  # noqa: E731
    result = _seen(run, ("WorkerDied", "OSError"), ("worker", "sample 7"))
    if not run().shares:
        result["violations"].append("not right after the fault")
    loader.close()
    tell(result)


def drill_tune(number: int, at: int, work: Path) -> None:
    """A worker dies within `tune`."""
    import labkit as lk

    dataset, config = Deadly(f"{work}/mark", number, at), _config("fork", True)
    run = lambda: lk.tune(dataset, lambda batch: None, config=config, budget_s=2, progress=False)  # noqa: E731
    result = _seen(run, ("WorkerDied", "VariantError", "OSError"), ("worker", "sample 7"))
    if run().frame.empty:
        result["violations"].append("not right after the fault")
    tell(result)


class FailingStore:
    """A store whose `at`-th read fails once, in whichever thread."""

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


def drill_threads(at: int, work: Path) -> None:
    """A thread of a BatchLoader raises."""
    import labkit as lk

    store = lk.FolderStore(work / "src" / "photos")
    wanted = [images.clone() for images, _ in lk.BatchLoader(store, size=16, batch_size=2, num_threads=2)]
    loader = lk.BatchLoader(FailingStore(store, at), size=16, batch_size=2, num_threads=2)
    result = _seen(partial(list, loader), ("OSError",), (".jpg",))
    loader.set_epoch(0)
    found = [images.clone() for images, _ in loader]
    if len(found) != len(wanted) or not all(map(torch.equal, found, wanted)):
        result["violations"].append("not right after the fault")
    del loader  # whose threads are kept for its next epoch, and end with it
    gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    if threading.active_count() > 1:
        result["violations"].append(f"{threading.active_count() - 1} threads left")
    tell(result)
