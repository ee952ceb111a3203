"""`map_items`: one function over many items, in processes or threads of this machine, or on a Ray cluster.

Items travel in chunks that take about `_CHUNK_S` each: cheap items do not pay for one message each, and slow ones do
not wait for one another. An outcome is `(value, None)` or `(None, error text)`: errors are passed on, not raised.
"""

import errno
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle

from labkit.errors import ArgumentError, ItemErrors, MissingLibraryError, OperationError, StorageError
from labkit.util.arguments import require_callable, require_choice, require_int, require_iterable
from labkit.util.machine import install_command, usable_cores
from labkit.util.process import progress_bar, use_one_torch_thread
from labkit.util.redact import redact

Outcome = tuple[Any, str | None]  # (value, None) or (None, error text)

_MAX_ERROR_LINES = 3

_load_function: Callable[[], Callable]  # in a worker process: what its pool runs


class Pool(NamedTuple):
    """submit: sends items to a worker. result: the seconds that they took and their outcomes, from its future."""

    submit: Callable[[list], Future]
    result: Callable[[Future], tuple[float, list[Outcome]]]


class DiskFull(str):
    """The text of an error by which no further item can be done: a disk or quota is full."""


def apply_to_outcome(function: Callable, outcome: Outcome) -> Outcome:
    """`function` of the outcome's value; an error, earlier or now, becomes the outcome."""
    value, error = outcome
    if error is not None:
        return outcome
    try:
        return function(value), None
    except (Exception, SystemExit) as failure:
        return None, DiskFull(redact(str(failure))) if is_disk_full(failure) else format_error(failure)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says so."""
    if error is None:
        return False
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_full or is_disk_full(error.__cause__ or error.__context__)


def format_error(error: BaseException) -> str:
    """Type and first lines of an error, without credentials, as one line: in many messages a file name, which may
    contain a line break, precedes the cause."""
    lines = redact(str(error)).strip().splitlines()[:_MAX_ERROR_LINES]
    return f"{type(error).__name__}: " + r"\n".join(lines) if lines else type(error).__name__


def pack_items(items: list) -> list[Outcome]:
    """Items as bytes, one by one: what cannot be pickled is an error of that item alone."""
    return [apply_to_outcome(cloudpickle.dumps, (item, None)) for item in items]


def run_chunk(function: Callable, chunk: list[Outcome]) -> tuple[float, list[Outcome]]:
    """Map a chunk in a worker: seconds that it took, and its outcomes. Behind a full disk nothing more is tried."""
    start, outcomes, full = time.perf_counter(), [], None
    for item in chunk:
        outcomes.append(full or apply_to_outcome(function, item))
        full = outcomes[-1] if isinstance(outcomes[-1][1], DiskFull) else None
    return time.perf_counter() - start, outcomes


def run_packed(function: Callable, packed: list[Outcome]) -> tuple[float, list[Outcome]]:
    """`run_chunk` of packed items, with packed outcomes."""

    def run_one(item: bytes) -> bytes:
        return cloudpickle.dumps(function(pickle.loads(item)))  # noqa: S301 - packed by the process that sent it

    return run_chunk(run_one, packed)


def unpack_result(future: Future) -> tuple[float, list[Outcome]]:
    """What `run_packed` returned to a future, with its outcomes unpacked."""
    seconds, outcomes = future.result()
    return seconds, [apply_to_outcome(pickle.loads, outcome) for outcome in outcomes]


@contextmanager
def thread_pool(function: Callable, num_threads: int) -> Iterator[Pool]:
    """The current process's threads."""
    executor = ThreadPoolExecutor(num_threads, initializer=use_one_torch_thread)
    try:
        yield Pool(lambda items: executor.submit(run_chunk, function, [(item, None) for item in items]), Future.result)
    finally:
        executor.shutdown(cancel_futures=True)


@contextmanager
def process_pool(function: Callable, num_processes: int) -> Iterator[Pool]:
    """New processes. They end with this one, however it ends, and at once when an exception leaves the block."""
    # A fork would copy locks that other threads (torch's, Jupyter's) hold at this moment.
    context = multiprocessing.get_context("spawn")
    worker_end, lifeline = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(
        num_processes, mp_context=context, initializer=_start_worker, initargs=(worker_end, cloudpickle.dumps(function))
    )

    def submit(items: list) -> Future:
        try:
            return executor.submit(_run_in_worker, pack_items(items))
        except (BrokenExecutor, OSError) as error:  # OSError: the executor closes its pipes while it is breaking
            broken: Future = Future()
            broken.set_exception(error)
            return broken

    with worker_end, lifeline:
        try:
            # All start before the first item runs: the executor starts one at a time as items come, and a process that
            # it starts while it ends the others of a broken pool is waited for in vain.
            for _ in range(num_processes):
                submit([])
            yield Pool(submit, unpack_result)
        except BaseException:
            lifeline.close()
            raise
        finally:
            executor.shutdown(cancel_futures=True)


def _start_worker(lifeline: Connection, packed_function: bytes) -> None:
    global _load_function
    _load_function = cache(partial(pickle.loads, packed_function))  # later: its errors are for the pool to tell
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the parent decides
    threading.Thread(target=_exit_with_parent, args=(lifeline,), daemon=True).start()


def _exit_with_parent(lifeline: Connection) -> None:
    try:
        lifeline.recv()
    except EOFError:  # closed by the parent, or by its death
        os._exit(1)


def _run_in_worker(packed: list[Outcome]) -> tuple[float, list[Outcome]]:
    return run_packed(_load_function(), packed)


_TIMEOUT_S = 5.0


@contextmanager
def joined_cluster(address: str | None, num_tasks: int | None) -> Iterator[int]:
    """How many tasks to keep submitted, while the cluster is joined; a cluster joined earlier stays joined."""
    try:
        import ray
    except ImportError as error:
        raise MissingLibraryError(f'engine="ray" needs Ray: {install_command("cluster")}') from error
    with ExitStack() as joined:
        if not ray.is_initialized():
            address = address or os.environ.get("RAY_ADDRESS")
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options: dict[str, Any] = {} if address else {"num_cpus": usable_cores(), "include_dashboard": False}
            host, _, port = (address or "").rpartition(":")
            try:
                if port.isdecimal():  # fail at once: Ray would try for more than a minute, and then end this process
                    socket.create_connection((host, int(port)), timeout=_TIMEOUT_S).close()
                # Not None, for which Ray joins whatever cluster runs on this machine.
                ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **options)
            except Exception as error:  # a plain Exception if a node does not start in time
                raise ConnectionError(
                    f"no Ray cluster could be joined at {address or 'this machine'} ({error}): "
                    "start one with `ray start --head`, and give its address as host:port"
                ) from error
            joined.callback(ray.shutdown)
        yield 2 * max(1, int(ray.cluster_resources().get("CPU", 1))) if num_tasks is None else max(1, num_tasks)


@contextmanager
def ray_pool(function: Callable) -> Iterator[Pool]:
    """Tasks of one core each. Ray sends the function once to each worker process, by value if a notebook defines it.

    Ray itself tries a task three more times (its default) if its machine or worker is lost.
    """
    import ray

    def map_items(packed: list[Outcome]) -> tuple[float, list[Outcome]]:  # the name that Ray shows in its messages
        return run_packed(function, packed)

    task = ray.remote(num_cpus=1)(map_items)
    yield Pool(lambda items: task.remote(pack_items(items)).future(), unpack_result)


ENGINES = ("local", "threads", "ray")

_CHUNK_S = 0.05
_MAX_CHUNK_ITEMS = 1000

OpenPool = Callable[[], AbstractContextManager[Pool]]


def map_items(
    function: Callable[[Any], Any],
    items: Iterable,
    *,
    engine: str = "local",
    key: Callable[[Any], str] = str,
    is_done: Callable[[Any], bool] | None = None,
    num_workers: int | None = None,
    address: str | None = None,
    progress: bool = True,
    description: str = "",
    unit: str = "item",
) -> list:
    """`[function(item) for item in items]`, spread over cores or machines; one failed item does not stop the others.

    Functions and items may come from notebook cells; scripts call this under `if __name__ == "__main__":`. Items that a
    dying worker held (out of memory, crash in C code) run again, one by one; one that kills another worker has failed.

    Args:
        function, items: The function may be killed midway: it must write files atomically.
        engine: `"local"`: new processes. `"threads"`: for a function that releases the GIL. `"ray"`: a cluster that
            shares the filesystem and has this labkit; extra `cluster`.
        key: Name of an item, for the report of failures.
        is_done: Items for which this is true before the start are left out and give None.
        num_workers: Default: all usable cores. `"local"` and `"threads"` run in this process if it is 0 or 1.
        address: Ray cluster. Default: one already joined, `RAY_ADDRESS`, or a temporary one of this machine.
        progress, description, unit: Whether to show a live bar, its title, and what it calls an item.

    >>> lk.map_items(len, ["a", "bb", "ccc"], num_workers=0, progress=False)
    [1, 2, 3]

    Raises:
        ItemErrors: some items failed; has their keys and texts, and the results of the others.
        OSError: the disk is full; names the file, and how many items are done. No further item begins.
        ValueError: unknown engine, negative `num_workers`, or an `address` without `engine="ray"`.
        RuntimeError, ImportError, ConnectionError: no worker can start; no Ray; no Ray cluster at `address`.
    Taught in: notebooks/11_prepare_once.ipynb
    """
    check_engine(engine, num_workers, address)
    items = list(require_iterable("items", items, "iterable, such as a list"))
    require_callable("function", function)
    results, errors = [None] * len(items), {}
    waiting = deque(position for position, item in enumerate(items) if is_done is None or not is_done(item))
    n_done, full = len(items) - len(waiting), None
    outcomes = _iter_outcomes(function, items, waiting, engine, num_workers, address)
    bar = progress_bar(show=progress, total=len(items), initial=n_done, desc=description, unit=unit)
    # Closed at once on Ctrl-C: a stored traceback, as in a notebook, would keep the workers alive.
    with bar, closing(outcomes):
        for position, (value, error) in outcomes:
            results[position] = value
            n_done += error is None
            if error is not None:
                errors[position] = error
            if isinstance(error, DiskFull):
                full = full or f"{key(items[position])}: {error}"
                waiting.clear()  # what has begun comes to its end
            bar.update()
    if full:
        raise StorageError(
            f"the disk is full ({full}): {n_done} of {len(items)} {unit}{'s' * (len(items) > 1)} are done, and no more "
            "were tried. Make room, then run the same again: it goes on with what is there"
        )
    if errors:
        raise ItemErrors({key(items[position]): errors[position] for position in sorted(errors)}, results)
    return results


def check_engine(engine: str, num_workers: int | None = None, address: str | None = None) -> None:
    """Raise the ValueErrors of `map_items`: for callers that do other work first."""
    require_choice("engine", engine, ENGINES)
    if num_workers is not None:
        require_int("num_workers", num_workers, 0)
    if address is not None and engine != "ray":
        raise ArgumentError(f"address must be None unless engine='ray', got {address!r} with engine={engine!r}")


def _iter_outcomes(
    function: Callable, items: list, remaining: deque[int], engine: str, num_workers: int | None, address: str | None
) -> Generator[tuple[int, Outcome], None, None]:
    """(position, outcome) of every item in `remaining`, in the order of completion; clearing it ends the work."""
    if engine == "ray" and remaining:
        with joined_cluster(address, num_workers) as num_tasks:
            yield from _pooled(lambda: ray_pool(function), lambda: ray_pool(function), items, remaining, num_tasks)
        return
    count = min(usable_cores() if num_workers is None else num_workers, len(remaining))
    if count <= 1:
        while remaining:
            position = remaining.popleft()
            yield position, apply_to_outcome(function, (items[position], None))
    else:
        open_pool = {"local": process_pool, "threads": thread_pool}[engine]
        pools = (lambda: open_pool(function, count)), (lambda: open_pool(function, 1))
        yield from _pooled(*pools, items, remaining, 2 * count)


def _pooled(
    open_pool: OpenPool, open_single: OpenPool, items: list, waiting: deque[int], window: int
) -> Iterator[tuple[int, Outcome]]:
    """Outcomes from pools with at most `window` chunks in flight; items that a dying worker held run again.

    `open_single` opens pools of one worker, for those.
    """
    while waiting:
        lost: deque[int] = deque()
        with _open_checked(open_pool) as pool:
            yield from _run_chunks(pool, items, waiting, window, lost)
        while lost:  # a pool may be useless once a worker has died: each pass opens a new one
            with _open_checked(open_single) as pool:
                while lost:
                    position = lost.popleft()
                    try:
                        _, outcomes = pool.result(pool.submit([items[position]]))
                    except Exception as error:
                        yield position, (None, f"its worker died twice ({format_error(error)})")
                        break
                    yield position, outcomes[0]


@contextmanager
def _open_checked(open_pool: OpenPool) -> Iterator[Pool]:
    """A pool that has run an empty chunk: a function that no worker can load fails here, once, not for each item."""
    with open_pool() as pool:
        try:
            pool.result(pool.submit([]))
        except Exception as error:
            raise OperationError(
                f"no worker can start and load the function ({format_error(error)}): "
                "in a script, call this under `if __name__ == '__main__':`"
            ) from error
        yield pool


def _run_chunks(
    pool: Pool, items: list, waiting: deque[int], window: int, lost: deque[int]
) -> Iterator[tuple[int, Outcome]]:
    """Outcomes of `waiting`, until it is empty or a worker dies; what was in flight then goes to `lost`."""
    size = 1
    in_flight: dict[Future, list[int]] = {}
    while True:
        while waiting and not lost and len(in_flight) < window:
            chunk = [waiting.popleft() for _ in range(min(size, len(waiting)))]
            in_flight[pool.submit([items[position] for position in chunk])] = chunk
        if not in_flight:
            return
        for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
            chunk = in_flight.pop(future)
            try:
                seconds, outcomes = pool.result(future)
            except Exception:
                lost.extend(chunk)
                continue
            size = _next_size(len(chunk), seconds, len(waiting) // window)
            yield from zip(chunk, outcomes, strict=True)


def _next_size(size: int, seconds: float, fair_share: int) -> int:
    """Items of the next chunk, for `_CHUNK_S` of work; fewer near the end, so that all workers have a share."""
    fitting = int(size * _CHUNK_S / max(seconds, 1e-9))
    return max(1, min(fitting, 2 * size, _MAX_CHUNK_ITEMS, fair_share))
