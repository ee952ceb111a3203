"""A loader that takes simulated time, as workers would."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from labkit.core import require_int
from labkit.pipeline.simulation.simulation import Simulation, active


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
        stamped: Yield `(batch, stamps)` as a loader over `lk.Stamped` does, for `lk.trace`.

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
