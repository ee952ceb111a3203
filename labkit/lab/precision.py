"""How precise the intervals of a tour are, beside its noise floor: what two names of one loader differ by."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from labkit.measure import format_ratio, quiet_summary

TWINS = "00 twins"  # the experiment that compares a loader with itself


def comparisons(runs: pd.DataFrame) -> pd.DataFrame:
    """The rows of `summarize` that have an interval, with the column `half_width`: half of it, as a share of the ratio.

    Args:
        runs: Of one experiment, as `compare` returns them.
    """
    summary = quiet_summary(runs).assign(experiment=runs["experiment"].iloc[0])
    found = summary[(summary["verdict"] != "baseline") & np.isfinite(summary["ci_low"] * summary["ci_high"])]
    return found.assign(half_width=np.expm1(np.log(found["ci_high"] / found["ci_low"]) / 2))


def describe_precision(tables: Sequence[pd.DataFrame]) -> str:
    """Say how wide the intervals of all experiments are, and what the noise floor is; empty if there are none.

    Args:
        tables: From `comparisons`, one per experiment.
    """
    rows = pd.concat(tables) if tables else pd.DataFrame()
    if rows.empty:
        return ""
    middle, most = rows["half_width"].quantile([0.5, 0.9])
    widths = f"Half of the {len(rows)} intervals reach at most {middle:.1%} to either side, nine in ten {most:.1%}."
    twins = rows[rows["experiment"] == TWINS]
    if twins.empty:
        return widths
    found = twins.iloc[0]
    interval = f"{format_ratio(found['ci_low'])} to {format_ratio(found['ci_high'])}"
    ratio = f"{format_ratio(found['speedup'])} (95 % interval {interval})"
    return f"{widths} The noise floor, two names of one loader ({TWINS}): {ratio}."
