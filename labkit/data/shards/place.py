"""Which rank and worker a process is, and so what it reads."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Which part of the shards this process reads."""

    rank: int
    world_size: int
    worker: int
    num_workers: int

    def part(self, shards: Sequence[Any]) -> Sequence[Any]:
        """A rank has every `world_size`-th shard, and each of its workers every `num_workers`-th of these."""
        return shards[self.rank :: self.world_size][self.worker :: self.num_workers]

    def share(self, count: int) -> int:
        """This worker's part of a rank's `count` samples."""
        return len(range(self.worker, count, self.num_workers))

    def offset(self, count: int) -> int:
        """Where that part begins among the `count` samples of every rank, one rank after another."""
        parts_before = sum(self._replace(worker=worker).share(count) for worker in range(self.worker))
        return self.rank * count + parts_before

    def __str__(self) -> str:
        return f"worker {self.worker} of {self.num_workers} on rank {self.rank} of {self.world_size}"
