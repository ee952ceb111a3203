"""`lk.tune`: how many workers to load with, by a sweep that `lk.compare` measures in interleaved rounds.

In come a data set and a `LoaderConfig`; out goes `Tuned`, the same with the best number of workers.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
from torch.utils.data import Subset

from labkit.data.dataset import collate
from labkit.errors import WrongTypeError
from labkit.loading.torch_loader import LoaderConfig, allow_waiting_workers, make_loader
from labkit.measure.compare import compare
from labkit.measure.statistics import quiet_summary
from labkit.measure.steady import ReplayLoader, with_step
from labkit.measure.unchanged import unchanged
from labkit.util.arguments import require_int, require_positive
from labkit.util.machine import usable_cores
from labkit.util.ranks import cores_per_rank
from labkit.watching.diagnose import counted

DEFAULT, STEP_ALONE = "default", "step alone"
_N_QUEUED = 3  # batches of each worker in a pass
_LEAST_BATCHES, _KEPT = 8, 2


@dataclass(frozen=True)
class Tuned:
    """What `tune` chose; unpacks as `config, runs = lk.tune(...)`.

    Attributes:
        config: The settings with the best number of workers, for `make_loader`.
        why: The reason, in a sentence.
        frame: The runs that decided, as `compare` returns them.
    """

    config: LoaderConfig
    why: str
    frame: pd.DataFrame

    def __iter__(self) -> Iterator[Any]:
        return iter((self.config, self.frame))

    def __repr__(self) -> str:
        return f"{self.config!r}\n{self.why}"


def tune(
    dataset: Any,
    step: Callable[[Any], Any] | None = None,
    *,
    config: LoaderConfig | None = None,
    num_workers: Iterable[int] | None = None,
    budget_s: float = 60.0,
    shuffle: bool = True,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] = collate,
    batch_transform: Callable[[Any], Any] | None = None,
    progress: bool = True,
) -> Tuned:
    """Choose the number of worker processes for one data set and one step, by `lk.compare`.

    Args:
        dataset: Map-style, as for `make_loader`; some of its samples are loaded.
        step: Called with each batch; it really trains. None: find the fastest loader.
        config: The default, which is one of the candidates; all its other settings stay.
        num_workers: The numbers to try. Default: none, one, half of the usable cores, all of them, and twice as many,
            which help where workers mostly wait for storage.
        budget_s: Seconds, about; one comparison of all candidates is always finished.
        shuffle, drop_last, collate_fn, batch_transform: As for `make_loader`.
        progress: Show a progress bar.

    Returns:
        A `Tuned`. Its choice differs from the default only if the measured interval shows that it is faster. Global
        random generators are as they were.

    >>> config, runs = lk.tune(lk.ImageDataset("photos"), num_workers=(0, 2), budget_s=60)  # doctest: +SKIP

    Raises:
        TypeError, ValueError: an iterable or empty data set, a step that cannot be called, a number of workers that is
            none, or a budget of 0 seconds.
    """
    if step is not None and not callable(step):
        raise WrongTypeError(f"step must be a function of one batch or None, got a {type(step).__name__}")
    require_positive("budget_s", budget_s)
    config, cores = allow_waiting_workers(config or LoaderConfig(), dataset), cores_per_rank()
    given = (0, 1, cores // 2, cores, 2 * cores) if num_workers is None else num_workers
    counts = [require_int("num_workers", count, 0) for count in given]
    own: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last, "collate_fn": collate_fn}
    own["batch_transform"] = batch_transform
    data: Any = make_loader(dataset, _with_workers(config, 0), **own).dataset  # of a path, the images there
    usual = config.resolved().num_workers or 0
    n_batches = max(_LEAST_BATCHES, _N_QUEUED * max([usual, *counts]))
    some = Subset(data, _some_indices(len(data), n_batches * config.batch_size))
    configs = {DEFAULT: config}
    configs |= {_label(count): _with_workers(config, count) for count in sorted({*counts} - {usual})}
    loaders: dict[str, Any] = {label: make_loader(some, each, **own) for label, each in configs.items()}
    with unchanged():
        try:
            if step:
                kept = ReplayLoader(make_loader(some, _with_workers(config, 0), **own), _KEPT, length=n_batches)
                loaders[STEP_ALONE] = kept
            trained = {label: with_step(loader, step) if step else loader for label, loader in loaders.items()}
            variants = {label: partial(lambda each: each, loader) for label, loader in trained.items()}
            runs = compare(variants, baseline=DEFAULT, count=counted, budget_s=budget_s, progress=progress, rung=False)
        finally:
            for label in configs:
                loaders[label].close()
    summary = quiet_summary(runs, DEFAULT)
    faster = summary.drop(index=STEP_ALONE, errors="ignore").query("verdict == 'faster'")["speedup"]
    best = DEFAULT if faster.empty else str(faster.idxmax())
    chosen = replace(configs[best].resolved(), oversubscribe=configs[best].oversubscribe)
    return Tuned(chosen, _explain_choice(summary, best), runs)


def _label(num_workers: int) -> str:
    return f"{num_workers} worker{'s' * (num_workers != 1)}"


def _with_workers(config: LoaderConfig, count: int) -> LoaderConfig:
    """`config` with another number of workers; without workers, settings that only workers use are reset."""
    idle: dict[str, Any] = {} if count else {"prefetch_factor": None, "persistent_workers": None, "start_method": None}
    return replace(config, num_workers=count, oversubscribe=count > usable_cores(), **idle)


def _some_indices(n_samples: int, count: int) -> list[int]:
    """`count` samples from all over the data set, all equally often."""
    order = random.Random(0).sample(range(n_samples), min(count, n_samples))
    return [order[number % len(order)] for number in range(count)]


def _explain_choice(summary: pd.DataFrame, best: str) -> str:
    own = summary.loc[best]
    words = "No other number of workers was faster than the default beyond doubt"
    if best != DEFAULT:
        words = f"{best}: {own['speedup']:.2f}x [{own['ci_low']:.2f}, {own['ci_high']:.2f}] as fast as the default"
    if STEP_ALONE in summary.index:
        words += f"; {best} runs at {own['images_per_s'] / summary.loc[STEP_ALONE, 'images_per_s']:.0%} of the rate of "
        words += "the step alone"
    return f"{words}."
