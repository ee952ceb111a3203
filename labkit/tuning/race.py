"""A race of loaders in interleaved rounds: who is slower every time drops out, until the winner is beyond doubt."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from labkit.measure import compare, paired_ratios, quiet_summary
from labkit.tuning.training_loop import counted

STEP_ALONE = "step alone"

_KEEPS_UP = 0.95  # of the rate of the step alone: no loader can bring more than the rest
_LEFT_BEHIND = 0.95  # of the leader's rate, in every round so far
_ROUNDS_A_HEAT = 3  # fewer give no interval to speak of
_MOST_ROUNDS = 9


def race(
    variants: Mapping[str, Callable[[], Any]],
    *,
    default: str,
    deadline: float,
    progress: bool = True,
    try_default_first: bool = True,
) -> pd.DataFrame:
    """Run variants against each other, and against the step alone, where it is among them.

    Args:
        variants: As for `compare`.
        default: The one to beat.
        deadline: By `time.perf_counter`; no further heat is begun that would go beyond it.
        progress: Show a live bar.
        try_default_first: Against the step alone; where it keeps up, the others are not run at all.

    Returns:
        The runs of all heats, one row a run; rounds are numbered through.
    """
    runs, alive = pd.DataFrame(), list(variants)
    if try_default_first and STEP_ALONE in variants:
        runs = _heat(variants, [default, STEP_ALONE], runs, default, progress, warmups=1)
        if _keeps_up(runs, default):
            return runs
    while True:
        start, n_alive = time.perf_counter(), len(alive)
        new = len(alive) == len(variants) and not set(variants) <= set(runs.get("variant", ()))
        runs = _heat(variants, alive, runs, default, progress, warmups=int(new))
        alive, decided = next_heat(runs, alive, default)
        n_rounds = len(rounds_of(runs, default))
        now = time.perf_counter()
        if decided or n_rounds >= _MOST_ROUNDS or now + (now - start) * len(alive) / n_alive > deadline:
            return runs


def rounds_of(runs: pd.DataFrame, label: str) -> pd.DataFrame:
    """The runs of a variant that count."""
    return runs[(runs["variant"] == label) & ~runs["is_warmup"].astype(bool)]


def _heat(
    variants: Mapping[str, Any], labels: list[str], runs: pd.DataFrame, default: str, progress: bool, warmups: int
) -> pd.DataFrame:
    done = 0 if runs.empty else int(runs["round"].max()) + 1
    new = compare(
        {label: variants[label] for label in labels}, baseline=default, rounds=_ROUNDS_A_HEAT, warmups=warmups,
        seed=done, count=counted, progress=progress, rung=False,
    )  # fmt: skip
    return pd.concat([*[runs] * (not runs.empty), new.assign(round=new["round"] + done)], ignore_index=True)


def next_heat(runs: pd.DataFrame, alive: list[str], default: str) -> tuple[list[str], bool]:
    """Who goes on, and whether it is decided."""
    racing = [label for label in alive if label != STEP_ALONE]
    leader = _leader(runs, racing, default)
    if STEP_ALONE in alive and _keeps_up(runs, leader):
        racing = [leader]  # nobody can be faster: it only remains to be sure
    close = [label for label in racing if label == leader or not _left_behind(runs, label, leader)]
    kept = [label for label in alive if label in {*close, default, STEP_ALONE}]
    rivals = [label for label in close if label not in (default, leader)]
    if leader == default:
        return kept, not rivals
    return kept, not rivals and quiet_summary(runs, default).loc[leader, "verdict"] == "faster"


def _leader(runs: pd.DataFrame, labels: list[str], default: str) -> str:
    """The fastest by the mean ratio to the default, which every round holds."""
    own = rounds_of(runs, default)
    return max(labels, key=lambda label: paired_ratios(rounds_of(runs, label), own)["speedup"].mean())


def _left_behind(runs: pd.DataFrame, label: str, leader: str) -> bool:
    ratios = paired_ratios(rounds_of(runs, label), rounds_of(runs, leader))["speedup"]
    return bool((ratios < _LEFT_BEHIND).all())


def _keeps_up(runs: pd.DataFrame, label: str) -> bool:
    """After the first batch, which a real epoch waits for once."""
    own, alone = (rounds_of(runs, name) for name in (label, STEP_ALONE))
    steady = [found.assign(images_per_s=1 / found["steady_s"]) for found in (own, alone)]
    return bool(paired_ratios(*steady)["speedup"].median() >= _KEEPS_UP)
