"""Many requests at a time: threads that only wait for bytes, separate from those that decode."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from threading import Lock
from typing import Any

from labkit.data.blobs import allow_requests
from labkit.data.stores import Store, read_bytes
from labkit.util.process import PerProcess


def look_ahead(batches: Iterable[list[int]], count: int) -> Iterator[tuple[Any, list[int]]]:
    """Each batch, and `count` indices of those that come after it; fewer at the end.

    No more batches are drawn than that takes.
    """
    batches, drawn = iter(batches), deque[list[int]]()
    while True:
        while not drawn or sum(map(len, islice(drawn, 1, None))) < count:
            batch = next(batches, None)
            if batch is None:
                break
            drawn.append(batch)
        if not drawn:
            return
        coming: Iterator[int] = chain.from_iterable(map(list.copy, islice(drawn, 1, None)))
        yield drawn[0], list(islice(coming, count))
        drawn.popleft()


class Reader:
    """Reads a store's images in threads of its own, in each process that uses it.

    Args:
        store: Where the bytes come from. A remote one is allowed as many connections as there are threads.
        keys: Of the store's images; indices count in them.
        reads_in_flight: Threads, each with one request at a time.
    """

    def __init__(self, store: Store, keys: Sequence[str], reads_in_flight: int):
        self._store, self._keys, self.reads_in_flight = store, keys, reads_in_flight
        allow_requests(store, reads_in_flight)
        self._threads = PerProcess(partial(ThreadPoolExecutor, reads_in_flight, "labkit-reads"))

    def ask(self, index: int) -> Future:
        """Bytes of one image, when they are there."""
        return self._threads().submit(read_bytes, self._store, self._keys[index])


def with_reads(
    reader: Reader | None, batches: Iterable[list[int]]
) -> Generator[tuple[Any, list[Future] | None], None, None]:
    """Each batch with its bytes, for which the reader is ahead until this ends or is left; without one, with None.

    Images are asked for in order, and each once. Reads that have begun when this is left end in their threads; nobody
    waits for them.
    """
    if reader is None:
        yield from ((indices, None) for indices in batches)
        return
    asked = deque[Future]()
    try:
        for indices, coming in look_ahead(batches, reader.reads_in_flight):
            wanted = [*list.copy(indices), *coming]
            asked.extend(map(reader.ask, wanted[len(asked) :]))
            yield indices, [asked.popleft() for _ in range(len(indices))]
    finally:
        for read in asked:
            read.cancel()


class AfterReads(Future):
    """A task that waits for reads without a thread, and is then given to `pool`.

    Args:
        pool: Threads that decode.
        reads: What the task needs. Their bytes are let go when it has run.
        task: Called with `reads`, which are all done. An error of a read is in its future, for the task to raise.
    """

    def __init__(self, pool: ThreadPoolExecutor, reads: Sequence[Future], task: Callable[[Sequence[Future]], Any]):
        super().__init__()
        self._pool, self._reads, self._task = pool, reads, task
        # An error of the task holds the frames that it went through, and these the reads. What the reads and the pool
        # keep of their calls must not hold the task then: such a circle would keep a batch in memory.
        waiting, lock = [self] * len(reads), Lock()

        def count(_: Future) -> None:
            with lock:
                task, is_last = waiting.pop(), not waiting
            if is_last:
                task._begin()

        for read in reads:
            read.add_done_callback(count)

    def cancel(self) -> bool:
        """Cancel the task and its reads, unless it runs."""
        is_cancelled = super().cancel()
        if is_cancelled:
            for read in self._reads:
                read.cancel()
        return is_cancelled

    def _begin(self) -> None:
        if not self.cancelled():
            try:
                self._pool.submit(_run, [self])
            except RuntimeError as error:  # the interpreter ends
                self.set_exception(error)


def _run(waiting: list[AfterReads]) -> None:
    """Run the one task that waits here."""
    task = waiting.pop()
    reads, task._reads = task._reads, ()
    if not task.set_running_or_notify_cancel():
        return
    try:
        task.set_result(task._task(reads))
    except BaseException as error:
        task.set_exception(error)
        del task, reads  # the error's traceback holds this frame
