"""Workers of this machine for `map_items`: a pool is a `submit(items)` that gives a future of the outcomes."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from labkit.core.credentials import redact
from labkit.core.threads import use_one_torch_thread

Outcome = tuple[Any, str | None]  # (value, None) or (None, error text)
Submit = Callable[[list[Any]], Future]  # items -> future of (seconds, outcomes)

_MOST_LINES = 3  # of an error

_packed_function = b""  # in a worker process: what its pool runs


def then(function: Callable, outcome: Outcome) -> Outcome:
    """`function` of the outcome's value; an error, past or new, becomes the outcome."""
    value, error = outcome
    if error is not None:
        return outcome
    try:
        return function(value), None
    except (Exception, SystemExit) as failure:
        return None, format_error(failure)


def format_error(error: BaseException) -> str:
    """Type and first lines of an error, without credentials, as one line: a file's name may hold a line break, and the
    cause follows it."""
    lines = redact(str(error)).strip().splitlines()[:_MOST_LINES]
    return f"{type(error).__name__}: " + r"\n".join(lines) if lines else type(error).__name__


def pack(items: list) -> list[Outcome]:
    """Items as bytes, one by one: what cannot be pickled is an error of that item alone."""
    return [then(cloudpickle.dumps, (item, None)) for item in items]


def run_packed(function: Callable, packed: list[Outcome]) -> tuple[float, list[Outcome]]:
    """In a worker: seconds that the chunk took, and its packed outcomes."""
    start = time.perf_counter()
    outcomes = [then(cloudpickle.dumps, then(function, then(pickle.loads, item))) for item in packed]
    return time.perf_counter() - start, outcomes


def unpacking(future: Future) -> Future:
    """Future of the outcomes that `future` brings packed."""
    unpacked = Future()

    def pass_on(done: Future) -> None:
        if done.cancelled():
            unpacked.cancel()
        elif (error := done.exception()) is not None:
            unpacked.set_exception(error)
        else:
            seconds, outcomes = done.result()
            unpacked.set_result((seconds, [then(pickle.loads, outcome) for outcome in outcomes]))

    future.add_done_callback(pass_on)
    return unpacked


@contextmanager
def thread_pool(function: Callable, num_threads: int) -> Iterator[Submit]:
    """Threads of this process."""

    def run(items: list) -> tuple[float, list[Outcome]]:
        start = time.perf_counter()
        outcomes = [then(function, (item, None)) for item in items]
        return time.perf_counter() - start, outcomes

    pool = ThreadPoolExecutor(num_threads, initializer=use_one_torch_thread)
    try:
        yield lambda items: pool.submit(run, items)
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def process_pool(function: Callable, num_processes: int) -> Iterator[Submit]:
    """Fresh processes. They end with this one, however it ends, and at once when the block is left by an exception."""
    # Fork would copy locks that other threads (torch's, Jupyter's) hold at this moment.
    context = multiprocessing.get_context("spawn")
    theirs, lifeline = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        num_processes, mp_context=context, initializer=_start_worker, initargs=(theirs, cloudpickle.dumps(function))
    )

    def submit(items: list) -> Future:
        try:
            return unpacking(pool.submit(_work, pack(items)))
        except BrokenExecutor as error:
            broken = Future()
            broken.set_exception(error)
            return broken

    try:
        yield submit
    except BaseException:
        lifeline.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        lifeline.close()
        theirs.close()


def _start_worker(lifeline: Connection, packed_function: bytes) -> None:
    global _packed_function
    _packed_function = packed_function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the parent decides
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    try:
        lifeline.recv()
    except EOFError:  # closed by the parent, or by its death
        os._exit(1)


def _work(packed: list[Outcome]) -> tuple[float, list[Outcome]]:
    return run_packed(_function(), packed)


@cache
def _function() -> Callable:
    return pickle.loads(_packed_function)  # noqa: S301 - packed by the process that started this one
