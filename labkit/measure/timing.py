"""compare(): run variants of a loader side by side, so that their ratio means something.

Two loops timed one after the other measure the state of the machine as much as the code. Here each round runs every
variant once, in random order, and speed-ups are ratios within a round: what slows down a whole round cancels.
"""

import gc
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd

from labkit.core import contains_secret, progress_bar, redact, require_choice, require_int
from labkit.measure.frames import make_frame
from labkit.measure.processes import PeakMemory, tree_usage
from labkit.measure.recording import current_recorder
from labkit.measure.runs import count_images, page_cache_state, synchronize

Factory = Callable[[], Iterable[Any]]

# Taken from the iterable, if it has them: a loader that works outside this process tree reports its own costs.
_REPORTED_BY_LOADERS = ("batch_size", "num_workers", "cpu_s", "peak_mem_mb", "page_cache")


class DifferentWorkWarning(UserWarning):
    """The variants of a comparison did not deliver the same number of images."""


class VariantError(RuntimeError):
    """A variant raised or yielded nothing; the message names it as `label` does, the cause is chained."""

    def __init__(self, message: str, label: str = ""):
        super().__init__(message)
        self.label = label


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
        variants: Label -> function without arguments that returns an iterable of batches: arrays or tensors (4-D: the
            first axis counts images, 3-D: one image), tuples, lists or dicts that begin with one, or ints.
        baseline: Label of the variant that speed-ups refer to.
        rounds, warmups: Measured rounds, and rounds before them, which are marked `is_warmup` and never summarized.
        experiment: Its name; with `rung=False` it is no rung of the ladder.
        seed: Of the order of variants within rounds; every second round mirrors the one before.
        evict: Called before each run, outside the clock: drops files from the page cache and returns their bytes, as
            `lambda: labkit.evict(paths)`. A mapping applies to the variants it names. Such runs have `page_cache`
            "cold" only if the kernel reports that the bytes came from storage.
        count, clock: Return the images of other kinds of batches, and, for tests, the seconds.
        progress: Show a progress bar.
        **factors: Further columns, `storage="folder"` or, by variant, `storage={"tar": "simulated hard disk"}`.

    Returns:
        One row per run, with the columns `labkit.measure.frames.COLUMNS`. `startup_s` covers the factory and `iter()`,
        `first_batch_s` the wait for the first batch, `steady_s` the rest. `images_per_s` is all images over the last
        two, so a queue that filled before the first batch is paid for, but no start-up. Warm-ups have no `peak_mem_mb`.

    Raises:
        VariantError: a variant raised, or yielded no batch.
        ValueError: no variants, an unknown baseline, no rounds, or a name that cannot be saved.

    Taught in: notebooks/00_measure.ipynb
    """
    _check_arguments(variants, baseline, rounds, warmups, experiment)
    runner = _Runner(variants, experiment or "compare", evict, count or count_images, clock)
    rows = runner.run_rounds(rounds, warmups, seed, progress)
    _warn_of_different_work(rows)
    factors = {"experiment": experiment, "baseline": baseline, "seed": seed, **factors}
    frame = make_frame(_move_own_factors(rows, factors), **factors)
    if experiment and (recorder := current_recorder()):
        recorder.record_frame(frame)
    return frame


def _check_arguments(
    variants: Mapping[str, Factory], baseline: str, rounds: int, warmups: int, experiment: str
) -> None:
    if not variants:
        raise ValueError("no variants to compare")
    require_choice("baseline", baseline, variants)
    require_int("rounds", rounds)
    require_int("warmups", warmups, 0)
    for label, factory in variants.items():
        if not callable(factory):
            raise ValueError(f"variant {label!r} is not a function: write `lambda: loader`, so each run starts anew")
    for name in (*variants, experiment):  # checked now, not after the runs when the frame is saved
        if isinstance(name, str) and ("\0" in name or name != name.encode("utf-8", "replace").decode()):
            raise ValueError(f"{name!r} cannot be saved in a table: remove zero bytes and broken UTF-8")


def _move_own_factors(rows: list[dict[str, Any]], factors: dict[str, Any]) -> list[dict[str, Any]]:
    """Take the factors that differ between variants out of `factors`, and add them to the rows."""
    own = {name: factors.pop(name) for name in list(factors) if isinstance(factors[name], Mapping)}
    return [{**row, **{name: values.get(row["variant"]) for name, values in own.items()}} for row in rows]


def _shuffled_orders(labels: list[str], shuffler: random.Random) -> Iterator[list[str]]:
    """Random orders, each followed by its reverse: over two rounds no variant comes earlier than another."""
    while True:
        shuffler.shuffle(labels)
        yield list(labels)
        yield labels[::-1]


def _warn_of_different_work(rows: list[dict[str, Any]]) -> None:
    n_images = {row["variant"]: row["n_images"] for row in rows}
    if len(set(n_images.values())) > 1:
        message = f"the variants did not deliver the same number of images: {n_images}"
        warnings.warn(message, DifferentWorkWarning, stacklevel=3)


@dataclass(frozen=True)
class _Runner:
    """Runs variants; arguments as for `compare`."""

    variants: Mapping[str, Factory]
    name: str
    evict: Callable[[], int] | Mapping[str, Callable[[], int]] | None
    count: Callable[[Any], int]
    clock: Callable[[], float]

    def run_rounds(self, rounds: int, warmups: int, seed: int, progress: bool) -> list[dict[str, Any]]:
        """One row per run, by round and in the order of the variants."""
        labels, rows = list(self.variants), []
        orders = _shuffled_orders(list(labels), random.Random(seed))
        progress_of_runs = progress_bar(show=progress, total=(rounds + warmups) * len(labels), unit="run")
        with _frozen_heap(), PeakMemory() as memory, progress_of_runs as bar:
            for number in range(warmups + rounds):
                for order, label in enumerate(next(orders)):
                    bar.set_description(f"{self.name}: {label}", refresh=False)
                    row = {"variant": label, "round": number, "order": order, "is_warmup": number < warmups}
                    # No summary counts warm-ups, and in a large process a sample takes a tenth of a second.
                    memory.is_sampled = number >= warmups
                    rows.append({**row, **self._run(label, memory)})
                    bar.update()
        return sorted(rows, key=lambda row: (row["round"], labels.index(row["variant"])))

    def _run(self, label: str, memory: PeakMemory) -> dict[str, Any]:
        evict = self.evict.get(label) if isinstance(self.evict, Mapping) else self.evict
        evicted = evict() if evict else 0
        gc.collect()
        memory.begin()
        before = tree_usage()
        try:
            measured = self._time_batches(self.variants[label], memory)
        except Exception as error:
            is_named = isinstance(error, VariantError)
            what = error if is_named else f"raised {type(error).__name__}: {error}"
            cause = None if is_named or contains_secret(error) else error
            raise VariantError(redact(f"variant {label!r} {what}"), label) from cause
        after = tree_usage()
        asked = evict is not None
        page_cache = page_cache_state(before.read_bytes, after.read_bytes, asked=asked, evicted=evicted)
        return {"cpu_s": after.cpu_s - before.cpu_s, "page_cache": page_cache, **measured}

    def _time_batches(self, factory: Factory, memory: PeakMemory) -> dict[str, Any]:
        synchronize()
        started = self.clock()
        iterable = factory()
        batches = iter(iterable)
        ready = self.clock()
        try:
            batch = next(batches)
        except StopIteration:
            raise VariantError("yielded no batch") from None
        synchronize()
        first = self.clock()
        memory.now()  # a DataLoader ends its workers with the last batch
        n_images = self.count(batch)
        for batch in batches:
            n_images += self.count(batch)
        synchronize()
        ended = self.clock()
        measured = {
            "n_images": n_images, "startup_s": ready - started, "first_batch_s": first - ready,
            "steady_s": ended - first, "images_per_s": n_images / (ended - ready) if ended > ready else float("inf"),
            "peak_mem_mb": memory.end(),
        }  # fmt: skip
        reported = {name: getattr(iterable, name) for name in _REPORTED_BY_LOADERS if hasattr(iterable, name)}
        return {**measured, **reported}


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Exempt all living objects from garbage collection: between runs it then takes microseconds, not 0.1 s."""
    gc.collect()
    with ExitStack() as frozen:
        if not _is_frozen():  # a freeze by somebody else stays
            gc.freeze()
            frozen.callback(gc.unfreeze)
        yield


def _is_frozen() -> bool:
    """Whether what lives as long as the process is exempt. Counts do not tell: Python 3.12 exempts some of its own."""
    return not any(item is sys.modules for item in gc.get_objects())
