"""For how long the device had nothing to do, by events on the stream that trains, whose reading waits for nothing.

In come calls of `Record` before and after it gets a batch, and of copies; out go the seconds in which the device had
computed all there was while a batch was waited for, and those of the copies.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

_INTERVAL_S = 0.1  # between two samples of the driver
_MAX_PENDING = 64  # pairs of events; the oldest have long been reached when there are this many

DeviceMark = tuple[int, int]  # how many `idle_s` and `copy_s` there were


class DeviceSpan(NamedTuple):
    """A part of what `DeviceTimes` has."""

    idle_s: list[float]
    copy_s: list[float]


class DeviceTimes:
    """Seconds for which the current stream had nothing to do while the host waited for a batch, and of copies.

    An event is recorded when a batch is asked for, behind the kernels that were sent so far, and another one when it is
    there. The time between them is what the device stood still for: none, if it was still busy when the batch came.

    Attributes:
        idle_s: Of each batch; empty without CUDA.
        copy_s: Of each copy from the host, on the stream that was current.
        busy: Samples of the driver once batches come: the share of the time in which a kernel ran, 0 to 1. One that
            uses one of a hundred multiprocessors counts in full: low means idle, high does not mean well used. None
            if NVML does not answer. Source: nvmlDeviceGetUtilizationRates, via torch.cuda.utilization.
    """

    def __init__(self) -> None:
        self.busy: list[float] = []
        self._sampler: threading.Thread | None = None
        self._ended = threading.Event()
        self.idle_s: list[float] = []
        self.copy_s: list[float] = []
        self._pending: list[tuple[list[float], Any, Any]] = []
        self._lock = threading.Lock()  # a script may copy in several threads

    def start(self) -> Callable[[], None]:
        """Time copies by `Tensor.to` and `Tensor.cuda`; returns what undoes it."""
        from torch import Tensor

        own = {name: vars(Tensor).get(name) for name in ("to", "cuda")}  # usually inherited
        for name in own:
            setattr(Tensor, name, self._timed(getattr(Tensor, name)))

        def stop() -> None:
            for name, original in own.items():
                delattr(Tensor, name) if original is None else setattr(Tensor, name, original)
            self.read(wait=True)
            self._ended.set()
            if self._sampler is not None:
                self._sampler.join()

        return stop

    def asked(self) -> Any:
        """Called when a batch is asked for."""
        return _event() if _has_device() else None

    def received(self, asked: Any) -> None:
        """Called when it is there."""
        if asked is not None:
            if self._sampler is None:
                self._sampler = threading.Thread(target=self._sample, name="labkit-gpu-utilization", daemon=True)
                self._sampler.start()
            self._add(self.idle_s, asked)

    def _sample(self) -> None:
        import torch

        with suppress(Exception):  # NVML, or its Python package, is missing
            while not self._ended.wait(_INTERVAL_S):
                self.busy.append(torch.cuda.utilization() / 100)

    def read(self, *, wait: bool = False) -> None:
        """Take over the times of the events that the device has reached; all of them, if it waits."""
        with self._lock:
            while self._pending and (wait or self._pending[0][2].query()):
                into, first, last = self._pending.pop(0)
                last.synchronize()
                into.append(first.elapsed_time(last) / 1e3)

    def mark(self) -> DeviceMark:
        """How many of each have been noted so far, whether or not the device has reached them."""
        with self._lock:
            pending = [into for into, _, _ in self._pending]
            n_idle, n_copy = (len(of) + sum(into is of for into in pending) for of in (self.idle_s, self.copy_s))
        return n_idle, n_copy

    def between(self, began: DeviceMark, ended: DeviceMark) -> DeviceSpan:
        """What was noted between two marks; waits until the device has reached it."""
        self.read(wait=True)
        return DeviceSpan(self.idle_s[began[0] : ended[0]], self.copy_s[began[1] : ended[1]])

    def forget(self) -> None:
        """Begin again, in a forked process, which can use no device that its parent uses."""
        self.idle_s, self.copy_s, self.busy, self._pending, self._sampler = [], [], [], [], None
        self._lock, self._ended = threading.Lock(), threading.Event()  # a thread may have held the parent's

    def _add(self, into: list[float], first: Any) -> None:
        last = _event()
        with self._lock:
            self._pending.append((into, first, last))
            is_full = len(self._pending) > _MAX_PENDING
        if is_full:
            self.read()

    def _timed(self, original: Any) -> Any:
        @functools.wraps(original)
        def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_cuda or not _has_device():
                return original(self, *args, **kwargs)
            first = _event()
            result = original(self, *args, **kwargs)
            if result.is_cuda:
                times._add(times.copy_s, first)
            return result

        times = self
        return moved


def _has_device() -> bool:
    import torch  # by now the script has imported it

    return torch.cuda.is_initialized()


def _event() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
