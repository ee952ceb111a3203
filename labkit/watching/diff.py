"""A training in blocks of neighboring batches: by them a run has its interval, and two runs are compared.

A run is compared in blocks of neighboring batches, whose spread gives the interval. Blocks of one run are more alike
than runs are, since a machine drifts from minute to minute, so that an interval must lie beyond a margin, too.
"""

import math
import os
from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from statistics import fmean
from typing import Any, TypeVar

from labkit.measure.intervals import format_ratio, interval_of_means, speedup_interval, speedup_of
from labkit.measure.usage import MAX_OTHERS
from labkit.util.arguments import require_report
from labkit.watching.accounts import LEAST_S, Accounts, waiting_share
from labkit.watching.advice import MIN_SHARE, SHORT_NAMES, Costs
from labkit.watching.loaders import REPLAY

_CONFIDENCE = 0.99
_HARDWARE = ("cpu", "usable_cores", "memory_gib", "gpu")


_MOST_BLOCKS = 20
_LEAST_OF_BLOCK = 3  # batches


def blocks_of(accounts: Accounts, costs: Costs) -> dict[str, list[float]]:
    """Seconds per batch, by cause, in blocks of neighboring batches; on average those of `costs`."""
    turns = accounts.of("training")
    waits, receives, steps = (
        _block_means([getattr(turn, name) for turn in turns]) for name in ("wait_s", "hand_over_s", "step_s")
    )
    steps, copies = _scaled(steps, costs.step), _scaled(steps, costs.copy)
    receives = _scaled(receives, costs.hand_over)
    waits = _scaled(waits, costs.fetch + costs.prepare + costs.hand_over)
    making = [max(0.0, wait_s - receive_s) for wait_s, receive_s in zip(waits, receives, strict=True)]
    made = sorted(accounts.made, key=lambda each: each.end_s)
    has_all = len(made) >= len(steps)
    waiting = [*map(waiting_share, in_parts(made, len(steps)))] if has_all else [costs.waiting] * len(steps)
    starts_s = accounts.starts_s[1:] or accounts.starts_s or [0.0]
    starts = [*islice(cycle(starts_s), len(steps))]  # as different as those of the epochs are
    return {
        "compute": steps,
        "fetch": [each_s * share for each_s, share in zip(making, waiting, strict=True)],
        "prepare": [each_s * (1 - share) for each_s, share in zip(making, waiting, strict=True)],
        "copy": copies, "hand-over": receives, "start": _scaled(starts, costs.start),
    }  # fmt: skip


Item = TypeVar("Item")


def in_parts(items: list[Item], n_parts: int) -> Iterator[list[Item]]:
    """Neighboring items together, in parts of about the same length, the longer ones first."""
    each, n_longer = divmod(len(items), n_parts)
    end = 0
    for number in range(n_parts):
        begin, end = end, end + each + (number < n_longer)
        yield items[begin:end]


def _block_means(seconds: list[float]) -> list[float]:
    n_blocks = min(_MOST_BLOCKS, len(seconds) // _LEAST_OF_BLOCK)
    return [*map(fmean, in_parts(seconds, n_blocks))] if n_blocks >= 2 else seconds


def _scaled(seconds: list[float], mean_s: float) -> list[float]:
    own_s = fmean(seconds) if seconds else 0.0
    return [mean_s * each / own_s if own_s > 0 else mean_s for each in seconds]


def ceiling_interval(accounts: Accounts, costs: Costs, blocks: dict[str, list[float]]) -> tuple[float, float]:
    """95 % interval of `together` over `step`, from the blocks of a run."""
    replayed = _block_means([turn.step_s for turn in accounts.of(REPLAY)])
    steps, together = ([max(LEAST_S, each) for each in seconds] for seconds in (blocks["compute"], _totals(blocks)))
    if replayed:
        low, high = speedup_interval(together, [max(LEAST_S, each) for each in replayed])
    else:
        low, high = speedup_interval(all_s / step_s for all_s, step_s in zip(together, steps, strict=True))
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
    seconds = [
        [max(LEAST_S, each) / count for each in _totals(run["blocks_s"])]
        for run, count in zip(runs, counts, strict=True)
    ]
    earlier, later = ([1 / each for each in of_run] for of_run in seconds)
    low, high = speedup_interval(later, earlier, confidence=_CONFIDENCE)
    ratio = speedup_of(later, earlier)
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
        low, high = interval_of_means(other, own, confidence=_CONFIDENCE)
        low, high = min(low, change), max(high, change)
        verdict = "more" if low > MIN_SHARE else "less" if high < -MIN_SHARE else "inconclusive"
        verdict = "inconclusive" if disturbed else verdict
        within = "" if math.isnan(low) else f" [{100 * low:+.1f}, {100 * high:+.1f}]"
        told = f"{_known(before, name):.1%} -> {_known(after, name):.1%}: {100 * change:+.1f} points{within}, {verdict}"
        yield f"{SHORT_NAMES.get(name, name)} {told}"


def _known(run: dict[str, Any], name: str) -> float:
    """The share of the report itself."""
    return 1 - run["shares"]["compute"] if name == "waiting" else run["shares"][name]


def _totals(blocks: dict[str, list[float]]) -> list[float]:
    return [*map(math.fsum, zip(*blocks.values(), strict=True))]


def _share_in_blocks(run: dict[str, Any], name: str = "waiting") -> list[float]:
    """The share of a cause in each block of a run; of all waiting, by that name."""
    blocks = run["blocks_s"]
    pairs = zip(blocks["compute" if name == "waiting" else name], _totals(blocks), strict=True)
    shares = [each_s / max(LEAST_S, all_s) for each_s, all_s in pairs]
    return [1 - share for share in shares] if name == "waiting" else shares


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
        if interval_of_means(shares, confidence=_CONFIDENCE)[0] > most:
            said.append(f"over the budget: {name} is {_known(run, name):.1%} of the time, and may be {most:.1%}")
    return said
