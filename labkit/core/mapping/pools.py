"""Workers of this machine for `map_items`."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle

from labkit.core.credentials import redact
from labkit.core.threads import use_one_torch_thread

Outcome = tuple[Any, str | None]  # (value, None) or (None, error text)

_MAX_ERROR_LINES = 3

_load_function: Callable[[], Callable]  # in a worker process: what its pool runs


class Pool(NamedTuple):
    """submit: sends items to a worker. result: the seconds that they took and their outcomes, from its future."""

    submit: Callable[[list], Future]
    result: Callable[[Future], tuple[float, list[Outcome]]]


def then(function: Callable, outcome: Outcome) -> Outcome:
    """`function` of the outcome's value; an error, earlier or now, becomes the outcome."""
    value, error = outcome
    if error is not None:
        return outcome
    try:
        return function(value), None
    except (Exception, SystemExit) as failure:
        return None, format_error(failure)


def format_error(error: BaseException) -> str:
    """Type and first lines of an error, without credentials, as one line: in many messages a file name, which may
    contain a line break, precedes the cause."""
    lines = redact(str(error)).strip().splitlines()[:_MAX_ERROR_LINES]
    return f"{type(error).__name__}: " + r"\n".join(lines) if lines else type(error).__name__


def pack_items(items: list) -> list[Outcome]:
    """Items as bytes, one by one: what cannot be pickled is an error of that item alone."""
    return [then(cloudpickle.dumps, (item, None)) for item in items]


def run_chunk(function: Callable, chunk: list[Outcome]) -> tuple[float, list[Outcome]]:
    """In a worker: seconds that the chunk took, and its outcomes."""
    start = time.perf_counter()
    outcomes = [then(function, item) for item in chunk]
    return time.perf_counter() - start, outcomes


def run_packed(function: Callable, packed: list[Outcome]) -> tuple[float, list[Outcome]]:
    """`run_chunk` of packed items, with packed outcomes."""

    def run_one(item: bytes) -> bytes:
        return cloudpickle.dumps(function(pickle.loads(item)))  # noqa: S301 - packed by the process that sent it

    return run_chunk(run_one, packed)


def unpack_result(future: Future) -> tuple[float, list[Outcome]]:
    """What `run_packed` returned to a future, with its outcomes unpacked."""
    seconds, outcomes = future.result()
    return seconds, [then(pickle.loads, outcome) for outcome in outcomes]


@contextmanager
def thread_pool(function: Callable, num_threads: int) -> Iterator[Pool]:
    """Threads of this process."""
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
