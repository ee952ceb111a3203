"""What the measured costs predict for more cores: threads of one process share one lock (GIL)."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from labkit.measure import COLORS, MARKERS, format_ratio, make_axes, put_legend_below, write_title

CORES = (1, 2, 4, 8, 16, 32, 64, 128)


def predict_cores(table: pd.DataFrame, cores: Sequence[int] = CORES) -> pd.DataFrame:
    """Images per second of threads in one process, on so many cores: a prediction, not a measurement.

    The cores deliver `cores` / CPU seconds per image, until the lock is held all the time. Memory bandwidth, clock
    rates and hyper-threads are left out, so the truth lies below.

    Args:
        table: As `peer_table` returns it, with `cpu_s_per_1000` and `gil_us_per_image`; rows without both are left out.
        cores: Numbers of cores.

    Returns:
        One row per loader and number of cores: `variant`, `cores`, `images_per_s`, `n_processes`, how many processes
        would lift the bound of the lock, and `simulated` (`"predicted"`).

    Taught in: notebooks/13_peers.ipynb
    """
    known = table.dropna(subset=["cpu_s_per_1000", "gil_us_per_image"])
    rows = []
    for name, row in known[known["gil_us_per_image"] > 0].iterrows():
        lock = 1e6 / row["gil_us_per_image"]
        for number in cores:
            free = number * 1000 / row["cpu_s_per_1000"]
            rows.append({
                "variant": name, "cores": number, "images_per_s": min(free, lock),
                "n_processes": max(1, -int(-free // lock)), "simulated": "predicted",
            })  # fmt: skip
    return pd.DataFrame(rows)


def plot_cores(
    predicted: pd.DataFrame, measured: pd.DataFrame, *, ax: Axes | None = None, about: str = "", **kwargs: Any
) -> Axes:
    """Predicted rates over cores as dashed lines, and what was measured as filled marks.

    The title says where the lock ends the growth of the fastest.

    Args:
        predicted: From `predict_cores`.
        measured: Columns `variant`, as in `predicted`, `cores` and `images_per_s`.
        about: What was measured; the title begins with it.
        **kwargs: Passed to `Axes.plot` for the lines.

    Taught in: notebooks/13_peers.ipynb
    """
    ax = ax or make_axes(5)
    for color, marker, (name, line) in zip(COLORS, MARKERS, predicted.groupby("variant", sort=False), strict=False):
        style = {"linestyle": "--", "color": color, "marker": marker, "markerfacecolor": "white", "label": name}
        ax.plot(line["cores"], line["images_per_s"], **{**style, **kwargs})
        dots = measured[measured["variant"] == name]
        ax.scatter(dots["cores"], dots["images_per_s"], color=color, marker=marker, s=70, zorder=3)
    ax.plot([], [], "--", color="0.4", label="predicted: cores, then the lock")
    ax.scatter([], [], color="0.4", label="measured")
    ax.set(xscale="log", yscale="log", xlabel="cores of one process", ylabel="images per second")
    ax.set_xticks(sorted(set(predicted["cores"])), [str(number) for number in sorted(set(predicted["cores"]))])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:,.0f}"))
    ax.grid(alpha=0.3)
    put_legend_below(ax, columns=2)
    message = _tell_growth(predicted)
    write_title(ax, f"{about}: {message}" if about else message)
    return ax


def _tell_growth(predicted: pd.DataFrame) -> str:
    """How far the fastest loader grows with cores."""
    if predicted.empty:
        return "no loader has a measured lock: nothing is predicted"
    best = predicted[predicted["variant"] == predicted.loc[predicted["images_per_s"].idxmax(), "variant"]]
    first, top = best.iloc[0], best.loc[best["images_per_s"].idxmax()]
    ratio = format_ratio(top["images_per_s"] / first["images_per_s"])
    return f"{top['variant']} on {top['cores']} cores: predicted {ratio}x of {first['cores']}"
