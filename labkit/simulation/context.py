"""`lk.simulated_cuda`: within it, code for CUDA runs on a simulated device."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from labkit.simulation.simulated_device import Duration, SimulatedDevice, Simulation, activate
from labkit.simulation.streams import METHODS, SimulatedEvent, SimulatedStream, current_stream
from labkit.simulation.tensor import DeviceMode
from labkit.simulation.torch_names import only_lift_cpu_tensors, register_no_device
from labkit.util.machine import environment


@contextmanager
def simulated_cuda(device: SimulatedDevice | None = None, *, duration: Duration | None = None) -> Iterator[Simulation]:
    """Run code for CUDA, unchanged, on a simulated device whose time is exact and whose bytes are real.

    Within the `with` statement `"cuda"` is this device: `.to("cuda", non_blocking=...)`, `.cuda()`, `pin_memory`,
    `torch.cuda.Stream`, `Event`, `stream`, `current_stream`, `synchronize`, `record_stream`, `torch.accelerator`, and
    every operator, forward and backward. `time.perf_counter()` is the host's simulated clock, which stands still but
    for what the host does with the device and for `simulation.work(seconds)`.

    What holds, as CUDA's and torch's documents say:

    - Streams run what they are given in order, concurrently with the host; kernels one at a time, copies one at a time
      in each direction, all three at once.
    - A copy from pageable memory makes the host wait for the stream and then stage the bytes itself; a copy that is not
      `non_blocking` makes it wait for the end.
    - The allocator gives a block that was freed to the next request of the same stream at once, whatever another stream
      still reads; `record_stream` keeps it back.
    - Kernels read memory when they run. So a program without the order that it needs computes with another batch's
      pixels, and does so each time; `simulation.races` names every pair of operations without an order.

    What does not: kernels never share the device; its memory has no end, and blocks are not split; small copies from
    pageable memory, up to 64 KB, need not make a real host wait, and strided pinned sources count as pinned. Gradients
    that cross between host and device, several devices, graphs, mixed precision by `torch.autocast` (which computes as
    if it were off), `torch.compile`, priorities, warnings of `set_sync_debug_mode` (it knows "error" alone), statistics
    of memory and the host's own computing are not simulated. Random numbers are not those of a GPU. After a simulation
    on a machine without a GPU, torch names another reason when it refuses CUDA.

    Args:
        device: Its rates; default: round figures of no device.
        duration: Gets an operation's name and its calculated seconds, and returns the seconds that it takes: for tests
            that try other schedules.

    Returns:
        The `Simulation`: `now_s`, `work(seconds)`, `timeline()`, `races`, `max_reserved_bytes`.

    >>> with lk.simulated_cuda():
    ...     torch.zeros(4).to("cuda").device.type
    'cuda'

    Raises:
        RuntimeError: another simulation is active.

    Source: CUDA C++ Programming Guide, "Asynchronous Concurrent Execution"; CUDA Runtime API, "API synchronization
    behavior" and "Stream synchronization behavior"; PyTorch, "CUDA semantics" and `torch.Tensor.record_stream`
    Taught in: notebooks/07_cuda_prefetch.ipynb
    """
    environment()  # kept from now on: the simulated device is no part of this machine
    simulation = Simulation(device or SimulatedDevice(), duration)
    if torch.cuda.is_available():
        torch.cuda.init()  # so that the real device is ready afterwards
    else:
        register_no_device()
    with ExitStack() as stack:
        # Module.to exchanges whole parameters; by default it would exchange only their storage, which is not torch's.
        stack.enter_context(mock.patch.object(torch.__future__, "_swap_module_params_on_conversion", True))
        stack.callback(only_lift_cpu_tensors, only_lift_cpu_tensors(True))  # so that DeviceMode sees the move
        stack.enter_context(activate(simulation))
        for owner, names in _replacements(simulation):
            stack.enter_context(mock.patch.multiple(owner, **names))
        stack.enter_context(DeviceMode())
        yield simulation


def _replacements(simulation: Simulation) -> list[tuple[Any, dict[str, Any]]]:
    """Module or class -> what stands for its names during a simulation."""

    def sleep(cycles: int) -> None:
        simulation.launch("sleep", list, reads=[], writes=[], outputs=[], seconds=cycles / simulation.device.clock_hz)

    def set_stream(stream: SimulatedStream) -> None:
        simulation.current = stream.queue

    def set_sync_debug_mode(mode: int | str) -> None:
        simulation.sync_mode = mode

    common = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_stream": current_stream,
        "synchronize": lambda device=None: simulation.wait_for_all(),
    }  # fmt: skip
    return [
        (time, {"perf_counter": lambda: simulation.now_s}),
        (Tensor, METHODS),
        (torch, {"Stream": SimulatedStream}),
        (torch.accelerator, {
            **common, "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "current_device_index": lambda: 0, "set_device_index": lambda device: None,
        }),
        (torch.cuda, {
            **common, **{name: lambda *_: None for name in ("_lazy_init", "init", "set_device")},
            "is_initialized": lambda: True, "current_device": lambda: 0, "device": lambda device: nullcontext(),
            "get_device_name": lambda device=None: "CUDA (simulated)",
            "get_device_capability": lambda device=None: (8, 0),
            "manual_seed": simulation.seed, "manual_seed_all": simulation.seed,
            "Stream": SimulatedStream, "Event": SimulatedEvent, "set_stream": set_stream, "_sleep": sleep,
            "set_sync_debug_mode": set_sync_debug_mode,
            "stream": lambda stream: nullcontext() if stream is None else stream,
            "default_stream": lambda device=None: SimulatedStream(queue=simulation.default),
            "is_current_stream_capturing": lambda: False,
        }),
    ]  # fmt: skip
