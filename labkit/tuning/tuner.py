"""tune(): choose how to load by measuring, in a minute instead of a grid's hour."""

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import pandas as pd

from labkit.core import require_positive
from labkit.data import collate
from labkit.measure import ReplayLoader, quiet_summary, synchronize, with_step
from labkit.pipeline.loader import LoaderConfig, cores_per_rank
from labkit.tuning.candidates import (
    DEFAULT,
    WORTH_MEASURING,
    Candidate,
    Source,
    candidates,
    with_workers,
)
from labkit.tuning.contention import expected_s
from labkit.tuning.decoder_choice import fastest_decoder
from labkit.tuning.io_wait import Making, making_in_one_process
from labkit.tuning.race import STEP_ALONE, race


@dataclass(frozen=True)
class Tuned:
    """What `tune` chose; unpacks as `config, frame = lk.tune(...)`.

    Attributes:
        config: The best settings of worker processes, for `make_loader`.
        decoder: The decoder to use; None: leave the data set's own.
        threads: Whether `BatchLoader`, which does the same work, is faster than any of these.
        why: The reason, in a sentence.
        frame: The runs that decided.
        decoders: The runs of the decoders on their own; None if there was nothing to choose.
    """

    config: LoaderConfig
    decoder: str | None
    threads: bool
    why: str
    frame: pd.DataFrame
    decoders: pd.DataFrame | None
    source: Source

    def loader(self) -> Iterable[Any]:
        """The chosen loader, over the whole data set."""
        return self.source.loader(Candidate(self.config, self.decoder, self.threads))

    def __iter__(self) -> Iterator[Any]:
        return iter((self.config, self.frame))

    def __repr__(self) -> str:
        what = "lk.BatchLoader" if self.threads else repr(self.config)
        decoder = f", decoder={self.decoder!r}" * (self.decoder is not None and not self.threads)
        return f"{what}{decoder}\n{self.why}"


def tune(
    dataset: Any,
    step: Callable[[Any], Any] | None = None,
    *,
    config: LoaderConfig | None = None,
    budget_s: float = 60.0,
    shuffle: bool = True,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] = collate,
    batch_transform: Callable[[Any], Any] | None = None,
    progress: bool = True,
) -> Tuned:
    """Choose decoder, `num_workers`, `prefetch_factor`, and threads or processes, for one data set and one step.

    First, batches are made in this process, to see what one costs and how much of that is waiting; a model then drops
    what cannot win. The rest race in interleaved rounds until the default keeps up with the step, or a winner is sure.

    Args:
        dataset: Map-style, as for `make_loader`. For an `ImageDataset` the decoder is chosen too, and threads are tried
            if its transform does nothing that `BatchLoader` cannot do.
        step: Called with each batch; it really trains. None: find the fastest loader.
        config: The default to start from; its batch size, seed, pinning and start method stay.
        budget_s: Seconds, about; one comparison of all candidates is always finished.
        shuffle, drop_last, collate_fn, batch_transform: As for `make_loader`.
        progress: Show a progress bar.

    Returns:
        A `Tuned`. Its choice differs from the default only if the measured interval shows that it is faster.

    Raises:
        TypeError, ValueError: an iterable or empty data set, a step that cannot be called, or a budget of 0 seconds.

    Taught in: notebooks/12_find_the_stall.ipynb
    """
    if step is not None and not callable(step):
        raise TypeError(f"step must be a function of one batch or None, got a {type(step).__name__}")
    require_positive("budget_s", budget_s)
    deadline, config = time.perf_counter() + budget_s, config or LoaderConfig()
    source = Source(dataset, shuffle, drop_last, collate_fn, batch_transform)
    source.loader(Candidate(with_workers(config, 0)))  # report errors of the data set before measuring
    decoder, decoders = fastest_decoder(dataset, limit_s=budget_s / 15, seed=config.seed)
    alone = _CostsAlone.of(source, Candidate(with_workers(config, 0), decoder), step, budget_s)
    field = candidates(
        config, alone.making, alone.step_s, alone.step_cpu_s, decoder=decoder, threads=source.has_threads()
    )
    n_batches = alone.n_batches(budget_s, field)
    with _variants(source, field, alone.batches, step, n_batches) as variants:
        default_first = alone.may_keep_up(config)
        runs = race(variants, default=DEFAULT, deadline=deadline, progress=progress, try_default_first=default_first)
    return _to_tuned(source, field, runs, decoders)


@dataclass(frozen=True)
class _CostsAlone:
    """Making a batch and the step, each on its own; seconds per batch."""

    making: Making
    step_s: float
    step_cpu_s: float
    batches: list[Any]

    @classmethod
    def of(cls, source: Source, candidate: Candidate, step: Any, budget_s: float) -> "_CostsAlone":
        loader = source.loader(candidate, _some_indices(source.dataset, 16 * candidate.config.batch_size))
        batches = list(islice(loader, 2))
        making = making_in_one_process(loader, limit_s=budget_s / 15, n_batches=12)
        if making.seconds is None:  # one batch is all there is
            making = Making(_seconds_per_call(lambda: next(iter(loader)), 1)[0], 0.0)
        step_s, step_cpu_s = _seconds_per_call(lambda: step(batches[0]), 3) if step else (0.0, 0.0)
        return cls(making, step_s, step_cpu_s, batches)

    def may_keep_up(self, config: LoaderConfig) -> bool:
        """Whether the default can be as fast as the step, according to a rough model."""
        num_workers, cores = config.resolved().num_workers or 0, cores_per_rank()
        expected = expected_s(num_workers, self.making, self.step_s, self.step_cpu_s, cores)
        return expected <= WORTH_MEASURING * self.step_s

    def n_batches(self, budget_s: float, field: dict[str, Candidate]) -> int:
        """Batches per run: a sixtieth of the budget, but enough that every worker makes some."""
        most = max(each.config.resolved().num_workers or 0 for each in field.values())
        a_batch_s = max(self.step_s, self.making.known_s / max(1, most))
        return max(4, 3 * most, min(200, int(budget_s / 60 / a_batch_s)))


def _seconds_per_call(function: Callable[[], Any], n: int) -> tuple[float, float]:
    """Wall and processor seconds per call, after a warm-up call."""
    function()
    synchronize()
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(n):
        function()
    synchronize()
    return (time.perf_counter() - start) / n, (time.process_time() - cpu) / n


def _some_indices(dataset: Any, count: int) -> list[int]:
    """`count` samples from all over the data set, all equally often."""
    order = random.Random(0).sample(range(len(dataset)), min(count, len(dataset)))
    return [order[number % len(order)] for number in range(count)]


@contextmanager
def _variants(
    source: Source, field: dict[str, Candidate], batches: list[Any], step: Any, n_batches: int
) -> Iterator[dict[str, Callable[[], Any]]]:
    """Factories for `compare`: workers stay alive between rounds, and end with the race."""
    indices = _some_indices(source.dataset, n_batches * field[DEFAULT].config.batch_size)
    loaders = {label: source.loader(candidate, indices) for label, candidate in field.items()}
    if step:
        loaders[STEP_ALONE] = ReplayLoader(batches, len(batches), length=n_batches)
    try:
        trained = {label: with_step(loader, step) if step else loader for label, loader in loaders.items()}
        yield {label: partial(_itself, loader) for label, loader in trained.items()}
    finally:
        for loader in loaders.values():
            if hasattr(loader, "close"):
                loader.close()


def _itself(loader: Any) -> Any:
    return loader


def _to_tuned(source: Source, field: dict[str, Candidate], runs: pd.DataFrame, decoders: pd.DataFrame | None) -> Tuned:
    summary = quiet_summary(runs, DEFAULT)
    best = _fastest(summary, list(field))
    of_processes = _fastest(summary, [label for label, each in field.items() if not each.threads])
    chosen = field[of_processes]
    config = replace(chosen.config.resolved(), oversubscribe=chosen.config.oversubscribe)
    return Tuned(config, chosen.decoder, field[best].threads, _explain_choice(summary, best), runs, decoders, source)


def _fastest(summary: pd.DataFrame, labels: list[str]) -> str:
    run = summary[summary.index.isin(labels)]  # only the default, if it keeps up
    faster = run.loc[run["verdict"] == "faster", "speedup"]
    return DEFAULT if faster.empty else str(faster.idxmax())


def _explain_choice(summary: pd.DataFrame, best: str) -> str:
    own = summary.loc[best]
    if best != DEFAULT:
        words = f"{best}: {own['speedup']:.2f}x [{own['ci_low']:.2f}, {own['ci_high']:.2f}] as fast as the default"
    elif len(summary.drop(index=STEP_ALONE, errors="ignore")) == 1:
        words = "The default keeps up with the step, so that no other setting was tried: it runs"
    else:
        words = "No other setting was faster than the default beyond doubt"
    if STEP_ALONE in summary.index:
        share = own["images_per_s"] / summary.loc[STEP_ALONE, "images_per_s"]
        words += f"{',' * (not words.endswith('runs'))} at {share:.0%} of the rate of the step alone"
    return f"{words}."
