"""compare(): run variants of a loader side by side, so that their ratio means something.

Two loops timed one after the other measure the machine's mood as much as the code. Here each round runs every variant
once, in random order, and speed-ups are ratios within a round: what slows a whole round cancels.
"""

import gc
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd

from labkit.core import contains_secret, progress_bar, redact
from labkit.measure.frames import make_frame
from labkit.measure.processes import PeakMemory, tree_usage
from labkit.measure.recording import current_recorder
from labkit.measure.runs import count_images, page_cache_state, synchronize

Factory = Callable[[], Iterable[Any]]

# Taken from the iterable, where it has them. One whose work is done outside this process tree tells its own costs.
_ATTRIBUTES = ("batch_size", "num_workers", "cpu_s", "peak_mem_mb", "page_cache")


class VariantError(RuntimeError):
    """A variant raised or yielded nothing; the message names it, the cause is chained."""


def compare(
    variants: Mapping[str, Factory],
    *,
    baseline: str,
    rounds: int = 5,
    warmups: int = 1,
    experiment: str = "",
    seed: int = 0,
    evict: Callable[[], int] | Mapping[str, Callable[[], int]] | None = None,
    count: Callable[[Any], int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: bool = True,
    **factors: Any,
) -> pd.DataFrame:
    """Time variants in interleaved rounds.

    Args:
        variants: Label -> zero-argument factory of an iterable of batches. A batch is a tensor or array, or a tuple,
            list or dict that begins with one; 4-D counts its first axis, 3-D is one image, an int counts itself.
        baseline: The label that speed-ups refer to.
        rounds: Rounds that count.
        warmups: Rounds before them; kept in the frame as `is_warmup`, left out of every summary.
        experiment: Name of the experiment; also the file's name when a tour collects frames.
        seed: Of the order of variants within each round; every second round mirrors the one before.
        evict: Called before every run, outside the clock; drops the files from the page cache and returns their
            bytes, as `lambda: labkit.evict(paths)` does. A mapping does so for the variants it names. Runs count as
            `page_cache == "cold"` only where the kernel says that the bytes came from storage.
        count: Images of a batch, where the rule above does not fit.
        clock: Seconds; for tests.
        progress: Show a live bar.
        **factors: Further columns, such as `storage="folder"`, or with a mapping one value a variant,
            `storage={"tar": "simulated hard disk"}`. `rung=False` keeps an experiment out of the tour's
            ladder: a what-if that nobody can use, or a detail.

    Returns:
        One row a run, as `labkit.measure.frames.COLUMNS` states. `startup_s` covers the factory and `iter()`,
        `first_batch_s` the wait for the first batch, `steady_s` the rest; `images_per_s` is all images over
        first batch + rest, so a queue that filled during the first wait is paid for. Start-up is a column of its own
        and not in the rate: an epoch of a real data set is far longer than a measured one, its start-up is not.

    Raises:
        VariantError: a variant raised, or yielded no batch.
        ValueError: no variants, an unknown baseline, fewer than one round, or a name that no table can hold.

    Taught in: notebooks/00_measure.ipynb
    """
    _check_arguments(variants, baseline, rounds, warmups)
    _check_names([*variants, experiment])  # now, not when the runs are to be written down
    orders = _orders(list(variants), random.Random(seed))
    rows = []
    bar_of_runs = progress_bar(show=progress, total=(rounds + warmups) * len(variants), unit="run")
    with _frozen_heap(), PeakMemory() as memory, bar_of_runs as bar:
        for number in range(warmups + rounds):
            for order, label in enumerate(next(orders)):
                bar.set_description(f"{experiment or 'compare'}: {label}", refresh=False)
                evict_now = evict.get(label) if isinstance(evict, Mapping) else evict
                measured = _run(label, variants[label], evict_now, count or count_images, clock, memory)
                rows.append(
                    {"variant": label, "round": number, "order": order, "is_warmup": number < warmups, **measured}
                )
                bar.update()
    _warn_of_different_work(rows)
    listed = list(variants)  # tables and plots keep the caller's order; `order` says when each run came
    rows.sort(key=lambda row: (row["round"], listed.index(row["variant"])))
    frame = make_frame(_with_own_factors(rows, factors), experiment=experiment, baseline=baseline, seed=seed, **factors)
    if experiment and (recorder := current_recorder()):
        recorder.record_frame(frame)
    return frame


def _check_names(names: list[str]) -> None:
    for name in names:
        if isinstance(name, str) and ("\0" in name or name != name.encode("utf-8", "replace").decode()):
            raise ValueError(f"{name!r} is no text that a table can hold: leave out zero bytes and broken UTF-8")


def _with_own_factors(rows: list[dict[str, Any]], factors: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows with the factors that differ between variants, which are taken out of `factors`."""
    own = {name: factors.pop(name) for name in list(factors) if isinstance(factors[name], Mapping)}
    return [{**row, **{name: values.get(row["variant"]) for name, values in own.items()}} for row in rows]


def _orders(labels: list[str], shuffler: random.Random) -> Iterator[list[str]]:
    """Random orders, each followed by its mirror image: over two rounds no variant comes earlier than another."""
    while True:
        shuffler.shuffle(labels)
        yield list(labels)
        yield labels[::-1]


def _warn_of_different_work(rows: list[dict[str, Any]]) -> None:
    n_images = {row["variant"]: row["n_images"] for row in rows}
    if len(set(n_images.values())) > 1:
        warnings.warn(f"the variants did not deliver the same number of images: {n_images}", stacklevel=3)


@dataclass
class _Walk:
    """One pass over an iterable: when it was ready, when the first batch came, when it ended."""

    started: float
    ready: float
    first: float
    ended: float
    n_images: int
    peak_mem_mb: float


def _run(label: str, factory: Factory, evict, count, clock, memory: PeakMemory) -> dict[str, Any]:
    evicted = evict() if evict else 0
    gc.collect()
    memory.begin()
    before = tree_usage()
    try:
        walk, attributes = _walk(factory, count, clock, memory)
    except VariantError as error:
        raise VariantError(redact(f"variant {label!r} {error}")) from None
    except Exception as error:
        cause = None if contains_secret(error) else error
        raise VariantError(redact(f"variant {label!r} raised {type(error).__name__}: {error}")) from cause
    after = tree_usage()
    waited_s = walk.ended - walk.ready
    return {
        "n_images": walk.n_images,
        "startup_s": walk.ready - walk.started,
        "first_batch_s": walk.first - walk.ready,
        "steady_s": walk.ended - walk.first,
        "images_per_s": walk.n_images / waited_s if waited_s > 0 else float("inf"),
        "cpu_s": after.cpu_s - before.cpu_s,
        "peak_mem_mb": walk.peak_mem_mb,
        "page_cache": page_cache_state(before.read_bytes, after.read_bytes, asked=evict is not None, evicted=evicted),
        **attributes,
    }


def _walk(factory: Factory, count, clock, memory: PeakMemory) -> tuple[_Walk, dict]:
    synchronize()
    started = clock()
    iterable = factory()
    batches = iter(iterable)
    ready = clock()
    try:
        batch = next(batches)
    except StopIteration:
        raise VariantError("yielded no batch") from None
    synchronize()
    first = clock()
    memory.now()  # a DataLoader ends its workers with the last batch
    n_images = count(batch)
    for batch in batches:
        n_images += count(batch)
    synchronize()
    ended = clock()
    peak_mem_mb = memory.end()
    attributes = {name: getattr(iterable, name) for name in _ATTRIBUTES if hasattr(iterable, name)}
    return _Walk(started, ready, first, ended, n_images, peak_mem_mb), attributes


@contextmanager
def _frozen_heap():
    """Set aside what lives already, so that collecting garbage between runs costs microseconds, not 0.1 s."""
    gc.collect()
    frozen = gc.get_freeze_count() == 0  # else somebody else's: leave it
    if frozen:
        gc.freeze()
    try:
        yield
    finally:
        if frozen:
            gc.unfreeze()


def _check_arguments(variants: Mapping[str, Factory], baseline: str, rounds: int, warmups: int) -> None:
    if not variants:
        raise ValueError("no variants to compare")
    if baseline not in variants:
        raise ValueError(f"baseline {baseline!r} is not a variant: choose one of {', '.join(variants)}")
    if rounds < 1 or warmups < 0:
        raise ValueError(f"rounds={rounds}, warmups={warmups}: at least one round, and no negative warm-ups")
    not_callable = [label for label, factory in variants.items() if not callable(factory)]
    if not_callable:
        raise ValueError(
            f"variant {not_callable[0]!r} is not a function: write `lambda: loader`, so each run starts anew"
        )
