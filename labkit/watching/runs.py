"""A training in blocks of neighboring batches: by them a run has its interval, and two runs are compared.

A run is compared in blocks of neighboring batches, whose spread gives the interval. Blocks of one run are more alike
than runs are, since a machine drifts from minute to minute, so that an interval must lie beyond a margin, too.
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from scipy import stats

from labkit.measure.statistics import MAX_OTHERS, format_ratio, speedup_interval, speedup_of
from labkit.util.arguments import require_report
from labkit.watching.accounts import LEAST_S, Accounts, waiting_share
from labkit.watching.advice import MIN_SHARE, Costs
from labkit.watching.seen import REPLAY

_CONFIDENCE = 0.99
_HARDWARE = ("cpu", "usable_cores", "memory_gib", "gpu")


_MOST_BLOCKS = 20
_LEAST_OF_BLOCK = 3  # batches


def blocks_of(accounts: Accounts, costs: Costs) -> dict[str, list[float]]:
    """Seconds per batch, by cause, in blocks of neighboring batches; on average those of `costs`."""
    turns = accounts.of("training")
    waits, hand_overs, steps = (
        np.array(_block_means([getattr(turn, name) for turn in turns])) for name in ("wait_s", "hand_over_s", "step_s")
    )
    steps, receives = (_scaled(seconds, 1.0) for seconds in (steps, hand_overs))
    waits = _scaled(waits, costs.fetch + costs.prepare + costs.hand_over)
    making = np.maximum(0.0, waits - costs.hand_over * receives)
    made = sorted(accounts.made, key=lambda each: each.end_s)
    parts = [made[part[0] : part[-1] + 1] for part in np.array_split(range(len(made)), len(steps)) if len(part)]
    waiting = np.array([*map(waiting_share, parts)]) if len(parts) == len(steps) else costs.waiting
    starts_s = accounts.starts_s[1:] or accounts.starts_s
    starts = np.resize(starts_s, len(steps))  # as different as those of the epochs are
    blocks = {
        "compute": costs.step * steps, "fetch": making * waiting, "prepare": making * (1 - waiting),
        "copy": costs.copy * steps, "hand-over": costs.hand_over * receives, "start": _scaled(starts, costs.start),
    }  # fmt: skip
    return {name: seconds.tolist() for name, seconds in blocks.items()}


def _block_means(seconds: list[float]) -> list[float]:
    n_blocks = min(_MOST_BLOCKS, len(seconds) // _LEAST_OF_BLOCK)
    return [float(block.mean()) for block in np.array_split(seconds, n_blocks)] if n_blocks >= 2 else seconds


def _scaled(seconds: np.ndarray, mean_s: float) -> np.ndarray:
    return seconds * (mean_s / seconds.mean()) if len(seconds) and seconds.mean() > 0 else np.full(len(seconds), mean_s)


def ceiling_interval(accounts: Accounts, costs: Costs, blocks: dict[str, list[float]]) -> tuple[float, float]:
    """95 % interval of `together` over `step`, from the blocks of a run."""
    replayed = _block_means([turn.step_s for turn in accounts.of(REPLAY)])
    steps = np.maximum(LEAST_S, replayed or blocks["compute"])
    together = np.maximum(LEAST_S, _totals(blocks))
    low, high = speedup_interval(together, steps) if replayed else speedup_interval(together / steps)
    point = costs.together / costs.step
    return min(low, point), max(high, point)  # bursts are trimmed from the interval, not from the mean


def compare_runs(before: str | os.PathLike, after: str | os.PathLike) -> list[str]:
    """What differs between two reports of `labkit watch --json`, line by line: settings, time of a batch, shares.

    Times are those of an image where both loaders say how many a batch has, and of a batch otherwise, without the
    slowest and the fastest fifth of the blocks. They are compared on one machine only, shares on any two.

    Args:
        before, after: The files.

    >>> compare_runs("before.json", "after.json")  # doctest: +SKIP
    ['differs: num_workers 0 -> 2', 'time of a batch 12.1 ms -> 6.2 ms: 1.95x [1.90, 2.01] as fast, faster', ...]

    Raises:
        ArgumentError: a file is no report, one of a later labkit, or one of an earlier, without what it takes.
    """
    runs = [require_report("a report", path, "blocks_s") for path in (before, after)]
    others = [run["others_share"] for run in runs]
    disturbed = max(others) > MAX_OTHERS
    used = f"{others[0]:.0%} and {others[1]:.0%}"
    said = [f"disturbed: other programs used {used} of the cores: watch both again without them"] if disturbed else []
    return [*_differences(*runs), *said, _compare_times(runs, disturbed), *_compare_shares(runs, disturbed)]


def _differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """What else is different: a line for settings, and one for the machine."""
    for kind, title in (("settings", "differs"), ("machine", "on")):
        own, other = before[kind], after[kind]
        names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
        if names:
            told = (f"{name} {own.get(name, 'none')} -> {other.get(name, 'none')}" for name in names)
            yield f"{title}: {'; '.join(told)}"


def _compare_times(runs: list[dict[str, Any]], disturbed: bool) -> str:
    before, after = runs
    if [before["machine"].get(name) for name in _HARDWARE] != [after["machine"].get(name) for name in _HARDWARE]:
        return "time: not compared, since the machines differ; shares are"
    sizes = [run["settings"].get("batch_size") for run in runs]
    per, counts = ("an image", sizes) if all(sizes) else ("a batch", [1, 1])
    seconds = [_totals(run["blocks_s"]) / count for run, count in zip(runs, counts, strict=True)]
    low, high = speedup_interval(1 / seconds[1], 1 / seconds[0], confidence=_CONFIDENCE)
    ratio = speedup_of(1 / seconds[1], 1 / seconds[0])
    verdict = "faster" if low > 1 + MIN_SHARE else "slower" if high < 1 / (1 + MIN_SHARE) else "inconclusive"
    verdict = "inconclusive" if disturbed else verdict
    own, other = (f"{1e3 * speedup_of(values):.4g} ms" for values in seconds)  # trimmed, so that the ratio is theirs
    within = "" if math.isnan(low) else f" [{format_ratio(low)}, {format_ratio(high)}]"
    return f"time of {per} {own} -> {other}: {format_ratio(ratio)}x{within} as fast, {verdict}"


def _compare_shares(runs: list[dict[str, Any]], disturbed: bool) -> Iterator[str]:
    """A line for the waiting as a whole, and one for each cause that is worth one in either run."""
    before, after = runs
    for name in ("waiting", *before["shares"]):
        own, other = (_share_in_blocks(run, name) for run in runs)
        if name != "waiting" and (name == "compute" or max(_known(before, name), _known(after, name)) < MIN_SHARE):
            continue
        change = _known(after, name) - _known(before, name)
        low, high = _interval_of_difference(own, other)
        low, high = min(low, change), max(high, change)
        verdict = "more" if low > MIN_SHARE else "less" if high < -MIN_SHARE else "inconclusive"
        verdict = "inconclusive" if disturbed else verdict
        within = "" if math.isnan(low) else f" [{100 * low:+.1f}, {100 * high:+.1f}]"
        told = f"{_known(before, name):.1%} -> {_known(after, name):.1%}: {100 * change:+.1f} points{within}, {verdict}"
        yield f"{name} {told}"


def _known(run: dict[str, Any], name: str) -> float:
    """The share of the report itself."""
    return 1 - run["shares"]["compute"] if name == "waiting" else run["shares"][name]


def _totals(blocks: dict[str, list[float]]) -> np.ndarray:
    return np.sum([*blocks.values()], axis=0)


def _share_in_blocks(run: dict[str, Any], name: str = "waiting") -> np.ndarray:
    """The share of a cause in each block of a run; of all waiting, by that name."""
    blocks = run["blocks_s"]
    total = _totals(blocks)
    return 1 - np.array(blocks["compute"]) / total if name == "waiting" else np.array(blocks[name]) / total


def _interval_of_difference(own: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    if min(len(own), len(other)) < 2:
        return float("nan"), float("nan")
    if np.ptp(own) == np.ptp(other) == 0:
        return (float(other[0] - own[0]),) * 2
    low, high = stats.ttest_ind(other, own, equal_var=False).confidence_interval(_CONFIDENCE)
    return float(low), float(high)


def judge_budget(run: dict[str, Any], budget: Mapping[str, float]) -> list[str]:
    """What is over the budget, or cannot be judged; empty if all is within.

    A share is over it only if its whole interval is: a run at the budget passes more often than not.

    Args:
        run: A report, as `WatchReport.to_dict` gives it.
        budget: The most that a share may be, by name.
    """
    said = []
    for name, most in budget.items():
        shares = _share_in_blocks(run, name)
        if len(shares) < 2:
            said.append(f"the budget {name}={most:.1%} cannot be judged: too few batches were seen")
            continue
        error = stats.sem(shares) * stats.t.ppf((1 + _CONFIDENCE) / 2, len(shares) - 1)
        if shares.mean() - error > most:
            said.append(f"over the budget: {name} is {_known(run, name):.1%} of the time, and may be {most:.1%}")
    return said
