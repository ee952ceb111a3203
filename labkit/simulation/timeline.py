"""A timeline of a training loop: workers, host, copies and compute as spans on one time axis."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
    recorder = _Recorder(torch.device(device))
    copies = None
    batches: Any = loader
    if copy == "prefetch":
        batches = CUDAPrefetcher(loader, device)
        if recorder.has_streams:
            copies = batches.transfer = _TimedCopyStream(recorder.device)
    batches = iter(batches)
    for batch, _ in list(islice(batches, 2)):
        step(batch)
    n_warmed_up = len(copies.pairs) if copies else 0
    recorder.start()
    for number in range(n_batches):
        with recorder.span("wait", number):
            item = next(batches, None)
        if item is None:
            raise ArgumentError(f"the loader must give {n_batches} batches after 2 to warm up, got {number}")
        batch, stamps = item
        if recorder.device.type != "cpu" and copy != "prefetch":
            with recorder.span("copy", number, on_device="copy"):
                batch = move_tensors(batch, recorder.device, non_blocking=copy == "non_blocking")
        with recorder.span("step", number, on_device="compute"):
            step(batch)
        recorder.stamps.append((stamps, number))
    if copies:  # batches -2 and -1 warmed up
        recorder.events += [("copy", number, *pair) for number, pair in enumerate(copies.pairs, -2)][n_warmed_up:]
    return recorder.frame()


class _Recorder:
    """Spans by the host's clock, and on CUDA what the streams did, by events.

    Events, and stamps on a device, are read at the end, because reading one waits for it.
    """

    def __init__(self, device: torch.device):
        self.device, self.has_streams = device, device.type == "cuda"
        self.rows: list[tuple[str, str, float, float, int]] = []
        self.events: list[tuple[str, int, Any, Any]] = []
        self.stamps: list[tuple[Tensor, int]] = []

    def start(self) -> None:
        if self.has_streams:
            torch.cuda.synchronize(self.device)
            self.zero = self._mark()
            torch.cuda.synchronize(self.device)
        self.began = time.perf_counter()

    @contextmanager
    def span(self, kind: str, batch: int, *, on_device: str = "") -> Iterator[None]:
        begun = time.perf_counter()
        first = self._mark() if on_device and self.has_streams else None
        yield
        if first is not None:
            self.events.append((on_device, batch, first, self._mark()))
        self.rows.append(("host", kind, begun - self.began, time.perf_counter() - self.began, batch))

    def _mark(self) -> Any:
        return _record_event(torch.cuda.current_stream(self.device))

    def frame(self) -> pd.DataFrame:
        if self.has_streams:
            torch.cuda.synchronize(self.device)
        for kind, batch, first, last in self.events:
            lane = "copy" if kind == "copy" else "GPU"
            start, end = (self.zero.elapsed_time(event) / 1e3 for event in (first, last))
            self.rows.append((lane, kind, start, end, batch))
        for stamps, batch in self.stamps:
            worker, start, end = int(stamps[0, 0]), float(stamps[:, 1].min()), float(stamps[:, 2].max())
            if worker < 0:  # the host did not wait, it loaded
                self.rows = [row for row in self.rows if (row[1], row[4]) != ("wait", batch)]
            lane = "host" if worker < 0 else f"worker {worker}"
            self.rows.append((lane, "load", start - self.began, end - self.began, batch))
        order = {lane: f"~{place}" for place, lane in enumerate(("host", "copy", "GPU"))}  # after all workers
        self.rows.sort(key=lambda row: (order.get(row[0], row[0]), row[2]))
        # What ended before the first step is left out.
        rows = [(lane, kind, max(0.0, start), end, batch) for lane, kind, start, end, batch in self.rows if end > 0]
        frame = pd.DataFrame(rows, columns=["lane", "kind", "start_s", "end_s", "batch"])
        return frame.assign(simulated=True) if is_simulated() else frame


class _TimedCopyStream(CopyStream):
    def __init__(self, device: torch.device):
        super().__init__(device)
        self.pairs: list[tuple[Any, Any]] = []

    def send(self, batch: Any) -> Any:
        first = _record_event(self.stream)
        sent = super().send(batch)
        self.pairs.append((first, _record_event(self.stream)))
        return sent


def _record_event(stream: Any) -> Any:
    return stream.record_event(torch.cuda.Event(enable_timing=True))
