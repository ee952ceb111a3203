"""Do two tours agree? Their comparisons side by side: of two days, of two machines, or yours and the stored one.

An interval covers the rounds of one session. Another day's machine may run Python code twice as fast, and JPEG decoders
no faster: only a second tour shows that.
"""

import os
from pathlib import Path

import numpy as np
import pandas as pd

from labkit.core import NOTEBOOK_FOLDER
from labkit.lab.precision import comparisons
from labkit.measure import format_ratio
from labkit.teach.claims import read_folder

STORED = NOTEBOOK_FOLDER / "tour.csv"  # the comparisons of the stored tour

_KEYS = ["scale", "experiment", "variant"]
_VALUES = ["speedup", "ci_low", "ci_high", "images_per_s", "baseline_images_per_s"]


def read_comparisons(results: str | os.PathLike | None) -> pd.DataFrame:
    """All comparisons of a tour that have an interval, with the columns of `tabulate`.

    Args:
        results: Folder of a tour's results, as `labkit.claims` takes it, or the CSV of a stored tour.

    Raises:
        FileNotFoundError: there is neither, or no comparison in it; says what to run.
        ValueError: a file in the folder is not a frame of runs; names it.
    """
    if results is not None and Path(results).is_file():
        return pd.read_csv(results, dtype=dict.fromkeys(_KEYS, str), keep_default_na=False)
    table = tabulate(read_folder(results))
    if table.empty:
        raise FileNotFoundError(f"no comparisons in {results or 'results'}: `python -m labkit tour` records them")
    return table


def tabulate(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """One row per comparison: `scale`, `experiment`, `variant`, `speedup`, `ci_low`, `ci_high`, both rates in images/s.

    Args:
        frames: Of one experiment each, as `compare` returns them.
    """
    tables = [_with_rates(runs) for runs in frames]
    return pd.concat(tables, ignore_index=True)[_KEYS + _VALUES] if tables else pd.DataFrame(columns=_KEYS + _VALUES)


def _with_rates(runs: pd.DataFrame) -> pd.DataFrame:
    found = comparisons(runs)
    base = runs[(runs["variant"] == runs["baseline"].iloc[0]) & ~runs["is_warmup"]]
    found = found.rename_axis("variant").reset_index().assign(scale=str(runs["scale"].iloc[0]))
    return found.assign(baseline_images_per_s=base["images_per_s"].median())


def agreement(earlier: pd.DataFrame, later: pd.DataFrame) -> pd.DataFrame:
    """The comparisons that both tours made at the same scale, those that differ most first.

    Args:
        earlier, later: From `read_comparisons`.

    Returns:
        Both tours' columns with `_earlier` and `_later` behind them, and: `overlap` (whether the 95 % intervals do),
        `baseline_change` and `variant_change` (later rate over earlier).
    """
    both = earlier.drop_duplicates(_KEYS).merge(later.drop_duplicates(_KEYS), on=_KEYS, suffixes=("_earlier", "_later"))
    gap = np.maximum(both["ci_low_later"] / both["ci_high_earlier"], both["ci_low_earlier"] / both["ci_high_later"])
    changes = {
        f"{name}_change": both[f"{column}_later"] / both[f"{column}_earlier"]
        for name, column in (("baseline", "baseline_images_per_s"), ("variant", "images_per_s"))
    }
    return both.assign(overlap=gap <= 1, gap=gap, **changes).sort_values("gap", ascending=False, ignore_index=True)


def describe_agreement(table: pd.DataFrame) -> list[str]:
    """Lines that say how many intervals overlap, and which do not, with what changed: the baseline or the variant."""
    if table.empty:
        return ["The two tours have no comparison in common: their scales or experiments differ."]
    n_overlapping = int(table["overlap"].sum())
    changes = pd.concat([table["baseline_change"], table["variant_change"]])
    lines = [
        f"{n_overlapping} of {len(table)} intervals overlap ({n_overlapping / len(table):.1%}).",
        f"The later rates are {format_ratio(changes.median())} times the earlier ones in the median, "
        f"{format_ratio(changes.quantile(0.05))} to {format_ratio(changes.quantile(0.95))} times in nine of ten.",
    ]
    return lines + [_describe_row(row) for _, row in table[~table["overlap"]].iterrows()]


def _describe_row(row: pd.Series) -> str:
    before, after = (
        f"{format_ratio(row[f'speedup_{when}'])} [{format_ratio(row[f'ci_low_{when}'])}, "
        f"{format_ratio(row[f'ci_high_{when}'])}]"
        for when in ("earlier", "later")
    )
    own, base = (format_ratio(row[f"{name}_change"]) for name in ("variant", "baseline"))
    changes = f"its rate is {own} times the earlier one, its baseline's {base} times"
    return f"{row['experiment']}, {row['variant']}: {before}, later {after}; {changes}"
