"""What a frame shows, in one sentence."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from labkit.core import require_choice
from labkit.measure.frames import measured_runs
from labkit.measure.summary import quiet_summary

_MAX_NAMES = 3  # a sentence that lists more labels is hard to read


def conclude(frame: pd.DataFrame, variant: str | None = None, baseline: str | None = None) -> str:
    """Say in one sentence what the runs show: the ratio to the baseline, its interval, and whether it is certain.

    Args:
        frame: Runs, as `compare` returns them.
        variant: The variant to speak of; default: the one that is faster by most, then all inconclusive ones.
        baseline: The variant that it is compared with; default: the frame's own.

    Returns:
        The sentence. Ratios, 95 % intervals, verdicts and notes are those of `summarize`; a variant without a verdict
        is not judged. Labels stand in quotes, and simulated storage behind its label.

    Raises:
        ValueError: an unknown variant, no variant besides the baseline, or a frame that `summarize` refuses.

    Taught in: notebooks/00_measure.ipynb
    """
    summary = quiet_summary(frame, baseline)
    base = summary.index[summary["verdict"] == "baseline"][0]
    others = _others(summary, base, variant)
    best = most_telling(others)
    names = {label: _name(label, frame) for label in summary.index}
    told = _compare(names[best], names[base], others.loc[best], _rank(others, best))
    if doubtful := [label for label in others.index[others["verdict"] == "inconclusive"] if label != best]:
        join = ", nor" if others.loc[best, "verdict"] == "inconclusive" else "; these runs cannot tell"
        told += f"{join} {_list([names[label] for label in doubtful])} from {names[base]}"
    return "; ".join([told, *_remarks(summary.loc[[best, *doubtful, base], "note"])]) + "."


def _rank(others: pd.DataFrame, label: str) -> str:
    is_largest = len(others) > 1 and others["speedup"].idxmax() == label
    return f", the largest of {len(others)} ratios" if is_largest else ""


def simulated_storage(runs: pd.DataFrame, label: str) -> str:
    """What simulates the storage of a variant, such as "simulated hard disk"; "" if all of it was measured."""
    storage = runs.loc[runs["variant"] == label, "storage"].dropna().astype(str).unique()
    return ", ".join(name for name in storage if "simulated" in name)


def format_ratio(ratio: float) -> str:
    """A ratio with two decimals, or so many digits that it is neither rounded to 1 nor to 0: 1.58, 12.3, 288, 1.003."""
    if ratio != 1 and f"{ratio:.2f}" == "1.00":
        return f"{ratio:.4f}"
    return f"{ratio:.2g}" if ratio < 0.095 else f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.{int(ratio < 100)}f}"


def _others(summary: pd.DataFrame, base: str, variant: str | None) -> pd.DataFrame:
    """The rows to speak of: all but the baseline's, or that of one variant."""
    others = summary.drop(index=base)
    if others.empty:
        raise ValueError(f"the frame holds only its baseline {base!r}: there is nothing to compare it with")
    return others if variant is None else others.loc[[require_choice("variant", variant, others.index)]]


def most_telling(others: pd.DataFrame) -> str:
    """The variant of the largest ratio that is certainly above 1; without one, of the largest of all."""
    faster = others[others["verdict"] == "faster"]
    return (others if faster.empty else faster)["speedup"].idxmax()


def _compare(name: str, base: str, row: pd.Series, remark: str) -> str:
    has_interval = np.isfinite([row["ci_low"], row["ci_high"]]).all()
    interval = f"95 % interval {format_ratio(row['ci_low'])} to {format_ratio(row['ci_high'])}"
    ratio = f"{format_ratio(row['speedup'])} times the speed"
    shown = f"({interval if has_interval else 'one round, no interval'}){remark}"
    if row["verdict"] == "inconclusive":
        return f"{name} against {base}: {ratio} {shown}: these runs cannot tell them apart"
    judged = {"faster": f"ran faster than {base}: {ratio}", "slower": f"ran slower than {base}: only {ratio}"}
    return f"{name} {judged.get(row['verdict'], f'ran at {ratio} of {base}')} {shown}"


def _name(label: str, frame: pd.DataFrame) -> str:
    """The label in quotes, since it may contain commas; simulated storage is said, unless the label does."""
    storage = simulated_storage(measured_runs(frame), label)
    return f'"{label}"' + (f" ({storage})" if storage and "simulated" not in label else "")


def _list(names: Sequence[str]) -> str:
    if len(names) > _MAX_NAMES:
        names = [*names[: _MAX_NAMES - 1], f"{len(names) - _MAX_NAMES + 1} others"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _remarks(notes: pd.Series) -> list[str]:
    """The notes of `summarize` as parts of the sentence. That there was one run, the missing interval says."""
    said = {
        "unstable": "the runs were unstable", "not interleaved": "the runs were not interleaved",
        "leans": "more rounds would tell", "one run": "", "disturbed": "other programs or the host took time from them",
        "whole runs": "",
    }  # fmt: skip
    parts = [part for note in notes for part in note.split("; ") if part]
    remarks = [next((text for start, text in said.items() if part.startswith(start)), part) for part in parts]
    return list(dict.fromkeys(filter(None, remarks)))
