"""`lk.tune`: choose how to load by measuring, in a minute instead of a grid's hour.

A model of their speed excludes most of the grid. The others race in interleaved rounds: whoever is slower every time
drops out, until the winner is certain.
"""

import copy
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import pandas as pd
from torch.utils.data import Subset

from labkit.data.dataset import ImageDataset, collate
from labkit.data.decode import DECODERS, decode, missing_decoders
from labkit.errors import DecodeError, WrongTypeError
from labkit.loading.batch_loader import BatchLoader
from labkit.loading.torch_loader import LoaderConfig, allow_waiting_workers, cores_per_rank, make_loader
from labkit.measure.compare import compare
from labkit.measure.frames import measured_runs
from labkit.measure.statistics import paired_ratios, quiet_summary
from labkit.measure.steady import ReplayLoader, synchronize, with_step
from labkit.util.arguments import require_positive
from labkit.util.machine import usable_cores
from labkit.watching.advice import expected_s
from labkit.watching.diagnose import counted
from labkit.watching.timings import Making, making_in_one_process

_OTHER_WORK = {"pil_draft"}  # decodes to another size

_PREFERRED = "turbojpeg"  # unless the fastest is faster: the default elsewhere too

_N_FILES, _N_TRIAL_FILES, _ROUNDS = 24, 4, 5


def fastest_decoder(dataset: Any, *, limit_s: float, seed: int = 0) -> tuple[str | None, pd.DataFrame | None]:
    """The decoder that is certainly faster than the data set's own, on some of its files, in one thread.

    Returns:
        Its name, or None if there is none or the data set is not an `ImageDataset`; and the frame that shows it.
    """
    if not isinstance(dataset, ImageDataset) or type(dataset)._decode is not ImageDataset._decode:
        return None, None
    files, own = _read_some_files(dataset, seed), dataset.decoder
    unusable = {*missing_decoders(), *_OTHER_WORK} - {own}
    candidates = [name for name in dict.fromkeys([own, *DECODERS]) if name not in unusable]
    able = {name: seconds for name in candidates if (seconds := _seconds_per_file(files, name)) is not None}
    if own not in able or len(able) < 2:
        return None, None
    n_files = int(max(_N_TRIAL_FILES, limit_s / (_ROUNDS + 1) / sum(able.values())))
    variants = {name: _decode_files(files[:n_files], name) for name in able}
    frame = compare(variants, baseline=own, rounds=_ROUNDS, progress=False, rung=False)
    return _fastest_label(frame, own), frame


def _fastest_label(frame: pd.DataFrame, own: str) -> str | None:
    summary = quiet_summary(frame, own)
    faster = summary[summary["verdict"] == "faster"]
    if faster.empty:
        return None
    best = str(faster["speedup"].idxmax())
    to_best = quiet_summary(frame, best)["verdict"]
    return _PREFERRED if _PREFERRED in faster.index and to_best[_PREFERRED] == "inconclusive" else best


def _read_some_files(dataset: ImageDataset, seed: int) -> list[bytes]:
    rows = random.Random(seed).sample(range(len(dataset)), min(_N_FILES, len(dataset)))
    return [dataset.store.read(dataset.keys[row]) for row in rows]


def _seconds_per_file(files: list[bytes], decoder: str) -> float | None:
    """Measured on a few files; None if the decoder cannot read one of them."""
    trial = files[:_N_TRIAL_FILES]
    start = time.perf_counter()
    try:
        for data in trial:
            decode(data, decoder)
    except (DecodeError, ImportError):
        return None
    return (time.perf_counter() - start) / len(trial)


def _decode_files(files: list[bytes], decoder: str) -> Callable[[], Iterator[int]]:
    return lambda: (len(decode(data, decoder)[:1]) for data in files)


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
        if candidate.threads:
            return _batch_loader(self.dataset, candidate.config, self.shuffle, self.drop_last, indices)
        dataset = self.dataset if candidate.decoder is None else with_decoder(self.dataset, candidate.decoder)
        return make_loader(
            dataset if indices is None else Subset(dataset, indices), candidate.config, shuffle=self.shuffle,
            drop_last=self.drop_last, collate_fn=self.collate_fn, batch_transform=self.batch_transform,
        )  # fmt: skip

    def has_threads(self) -> bool:
        """Whether `BatchLoader` does the same work."""
        plain = self.collate_fn is collate and self.batch_transform is None
        return plain and _crop_and_flip(self.dataset) is not None


def candidates(
    config: LoaderConfig, making: Making, step_s: float, step_cpu_s: float, *, decoder: str | None, threads: bool
) -> dict[str, Candidate]:
    """Candidates by label: the default, worker counts that the model finds worth measuring, a longer queue, threads.

    Args:
        config: The default.
        making: What making a batch costs one process, with the decoder that was chosen.
        step_s, step_cpu_s: Wall and processor seconds of a step.
        decoder: The decoder to use; None keeps the data set's own.
        threads: Whether `BatchLoader` does the same work.
    """
    counts = worth_measuring(making, step_s, step_cpu_s)
    found = [Candidate(with_workers(config, count), decoder) for count in counts]
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


def worth_measuring(making: Making, step_s: float, step_cpu_s: float) -> list[int]:
    """Numbers of workers, the most promising first, and the smaller first among equals."""
    cores = cores_per_rank()
    counts = {0, 1, cores // 2, cores - 1, cores}
    if making.waiting > _WAITING_SHARE:
        counts |= {min(_MAX_WORKERS, factor * cores) for factor in (2, 4, 8)}
    expected = {count: expected_s(count, making, step_s, step_cpu_s, cores) for count in counts}
    limit = WORTH_MEASURING * min(expected.values())
    worth = [count for count in counts if expected[count] <= limit]
    return sorted(worth, key=lambda count: (round(expected[count] / limit, 2), count))[:_MAX_COUNTS]


def with_decoder(dataset: ImageDataset, decoder: str) -> ImageDataset:
    """The same data set with another decoder."""
    other = copy.copy(dataset)
    other.decoder = decoder
    return other


def _batch_loader(
    dataset: ImageDataset, config: LoaderConfig, shuffle: bool, drop_last: bool, indices: list[int] | None
) -> BatchLoader:
    found = _crop_and_flip(dataset)
    if found is None:
        raise WrongTypeError("BatchLoader crops and flips, and nothing else: use it only if `Source.has_threads()`")
    crop, flip = found
    order: dict[str, Any] = {"shuffle": shuffle} if indices is None else {"sampler": indices}
    return BatchLoader(
        dataset.store, size=crop.size[0], batch_size=config.batch_size, seed=config.seed, scale=tuple(crop.scale),
        ratio=tuple(crop.ratio), flip=flip.p, drop_last=drop_last, pin_memory=config.pin_memory,
        on_error="raise" if dataset._skips is None else "skip", **order,
    )  # fmt: skip


def _crop_and_flip(dataset: Any) -> tuple[Any, Any] | None:
    """Crop and flip of a data set that does what `BatchLoader` does and nothing else; else None."""
    from torchvision.transforms import v2

    if type(dataset) is not ImageDataset or not isinstance(dataset.transform, v2.Compose):
        return None
    steps = dataset.transform.transforms
    if [type(step) for step in steps] != [v2.RandomResizedCrop, v2.RandomHorizontalFlip]:
        return None
    crop, flip = steps
    bilinear = str(getattr(crop.interpolation, "value", crop.interpolation)) == "bilinear"  # an enum, or its name
    return (crop, flip) if bilinear and crop.antialias and crop.size[0] == crop.size[1] else None


STEP_ALONE = "step alone"

_KEEPS_UP = 0.95  # of the rate of the step alone: a faster loader would gain almost nothing
_KEEPS_CLOSE = 0.95  # of the leader's rate: a loader that is slower in every round so far drops out
_ROUNDS_PER_HEAT = 3  # fewer give no useful interval
_MAX_ROUNDS = 9


def race(
    variants: Mapping[str, Callable[[], Any]],
    *,
    default: str,
    deadline: float,
    progress: bool = True,
    try_default_first: bool = True,
) -> pd.DataFrame:
    """Run variants against each other, and against the step alone, if it is among them.

    Args:
        variants: As for `compare`.
        default: The variant to beat.
        deadline: By `time.perf_counter`; a heat that would exceed it is not started.
        progress: Show a progress bar.
        try_default_first: Run it against the step alone; if it keeps up, the others do not run.

    Returns:
        The runs of all heats, one row per run, with rounds numbered consecutively.
    """
    runs, alive = pd.DataFrame(), list(variants)
    if try_default_first and STEP_ALONE in variants:
        runs = _run_heat(variants, [default, STEP_ALONE], runs, default, progress)
        if _keeps_up(runs, default):
            return runs
    while True:
        start, n_alive = time.perf_counter(), len(alive)
        runs = _run_heat(variants, alive, runs, default, progress)
        alive, decided = next_heat(runs, alive, default)
        n_rounds = len(rounds_of(runs, default))
        now = time.perf_counter()
        if decided or n_rounds >= _MAX_ROUNDS or now + (now - start) * len(alive) / n_alive > deadline:
            return runs


def rounds_of(runs: pd.DataFrame, label: str) -> pd.DataFrame:
    """The runs of a variant, without its warm-ups."""
    return measured_runs(runs[runs["variant"] == label])


def _run_heat(
    variants: Mapping[str, Any], labels: list[str], runs: pd.DataFrame, default: str, progress: bool
) -> pd.DataFrame:
    """`runs` and those of another heat, with a warm-up round if a variant has not run yet."""
    warmups = 0 if set(labels) <= set(runs.get("variant", ())) else 1
    done = 0 if runs.empty else int(runs["round"].max()) + 1
    new = compare(
        {label: variants[label] for label in labels}, baseline=default, rounds=_ROUNDS_PER_HEAT, warmups=warmups,
        seed=done, count=counted, progress=progress, rung=False,
    )  # fmt: skip
    return pd.concat([*[runs] * (not runs.empty), new.assign(round=new["round"] + done)], ignore_index=True)


def next_heat(runs: pd.DataFrame, alive: list[str], default: str) -> tuple[list[str], bool]:
    """The labels that stay in the race, and whether it is decided."""
    racing = [label for label in alive if label != STEP_ALONE]
    # The fastest, by the mean ratio to the default, which runs in every round.
    leader = max(racing, key=lambda label: _speedups(runs, label, default).mean())
    if STEP_ALONE in alive and _keeps_up(runs, leader):
        racing = [leader]  # nobody can be faster
    survivors = {label for label in racing if _keeps_close(runs, label, leader)}
    decided = survivors <= {default, leader} and _is_certain(runs, leader, default)
    survivors |= {default, STEP_ALONE}
    return [label for label in alive if label in survivors], decided


def _is_certain(runs: pd.DataFrame, leader: str, default: str) -> bool:
    return leader == default or quiet_summary(runs, default).loc[leader, "verdict"] == "faster"


def _keeps_close(runs: pd.DataFrame, label: str, leader: str) -> bool:
    return label == leader or bool((_speedups(runs, label, leader) >= _KEEPS_CLOSE).any())


def _speedups(runs: pd.DataFrame, label: str, baseline: str) -> pd.Series:
    return paired_ratios(rounds_of(runs, label), rounds_of(runs, baseline))["speedup"]


def _keeps_up(runs: pd.DataFrame, label: str) -> bool:
    """Whether a loader is as fast as the step alone, not counting the first batch, for which an epoch waits once."""
    steady = runs.assign(images_per_s=runs["n_steady_images"] / runs["steady_s"])
    return bool(_speedups(steady, label, STEP_ALONE).median() >= _KEEPS_UP)


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
