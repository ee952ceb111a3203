"""One function over many items: in processes or threads of this machine, or on a Ray cluster, with the same results.

Items travel in chunks, sized so that one takes about `_CHUNK_S`: cheap items are not drowned in messages, and dear ones
do not wait for one another. An outcome is `(value, None)` or `(None, error text)`; an error is passed on, not raised.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

from labkit.core.machine import usable_cores
from labkit.core.mapping.pools import Outcome, Submit, format_error, process_pool, then, thread_pool
from labkit.core.progress import progress_bar

ENGINES = ("local", "threads", "ray")

_CHUNK_S = 0.05
_LARGEST_CHUNK = 1000
_MOST_NAMED = 10

OpenPool = Callable[[], AbstractContextManager[Submit]]


class ItemErrors(RuntimeError):
    """Some items failed; all others are done.

    failures: key of the item -> error text, in the order of the items.
    results: list as `map_items` would have returned it, None where an item failed.
    """

    def __init__(self, failures: dict[str, str], results: list):
        super().__init__(failures, results)  # as they are, so that the error can be pickled
        self.failures, self.results = failures, results

    def __str__(self) -> str:
        named = "; ".join(f"{key}: {text}" for key, text in list(self.failures.items())[:_MOST_NAMED])
        more = len(self.failures) - _MOST_NAMED
        others = f"; and {more} more (see .failures)" if more > 0 else ""
        return f"{len(self.failures)} of {len(self.results)} items failed, the others are done: {named}{others}"


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

    Functions and items may come from notebook cells, and need no import in the workers. A script that uses processes
    calls this under `if __name__ == "__main__":`. A worker that dies (out of memory, crash in C code) costs nothing but
    time: what it had in hand is tried once more, each item alone, and reported if it kills its worker again.

    Args:
        function: Called with one item. What it writes must be whole or absent after a kill (`write_whole`).
        items: Read whole before the start.
        engine: `"local"`: processes, started afresh, so that threads and CUDA in this process do no harm. `"threads"`:
            for a function that releases the GIL. `"ray"`: a Ray cluster whose machines share the filesystem and have
            the same labkit installed; extra `cluster`.
        key: Name of an item, for the report of failures.
        is_done: Items for which this is true, asked here before the start, are left out and give None: a resume.
        num_workers: Default: the usable cores, or all cores of the Ray cluster. `"local"` and `"threads"` with 0 or 1
            run in this process, where a crash is a crash of this process.
        address: Ray cluster to join, such as `"auto"` or `"10.0.0.1:6379"`. None: the one that is already joined, else
            `RAY_ADDRESS`, else a cluster of this machine alone, which ends with the call.
        progress: Show a live bar.
        description: Words before the bar.
        unit: What an item is called on the bar.

    Returns:
        Results in the order of the items.

    Raises:
        ItemErrors: some items failed; has their keys and texts, and the results of the others.
        ValueError: unknown engine, negative `num_workers`, or an `address` for another engine than Ray.
        RuntimeError: no worker can start, or none can load the function.
        ImportError: `engine="ray"` without Ray; names the extra.
        ConnectionError: no Ray cluster at `address`.

    Taught in: notebooks/08_shard_formats.ipynb
    """
    check_engine(engine, num_workers, address)
    items = list(items)
    remaining = [position for position, item in enumerate(items) if is_done is None or not is_done(item)]
    results, errors = [None] * len(items), {}
    options = {"show": progress, "total": len(items), "initial": len(items) - len(remaining), "desc": description}
    # Closed at once on Ctrl-C: a traceback that is kept, as a notebook keeps it, would hold the workers alive.
    with (
        progress_bar(unit=unit, **options) as bar,
        closing(_outcomes(function, items, remaining, engine, num_workers, address)) as outcomes,
    ):
        for position, (value, error) in outcomes:
            if error is None:
                results[position] = value
            else:
                errors[position] = error
            bar.update()
    if errors:
        raise ItemErrors({key(items[position]): errors[position] for position in sorted(errors)}, results)
    return results


def check_engine(engine: str, num_workers: int | None = None, address: str | None = None) -> None:
    """Refuse, by ValueError, what `map_items` would: for callers that make folders first."""
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}: choose one of {', '.join(ENGINES)}")
    if num_workers is not None and num_workers < 0:
        raise ValueError(f"num_workers={num_workers}: it cannot be negative")
    if address is not None and engine != "ray":
        raise ValueError(f"address={address!r} is a Ray cluster's: engine={engine!r} runs here, engine='ray' there")


def _outcomes(
    function: Callable, items: list, remaining: list[int], engine: str, num_workers: int | None, address: str | None
) -> Iterator[tuple[int, Outcome]]:
    """(position, outcome) of every item in `remaining`, as they come."""
    if not remaining:
        return
    if engine == "ray":
        from labkit.core.mapping.ray import joined_cluster, ray_pool

        with joined_cluster(address, num_workers) as num_tasks:
            yield from _spread(lambda: ray_pool(function), items, remaining, num_tasks)
        return
    count = min(usable_cores() if num_workers is None else num_workers, len(remaining))
    if count <= 1:
        yield from ((position, then(function, (items[position], None))) for position in remaining)
    else:
        open_pool = {"local": process_pool, "threads": thread_pool}[engine]
        yield from _spread(lambda: open_pool(function, count), items, remaining, 2 * count)


def _spread(open_pool: OpenPool, items: list, remaining: list[int], window: int) -> Iterator[tuple[int, Outcome]]:
    """Outcomes from pools with at most `window` chunks in flight; what a dying worker had in hand is tried again."""
    waiting = deque(remaining)
    while waiting:
        lost: deque[int] = deque()
        with _checked(open_pool) as submit:
            yield from _drain(submit, items, waiting, window, lost)
        while lost:  # a pool that lost a worker may be of no more use: each pass opens a new one
            with _checked(open_pool) as submit:
                yield from _one_by_one(submit, items, lost)


@contextmanager
def _checked(open_pool: OpenPool) -> Iterator[Submit]:
    """The pool, after an empty chunk: what no worker can load fails here, once, and not under the key of each item."""
    with open_pool() as submit:
        try:
            submit([]).result()
        except Exception as error:
            raise RuntimeError(
                f"no worker can start and load the function ({format_error(error)}): "
                "in a script, call this under `if __name__ == '__main__':`"
            ) from error
        yield submit


def _drain(
    submit: Submit, items: list, waiting: deque[int], window: int, lost: deque[int]
) -> Iterator[tuple[int, Outcome]]:
    """Outcomes of `waiting`, until it is empty or a worker dies; what was in flight then goes to `lost`."""
    size, in_flight = 1, {}
    while in_flight or (waiting and not lost):
        while waiting and not lost and len(in_flight) < window:
            chunk = [waiting.popleft() for _ in range(min(size, len(waiting)))]
            in_flight[submit([items[position] for position in chunk])] = chunk
        for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
            chunk = in_flight.pop(future)
            try:
                seconds, outcomes = future.result()
            except Exception:
                lost.extend(chunk)
                continue
            size = _next_size(len(chunk), seconds, len(waiting) // window)
            yield from zip(chunk, outcomes, strict=True)


def _next_size(size: int, seconds: float, fair_share: int) -> int:
    """Items of the next chunk, for `_CHUNK_S` of work; at the end less, so that no worker is left with all of it."""
    fitting = int(size * _CHUNK_S / max(seconds, 1e-9))
    return max(1, min(fitting, 2 * size, _LARGEST_CHUNK, fair_share))


def _one_by_one(submit: Submit, items: list, lost: deque[int]) -> Iterator[tuple[int, Outcome]]:
    """Outcomes of `lost`, each item alone, up to the first that kills its worker again."""
    while lost:
        position = lost.popleft()
        try:
            _, outcomes = submit([items[position]]).result()
        except Exception as error:
            yield position, (None, f"its worker died twice ({format_error(error)})")
            return
        yield position, outcomes[0]
