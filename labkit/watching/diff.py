"""Two runs compared, and one with a budget, by their blocks of neighboring batches.

In come reports as `labkit watch --json` writes them, with the blocks that `findings` makes; out go lines of text. The
spread of the blocks gives the interval. Blocks of one run are more alike than runs are, since a machine drifts from
minute to minute, so that an interval must lie beyond a margin, too.
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from labkit.errors import ArgumentError
from labkit.measure.intervals import format_ratio, interval_of_means, speedup_interval, speedup_of
from labkit.measure.usage import MAX_OTHERS
from labkit.util.arguments import require_report
from labkit.watching.accounts import LEAST_S
from labkit.watching.advice import CAUSES, MIN_SHARE, SHORT_NAMES
from labkit.watching.findings import totals
from labkit.watching.loaders import FEW

_CONFIDENCE = 0.99
_HARDWARE = ("cpu", "usable_cores", "memory_gib", "gpu")


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
        [max(LEAST_S, each) / count for each in totals(run["blocks_s"])]
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


def _share_in_blocks(run: dict[str, Any], name: str = "waiting") -> list[float]:
    """The share of a cause in each block of a run; of all waiting, by that name."""
    blocks = run["blocks_s"]
    pairs = zip(blocks["compute" if name == "waiting" else name], totals(blocks), strict=True)
    shares = [each_s / max(LEAST_S, all_s) for each_s, all_s in pairs]
    return [1 - share for share in shares] if name == "waiting" else shares


def parse_budget(text: str) -> dict[str, float]:
    """`waiting=5%,copy=0.01` as shares, 0 to 1.

    Raises:
        ArgumentError: no share of this name, or no percentage.
    """
    names, found = ("waiting", *CAUSES), dict[str, float]()
    for part in filter(None, text.split(",")):
        name, _, amount = part.strip().partition("=")
        try:
            share = float(amount.removesuffix("%")) / (100 if amount.endswith("%") else 1)
        except ValueError:
            share = -1.0
        if name not in names or not 0 <= share < 1:
            raise ArgumentError(f"a budget is like waiting=5%, with one of {', '.join(names)}; got {part.strip()!r}")
        found[name] = share
    return found


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
        low, high = interval_of_means(shares, confidence=_CONFIDENCE)
        if low > most:
            said.append(f"over the budget: {name} is {_known(run, name):.1%} of the time, and may be {most:.1%}")
        elif (n_batches := run.get("n_batches", FEW)) < FEW and high > most:
            seen = f"{n_batches} steps were counted, and {FEW} are needed"
            said.append(f"the budget {name}={most:.1%} cannot be judged: {seen}")
    return said
