"""One picture of the ledger: claimed ratios beside measured ones."""

from math import isfinite
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from labkit.teach.claims.verdicts import FAILS, HOLDS, OPEN, format_ratio

_MEASURED_COLOR, _CLAIMED_COLOR = sns.color_palette("colorblind")[0], sns.color_palette("colorblind")[1]
_MARKERS = {HOLDS: "o", FAILS: "X", OPEN: "s"}


def plot_claims(data: pd.DataFrame, *, ax: Axes | None = None, **kwargs: Any) -> Axes:
    """Measured ratio of each test with its 95 % interval, beside the claimed ratio, on a logarithmic axis.

    A disc holds, a cross does not, an open square is inconclusive; the words on the right say the same. A test without
    a ratio has words only.

    Args:
        data: The table of `claims()`.
        **kwargs: Passed to `Axes.errorbar` for the measured ratios.
    """
    tests = pd.DataFrame(data.attrs["tests"])
    ax = ax or plt.subplots(figsize=(10, 1.2 + 0.27 * len(tests)), layout="constrained")[1]
    for row, test in enumerate(tests.to_dict("records")):
        _draw_test(ax, row, test, **kwargs)
    first = ~tests["id"].duplicated()
    labels = [
        f"{name}   {setting}" if new else setting
        for name, setting, new in zip(tests["id"], tests["setting"], first, strict=True)
    ]
    ax.set_yticks(range(len(tests)), labels, fontsize="small")
    for row in tests.index[first][1:]:
        ax.axhline(row - 0.5, color="0.9", linewidth=0.8, zorder=0)
    ax.axvline(1, color="0.3", linewidth=1.2, zorder=1)
    ax.set(xscale="log", xlabel="ratio (x); 1 is no difference", ylim=(len(tests) - 0.4, -0.6))
    ax.xaxis.set_major_formatter("{x:g}")
    _add_legend(ax)
    return ax


def _draw_test(ax: Axes, row: int, test: dict[str, Any], **kwargs: Any) -> None:
    text = test["outcome"]
    if isfinite(test["measured"]):
        text = f"{format_ratio(test['measured'])}x  {text}"
        error = [[test["measured"] - test["ci_low"]], [test["ci_high"] - test["measured"]]]
        style = {
            "fmt": _MARKERS[test["outcome"]], "color": _MEASURED_COLOR, "markersize": 7, "capsize": 3,
            "markerfacecolor": "white" if test["outcome"] == OPEN else _MEASURED_COLOR,
        }  # fmt: skip
        ax.errorbar(test["measured"], row, xerr=error if isfinite(test["ci_low"]) else None, **{**style, **kwargs})
        if isfinite(test["claimed"]):
            ax.scatter(test["claimed"], row, marker="|", s=160, linewidth=3, color=_CLAIMED_COLOR, zorder=4)
    ax.annotate(text, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize="small")


def _add_legend(ax: Axes) -> None:
    for outcome, marker in _MARKERS.items():
        face = "white" if outcome == OPEN else _MEASURED_COLOR
        ax.plot([], [], marker, color=_MEASURED_COLOR, markerfacecolor=face, label=f"measured: {outcome}")
    ax.plot([], [], "|", color=_CLAIMED_COLOR, markersize=12, markeredgewidth=3, label="claimed")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize="small")
