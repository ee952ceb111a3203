"""One simulated device and its host: its rates, what both do, and what is known about them afterwards."""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from labkit.errors import ArgumentError, OperationError
from labkit.simulation.engine import Copy, Engine, Kernel, Operation, Queue
from labkit.simulation.memory import Access, Allocator, Block, Memory, PinnedMemory, Race, Races


@dataclass(frozen=True)
class SimulatedDevice:
    """The figures of a device that decide how long its work takes.

    A kernel takes the longer of its floating-point operations by `flops_per_s` and the bytes of its tensors by
    `memory_bytes_per_s`, and never less than `min_kernel_s`; with `kernel_s`, every kernel takes just that.

    Args:
        name: As `torch.cuda.get_device_name` gives it.
        flops_per_s: Floating-point operations per second, in the precision that the work uses.
        memory_bytes_per_s: Of the device's own memory.
        pcie_bytes_per_s: Between page-locked memory of the host and the device, in each direction.
        staging_bytes_per_s: At which the host copies pageable memory into the driver's page-locked buffer.
        memory_bytes: Size of the device's memory.
        launch_s: How long the host is busy with each kernel or copy that it submits.
        min_kernel_s: The shortest kernel.
        kernel_s: The time of every kernel, if it is stated and not reckoned.
        clock_hz: Cycles per second, for `torch.cuda._sleep`.
        source: Where the figures come from.
    """

    name: str = "simulated device"
    flops_per_s: float = 100e12
    memory_bytes_per_s: float = 1e12
    pcie_bytes_per_s: float = 25e9
    staging_bytes_per_s: float = 8e9
    memory_bytes: int = 16 * 2**30
    launch_s: float = 5e-6
    min_kernel_s: float = 2e-6
    kernel_s: float | None = None
    clock_hz: float = 1.5e9
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("flops_per_s", "memory_bytes_per_s", "pcie_bytes_per_s", "staging_bytes_per_s", "clock_hz"):
            if not getattr(self, field) > 0:
                raise ArgumentError(f"{field} must be above 0, got {getattr(self, field)!r}")
        for field in ("launch_s", "min_kernel_s", "memory_bytes"):
            if not getattr(self, field) >= 0:
                raise ArgumentError(f"{field} must be 0 or more, got {getattr(self, field)!r}")

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
        max_reserved_bytes: The most memory that the allocator has asked the device for.
    """

    def __init__(self, device: SimulatedDevice, call: Callable, duration: Duration | None = None):
        self.device, self.call = device, call
        self.engine = Engine()
        self.allocator = Allocator(self.engine, device.memory_bytes)
        self.pinned = PinnedMemory()
        self.default = self.current = self.engine.new_queue()
        self.sync_mode = "default"
        self.seed(0)
        self._duration = duration or (lambda name, seconds: seconds)
        self._races = Races()
        self._pooled: list[Queue] = []
        self._n_streams = 0

    @property
    def now_s(self) -> float:
        """The host's clock, in seconds since the start."""
        return self.engine.now_s

    def clock(self) -> float:
        """`now_s`, as a function that can stand for `time.perf_counter`."""
        return self.engine.now_s

    @property
    def races(self) -> list[Race]:
        return list(self._races.found)

    @property
    def max_reserved_bytes(self) -> int:
        return self.allocator.max_reserved_bytes

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
        self._random = random.Random(seed)

    def draw_seed(self) -> int:
        """For a kernel that is launched now: it draws the same numbers whenever it runs."""
        return self._random.getrandbits(62)

    @contextmanager
    def random_numbers(self, seed: int | None) -> Iterator[None]:
        """Within, torch draws a kernel's random numbers, and the host's are untouched; None: it draws none."""
        if seed is None:
            yield
            return
        of_host = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_rng_state(of_host)

    def next_queue(self) -> Queue:
        """For a new stream: one of 32 in turn, as in torch's pool."""
        if len(self._pooled) < 32:
            self._pooled.append(self.engine.new_queue())
        self._n_streams += 1
        return self._pooled[(self._n_streams - 1) % 32]

    def allocate(self, size: Iterable[int], stride: Iterable[int], dtype: torch.dtype) -> View:
        """Memory of the current stream, with what is in it."""
        size, stride = tuple(size), tuple(stride)
        n_items = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 0
        memory = Memory(self.allocator, n_items * dtype.itemsize, self.current)
        items = memory.block.data[: n_items * dtype.itemsize].view(dtype)
        return items.as_strided(size, stride), memory

    def launch(
        self, name: str, work: Callable[[], Any], *, reads: list[View], writes: list[View], outputs: list[Tensor],
        n_flops: float = 0.0, in_place: bool = False, seconds: float | None = None,
    ) -> None:  # fmt: skip
        """Queue a kernel on the current stream."""
        if seconds is None:
            n_bytes = sum(view.nbytes for view, _ in [*reads, *writes])
            seconds = self.device.kernel_seconds(n_flops, n_bytes)
        kernel = Kernel(self.current, name, self._duration(name, seconds), work, outputs, in_place=in_place)
        self._submit(kernel, reads, writes)

    def copy_to_device(self, source: Tensor, target: View, *, non_blocking: bool) -> None:
        """From pageable memory the host waits for the stream and then copies into a page-locked buffer itself.

        Source: CUDA Runtime API, "API synchronization behavior": memory must be staged, and the driver may synchronize
        with the stream first.
        """
        name, seconds, staging_s = "copy to device", source.nbytes / self.device.pcie_bytes_per_s, 0.0
        if not self.pinned.holds(source):
            self.wait(self.current.newest, None)
            source = source.clone()
            staging_s = source.nbytes / self.device.staging_bytes_per_s
            seconds = max(seconds, staging_s)
        copy = Copy(self.current, name, self._duration(name, seconds), source, target[0])
        self._submit(copy, [], [target])
        if staging_s:
            self.work(staging_s, "stage")
        if not non_blocking:
            self.wait(copy, "a copy to the device")

    def copy_to_host(self, source: View, target: Tensor, *, non_blocking: bool, reason: str = "") -> None:
        name = "copy to host"
        seconds = self._duration(name, source[0].nbytes / self.device.pcie_bytes_per_s)
        copy = Copy(self.current, name, seconds, source[0], target)
        self._submit(copy, [source], [])
        if not (non_blocking and self.pinned.holds(target)):
            self.wait(copy, None if non_blocking else reason or "a copy to the host")

    def wait(self, operation: Operation | None, reason: str | None) -> None:
        """Let the host wait; with a reason, it counts for `torch.cuda.set_sync_debug_mode`."""
        message = f"called a synchronizing CUDA operation: {reason}"
        if reason and self.sync_mode == "error":
            raise OperationError(message)
        if reason and self.sync_mode == "warn":
            warnings.warn(message, stacklevel=2)
        self.engine.wait(operation)

    def wait_for_all(self) -> None:
        for queue in self.engine.queues:
            self.engine.wait(queue.newest)

    def _submit(self, operation: Operation, reads: list[View], writes: list[View]) -> None:
        self.engine.submit(operation)
        for views, is_write in ((reads, False), (writes, True)):
            for view, memory in views:
                self._note(memory.block, view, operation, is_write)
        self.engine.advance(self.device.launch_s)

    def _note(self, block: Block, view: Tensor, operation: Operation, is_write: bool) -> None:
        if view.numel():
            low = int(view.storage_offset()) * view.itemsize
            extent = 1 + sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
            self._races.note(block, Access(operation, low, low + int(extent) * view.itemsize, is_write))


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


def is_simulated() -> bool:
    """Whether CUDA is a simulated device just now."""
    return bool(_active)


@contextmanager
def activate(simulation: Simulation) -> Iterator[None]:
    if _active:
        raise OperationError("a simulated device is active already: leave its `with` statement first")
    _active.append(simulation)
    try:
        yield
    finally:
        _active.pop()
