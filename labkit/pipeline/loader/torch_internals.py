"""Every private name of torch's DataLoader that labkit uses.

Written for torch 2.11 to 2.15. Another torch is fine as long as these names keep their shape: `find_differences` lists
those that do not, and then a loader with workers is refused with that list.
"""

import inspect
import multiprocessing
import multiprocessing.queues
import pkgutil
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, dataloader

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as _TorchBatches
else:  # another torch may lack it: `find_differences` says so
    _TorchBatches = getattr(dataloader, "_MultiProcessingDataLoaderIter", object)

_JOIN_TIMEOUT_S = 5.0

_ITERATOR = "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter"
_LOADER = "torch.utils.data.dataloader:DataLoader"
_PARAMETERS = {
    f"{_ITERATOR}.__init__": ["self", "loader"],
    f"{_ITERATOR}._try_get_data": ["self", "timeout"],
    f"{_ITERATOR}._shutdown_workers": ["self"],
    f"{_LOADER}._get_iterator": ["self"],
    "torch._utils:ExceptionWrapper.__init__": ["self", "exc_info", "where"],
    "torch.utils.data._utils.worker:ManagerWatchdog.__init__": ["self"],
    "torch.utils.data._utils.worker:ManagerWatchdog.is_alive": ["self"],
}
_NAMES = {
    _ITERATOR: {"_shutdown", "_workers", "_worker_pids_set"},
    _LOADER: {"_iterator"},
    "torch._utils:ExceptionWrapper": {"exc_type"},
    "torch.utils.data._utils.signal_handling": {"_remove_worker_pids"},
    "torch.utils.data._utils.worker:_worker_loop": {"ManagerWatchdog"},
}


def find_differences() -> list[str]:
    """What this torch lacks of the names that this module uses, or has with other parameters; a line each."""
    found = []
    for path in [*_PARAMETERS, *_NAMES]:
        try:
            target = pkgutil.resolve_name(path)
        except (ImportError, AttributeError):
            found.append(f"{path} is gone")
            continue
        if path in _NAMES:
            found += [f"{path} does not use {name}" for name in sorted(_NAMES[path] - _used_names(target))]
        elif (parameters := list(inspect.signature(target).parameters)) != _PARAMETERS[path]:
            found.append(f"{path} takes ({', '.join(parameters)}), not ({', '.join(_PARAMETERS[path])})")
    return found


def _used_names(target: Any) -> set[str]:
    """Names in a module or class, and those in the code of its functions; of a function, those in its code."""
    functions = [target, *vars(target).values()]
    return {*dir(target), *(name for each in functions if inspect.isfunction(each) for name in each.__code__.co_names)}


class WorkerLoader(DataLoader):
    """A DataLoader that iterates over its workers by `WorkersBatches`, and can be closed.

    Raises:
        RuntimeError: this torch's DataLoader is built in another way than those that labkit knows.
    """

    def __init__(self, dataset: Dataset, *, num_workers: int, **options: Any):
        if num_workers and (differences := find_differences()):
            raise RuntimeError(
                f"workers cannot run on torch {torch.__version__}, whose DataLoader differs from that of 2.11 to 2.15 "
                f"({'; '.join(differences)}): use num_workers=0 or labkit.BatchLoader, or install an earlier torch"
            )
        super().__init__(dataset, num_workers=num_workers, **options)

    def close(self) -> None:
        """End persistent workers now, instead of when the loader is forgotten."""
        self.end_workers(self._iterator)

    def end_workers(self, batches: Iterator[Any] | None) -> None:
        """End the workers of an iterator of this loader."""
        if self._iterator is batches:
            self._iterator = None
        if isinstance(batches, WorkersBatches):
            batches._shutdown_workers()

    def _get_iterator(self) -> "dataloader._BaseDataLoaderIter":
        return WorkersBatches(self) if self.num_workers else super()._get_iterator()


class WorkersBatches(_TorchBatches):
    """torch's iterator over workers, except that only the caller that waits for a batch learns of a dead worker.

    torch's signal handler would raise wherever the main thread happens to be: in a training step, between two epochs,
    or in code that has nothing to do with the thread that iterates.
    """

    def __init__(self, loader: DataLoader):
        super().__init__(loader)
        torch.utils.data._utils.signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]  # private
        self._worker_pids_set = False

    def exit_codes(self) -> dict[int, int]:
        """Exit codes, by process id, of workers that ended with an error or a signal."""
        return {worker.pid: worker.exitcode for worker in self._workers if worker.pid and worker.exitcode}

    def _shutdown_workers(self) -> None:
        was_shut_down = self._shutdown
        super()._shutdown_workers()
        if self._shutdown and not was_shut_down:
            for worker in self._workers:
                worker.join(_JOIN_TIMEOUT_S)  # an older torch terminates slow workers and does not wait for their end

    def _try_get_data(self, timeout: float = 1.0) -> tuple[bool, Any]:
        try:
            return super()._try_get_data(timeout)  # looks for dead workers at each timeout; torch's default is 5 s
        except (OSError, EOFError) as error:
            # A worker that is being killed closes its sockets before it ends; until then nothing can be fetched.
            if self._wait_for_a_death(within_s=2.0):
                raise RuntimeError("DataLoader worker (pid unknown) exited unexpectedly") from error
            raise

    def _wait_for_a_death(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while all(worker.is_alive() for worker in self._workers):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def watch_starting_process() -> None:
    """In a worker of a fork server: end when the process that started it ends.

    torch watches the parent process. Here that is the fork server, which in turn waits for its workers: both would stay
    for ever after a kill of the main process.
    """
    torch.utils.data._utils.worker.ManagerWatchdog = multiprocessing.parent_process  # type: ignore[misc, assignment]  # private


def send_pickling_errors() -> None:
    """In a worker: send an error in place of what cannot be pickled; the main process would wait for it for ever."""
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_pickling_error  # type: ignore[attr-defined]  # private


def _send_pickling_error(queue: Any, error: Exception, message: tuple[int, Any]) -> None:
    number, content = message
    wrapper = torch._utils.ExceptionWrapper
    if not isinstance(content, wrapper):
        error.add_note("while sending a batch to the main process: it may hold only what can be pickled")
        content = wrapper((type(error), error, error.__traceback__), where="in a DataLoader worker process")
    content.exc_type = RuntimeError
    queue.put((number, content))
