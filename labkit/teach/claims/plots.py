"""One picture of the ledger: claimed ratios beside measured ones, and beside those that are not judged."""

from math import isfinite
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from labkit.measure import COLORS, SMALL_PT, make_axes, put_legend_below, write_title
from labkit.teach.claims.verdicts import (
    BESIDE,
    FAILS,
    HOLDS,
    LARGER,
    MEASURED,
    MISSING,
    NEEDS_GPU,
    NOT_JUDGED,
    OPEN,
    SIMULATED,
    SMALLER,
    UNEQUAL,
    format_ratio,
)  # fmt: skip

_LABEL_WIDTH = 36  # characters in a line
_CLAIMED = COLORS[1]
_KINDS = {MEASURED: (COLORS[0], ""), SIMULATED: (COLORS[4], "D"), UNEQUAL: (COLORS[3], "P"), BESIDE: ("0.45", "d")}
_OUTCOMES = {HOLDS: "o", LARGER: ">", SMALLER: "<", FAILS: "X", OPEN: "s"}


def plot_claims(data: pd.DataFrame, *, ax: Axes | None = None, **kwargs: Any) -> Axes:
    """Ratio of each test with its 95 % interval, beside the claimed ratio, on a logarithmic axis.

    Measured ratios, on which verdicts rest, are blue: their marks say the outcome, and so do the words on the right.
    Simulated ones, unequal work and what stands beside a claim are hollow, in colors and marks of their own. The orange
    line spans the ratios that agree with the claimed one. A test without a ratio has words only.

    Args:
        data: The table of `claims()`.
        **kwargs: Passed to `Axes.errorbar` for the ratios.
    """
    tests = pd.DataFrame(data.attrs["tests"])
    ax = ax or make_axes(2.4 + 0.36 * len(tests))
    for row, test in enumerate(tests.to_dict("records")):
        _draw_test(ax, row, test, **kwargs)
    first = ~tests["id"].duplicated()
    labels = [
        f"{name}   {setting}" if new else setting
        for name, setting, new in zip(tests["id"], tests["setting"], first, strict=True)
    ]
    ax.set_yticks(range(len(tests)), [fill(label, _LABEL_WIDTH) for label in labels], fontsize=SMALL_PT)
    for row in tests.index[first][1:]:
        ax.axhline(row - 0.5, color="0.9", linewidth=0.8, zorder=0)
    ax.axvline(1, color="0.3", linewidth=1.2, zorder=1)
    ax.set(xscale="log", xlabel="ratio (x); 1 is no difference", ylim=(len(tests) - 0.4, -0.6), xlim=_limits(tests))
    low, high = ax.get_xlim()
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    _add_legend(ax)
    write_title(ax, _tell_outcomes(tests))
    return ax


def _tell_outcomes(tests: pd.DataFrame) -> str:
    """How many measured tests ended in which way."""
    measured = tests[(tests["kind"] == MEASURED) & (tests["outcome"] != NOT_JUDGED)]
    counts = measured["outcome"].value_counts()
    parts = [f"{outcome} {counts[outcome]}" for outcome in (*_OUTCOMES, NEEDS_GPU, MISSING) if outcome in counts]
    return f"{len(measured)} tests: {', '.join(parts)}" if parts else "no test was measured"


def _limits(tests: pd.DataFrame) -> tuple[float, float]:
    """Room for all ratios, but not for all intervals: those of two rounds may span decades."""
    ratios = tests[["measured", "claimed", "agrees_to"]].where(tests["measured"].notna()).stack()
    return min(0.5, ratios.min() / 2), max(2.0, ratios.max() * 2)


def _draw_test(ax: Axes, row: int, test: dict[str, Any], **kwargs: Any) -> None:
    color, marker = _KINDS[test["kind"]]
    said = test["kind"] if test["outcome"] == NOT_JUDGED else test["outcome"]
    ratio = ""
    if isfinite(test["measured"]):
        ratio = f"{format_ratio(test['measured'])}x  "
        error = [[test["measured"] - test["ci_low"]], [test["ci_high"] - test["measured"]]]
        is_filled = test["kind"] == MEASURED and test["outcome"] != OPEN
        style = {
            "fmt": marker or _OUTCOMES[test["outcome"]], "color": color, "markersize": 7, "capsize": 3,
            "markerfacecolor": color if is_filled else "white",
        }  # fmt: skip
        ax.errorbar(test["measured"], row, xerr=error if isfinite(test["ci_low"]) else None, **{**style, **kwargs})
        _draw_claim(ax, row, test)
    ax.annotate(f"{ratio}{said}", (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=SMALL_PT)


def _draw_claim(ax: Axes, row: int, test: dict[str, Any]) -> None:
    if isfinite(test["claimed"]) and test["kind"] != BESIDE:
        ax.plot([test["agrees_from"], test["agrees_to"]], [row, row], color=_CLAIMED, linewidth=6, alpha=0.3, zorder=0)
        ax.scatter(test["claimed"], row, marker="|", s=160, linewidth=3, color=_CLAIMED, zorder=4)


def _add_legend(ax: Axes) -> None:
    blue = _KINDS[MEASURED][0]
    for kind, marker in _OUTCOMES.items():
        face = "white" if kind == OPEN else blue
        ax.plot([], [], marker, color=blue, markerfacecolor=face, label=f"{MEASURED}: {kind}")
    for kind, (color, marker) in list(_KINDS.items())[1:]:
        ax.plot([], [], marker, color=color, markerfacecolor="white", label=f"{kind}: {NOT_JUDGED}")
    ax.plot([], [], "|", color=_CLAIMED, markersize=12, markeredgewidth=3, label="claimed")
    ax.plot([], [], color=_CLAIMED, linewidth=6, alpha=0.3, label="agrees with it")
    put_legend_below(ax, columns=2)
