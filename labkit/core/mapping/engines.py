"""One function over many items: in processes or threads of this machine, or on a Ray cluster, with the same results.

Items travel in chunks that take about `_CHUNK_S` each: cheap items do not pay for one message each, and slow ones do
not wait for one another. An outcome is `(value, None)` or `(None, error text)`: errors are passed on, not raised.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

from labkit.core.arguments import require_choice, require_int
from labkit.core.machine import usable_cores
from labkit.core.mapping.pools import Outcome, Pool, format_error, process_pool, then, thread_pool
from labkit.core.progress import progress_bar

ENGINES = ("local", "threads", "ray")

_CHUNK_S = 0.05
_MAX_CHUNK_ITEMS = 1000
_MAX_LISTED_FAILURES = 10

OpenPool = Callable[[], AbstractContextManager[Pool]]


class ItemErrors(RuntimeError):
    """Some items failed; all others are done.

    failures: key of the item -> error text, in the order of the items.
    results: list as `map_items` would have returned it, None where an item failed.
    """

    def __init__(self, failures: dict[str, str], results: list):
        super().__init__(failures, results)  # unchanged, so that the error can be pickled
        self.failures, self.results = failures, results

    def __str__(self) -> str:
        listed = "; ".join(f"{key}: {text}" for key, text in list(self.failures.items())[:_MAX_LISTED_FAILURES])
        n_more = len(self.failures) - _MAX_LISTED_FAILURES
        more = f"; and {n_more} more (see .failures)" if n_more > 0 else ""
        return f"{len(self.failures)} of {len(self.results)} items failed, the others are done: {listed}{more}"


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

    Raises:
        ItemErrors: some items failed; has their keys and texts, and the results of the others.
        ValueError: unknown engine, negative `num_workers`, or an `address` without `engine="ray"`.
        RuntimeError, ImportError, ConnectionError: no worker can start; no Ray; no Ray cluster at `address`.
    Taught in: notebooks/08_shard_formats.ipynb
    """
    check_engine(engine, num_workers, address)
    items = list(items)
    results, errors = [None] * len(items), {}
    waiting = [position for position, item in enumerate(items) if is_done is None or not is_done(item)]
    outcomes = _iter_outcomes(function, items, waiting, engine, num_workers, address)
    bar = progress_bar(show=progress, total=len(items), initial=len(items) - len(waiting), desc=description, unit=unit)
    # Closed at once on Ctrl-C: a stored traceback, as in a notebook, would keep the workers alive.
    with bar, closing(outcomes):
        for position, (value, error) in outcomes:
            results[position] = value
            if error is not None:
                errors[position] = error
            bar.update()
    if errors:
        raise ItemErrors({key(items[position]): errors[position] for position in sorted(errors)}, results)
    return results


def check_engine(engine: str, num_workers: int | None = None, address: str | None = None) -> None:
    """Raise the ValueErrors of `map_items`: for callers that do other work first."""
    require_choice("engine", engine, ENGINES)
    if num_workers is not None:
        require_int("num_workers", num_workers, 0)
    if address is not None and engine != "ray":
        raise ValueError(f"address must be None unless engine='ray', got {address!r} with engine={engine!r}")


def _iter_outcomes(
    function: Callable, items: list, remaining: list[int], engine: str, num_workers: int | None, address: str | None
) -> Generator[tuple[int, Outcome], None, None]:
    """(position, outcome) of every item in `remaining`, in the order of completion."""
    if engine == "ray" and remaining:
        from labkit.core.mapping.ray import joined_cluster, ray_pool

        with joined_cluster(address, num_workers) as num_tasks:
            yield from _pooled(lambda: ray_pool(function), lambda: ray_pool(function), items, remaining, num_tasks)
        return
    count = min(usable_cores() if num_workers is None else num_workers, len(remaining))
    if count <= 1:
        yield from ((position, then(function, (items[position], None))) for position in remaining)
    else:
        open_pool = {"local": process_pool, "threads": thread_pool}[engine]
        pools = (lambda: open_pool(function, count)), (lambda: open_pool(function, 1))
        yield from _pooled(*pools, items, remaining, 2 * count)


def _pooled(
    open_pool: OpenPool, open_single: OpenPool, items: list, remaining: list[int], window: int
) -> Iterator[tuple[int, Outcome]]:
    """Outcomes from pools with at most `window` chunks in flight; items that a dying worker held run again.

    `open_single` opens pools of one worker, for those.
    """
    waiting = deque(remaining)
    while waiting:
        lost: deque[int] = deque()
        with _open_checked(open_pool) as pool:
            yield from _run_chunks(pool, items, waiting, window, lost)
        while lost:  # a pool may be useless once a worker has died: each pass opens a new one
            with _open_checked(open_single) as pool:
                yield from _run_one_by_one(pool, items, lost)


@contextmanager
def _open_checked(open_pool: OpenPool) -> Iterator[Pool]:
    """A pool that has run an empty chunk: a function that no worker can load fails here, once, not for each item."""
    with open_pool() as pool:
        try:
            pool.result(pool.submit([]))
        except Exception as error:
            raise RuntimeError(
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


def _run_one_by_one(pool: Pool, items: list, lost: deque[int]) -> Iterator[tuple[int, Outcome]]:
    """Outcomes of `lost`, each item alone, up to the first that kills its worker again."""
    while lost:
        position = lost.popleft()
        try:
            _, outcomes = pool.result(pool.submit([items[position]]))
        except Exception as error:
            yield position, (None, f"its worker died twice ({format_error(error)})")
            return
        yield position, outcomes[0]
