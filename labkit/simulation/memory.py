"""Memory of the simulated device, a caching allocator as torch's, its races, and page-locked memory of the host."""

import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from labkit.simulation.engine import Engine, Operation, Queue
from labkit.simulation.torch_names import disable_current_modes

_ROUND_BYTES = 512  # torch's kMinBlockSize


class Access(NamedTuple):
    """The bytes of a block that an operation reads or writes."""

    operation: Operation
    low: int
    high: int
    writes: bool


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

    def note(self, access: Access, races: list[Race]) -> None:
        """Add the races with earlier accesses: those that are not in order, whatever time they would take.

        Operations are ordered by their stream, by events that a stream or the host waits for, and by nothing else:
        vector clocks, as in torch.cuda._sanitizer, which needs a device.
        """
        kept = []
        for earlier in self.accesses:
            first, second = earlier.operation, access.operation
            in_order = second.comes_after(first)
            overlap = earlier.low < access.high and access.low < earlier.high
            if not in_order and overlap and (earlier.writes or access.writes):
                race = Race(first.name, first.queue.number, second.name, second.queue.number)
                if race not in races:
                    races.append(race)
            covers = access.low <= earlier.low and earlier.high <= access.high and access.writes >= earlier.writes
            if not (in_order and covers):
                kept.append(earlier)
        self.accesses = [*kept, access]


class Memory:
    """A block in use. All tensors over it hold this; when the last one goes, the block is free."""

    def __init__(self, allocator: "Allocator", n_bytes: int, queue: Queue):
        self.allocator = allocator
        self.block = allocator.allocate(n_bytes, queue)

    def __del__(self) -> None:
        self.allocator.free(self.block)


class Allocator:
    """Blocks that are free go to the next request of their stream at once, also while queued kernels still read them.

    That is torch's rule: within a stream it is safe, as what follows runs later. A block that `record_stream` gave to
    other streams is kept until what these had queued when it was freed is done, as the host sees it at a later request.
    Blocks are reused whole, for requests that round to the same size; torch also splits and joins them.

    Source: PyTorch's notes on CUDA semantics and `Tensor.record_stream`; c10/cuda/CUDACachingAllocator.cpp
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._free: dict[tuple[Queue, int], list[Block]] = defaultdict(list)
        self._kept: list[tuple[Block, list[Operation]]] = []
        self.reserved_bytes = 0

    def allocate(self, n_bytes: int, queue: Queue) -> Block:
        kept, self._kept = self._kept, []
        for block, users in kept:
            self._give_back(block, [user for user in users if not self._engine.has_seen(user)])
        rounded = max(1, -(-n_bytes // _ROUND_BYTES)) * _ROUND_BYTES
        if free := self._free[queue, rounded]:
            return free.pop()
        self.reserved_bytes += rounded
        with disable_current_modes():
            return Block(torch.zeros(rounded, dtype=torch.uint8), rounded, queue)

    def free(self, block: Block) -> None:
        users = [user.newest for user in block.users if user.newest is not None]
        block.users.clear()
        self._give_back(block, users)

    def _give_back(self, block: Block, users: list[Operation]) -> None:
        if users:
            self._kept.append((block, users))
        else:
            self._free[block.queue, block.n_bytes].append(block)


class PinnedMemory:
    """Knows its tensors and all views of them by where their storage lies, for as long as that exists."""

    def __init__(self) -> None:
        self._addresses: set[int] = set()

    def holds(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._addresses

    def empty_like(self, tensor: Tensor) -> Tensor:
        """New page-locked memory for as many values, dense, in the tensor's order of dimensions."""
        n_bytes = tensor.numel() * tensor.itemsize
        buffer = np.empty(max(1, n_bytes), np.uint8)
        address = buffer.ctypes.data
        self._addresses.add(address)
        weakref.finalize(buffer, self._addresses.discard, address)
        items = torch.from_numpy(buffer)[:n_bytes].view(tensor.dtype)
        return items.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())

    def copy_of(self, tensor: Tensor) -> Tensor:
        return tensor if self.holds(tensor) else self.empty_like(tensor).copy_(tensor)
