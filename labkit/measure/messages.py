"""What a plot shows, as its title: computed from the frame that is drawn."""

from contextlib import suppress

import pandas as pd

from labkit.measure.conclusion import format_ratio, most_telling
from labkit.measure.frames import measured_runs
from labkit.measure.summary import quiet_summary

_WORK = ("compute", "step")  # kinds of spans that training is for
_MAX_KINDS = 2


def tell_speedup(summary: pd.DataFrame) -> str:
    """The ratio of the variant to speak of, and how many ratios are inconclusive; `summary` as of `summarize`."""
    base = summary.index[summary["verdict"] == "baseline"][0]
    others = summary.drop(index=base)
    if others.empty:
        return f"{base}: nothing to compare it with"
    best = most_telling(others)
    return tell_ratio(best, base, others.loc[best]) + _count_doubtful(others["verdict"], best)


def tell_ratio(label: str, base: str, row: pd.Series) -> str:
    """A ratio, and what makes it doubtful."""
    told = f"{label}: {format_ratio(row['speedup'])}x of {base}"
    if row["verdict"] == "" and row["ci_low"] <= 1 <= row["ci_high"]:
        return f"{told}, and its interval contains 1"
    return told


def _count_doubtful(verdicts: pd.Series, best: str) -> str:
    doubtful = verdicts.index[verdicts == "inconclusive"]
    if list(doubtful) == [best]:
        return ", inconclusive"
    if len(doubtful) == len(verdicts):
        return f"; {'both' if len(verdicts) == 2 else f'all {len(verdicts)}'} ratios are inconclusive"
    return f"; {len(doubtful)} of {len(verdicts)} ratios inconclusive" if len(doubtful) else ""


def tell_rates(data: pd.DataFrame) -> str:
    """The highest median rate, and its ratio to the lowest: inconclusive if the runs cannot tell the two apart."""
    medians = measured_runs(data).groupby("variant", sort=False)["images_per_s"].median()
    best, worst = str(medians.idxmax()), str(medians[::-1].idxmin())  # two variants, even if all are equal
    told = f"{best}: {medians.max():,.0f} per second"
    if best == worst:
        return told
    told += f", {format_ratio(medians.max() / medians.min())}x of {worst}"
    verdict = ""
    with suppress(ValueError):  # runs of several machines have no verdict
        verdict = quiet_summary(data, worst).loc[best, "verdict"]
    return told + (", inconclusive" if verdict == "inconclusive" else "")


def tell_ladder(rungs: pd.DataFrame) -> str:
    """The largest ratio of all experiments that is certain, and how many are inconclusive."""
    best = most_telling(rungs.reset_index(drop=True))
    rung = rungs.iloc[best]
    told = f"{rung['experiment']}: {tell_ratio(rung['label'], rung['baseline_label'], rung)}"
    verdicts = rungs["verdict"].reset_index(drop=True)
    return told + _count_doubtful(verdicts, best)


def tell_spans(data: pd.DataFrame) -> str:
    """How much of the time the lane that does the work does so, and what else it does."""
    data = data.reset_index(drop=True)
    kinds = data["kind"] if "kind" in data else pd.Series("busy", index=data.index)
    work = next((kind for kind in _WORK if kind in set(kinds)), None)
    lane = data.loc[kinds == work, "lane"].iloc[-1] if work else _busiest(data)
    total_s = data["end_s"].max() - data["start_s"].min()
    own = data[data["lane"] == lane]
    seconds = {kind: _covered_s(spans) for kind, spans in own.groupby(kinds[own.index], sort=False)}
    largest = sorted(seconds.items(), key=lambda item: -item[1])[:_MAX_KINDS]
    shares = ", ".join(f"{kind} {_share(s, total_s)}" for kind, s in largest)
    return f"{lane}: {shares} of {total_s:.3g} s"


def _busiest(data: pd.DataFrame) -> str:
    return max(dict.fromkeys(data["lane"]), key=lambda lane: _covered_s(data[data["lane"] == lane]))


def _covered_s(spans: pd.DataFrame) -> float:
    """Seconds in which at least one of the spans runs."""
    covered, end = 0.0, float("-inf")
    for span in spans.sort_values("start_s").itertuples():
        covered += max(0.0, span.end_s - max(span.start_s, end))
        end = max(end, span.end_s)
    return covered


def tell_stages(table: pd.DataFrame) -> str:
    """The largest stage of the variant that takes longest, and how much longer than the shortest it takes.

    Args:
        table: Seconds, one row per variant, one column per stage.
    """
    totals = table.sum(axis=1)
    longest, shortest = totals.idxmax(), totals.idxmin()
    told = f"{longest}: {table.loc[longest].idxmax()} {_share(table.loc[longest].max(), totals.max())} of the time"
    if longest == shortest or totals.min() <= 0:
        return told
    return f"{told}; {format_ratio(totals.max() / totals.min())}x as long in all as {shortest}"


def tell_front(table: pd.DataFrame, front: pd.DataFrame, rate: str, rate_label: str) -> str:
    """Which variants no other beats in both; the cheapest of them has its rate, too."""
    first = front.iloc[0]
    others = len(front) - 1
    told = f"{first['variant']}: {_plain(first[rate])} {rate_label} at the least cost"
    beaten = f"{len(table) - len(front)} of {len(table)} are beaten in both"
    more = f"{others} {'costs' if others == 1 else 'cost'} more and {'is' if others == 1 else 'are'} faster"
    return "; ".join([told, more, beaten] if others else [told, beaten])


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}".replace("%", " %") if whole > 0 else "0 %"
