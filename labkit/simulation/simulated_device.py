"""One simulated device and its host: its rates, what both do, and what is known about them afterwards."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from labkit.errors import ArgumentError, OperationError
from labkit.simulation.engine import Engine, Operation
from labkit.simulation.memory import Access, Allocator, Memory, PinnedMemory, Race


@dataclass(frozen=True)
class SimulatedDevice:
    """The figures of a device that decide how long its work takes. The defaults are round figures of no device.

    A kernel takes the longer of its floating-point operations by `flops_per_s` and the bytes of its tensors by
    `memory_bytes_per_s`, and never less than `min_kernel_s`; with `kernel_s`, every kernel takes just that.

    Args:
        flops_per_s: Floating-point operations per second, in the precision that the work uses.
        memory_bytes_per_s: Of the device's own memory.
        pcie_bytes_per_s: Between page-locked memory of the host and the device, in each direction.
        staging_bytes_per_s: At which the host copies pageable memory into the driver's page-locked buffer.
        launch_s: How long the host is busy with each kernel or copy that it submits.
        min_kernel_s: The shortest kernel.
        kernel_s: The time of every kernel, if it is stated and not calculated.
        clock_hz: Cycles per second, for `torch.cuda._sleep`.

    Raises:
        ValueError: a rate that is not above 0, or a time below 0.
    """

    flops_per_s: float = 100e12
    memory_bytes_per_s: float = 1e12
    pcie_bytes_per_s: float = 25e9
    staging_bytes_per_s: float = 8e9
    launch_s: float = 5e-6
    min_kernel_s: float = 2e-6
    kernel_s: float | None = None
    clock_hz: float = 1.5e9

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            value, is_rate = getattr(self, name), not name.endswith("_s") or "_per_" in name
            if value is not None and not (value > 0 if is_rate else value >= 0):
                raise ArgumentError(f"{name} must be {'above 0' if is_rate else '0 or more'}, got {value!r}")

    def kernel_seconds(self, n_flops: float, n_bytes: float) -> float:
        if self.kernel_s is not None:
            return self.kernel_s
        return max(self.min_kernel_s, n_flops / self.flops_per_s, n_bytes / self.memory_bytes_per_s)


View = tuple[Tensor, Memory]  # values, and the block that they lie in
Duration = Callable[[str, float], float]


class Simulation:
    """What `lk.simulated_cuda` gives.

    Attributes:
        device: Its `SimulatedDevice`.
        races: Pairs of operations on the same memory that nothing puts in order, each a `Race`.
    """

    def __init__(self, device: SimulatedDevice, duration: Duration | None = None):
        self.device = device
        self.engine = Engine()
        self.allocator = Allocator(self.engine)
        self.pinned = PinnedMemory()
        self.default = self.current = self.engine.new_queue()
        self.races: list[Race] = []
        self.random = random.Random(0)
        self.sync_mode: str | int = "default"
        self._duration = duration or (lambda name, seconds: seconds)

    @property
    def now_s(self) -> float:
        """The host's clock, in seconds since the start."""
        return self.engine.now_s

    @property
    def max_reserved_bytes(self) -> int:
        """Memory that the allocator has asked the device for."""
        return self.allocator.reserved_bytes

    def work(self, seconds: float, kind: str = "work") -> None:
        """Let the host be busy."""
        self.engine.add_span("host", kind, self.now_s, self.now_s + seconds)
        self.engine.advance(seconds)

    def timeline(self) -> pd.DataFrame:
        """What every lane has done so far, for `plot_timeline`: `lane`, `kind`, `start_s`, `end_s`, `simulated`."""
        frame = pd.DataFrame(self.engine.spans, columns=["lane", "kind", "start_s", "end_s"])
        return frame.sort_values("start_s", kind="stable", ignore_index=True).assign(simulated=True)

    def seed(self, seed: int) -> None:
        """Start the device's own random numbers again; those of the host stay."""
        self.random.seed(seed)

    def allocate(self, size: Iterable[int], stride: Iterable[int], dtype: torch.dtype) -> View:
        """Memory of the current stream, with what is in it."""
        size, stride = tuple(size), tuple(stride)
        n_bytes = _n_items(size, stride) * dtype.itemsize
        memory = Memory(self.allocator, n_bytes, self.current)
        return memory.block.data[:n_bytes].view(dtype).as_strided(size, stride), memory

    def launch(
        self, name: str, work: Callable[[], list[Tensor]], *, reads: list[View], writes: list[View],
        outputs: list[Tensor], in_place: bool = False, n_flops: float = 0.0, seconds: float | None = None,
    ) -> None:  # fmt: skip
        """Queue a kernel on the current stream: `work` computes what goes into `outputs`.

        It reads memory when it starts, and what it computes is there when it ends; in place, all happens at the end.
        """
        if seconds is None:
            n_bytes = sum(view.nbytes for view, _ in [*reads, *writes])
            seconds = self.device.kernel_seconds(n_flops, n_bytes)

        results: list[Tensor] = []

        def begin() -> None:
            results.extend(work())

        def finish() -> None:
            if in_place:
                begin()
            for output, result in zip(outputs, results, strict=True):
                output.copy_(result)

        self._submit("compute", name, seconds, reads, writes, begin=None if in_place else begin, finish=finish)

    def copy_to_device(self, source: Tensor, target: View, *, non_blocking: bool) -> None:
        """Copy to the device. From pageable memory, the host waits for the stream, then stages the bytes itself.

        Source: CUDA Runtime API, "API synchronization behavior": memory must be staged, and the driver may synchronize
        with the stream first.
        """
        seconds, staging_s = source.nbytes / self.device.pcie_bytes_per_s, 0.0
        if not self.pinned.holds(source):
            self.engine.wait(self.current.newest)
            source = source.clone()
            staging_s = source.nbytes / self.device.staging_bytes_per_s
        finish, seconds = partial(target[0].copy_, source), max(seconds, staging_s)
        copy = self._submit("copy to device", "copy to device", seconds, [], [target], finish=finish)
        if staging_s:
            self.work(staging_s, "stage")
        if not non_blocking:
            self.wait(copy)

    def copy_to_host(self, source: View, target: Tensor, *, non_blocking: bool = False) -> None:
        seconds = source[0].nbytes / self.device.pcie_bytes_per_s
        copy = self._submit(
            "copy to host", "copy to host", seconds, [source], [], finish=partial(target.copy_, source[0])
        )
        if not non_blocking:
            self.wait(copy)
        elif not self.pinned.holds(target):
            self.engine.wait(copy)

    def wait(self, operation: Operation | None) -> None:
        """Let the host wait for the device; an error after `torch.cuda.set_sync_debug_mode("error")`."""
        if self.sync_mode in ("error", 2):
            raise OperationError("called a synchronizing CUDA operation")
        self.engine.wait(operation)

    def wait_for_all(self) -> None:
        """Let the host wait for the device."""
        for queue in self.engine.queues:
            self.engine.wait(queue.newest)

    def _submit(
        self, engine: str, name: str, seconds: float, reads: list[View], writes: list[View], **actions: Any
    ) -> Operation:
        operation = self.engine.submit(Operation(self.current, name, engine, self._duration(name, seconds)), **actions)
        for views, is_write in ((reads, False), (writes, True)):
            for view, memory in views:
                low = int(view.storage_offset()) * view.itemsize
                high = low + _n_items(view.shape, view.stride()) * view.itemsize
                if high > low:
                    memory.block.note(Access(operation, low, high, is_write), self.races)
        self.engine.advance(self.device.launch_s)
        return operation


def _n_items(size: Iterable[int], stride: Iterable[int]) -> int:
    """Values from the first to the last one of a tensor."""
    size = tuple(size)
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


_active: list[Simulation] = []


def active() -> Simulation:
    """The simulation whose `with` statement is running.

    Raises:
        RuntimeError: there is none.
    """
    if not _active:
        raise OperationError(
            "no simulated device is active: keep work with its tensors and streams inside of `with "
            "lk.simulated_cuda():`, and move results to the host there, by .cpu()"
        )
    return _active[-1]


@contextmanager
def activate(simulation: Simulation) -> Iterator[None]:
    """Make it the active one within the `with` statement; RuntimeError if another one is."""
    if _active:
        raise OperationError("a simulated device is active already: leave its `with` statement first")
    _active.append(simulation)
    try:
        yield
    finally:
        _active.pop()
