"""A race of loaders in interleaved rounds: whoever is slower every time drops out, until the winner is certain."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from labkit.measure import compare, measured_runs, paired_ratios, quiet_summary
from labkit.tuning.training_loop import counted

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
    """Who goes on, and whether the race is decided."""
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
