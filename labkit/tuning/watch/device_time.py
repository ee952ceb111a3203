"""What the loader costs on a CUDA device, by events on the stream that trains: reading them waits for nothing."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_MAX_PENDING = 64  # pairs of events; the oldest have long been reached when there are so many


class DeviceTimes:
    """Seconds for which the current stream had nothing to do while the host waited for a batch, and of copies.

    An event is recorded when a batch is asked for, behind the kernels that were sent so far, and another one when it is
    there. The time between them is what the device stood still for: none, if it was still busy when the batch came.

    Attributes:
        idle_s: Of each batch; empty without CUDA.
        copy_s: Of each copy from the host, on the stream that was current.
        busy: Samples of the driver, as `gpu_utilization` gives them.
    """

    def __init__(self) -> None:
        self.busy: list[float] = []
        self._sampler = ExitStack()
        self.idle_s: list[float] = []
        self.copy_s: list[float] = []
        self._pending: list[tuple[list[float], Any, Any]] = []

    def start(self) -> Callable[[], None]:
        """Time copies by `Tensor.to` and `Tensor.cuda`; returns what undoes it."""
        from torch import Tensor

        originals = {name: getattr(Tensor, name) for name in ("to", "cuda")}
        for name, original in originals.items():
            setattr(Tensor, name, self._timed(original))

        def stop() -> None:
            for name, original in originals.items():
                setattr(Tensor, name, original)
            self.read(wait=True)
            self._sampler.close()

        return stop

    def asked(self) -> Any:
        """Called when a batch is asked for."""
        return _event() if _has_device() else None

    def received(self, asked: Any) -> None:
        """Called when it is there."""
        if asked is not None:
            if not self.idle_s and not self._pending:
                from labkit.tuning.gpu_utilization import gpu_utilization

                self.busy = self._sampler.enter_context(gpu_utilization())
            self._add(self.idle_s, asked)

    def read(self, *, wait: bool = False) -> None:
        """Take over the times of the events that the device has reached; all of them, if it waits."""
        while self._pending and (wait or self._pending[0][2].query()):
            into, first, last = self._pending.pop(0)
            last.synchronize()
            into.append(first.elapsed_time(last) / 1e3)

    def _add(self, into: list[float], first: Any) -> None:
        self._pending.append((into, first, _event()))
        if len(self._pending) > _MAX_PENDING:
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
