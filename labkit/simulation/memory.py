"""Memory of the simulated device, a caching allocator as torch's, its races, and page-locked memory of the host."""

import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from labkit.simulation.engine import Engine, Operation, Queue

_ROUND_BYTES = 512  # torch's kMinBlockSize


class Access(NamedTuple):
    """The bytes of a block that an operation reads or writes."""

    operation: Operation
    low: int
    high: int
    writes: bool

    def conflicts(self, other: "Access") -> bool:
        return (self.writes or other.writes) and self.low < other.high and other.low < self.high

    def covers(self, other: "Access") -> bool:
        return self.low <= other.low and other.high <= self.high


@dataclass(frozen=True)
class Race:
    """Two operations on the same memory, of which one writes, and which nothing in the program puts in order."""

    first: str
    first_stream: int
    second: str
    second_stream: int

    def __str__(self) -> str:
        return (
            f"{self.second} on stream {self.second_stream} does not wait for {self.first} on stream "
            f"{self.first_stream}, and both use the same memory"
        )


@dataclass(eq=False)
class Block:
    """Bytes of the device, which one stream allocates."""

    data: Tensor
    n_bytes: int
    queue: Queue
    users: set[Queue] = field(default_factory=set)  # other streams, by record_stream
    accesses: list[Access] = field(default_factory=list)


class Memory:
    """A block in use. All tensors over it hold this; when the last one goes, the block is free."""

    def __init__(self, allocator: "Allocator", n_bytes: int, queue: Queue):
        self.allocator, self.n_bytes = allocator, n_bytes
        self.block = allocator.allocate(n_bytes, queue)

    def __del__(self) -> None:
        if hasattr(self, "block"):
            self.allocator.free(self.block)


class Allocator:
    """Blocks that are free go to the next request of their stream at once, also while queued kernels still read them.

    That is torch's rule: within a stream it is safe, as what follows runs later. A block that `record_stream` gave to
    other streams is kept until what these had queued when it was freed is done, as the host sees it at a later request.
    Blocks are reused whole, for requests that round to the same size; torch also splits and joins them.

    Source: PyTorch's notes on CUDA semantics and `Tensor.record_stream`; c10/cuda/CUDACachingAllocator.cpp
    """

    def __init__(self, engine: Engine, total_bytes: float):
        self._engine, self._total_bytes = engine, total_bytes
        self._free: dict[tuple[Queue, int], list[Block]] = defaultdict(list)
        self._kept: list[tuple[Block, list[Operation]]] = []
        self.allocated_bytes = self.max_allocated_bytes = self.reserved_bytes = self.max_reserved_bytes = 0

    def allocate(self, n_bytes: int, queue: Queue) -> Block:
        self._take_back()
        rounded = max(1, -(-n_bytes // _ROUND_BYTES)) * _ROUND_BYTES
        free = self._free[queue, rounded]
        if not free:
            free.append(self._reserve(rounded, queue))
        self.allocated_bytes += rounded
        self.max_allocated_bytes = max(self.max_allocated_bytes, self.allocated_bytes)
        return free.pop()

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.n_bytes
        users = [user.newest for user in block.users if user.newest is not None]
        block.users.clear()
        if users:
            self._kept.append((block, users))
        else:
            self._free[block.queue, block.n_bytes].append(block)

    def empty_cache(self) -> None:
        """Give free blocks back to the device; the host waits for those that other streams still use."""
        for _, users in self._kept:
            for user in users:
                self._engine.wait(user)
        self._take_back()
        self.reserved_bytes -= sum(block.n_bytes for free in self._free.values() for block in free)
        self._free.clear()

    def _reserve(self, n_bytes: int, queue: Queue) -> Block:
        if self.reserved_bytes + n_bytes > self._total_bytes:
            self.empty_cache()
        if self.reserved_bytes + n_bytes > self._total_bytes:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory (simulated): tried to allocate {n_bytes / 2**20:.2f} MiB; "
                f"{self.reserved_bytes / 2**20:.2f} of {self._total_bytes / 2**20:.2f} MiB are in use"
            )
        self.reserved_bytes += n_bytes
        self.max_reserved_bytes = max(self.max_reserved_bytes, self.reserved_bytes)
        with _disable_current_modes():
            return Block(torch.zeros(n_bytes, dtype=torch.uint8), n_bytes, queue)

    def _take_back(self) -> None:
        kept = []
        for block, users in self._kept:
            seen = [self._engine.has_seen(user) for user in users]
            if all(seen):
                self._free[block.queue, block.n_bytes].append(block)
            else:
                kept.append((block, users))
        self._kept = kept


class Races:
    """Finds accesses that are not in order, when they are submitted and whatever time they would take.

    Operations are ordered by their stream, by events that a stream or the host waits for, and by nothing else: vector
    clocks, as in torch.cuda._sanitizer, which needs a device.
    """

    def __init__(self) -> None:
        self.found: list[Race] = []

    def note(self, block: Block, access: Access) -> None:
        kept = []
        for earlier in block.accesses:
            in_order = access.operation.comes_after(earlier.operation)
            if not in_order and access.conflicts(earlier):
                self._report(earlier.operation, access.operation)
            if not (in_order and access.covers(earlier) and access.writes >= earlier.writes):
                kept.append(earlier)
        block.accesses = [*kept, access]

    def _report(self, first: Operation, second: Operation) -> None:
        race = Race(first.name, first.queue.number, second.name, second.queue.number)
        if race not in self.found:
            self.found.append(race)


class PinnedMemory:
    """Knows its tensors and all views of them by where their storage lies, for as long as that exists."""

    def __init__(self) -> None:
        self._addresses: set[int] = set()

    def holds(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._addresses

    def empty_like(self, tensor: Tensor) -> Tensor:
        """New page-locked memory for as many values, dense, in the tensor's order of dimensions."""
        buffer = np.empty(max(1, tensor.numel() * tensor.itemsize), np.uint8)
        address = buffer.ctypes.data
        self._addresses.add(address)
        weakref.finalize(buffer, self._addresses.discard, address)
        items = torch.from_numpy(buffer)[: tensor.numel() * tensor.itemsize].view(tensor.dtype)
        return items.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())

    def copy_of(self, tensor: Tensor) -> Tensor:
        return tensor if self.holds(tensor) else self.empty_like(tensor).copy_(tensor)
