"""Of runs, medians, paired speed-ups with intervals, verdicts, and the sentences that state them."""

from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from labkit.errors import ArgumentError
from labkit.measure.frames import measured_runs
from labkit.measure.intervals import format_ratio, side_of_one, speedup_interval, speedup_of
from labkit.measure.usage import MAX_OTHERS
from labkit.util.machine import usable_cores
from labkit.util.process import warn_caller

_UNSTABLE_SPREAD = 0.25  # interquartile range / median
_MAX_STOLEN = 0.05  # of the time of all cores
_MAX_DRIFT = 0.2  # from the first round to the last, as a logarithm
_MIN_TIMED_S = 0.5  # the kernel counts CPU time in ticks of 10 ms: in less, a few ticks would look like a disturbance


class InstabilityWarning(UserWarning):
    """The runs of a variant scatter or drift so much that they may tell more about the machine than about the code."""


def summarize(frame: pd.DataFrame, baseline: str | None = None) -> pd.DataFrame:
    """What can be said of each variant.

    Args:
        frame: Runs, as `compare` returns them.
        baseline: The variant that speed-ups refer to; default: the frame's own.

    Returns:
        One row per variant, in order of appearance: `n_runs`, `images_per_s` (median), `spread` (interquartile range /
        median), `cpu_s_per_1000`, `peak_mem_mb`, `speedup` (trimmed geometric mean of the ratios within rounds),
        `ci_low`, `ci_high` (95 %), `verdict` (`baseline`, `faster`, `slower`, `inconclusive`; empty for variants that
        `compare` was told to leave without one) and `note`.

        The verdict is the interval's: `faster` or `slower` if it excludes 1. One in 20 equal variants is called
        different on a quiet machine. The interval counts how often `compare` looked at the runs before it stopped
        (`speedup_interval`), and covers the rounds of one session only: another day, or another machine, may differ
        by more.

    >>> lk.summarize(runs)[["images_per_s", "speedup", "ci_low", "ci_high", "verdict"]]  # doctest: +SKIP

    Raises:
        ValueError: no runs, an unknown baseline, or runs of more than one environment.

    Warns:
        InstabilityWarning: runs scatter or drift; names the variant.

    Taught in: notebooks/00_measure.ipynb
    """
    summary = quiet_summary(frame, baseline)
    for variant, note in summary["note"].items():
        if "unstable" in note:
            warn_caller(f"{variant}: {note}", InstabilityWarning)
    return summary


def quiet_summary(frame: pd.DataFrame, baseline: str | None = None) -> pd.DataFrame:
    """`summarize` without its warning, for callers that use the column `note` or the interval."""
    runs = measured_runs(frame)
    if runs.empty:
        raise ArgumentError("the frame holds no run besides warm-ups")
    environments = runs["env_id"].unique()
    if len(environments) > 1:
        raise ArgumentError(f"runs of different machines cannot be compared: {', '.join(map(str, environments))}")
    if baseline is None:
        named = [name for name in runs["baseline"].dropna().unique() if name]
        if len(named) != 1:
            raise ArgumentError("the frame names no single baseline: pass baseline=")
        baseline = named[0]
    if baseline not in set(runs["variant"]):
        raise ArgumentError(f"baseline {baseline!r} is not in the frame: {', '.join(runs['variant'].unique())}")
    base = runs[runs["variant"] == baseline]
    peak_mem_mb = frame.groupby("variant")["peak_mem_mb"].max()  # taken in warm-ups
    rows = [_summarize_variant(own, base, peak_mem_mb[name]) for name, own in runs.groupby("variant", sort=False)]
    return _Summary(pd.DataFrame(rows).set_index("variant"))


class _Summary(pd.DataFrame):
    """A table that a script prints whole: pandas would put `...` in place of speed-up and verdict."""

    def __repr__(self) -> str:
        return self.to_string()


def paired_ratios(own: pd.DataFrame, base: pd.DataFrame) -> pd.DataFrame:
    """Speed-up of each run over the baseline's run of the same experiment and round: columns `round`, `speedup`.

    Raises:
        ValueError: an experiment has a variant twice in a round, as when two unnamed frames are concatenated.
    """
    keys = ["experiment", "round"]
    own, base = (runs[[*keys, "images_per_s"]] for runs in (own, base))  # all columns would take ten times as long
    if own.duplicated(keys).any() or base.duplicated(keys).any():
        raise ArgumentError("runs of two comparisons cannot be told apart: give each compare an experiment= of its own")
    both = own.merge(base, on=keys, suffixes=("", "_base"))
    return pd.DataFrame({"round": both["round"], "speedup": both["images_per_s"] / both["images_per_s_base"]})


def are_interleaved(*variants: pd.DataFrame) -> bool:
    """Whether the runs of all variants have an order within their rounds, so that they can be paired."""
    return all(runs["order"].notna().all() for runs in variants)


def _summarize_variant(own: pd.DataFrame, base: pd.DataFrame, peak_mem_mb: float) -> dict[str, Any]:
    variant, rates, is_paired = own["variant"].iloc[0], own["images_per_s"], are_interleaved(own, base)
    speedup, low, high, verdict = 1.0, 1.0, 1.0, "baseline"
    if variant != base["variant"].iloc[0]:
        samples = [paired_ratios(own, base)["speedup"]] if is_paired else [rates, base["images_per_s"]]
        samples = [sample.to_numpy(float) for sample in samples]
        n_looks = int(_column(own, "n_looks", 1).max())
        speedup, (low, high) = speedup_of(*samples), speedup_interval(*samples, n_looks=n_looks)
        verdict = side_of_one((low, high)) if _column(own, "has_verdict", True).all() else ""
    spread = float(rates.quantile(0.75) - rates.quantile(0.25)) / rates.median()
    notes = [] if is_paired else ["not interleaved"]
    # CPU seconds and images of one and the same stretch: the steady state, or the whole of a run that has none.
    n_images = own["n_images"].where(~_column(own, "is_steady", False), _column(own, "n_steady_images", np.nan))
    return {
        "variant": variant,
        "n_runs": len(own),
        "images_per_s": rates.median(),
        "spread": spread,
        "cpu_s_per_1000": float((own["cpu_s"] / n_images).median() * 1000),
        "peak_mem_mb": peak_mem_mb,
        "speedup": speedup,
        "ci_low": low,
        "ci_high": high,
        "verdict": verdict,
        "note": "; ".join([*notes, *_notes(own, spread), *disturbances(own)]),
    }


def _column(runs: pd.DataFrame, name: str, default: Any) -> pd.Series:
    """A column that only `compare` fills: frames of other timers have none."""
    filled = runs[name] if name in runs else pd.Series(default, runs.index)
    return filled.astype(object).where(filled.notna(), default).astype(type(default))


def _notes(own: pd.DataFrame, spread: float) -> list[str]:
    rates, notes = own["images_per_s"].to_numpy(), []
    if len(rates) == 1:
        notes.append("one run")
    if "is_steady" in own and not _column(own, "is_steady", True).all():
        is_whole = not _column(own, "n_steady_batches", 0).any()  # one batch per run, as `whole_pass` gives
        notes.append("whole runs" if is_whole else "too short for a steady rate: the first batch is counted")
    if spread > _UNSTABLE_SPREAD:
        notes.append(f"unstable: spread {spread:.0%}")
    elif len(rates) >= 5 and np.ptp(rates) > 0:
        is_certain = stats.spearmanr(np.arange(len(rates)), rates).pvalue < 0.01
        if is_certain and abs(np.log(rates[-1] / rates[0])) > _MAX_DRIFT:
            notes.append("unstable: drifts over the rounds")
    return notes


def disturbances(own: pd.DataFrame) -> list[str]:
    """Sentences on who else used the cores while these runs were timed, if it was much."""
    timed_s = (own["steady_s"] + own["first_batch_s"].where(~_column(own, "is_steady", False), 0.0)).sum()
    if timed_s < _MIN_TIMED_S:
        return []
    stolen, others = (
        _column(own, name, 0.0).sum() / (timed_s * usable_cores()) for name in ("steal_s", "others_cpu_s")
    )
    found = {
        f"disturbed: {stolen:.0%} of CPU time was stolen": stolen > _MAX_STOLEN,
        f"disturbed: other programs used {others:.0%} of the cores": others > MAX_OTHERS,
    }
    return [note for note, is_much in found.items() if is_much]


def conclude(frame: pd.DataFrame, *, baseline: str | None = None) -> str:
    """Say in one sentence what the runs show: the ratio to the baseline, its interval, and whether it is certain.

    It speaks of the variant that is faster by most, and then of all inconclusive ones.

    Args:
        frame: Runs, as `compare` returns them.
        baseline: The variant that it is compared with; default: the frame's own.

    Returns:
        The sentence. Ratios, 95 % intervals, verdicts and notes are those of `summarize`, each note with its variants;
        a variant without a verdict is not judged. Labels stand in quotes.

    >>> lk.conclude(runs)  # doctest: +SKIP

    Raises:
        ValueError: no variant besides the baseline, or a frame that `summarize` refuses.

    Taught in: notebooks/00_measure.ipynb
    """
    summary = quiet_summary(frame, baseline)
    base = summary.index[summary["verdict"] == "baseline"][0]
    others = summary.drop(index=base)
    if others.empty:
        raise ArgumentError(f"the frame holds only its baseline {base!r}: there is nothing to compare it with")
    names = {label: f'"{label}"' for label in summary.index}  # quoted: labels may contain commas

    best = most_telling(others)
    row = others.loc[best]
    shown = f"95 % interval {format_ratio(row['ci_low'])} to {format_ratio(row['ci_high'])}"
    shown = f"({shown})" if np.isfinite([row["ci_low"], row["ci_high"]]).all() else "(no interval)"
    if len(others) > 1 and others["speedup"].idxmax() == best:
        shown += f", the largest of {len(others)} ratios"
    ratio, name, of = f"{format_ratio(row['speedup'])} times the speed", names[best], names[base]
    told = {
        "faster": f"{name} ran faster than {of}: {ratio} {shown}",
        "slower": f"{name} ran slower than {of}: only {ratio} {shown}",
        "inconclusive": f"{name} against {of}: {ratio} {shown}: these runs cannot tell them apart",
        "": f"{name} ran at {ratio} of {of} {shown}",
    }[row["verdict"]]
    doubtful = [label for label in others.index[others["verdict"] == "inconclusive"] if label != best]
    if doubtful:
        told += f"; these runs cannot tell {', '.join(names[label] for label in doubtful)} from {of}"
    about = dict[str, list[str]]()  # each note once, with the variants that have it
    for label in (best, *doubtful, base):
        for note in filter(None, str(summary.loc[label, "note"]).split("; ")):
            about.setdefault(note, []).append(names[label])
    return "; ".join([told, *(f"{note} ({', '.join(labels)})" for note, labels in about.items())]) + "."


def describe(others: pd.DataFrame, base: str) -> str:
    """The most telling ratio in a few words, and whether it is inconclusive: the title of a plot.

    Args:
        others: Rows of `summarize` without the baseline's, by the names to use.
        base: The baseline's name.
    """
    best = most_telling(others)
    low, high, ratio = others.loc[best, ["ci_low", "ci_high", "speedup"]]
    told = f"{best}: {format_ratio(ratio)} times as fast as {base}"
    return f"{told}, inconclusive" if low <= 1 <= high or np.isnan(low) else told


def most_telling(others: pd.DataFrame) -> str:
    """The variant of the largest ratio that is certainly above 1; without one, of the largest of all."""
    faster = others[others["verdict"] == "faster"]
    return (others if faster.empty else faster)["speedup"].idxmax()
