"""Compare variants in interleaved, mirrored rounds until the answer is precise.

Two loops timed one after the other measure the state of the machine as much as the code. Here each round runs every
variant once, in random order, and speed-ups are ratios within a round: what slows down a whole round cancels.
"""

import gc
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from labkit.errors import ArgumentError, VariantError, WrongTypeError
from labkit.measure.frames import make_frame
from labkit.measure.intervals import speedup_interval, speedup_of
from labkit.measure.recorder import current_recorder
from labkit.measure.statistics import paired_ratios
from labkit.measure.steady import Factory, NoBatch, Stopwatch, count_images, page_cache_state
from labkit.measure.unchanged import unchanged
from labkit.measure.usage import PeakMemory, tree_usage
from labkit.util.arguments import is_number, require_choice, require_flag, require_int, require_seed
from labkit.util.machine import is_thorough, scale
from labkit.util.process import keep_freed_memory, note_unknown_class, progress_bar
from labkit.util.redact import contains_secret, redact

# Taken from the iterable, if it has them: a loader that works outside this process tree reports its own rate and costs.
_REPORTED_BY_LOADERS = (
    "batch_size",
    "num_workers",
    "images_per_s",
    "steady_s",
    "n_steady_batches",
    "n_steady_images",
    "is_steady",
    "cpu_s",
    "steal_s",
    "others_cpu_s",
    "peak_mem_mb",
    "page_cache",
)
_MAX_GROWTH = 4  # times the rounds before the first look: more would narrow an interval by less than half again
_THOROUGH = 6  # times the budget: an interval of sixteen rounds is about a third as wide as one of four
_FEWEST_ROUNDS = 3  # of which an interval can be computed that is not absurdly wide
_SHARE_OF_EFFECT = 0.1  # "ten times, within a quarter" is precise enough


class DifferentWorkWarning(UserWarning):
    """The variants of a comparison, or the passes of one of them, did not deliver the same number of images."""


def compare(
    variants: Mapping[str, Factory],
    *,
    baseline: str,
    rounds: int | None = None,
    precision: float = 0.05,
    budget_s: float | None = None,
    verdicts: bool = True,
    warmups: int = 1,
    experiment: str = "",
    seed: int = 0,
    count: Callable[[Any], int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: bool = True,
    rung: bool = True,
    factors: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Time variants in interleaved rounds, until their speed-ups are known precisely enough.

    Args:
        variants: Label -> function without arguments that returns an iterable of batches: arrays or tensors (4-D: the
            first axis counts images, 3-D: one image), tuples, lists, dicts or data classes that begin with one, ints.
        baseline: Label of the variant that speed-ups refer to.
        rounds: Measured rounds. Default: as many as `precision` asks for, see `Stopping`.
        precision: Half-width of a 95 % interval that is narrow enough: 0.05 is 5 %.
        budget_s: Seconds for all measured rounds. Default: `lk.scale().budget_s` for each variant, and six times as
            much if `LABKIT_THOROUGH` is set, as by `labkit tour --thorough`.
        verdicts: Whether `summarize` judges the variants, or gives their ratios only.
        warmups: Rounds before them, of about one pass per variant, marked `is_warmup`, never summarized.
        experiment: Its name.
        seed: Of the order of variants within rounds; every second round mirrors the one before.
        count, clock: Return the images of other kinds of batches, and, for tests, the seconds.
        progress: Show a progress bar.
        rung: Whether it is a notebook's main comparison, which a tour's page draws. Others take the fewest rounds
            unless `LABKIT_THOROUGH` is set.
        factors: Further columns, `{"storage": "folder"}` or, by variant, `{"storage": {"tar": "hard disk"}}`.

    Returns:
        One row per run, with the columns of `labkit.measure.frames`; `images_per_s` is the steady state's. The loaders
        are left with the epoch, order and state that they had, and all random generators as they were.

    >>> photos = lk.FolderStore("photos")
    >>> loaders = {decoder: lk.make_loader(lk.ImageDataset(photos, decoder=decoder), lk.LoaderConfig(batch_size=1))
    ...            for decoder in ("pil", "turbojpeg")}
    >>> variants = {name: (lambda loader=loader: loader) for name, loader in loaders.items()}
    >>> runs = lk.compare(variants, baseline="pil", rounds=3, progress=False)
    >>> print(lk.conclude(runs))  # doctest: +SKIP
    "turbojpeg" ran faster than "pil": 1.92 times the speed (95 % interval 1.83 to 2.01).

    Raises:
        VariantError: a variant raised, or yielded no batch, or batches without an image.
        ValueError, TypeError: an argument is impossible or unknown.

    Taught in: notebooks/00_measure.ipynb
    """
    if not isinstance(variants, Mapping):
        raise WrongTypeError(f"variants must be a dict, such as {{'one': lambda: loader}}, got {variants!r:.100}")
    if not variants:
        raise ArgumentError("no variants to compare")
    seed = require_seed(seed)
    require_choice("baseline", baseline, variants)
    warmups = require_int("warmups", warmups, 0)
    if not is_number(precision) or not precision > 0:
        raise ArgumentError(f"precision must be > 0, as 0.05 for 5 %, got {precision!r:.100}")
    if budget_s is not None and (not is_number(budget_s) or not budget_s >= 0):
        raise ArgumentError(f"budget_s must be a number of seconds >= 0, got {budget_s!r:.100}")
    for label, factory in variants.items():
        if not callable(factory):
            raise ArgumentError(
                f"variant {label!r} is not a function: write `lambda: loader`, so each run starts afresh"
            )
    if rounds is not None:
        stopping = Stopping(require_int("rounds", rounds), precision, 0, clock)
    elif rung or is_thorough() or budget_s is not None:
        if budget_s is None:
            budget_s = scale().budget_s * len(variants) * (_THOROUGH if is_thorough() else 1)
        stopping = Stopping(scale().rounds, precision, budget_s, clock)
    else:
        stopping = Stopping(min(scale().rounds, _FEWEST_ROUNDS), precision, 0, clock)
    runner = _Runner(variants, baseline, experiment or "compare", count or count_images, clock)
    rows = runner.run_rounds(stopping, warmups, seed, progress)
    # What one pass delivers: how often a loader was lengthened depends on its speed.
    passes = [(row["variant"], images) for row in rows if (images := row.pop("pass_images")) is not None]
    n_images = dict(passes)
    for label in n_images:
        of_passes = [images for variant, images in passes if variant == label]
        if len(set(of_passes)) > 1:
            message = (
                f"the passes of {label!r} did not deliver the same number of images: {of_passes}; their rates are of "
                "different work. Let each pass start from the beginning, as a new iterator of the same data does"
            )
            warnings.warn(message, DifferentWorkWarning, stacklevel=2)
    if len(set(n_images.values())) > 1:
        message = f"the variants did not deliver the same number of images: {n_images}"
        warnings.warn(message, DifferentWorkWarning, stacklevel=2)
    columns: dict[str, Any] = {"experiment": experiment, "baseline": baseline, "seed": seed, "rung": rung}
    columns |= {"has_verdict": require_flag("verdicts", verdicts), "n_looks": stopping.n_looks, **(factors or {})}
    for name in [name for name, values in columns.items() if isinstance(values, Mapping)]:
        by_variant = columns.pop(name)
        rows = [{**row, name: by_variant.get(row["variant"])} for row in rows]
    frame = make_frame(rows, **columns)
    if experiment and (recorder := current_recorder()):
        recorder.record_frame(frame)
    return frame


@dataclass
class Stopping:
    """Rounds until every speed-up is known precisely enough, or until the time is spent.

    The runs are looked at three times at most. When is planned once, from the time that the first rounds took and not
    from what they showed, so the intervals of `speedup_interval` stay valid with that number of looks.

    Args:
        min_rounds: Rounds before the first look.
        precision: Half-width of a 95 % interval that is narrow enough, as a share: 0.05 is 5 %. A tenth of the effect,
            on a logarithmic scale, is enough too.
        budget_s: Seconds after which no round is started that would not be looked at. 0: `min_rounds` rounds, and one
            look.
        clock: Returns seconds.

    Attributes:
        n_looks: Looks planned. 1 until the first rounds have been timed.
    """

    min_rounds: int
    precision: float
    budget_s: float
    clock: Callable[[], float] = time.perf_counter
    n_looks: int = 1
    _looks: list[int] = field(default_factory=list)

    def begin(self) -> None:
        self._started_s = self.clock()

    def next_round(self, rows: list[dict], labels: list[str], baseline: str, n_rounds: int) -> list[str]:
        """The variants that go on after `n_rounds` rounds; none: the comparison is over.

        Args:
            rows: The runs so far that are no warm-ups.
            labels: The variants of the last round.
            baseline: Runs in every round.
        """
        if n_rounds == self.min_rounds:
            self._looks = self._plan(n_rounds)
            self.n_looks = len(self._looks)
        if n_rounds not in self._looks:
            return labels
        if n_rounds == self._looks[-1]:
            return []
        vague = [label for label in labels if label != baseline and not self._is_precise(rows, label, baseline)]
        return [label for label in labels if label in (baseline, *vague)] if vague else []

    def _plan(self, n_rounds: int) -> list[int]:
        """Numbers of rounds after which to look: now, at the end of the time, and between them."""
        elapsed_s = self.clock() - self._started_s
        n_more = (self.budget_s - elapsed_s) * n_rounds / max(elapsed_s, 1e-9)
        last = n_rounds + max(0, int(min(n_more, (_MAX_GROWTH - 1) * n_rounds)))
        between = round(math.sqrt(n_rounds * last))
        return sorted({n_rounds, between, last}) if last > n_rounds + 1 else [last]

    def _is_precise(self, rows: list[dict], label: str, baseline: str) -> bool:
        frame = pd.DataFrame(rows).assign(experiment="")
        own, base = (frame[frame["variant"] == name] for name in (label, baseline))
        ratios = paired_ratios(own, base)["speedup"].to_numpy(float)
        low, high = speedup_interval(ratios, n_looks=self.n_looks)
        enough = max(math.log1p(self.precision), _SHARE_OF_EFFECT * abs(math.log(speedup_of(ratios))))
        return bool(np.log(high / low) / 2 <= enough)


@dataclass(frozen=True)
class _Runner:
    """Runs variants; arguments as for `compare`."""

    variants: Mapping[str, Factory]
    baseline: str
    name: str
    count: Callable[[Any], int]
    clock: Callable[[], float]
    n_steady_batches: dict[str, int | None] = field(default_factory=dict)  # as planned in a variant's first run

    def run_rounds(self, stopping: Stopping, warmups: int, seed: int, progress: bool) -> list[dict[str, Any]]:
        """One row per run, by round and in the order of the variants."""
        labels, rows, number = list(self.variants), [], 0
        active, orders = labels, _mirrored_orders(list(labels), random.Random(seed))
        torch = sys.modules.get("torch")
        n_threads = torch.get_num_threads() if torch else None
        keep_freed_memory()  # else a rate depends on what this process ran before
        with (
            progress_bar(show=progress, unit="run") as bar, unchanged() as keep, _frozen_heap(), PeakMemory() as memory,
        ):  # fmt: skip
            while active:
                memory.is_sampled = number == 0
                if number == warmups:
                    stopping.begin()
                for order, label in enumerate(name for name in next(orders) if name in active):
                    bar.set_description(f"{self.name}: {label}", refresh=False)
                    own = {"variant": label, "round": number, "order": order, "is_warmup": number < warmups}
                    try:
                        run = self._run(label, memory, keep, is_warmup=number < warmups)
                    finally:
                        if torch and torch.get_num_threads() != n_threads:  # the same for all variants
                            torch.set_num_threads(n_threads)
                    rows.append({**own, "torch_num_threads": n_threads, **run})
                    bar.update()
                number += 1
                if number > warmups:
                    measured = [row for row in rows if not row["is_warmup"]]
                    active = stopping.next_round(measured, active, self.baseline, number - warmups)
        return sorted(rows, key=lambda row: (row["round"], labels.index(row["variant"])))

    def _run(self, label: str, memory: PeakMemory, keep: Callable[[Any], None], *, is_warmup: bool) -> dict[str, Any]:
        gc.collect()
        memory.begin()
        before = tree_usage()
        watch = Stopwatch(
            self.count,
            self.clock,
            scale().min_steady_s,
            is_warmup=is_warmup,
            peak_mem_mb=memory.end,
            n_steady_batches=self.n_steady_batches.get(label),
            keep=keep,
        )
        try:
            iterable, measured = watch.time(self.variants[label])
            reported = {name: getattr(iterable, name) for name in _REPORTED_BY_LOADERS if hasattr(iterable, name)}
        except NoBatch:
            raise VariantError(redact(f"variant {label!r} yielded no batch"), label) from None
        except Exception as error:
            note_unknown_class(error)
            lines = [f"variant {label!r} raised {type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
            raise VariantError(redact("\n".join(lines)), label) from (None if contains_secret(error) else error)
        if not measured["n_images"]:
            raise VariantError(
                f"variant {label!r} gave batches, and no image in any of them, so it has no rate: let its loader give "
                "images, or say by count= what to count in a batch",
                label,
            ) from None
        self.n_steady_batches[label] = watch.n_steady_batches
        page_cache = page_cache_state(before.read_bytes, tree_usage().read_bytes)
        return {"page_cache": page_cache, **measured, **reported}


def _mirrored_orders(labels: list[str], shuffler: random.Random) -> Iterator[list[str]]:
    """Random orders, each followed by its reverse: over two rounds no variant comes earlier than another."""
    while True:
        shuffler.shuffle(labels)
        yield list(labels)
        yield labels[::-1]


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Exempt all living objects from garbage collection: between runs it then takes microseconds, not 0.1 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
