"""`lk.tune`: choose how to load by measuring, in a minute instead of a grid's hour.

A model of their speed excludes most of the grid. `compare` runs the others, in interleaved rounds, until their
speed-ups are known or the time is spent.
"""

import copy
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cv2
import pandas as pd
import torch
from torch.utils.data import Subset

from labkit.data.dataset import ImageDataset, collate
from labkit.data.decode import DECODERS, decode, missing_decoders
from labkit.data.stores import read_bytes
from labkit.errors import DecodeError, WrongTypeError
from labkit.loading.batch_loader import BatchLoader
from labkit.loading.torch_loader import LoaderConfig, allow_waiting_workers, cores_per_rank, make_loader
from labkit.measure.compare import compare
from labkit.measure.frames import measured_runs
from labkit.measure.statistics import paired_ratios, quiet_summary
from labkit.measure.steady import ReplayLoader, with_step
from labkit.util.arguments import require_positive
from labkit.util.machine import usable_cores
from labkit.util.process import preserve_rng_state
from labkit.watching.accounts import account_for, costs_of
from labkit.watching.advice import Costs, expected_s
from labkit.watching.diagnose import counted
from labkit.watching.observe import Observer

_OTHER_WORK = {"pil_draft"}  # decodes to another size

_PREFERRED = "turbojpeg"  # unless the fastest is faster: the default elsewhere too

_N_FILES, _ROUNDS = 8, 5


def fastest_decoder(dataset: Any, *, seed: int = 0) -> tuple[str | None, pd.DataFrame | None]:
    """The decoder that is certainly faster than the data set's own, on some of its files, in one thread.

    Returns:
        Its name, or None if there is none or the data set is not an `ImageDataset`; and the frame that shows it.
    """
    if not isinstance(dataset, ImageDataset) or type(dataset)._decode is not ImageDataset._decode:
        return None, None
    rows, own = random.Random(seed).sample(range(len(dataset)), min(_N_FILES, len(dataset))), dataset.decoder
    files = [read_bytes(dataset.store, dataset.keys[row]) for row in rows]
    unusable = {*missing_decoders(), *_OTHER_WORK} - {own}
    able = [each for each in dict.fromkeys([own, *DECODERS]) if each not in unusable and _decodes(each, files)]
    if own not in able or len(able) < 2:
        return None, None
    variants = {name: partial(_decoded, files, name) for name in able}
    frame = compare(variants, baseline=own, rounds=_ROUNDS, progress=False, rung=False)
    return _fastest_label(frame, own), frame


def _decoded(files: list[bytes], decoder: str) -> Iterator[int]:
    return (len(decode(data, decoder)[:1]) for data in files)


def _decodes(decoder: str, files: list[bytes]) -> bool:
    with suppress(DecodeError, ImportError):
        return sum(_decoded(files, decoder)) == len(files)
    return False


def _fastest_label(frame: pd.DataFrame, own: str) -> str | None:
    summary = quiet_summary(frame, own)
    faster = summary[summary["verdict"] == "faster"]
    if faster.empty:
        return None
    best = str(faster["speedup"].idxmax())
    to_best = quiet_summary(frame, best)["verdict"]
    return _PREFERRED if _PREFERRED in faster.index and to_best[_PREFERRED] == "inconclusive" else best


DEFAULT = "default"

WORTH_MEASURING = 1.25  # times the smallest prediction: the model is not more accurate
_MAX_COUNTS = 4
_MAX_WORKERS = 32
_WAITING_SHARE = 0.2  # with more waiting, more workers than cores may help


@dataclass(frozen=True)
class Candidate:
    """A way to load: processes as in `config`, or `BatchLoader`'s threads; decoder None is the data set's own."""

    config: LoaderConfig
    decoder: str | None = None
    threads: bool = False

    @property
    def label(self) -> str:
        """The candidate's name in frames and plots."""
        if self.threads:
            return "BatchLoader"
        config = self.config.resolved()
        words = [f"{config.num_workers} worker{'s' * (config.num_workers != 1)}"]
        words += [f"{config.prefetch_factor} ahead"] * bool(config.num_workers)
        return ", ".join([*words, *([] if self.decoder is None else [self.decoder])])


@dataclass(frozen=True)
class Source:
    """What is loaded, and `make_loader`'s further arguments."""

    dataset: Any
    shuffle: bool = True
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] = collate
    batch_transform: Callable[[Any], Any] | None = None

    def loader(self, candidate: Candidate, indices: list[int] | None = None) -> Iterable[Any]:
        """A loader of all samples, or of those at `indices`, which may repeat."""
        dataset, config = self.dataset, candidate.config
        if candidate.threads and (found := _crop_and_flip(dataset)) is not None:
            crop, flip = found
            order: dict[str, Any] = {"shuffle": self.shuffle} if indices is None else {"sampler": indices}
            return BatchLoader(
                dataset.store, size=crop.size[0], batch_size=config.batch_size, seed=config.seed,
                scale=tuple(crop.scale), ratio=tuple(crop.ratio), flip=flip.p, drop_last=self.drop_last,
                pin_memory=config.pin_memory, on_error="raise" if dataset._skips is None else "skip", **order,
                **_same_samples(dataset),
            )  # fmt: skip
        if candidate.decoder is not None:
            dataset = copy.copy(dataset)
            dataset.decoder = candidate.decoder
        return make_loader(
            dataset if indices is None else Subset(dataset, indices), config, shuffle=self.shuffle,
            drop_last=self.drop_last, collate_fn=self.collate_fn, batch_transform=self.batch_transform,
        )  # fmt: skip

    def has_threads(self) -> bool:
        """Whether `BatchLoader` does the same work."""
        plain = self.collate_fn is collate and self.batch_transform is None
        return plain and _crop_and_flip(self.dataset) is not None


def candidates(config: LoaderConfig, costs: Costs, *, decoder: str | None, threads: bool) -> dict[str, Candidate]:
    """Candidates by label: the default, worker counts that the model finds worth measuring, a longer queue, threads.

    Args:
        config: The default.
        costs: Of making a batch in one process, with the decoder that was chosen, and of a step.
        decoder: The decoder to use; None keeps the data set's own.
        threads: Whether `BatchLoader` does the same work.
    """
    found = [Candidate(with_workers(config, count), decoder) for count in worth_measuring(costs)]
    first = next((candidate.config for candidate in found if candidate.config.num_workers), None)
    if first:
        found.append(Candidate(replace(first, prefetch_factor=2 * (first.resolved().prefetch_factor or 2)), decoder))
    if threads:
        found.append(Candidate(with_workers(config, 0), threads=True))
    own = Candidate(config)
    return {DEFAULT: own, **{each.label: each for each in found if each.label != own.label}}


def with_workers(config: LoaderConfig, count: int) -> LoaderConfig:
    """`config` with another number of workers; without workers, settings that only workers use are reset."""
    idle: dict[str, Any] = {} if count else {"prefetch_factor": None, "persistent_workers": None, "start_method": None}
    return replace(config, num_workers=count, oversubscribe=count > usable_cores(), **idle)


def worth_measuring(costs: Costs) -> list[int]:
    """Numbers of workers, the most promising first, and the smaller first among equals."""
    cores = cores_per_rank()
    counts = {0, 1, cores // 2, cores - 1, cores}
    if costs.waiting > _WAITING_SHARE:
        counts |= {min(_MAX_WORKERS, factor * cores) for factor in (2, 4, 8)}
    expected = {count: expected_s(count, costs, cores) for count in counts}
    limit = WORTH_MEASURING * min(expected.values())
    worth = [count for count in counts if expected[count] <= limit]
    return sorted(worth, key=lambda count: (round(expected[count] / limit, 2), count))[:_MAX_COUNTS]


def _same_samples(dataset: ImageDataset) -> dict[str, Any]:
    """`BatchLoader`'s arguments for the images and labels of a data set, in its order."""
    labels: Any = dataset.labels
    classes = dataset.classes or None
    if classes and labels.ndim == 1:  # names stand for themselves, where numbers may be positions or names of classes
        labels = [classes[label] for label in labels.tolist()]
    return {"keys": dataset.keys, "labels": labels, "classes": classes, "return_keys": dataset.return_keys}


def _crop_and_flip(dataset: Any) -> tuple[Any, Any] | None:
    """Crop and flip of a data set that does what `BatchLoader` does and nothing else; else None."""
    from torchvision.transforms import v2

    if type(dataset) is not ImageDataset or dataset.buckets or not isinstance(dataset.transform, v2.Compose):
        return None
    steps = dataset.transform.transforms
    if [type(step) for step in steps] != [v2.RandomResizedCrop, v2.RandomHorizontalFlip]:
        return None
    crop, flip = steps
    bilinear = str(getattr(crop.interpolation, "value", crop.interpolation)) == "bilinear"  # an enum, or its name
    return (crop, flip) if bilinear and crop.antialias and crop.size[0] == crop.size[1] else None


STEP_ALONE = "step alone"
_KEEPS_UP = 0.95  # of the rate of the step alone: a faster loader would gain almost nothing
_FIRST_ROUNDS = 3  # of the default and the step alone: fewer give no useful interval


def race(variants: Mapping[str, Callable[[], Any]], *, deadline: float, progress: bool = True) -> pd.DataFrame:
    """The runs of all variants, or of the default and the step alone where the default keeps up with that.

    Args:
        variants: As for `compare`; `DEFAULT` is the one to beat.
        deadline: By `time.perf_counter`.
    """
    options: dict[str, Any] = {"baseline": DEFAULT, "count": counted, "progress": progress, "rung": False}
    if STEP_ALONE in variants:
        runs = compare({name: variants[name] for name in (DEFAULT, STEP_ALONE)}, rounds=_FIRST_ROUNDS, **options)
        if _keeps_up(runs):
            return runs
    return compare(variants, budget_s=max(0.0, deadline - time.perf_counter()), **options)


def _keeps_up(runs: pd.DataFrame) -> bool:
    """Whether the default is as fast as the step alone, not counting the first batch, for which an epoch waits once."""
    steady = measured_runs(runs.assign(images_per_s=runs["n_steady_images"] / runs["steady_s"]))
    default, alone = (steady[steady["variant"] == name] for name in (DEFAULT, STEP_ALONE))
    return bool(paired_ratios(default, alone)["speedup"].median() >= _KEEPS_UP)


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
    what cannot win. If the default does not keep up with the step, the rest run in interleaved rounds.

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

    >>> config, runs = lk.tune(lk.ImageDataset("photos"), step=None, budget_s=60)  # doctest: +SKIP

    Raises:
        TypeError, ValueError: an iterable or empty data set, a step that cannot be called, or a budget of 0 seconds.
    """
    if step is not None and not callable(step):
        raise WrongTypeError(f"step must be a function of one batch or None, got a {type(step).__name__}")
    require_positive("budget_s", budget_s)
    deadline, config = time.perf_counter() + budget_s, allow_waiting_workers(config or LoaderConfig(), dataset)
    source = Source(dataset, shuffle, drop_last, collate_fn, batch_transform)
    source.loader(Candidate(with_workers(config, 0)))  # report errors of the data set before measuring
    decoder, decoders = fastest_decoder(dataset, seed=config.seed)
    indices = _some_indices(dataset, 16 * config.batch_size)
    serial = source.loader(Candidate(with_workers(config, 0), decoder), indices)
    batches, costs = _costs_alone(serial, step, budget_s / 15)
    field = candidates(config, costs, decoder=decoder, threads=source.has_threads())
    # A sixtieth of the budget, but enough that every worker makes some.
    most = max(each.config.resolved().num_workers or 0 for each in field.values())
    a_batch_s = max(costs.step, (costs.making or 0.0) / max(1, most))
    n_batches = max(4, 3 * most, min(200, int(budget_s / 60 / a_batch_s)))
    with _variants(source, field, batches, step, n_batches) as variants:
        runs = race(variants, deadline=deadline, progress=progress)
    return _to_tuned(source, field, runs, decoders)


def _costs_alone(loader: Iterable[Any], step: Any, limit_s: float) -> tuple[list[Any], Costs]:
    """Two batches, and what making them in this process and a step take, as `watch` sees it."""
    observer, began_s, batches = Observer(), time.perf_counter(), list[Any]()
    usual = torch.get_num_threads(), cv2.getNumThreads()
    observer.start()
    try:
        with preserve_rng_state(), _threads(1, 0):  # as in a worker
            for batch in loader:
                batches = [*batches[:1], batch]
                if step:
                    with _threads(*usual):
                        step(batch)
                seen = observer.loaders[0]
                if seen.n_batches > _LEAST_SEEN and time.perf_counter() - began_s > limit_s:
                    break
        return batches, costs_of(account_for(observer, seen, {}), observer.device)
    finally:
        observer.stop()


@contextmanager
def _threads(of_torch: int, of_cv2: int) -> Iterator[None]:
    """Let libraries compute with so many threads meanwhile."""
    before = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(of_torch)
    cv2.setNumThreads(of_cv2)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        cv2.setNumThreads(before[1])


_LEAST_SEEN = 2  # batches: the first one says little


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
        yield {label: partial(lambda each: each, loader) for label, loader in trained.items()}
    finally:
        for loader in loaders.values():
            if hasattr(loader, "close"):
                loader.close()


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
