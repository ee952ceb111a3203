"""`lk.simulated_cuda`: within it, code for CUDA runs on a simulated device. And a loader that takes simulated time."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from labkit.simulation import streams
from labkit.simulation.simulated_device import Duration, SimulatedDevice, Simulation, activate, active
from labkit.simulation.streams import METHODS
from labkit.simulation.tensor import DeviceMode, call
from labkit.util.arguments import require_int
from labkit.util.machine import environment


class SimulatedLoader:
    """Batches that are ready when workers of a stated speed would have them ready.

    As in torch's DataLoader, worker k gets batches k, k + num_workers, ...; `prefetch_factor` a worker are asked for at
    the start, and one more whenever the host takes one. Without workers the host loads each batch itself.

    Args:
        make_batch: Called with 0, 1, ...: the batch, as a tensor or any nest of them. Takes no simulated time.
        n_batches: Length of an epoch.
        load_s: Seconds that one worker takes for a batch.
        num_workers: 0: the host loads.
        prefetch_factor: Batches ahead for each worker.
        stamped: Yield `(batch, stamps)` as a loader over `course.Stamped` does, for `course.trace`.

    Raises:
        RuntimeError: iterated outside of a simulation.
    """

    def __init__(
        self, make_batch: Callable[[int], Any], n_batches: int, *, load_s: float, num_workers: int = 2,
        prefetch_factor: int = 2, stamped: bool = False,
    ):  # fmt: skip
        self.make_batch, self.n_batches = make_batch, require_int("n_batches", n_batches)
        self.load_s, self.num_workers = load_s, require_int("num_workers", num_workers, minimum=0)
        self.prefetch_factor, self.stamped = require_int("prefetch_factor", prefetch_factor), stamped

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[Any]:
        simulation = active()
        begun_s = simulation.now_s
        free_s = [begun_s] * max(1, self.num_workers)
        asked_s = [begun_s] * (self.num_workers * self.prefetch_factor)
        for number in range(self.n_batches):
            worker = number % len(free_s)
            start_s = max(free_s[worker], asked_s[number]) if self.num_workers else simulation.now_s
            free_s[worker] = start_s + self.load_s
            self._wait(simulation, worker, start_s)
            asked_s.append(simulation.now_s)
            yield self._item(number, worker if self.num_workers else -1, start_s)

    def _wait(self, simulation: Simulation, worker: int, start_s: float) -> None:
        if not self.num_workers:
            simulation.work(self.load_s, "load")
            return
        end_s = start_s + self.load_s
        simulation.engine.add_span(f"worker {worker}", "load", start_s, end_s)
        if end_s > simulation.now_s:
            simulation.work(end_s - simulation.now_s, "wait for batch")

    def _item(self, number: int, worker: int, start_s: float) -> Any:
        batch = self.make_batch(number)
        if not self.stamped:
            return batch
        stamps = torch.tensor([[worker, start_s, start_s + self.load_s]], dtype=torch.float64)
        return batch, stamps.pin_memory()


@contextmanager
def simulated_cuda(device: SimulatedDevice | None = None, *, duration: Duration | None = None) -> Iterator[Simulation]:
    """Run code for CUDA, unchanged, on a simulated device whose time is exact and whose bytes are real.

    Within the `with` statement `"cuda"` is this device: `.to("cuda", non_blocking=...)`, `.cuda()`, `pin_memory`,
    `torch.cuda.Stream`, `Event`, `stream`, `current_stream`, `synchronize`, `record_stream`, `torch.accelerator`, and
    every operator, forward and backward. `time.perf_counter()` is the host's simulated clock, which stands still but
    for what the host does with the device and for `simulation.work(seconds)`.

    What holds, as CUDA's and torch's documents say:

    - Streams run what they are given in order, and beside the host; kernels one at a time, copies one at a time in each
      direction, all three at once.
    - A copy from pageable memory makes the host wait for the stream and then stage the bytes itself; a copy that is not
      `non_blocking` makes it wait for the end.
    - The allocator gives a block that was freed to the next request of the same stream at once, whatever another stream
      still reads; `record_stream` keeps it back.
    - Kernels read memory when they run. So a program without the order that it needs computes with another batch's
      pixels, and does so each time; `simulation.races` names every pair of operations without an order.

    What does not: kernels never share the device; blocks are not split; small copies from pageable memory, up to 64 KB,
    need not make a real host wait, and strided pinned sources count as pinned; several devices, graphs, mixed precision
    by `torch.autocast` (which computes as if it were off), `torch.compile`, priorities and the host's own computing are
    not simulated. Random numbers are not those of a GPU. After a simulation on a machine without a GPU, torch names
    another reason when it refuses CUDA.

    Args:
        device: Rates and sizes; default: round figures of no device. `PRESETS` has published ones.
        duration: Gets an operation's name and its reckoned seconds, and returns the seconds that it takes: for tests
            that try other schedules.

    Returns:
        The `Simulation`: `now_s`, `work(seconds)`, `timeline()`, `races`, `max_reserved_bytes`.

    Raises:
        RuntimeError: another simulation is active.

    Source: CUDA C++ Programming Guide, "Asynchronous Concurrent Execution"; CUDA Runtime API, "API synchronization
    behavior" and "Stream synchronization behavior"; PyTorch, "CUDA semantics" and `torch.Tensor.record_stream`
    Taught in: notebooks/07_cuda_prefetch.ipynb
    """
    environment()  # kept from now on: the simulated device is no part of this machine
    simulation = Simulation(device or SimulatedDevice(), call, duration)
    with ExitStack() as stack:
        _prepare_torch(stack)
        stack.enter_context(activate(simulation))
        stack.enter_context(mock.patch.object(time, "perf_counter", simulation.clock))
        for owner, replacements in _replacements(simulation):
            stack.enter_context(mock.patch.multiple(owner, **replacements))
        stack.enter_context(DeviceMode())
        yield simulation


def _prepare_torch(stack: ExitStack) -> None:
    """Settings of torch under which a tensor subclass can stand for a device's tensors."""
    if torch.cuda.is_available():
        torch.cuda.init()  # so that the real device is ready afterwards
    else:
        torch._C._ensureCUDADeviceGuardSet()  # as FakeTensorMode does
    # Module.to exchanges whole parameters; by default it would exchange only their storage, which is not torch's here.
    stack.enter_context(mock.patch.object(torch.__future__, "_swap_module_params_on_conversion", True))
    # torch.tensor(..., device="cuda") makes a tensor of the host and moves it, so that the mode sees the move.
    stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
    torch._C._set_only_lift_cpu_tensors(True)


def _replacements(simulation: Simulation) -> list[tuple[Any, dict[str, Any]]]:
    return [
        (Tensor, METHODS),
        (torch, {"Stream": streams.SimulatedStream, "Event": streams.SimulatedEvent}),
        (torch.cuda, {**_streams(simulation), **_facts(simulation), **_memory(simulation)}),
        (torch.accelerator, {
            "is_available": lambda: True, "device_count": lambda: 1,
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "current_device_index": lambda: 0, "set_device_index": lambda device: None,
            "current_stream": streams.current_stream, "set_stream": streams.set_stream,
            "synchronize": lambda device=None: simulation.wait_for_all(), **_memory(simulation),
        }),
    ]  # fmt: skip


def _streams(simulation: Simulation) -> dict[str, Any]:
    def sleep(cycles: int) -> None:
        simulation.launch("sleep", list, reads=[], writes=[], outputs=[], seconds=cycles / simulation.device.clock_hz)

    return {
        "Stream": streams.SimulatedStream, "Event": streams.SimulatedCudaEvent, "stream": streams.use_stream,
        "current_stream": streams.current_stream, "default_stream": streams.default_stream,
        "set_stream": streams.set_stream, "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: simulation.wait_for_all(), "_sleep": sleep,
    }  # fmt: skip


def _facts(simulation: Simulation) -> dict[str, Any]:
    modes = ["default", "warn", "error"]

    def set_sync_debug_mode(mode: int | str) -> None:
        simulation.sync_mode = modes[mode] if isinstance(mode, int) else mode

    return {
        **{name: lambda: True for name in ("is_available", "is_initialized")},
        **{name: lambda *_: None for name in ("_lazy_init", "init", "set_device")},
        "device_count": lambda: 1, "current_device": lambda: 0, "device": lambda device: nullcontext(),
        "get_device_name": lambda device=None: device_name(simulation),
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(
            name=device_name(simulation), total_memory=simulation.device.memory_bytes, major=8, minor=0
        ),
        "manual_seed": simulation.seed, "manual_seed_all": simulation.seed,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: modes.index(simulation.sync_mode),
    }  # fmt: skip


def device_name(simulation: Simulation) -> str:
    return f"{simulation.device.name} (simulated)"


def _memory(simulation: Simulation) -> dict[str, Callable[..., Any]]:
    allocator = simulation.allocator

    def reset_peak_memory_stats(device: Any = None) -> None:
        allocator.max_allocated_bytes, allocator.max_reserved_bytes = (
            allocator.allocated_bytes,
            allocator.reserved_bytes,
        )

    return {
        "memory_allocated": lambda device=None: allocator.allocated_bytes,
        "max_memory_allocated": lambda device=None: allocator.max_allocated_bytes,
        "memory_reserved": lambda device=None: allocator.reserved_bytes,
        "max_memory_reserved": lambda device=None: allocator.max_reserved_bytes,
        "reset_peak_memory_stats": reset_peak_memory_stats,
        "empty_cache": allocator.empty_cache,
    }
