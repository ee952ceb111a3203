"""A timeline of a training loop: workers, host, copies and compute as spans on one time axis."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from labkit.errors import ArgumentError
from labkit.loading.prefetch import CopyStream, CUDAPrefetcher
from labkit.simulation.simulated_device import is_simulated
from labkit.util.arguments import require_choice
from labkit.util.tensor_trees import move_tensors

COPIES = ("blocking", "non_blocking", "prefetch")


class Stamped(Dataset):
    """A data set whose items record when, and by which worker, they were made.

    Items: `(item, stamp)`; the stamp is a float64 tensor (3,): worker (-1: the main process), start, end. Times come
    from `time.perf_counter()`, which on Linux is the same clock in all processes.
    """

    def __init__(self, dataset: Dataset):
        self.dataset: Any = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        start, worker = time.perf_counter(), get_worker_info()
        item = self.dataset[index]
        number = -1 if worker is None else worker.id
        return item, torch.tensor([number, start, time.perf_counter()], dtype=torch.float64)


def trace(
    loader: Iterable[tuple[Any, Tensor]],
    step: Callable[[Any], Any],
    *,
    n_batches: int,
    device: Any = "cpu",
    copy: str = "blocking",
) -> pd.DataFrame:
    """Run training steps and record who worked when.

    Args:
        loader: A loader over a `Stamped` data set.
        step: Called with each batch, on the device. On CUDA it may return before the work is done.
        n_batches: Steps to record, after two that warm up.
        device: Where the step computes.
        copy: `"blocking"` (`batch.to(device)`), `"non_blocking"`, or `"prefetch"` (`CUDAPrefetcher`).

    Returns:
        One row per span: `lane` (worker 0, ..., host, copy, GPU), `kind`, `start_s`, `end_s`, `batch`; in seconds since
        the first step; `simulated`, if a simulation was active. `plot_timeline` draws it, `save_trace` saves it.

    Raises:
        ValueError: the loader ends before `n_batches` + 2, or `copy` is unknown.

    Taught in: notebooks/07_cuda_prefetch.ipynb
    """
    require_choice("copy", copy, COPIES)
    device = torch.device(device)
    recorder = _CudaSpans(device) if device.type == "cuda" else _HostSpans(device)
    batches = recorder.batches(loader, copy)
    for batch, _ in list(islice(batches, 2)):
        step(batch)
    recorder.start()
    for number in range(n_batches):
        with recorder.host("wait", number):
            item = next(batches, None)
        if item is None:
            raise ArgumentError(f"the loader must give {n_batches} batches after 2 to warm up, got {number}")
        batch, stamps = item
        if device.type != "cpu" and copy != "prefetch":
            with recorder.host("copy", number), recorder.on_device("copy", number):
                batch = move_tensors(batch, device, non_blocking=copy == "non_blocking")
        with recorder.host("step", number), recorder.on_device("compute", number):
            step(batch)
        recorder.workers(stamps, number)
    return recorder.frame()


class _HostSpans:
    """Spans by the host's clock, which is all there is on a CPU."""

    def __init__(self, device: torch.device):
        self.device, self.began = device, 0.0
        self.rows: list[Any] = []
        self.stamps: list[Any] = []

    def batches(self, loader: Iterable[Any], copy: str) -> Any:
        return iter(CUDAPrefetcher(loader, self.device) if copy == "prefetch" else loader)

    def start(self) -> None:
        self.began = time.perf_counter()

    @contextmanager
    def host(self, kind: str, batch: int) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.add("host", kind, begun, time.perf_counter(), batch)

    def on_device(self, kind: str, batch: int) -> AbstractContextManager[None]:
        return nullcontext()

    def workers(self, stamps: Tensor, batch: int) -> None:
        self.stamps.append((stamps, batch))  # read at the end, since reading from a GPU waits

    def add(self, lane: str, kind: str, start: float, end: float, batch: int) -> None:
        span = {"start_s": max(0.0, start - self.began), "end_s": end - self.began, "batch": batch}
        if span["end_s"] > 0:  # otherwise it ended before the first step
            self.rows.append({"lane": lane, "kind": kind, **span})

    def frame(self) -> pd.DataFrame:
        for stamps, batch in self.stamps:
            worker, start, end = int(stamps[0, 0]), float(stamps[:, 1].min()), float(stamps[:, 2].max())
            self.add("host" if worker < 0 else f"worker {worker}", "load", start, end, batch)
            if worker < 0:  # the host did not wait, it loaded
                self.rows = [row for row in self.rows if (row["kind"], row["batch"]) != ("wait", batch)]
        lanes = sorted({row["lane"] for row in self.rows}, key=_lane_order)
        frame = pd.DataFrame(sorted(self.rows, key=lambda row: (lanes.index(row["lane"]), row["start_s"])))
        return frame.assign(simulated=True) if is_simulated() else frame


class _CudaSpans(_HostSpans):
    """Adds what the streams did, by events, which are read at the end because reading one waits for it."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.pairs: list[Any] = []
        self.lane: _TimedCopyStream | None = None
        self.sent_before = 0

    def batches(self, loader: Iterable[Any], copy: str) -> Any:
        if copy != "prefetch":
            return iter(loader)
        prefetcher = CUDAPrefetcher(loader, self.device)
        self.lane = prefetcher.lane = _TimedCopyStream(self.device)
        return iter(prefetcher)

    def start(self) -> None:
        self.sent_before = len(self.lane.pairs) if self.lane else 0
        torch.cuda.synchronize(self.device)
        self.zero = _record_event(torch.cuda.current_stream(self.device))
        torch.cuda.synchronize(self.device)
        self.began = time.perf_counter()

    @contextmanager
    def on_device(self, kind: str, batch: int) -> Iterator[None]:
        first = _record_event(torch.cuda.current_stream(self.device))
        yield
        self.pairs.append((kind, batch, first, _record_event(torch.cuda.current_stream(self.device))))

    def frame(self) -> pd.DataFrame:
        torch.cuda.synchronize(self.device)
        if self.lane is not None:
            sent = list(enumerate(self.lane.pairs, start=-2))[self.sent_before :]  # batches -2 and -1 warmed up
            self.pairs += [("copy", number, *pair) for number, pair in sent]
        for kind, batch, first, last in self.pairs:
            start, end = (self.zero.elapsed_time(event) / 1e3 for event in (first, last))
            self.add("copy" if kind == "copy" else "GPU", kind, self.began + start, self.began + end, batch)
        return super().frame()


class _TimedCopyStream(CopyStream):
    def __init__(self, device: torch.device):
        super().__init__(device)
        self.pairs: list[Any] = []

    def send(self, batch: Any) -> Any:
        first = _record_event(self.stream)
        sent = super().send(batch)
        self.pairs.append((first, _record_event(self.stream)))
        return sent


def _lane_order(lane: str) -> tuple[int, str]:
    last = ("host", "copy", "GPU")
    return (last.index(lane) + 1 if lane in last else 0, lane)


def _record_event(stream: Any) -> Any:
    return stream.record_event(torch.cuda.Event(enable_timing=True))
