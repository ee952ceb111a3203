"""Batches filled by several processes, each with threads of its own: for more cores than one GIL can feed.

torch's DataLoader carries the batches: a worker is given the numbers of a whole batch, fills it with its threads, and
hands it over in shared memory.
"""

import multiprocessing
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from labkit.errors import OperationError
from labkit.loading.read_ahead import look_ahead
from labkit.loading.seeding import SeededIndices
from labkit.loading.torch_loader import note_start, prepare_to_start_workers, start_worker, worker_context
from labkit.util.process import on_cpu

# A forked worker would inherit locks that threads of OpenCV and torch hold, and wait forever.
_START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"

# The numbers of a batch's images, and those of images that the same worker will be given next.
Task = tuple[SeededIndices, Sequence[int]]


class _FilledBatches(Dataset):
    """Whole batches as the samples of a data set; `fill` makes one in the process where it is called."""

    def __init__(self, fill: Callable[..., Any]):
        self._fill = fill

    def __getstate__(self) -> bytes:
        import cloudpickle  # unlike pickle, it handles a store whose class is in a notebook's cell

        return cloudpickle.dumps(self._fill)

    def __setstate__(self, state: bytes) -> None:
        self._fill = pickle.loads(state)  # noqa: S301 - came inside a pickle that is trusted

    def __getitem__(self, task: Task) -> Any:
        return self._fill(*task)


def _as_it_is(batch: Any) -> Any:
    return batch


class _Tasks:
    """The tasks of an epoch, as a sampler. torch asks it in each epoch, and its workers take turns."""

    def __init__(self, num_processes: int, reads_in_flight: int) -> None:
        self.batches: Iterator[SeededIndices] = iter(())
        self._num_processes, self._reads_in_flight = num_processes, reads_in_flight

    def __iter__(self) -> Iterator[Task]:
        return look_ahead(self.batches, self._reads_in_flight, self._num_processes)


class ProcessPool:
    """Worker processes that fill batches. They start with the first epoch and end with this object.

    Args:
        fill: Takes the numbers of a batch's images, and of those that it will be given next; returns the batch. Goes to
            the workers.
        num_processes: Workers.
        prefetch_factor: Batches that each makes ahead.
        pin_memory: Copy each batch into page-locked memory, in a thread of this process.
        reads_in_flight: How many images of later batches a worker is told of.
    """

    def __init__(
        self, fill: Callable[..., Any], num_processes: int, prefetch_factor: int, pin_memory: bool,
        reads_in_flight: int = 0,
    ):  # fmt: skip
        self._tasks: Any = _Tasks(num_processes, reads_in_flight)
        self._loader: DataLoader = DataLoader(
            _FilledBatches(fill), sampler=self._tasks, batch_size=None, num_workers=num_processes,
            prefetch_factor=prefetch_factor, persistent_workers=True, pin_memory=pin_memory,
            multiprocessing_context=worker_context(_START_METHOD), worker_init_fn=start_worker,
            collate_fn=_as_it_is,  # torch's own makes tensors of arrays, each with an open file on its way
            generator=torch.Generator(),  # else each epoch draws from the training's
        )  # fmt: skip

    def run(self, batches: Iterable[SeededIndices]) -> Generator[Any, None, None]:
        """The batches of an epoch, in order.

        Raises:
            RuntimeError: another epoch was begun before this one was read to its end: the workers went on with that.
        """
        prepare_to_start_workers()
        self._newest = epoch_run = object()
        self._tasks.batches = iter(batches)
        try:
            with on_cpu():
                filled = iter(self._loader)
        except BaseException as error:
            note_start(error, self._loader.num_workers)
            raise
        while self._newest is epoch_run:
            batch = next(filled, None)
            if batch is None:
                return
            yield batch
        raise OperationError("another epoch of this loader has begun: with num_processes, read one epoch at a time")
