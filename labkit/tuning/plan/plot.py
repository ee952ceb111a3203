"""A plan as a picture: what each resource gives at most, beside what the GPUs ask for."""

from typing import TYPE_CHECKING, Any

from labkit.tuning.plan.estimate import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from labkit.tuning.plan.result import Plan


def plot_plan(data: "Plan", *, ax: "Axes | None" = None, **kwargs: Any) -> "Axes":
    """Images/s that each resource gives at most, the scarcest first, with 95 % intervals; the line is the demand.

    Args:
        data: The plan.
        ax: Where to draw.
        **kwargs: To `Axes.barh`.

    Taught in: notebooks/15_at_scale.ipynb
    """
    from labkit.measure import PREDICTED, SMALL_PT, make_axes, mark_simulated, put_legend_below, write_title

    rows = data.frame.query("group == 'ceiling' and name != 'gpu_ceiling'").sort_values("value")
    ax = ax or make_axes(1.5 + 0.45 * len(rows))
    spread = [rows["value"] - rows["low"], rows["high"] - rows["value"]]
    style = {"height": 0.6, "color": PREDICTED, "hatch": "//", "edgecolor": "white", "capsize": 3, **kwargs}
    ax.barh(range(len(rows)), rows["value"], xerr=spread, **style)
    demand, low, high = data.value("demand")
    ax.axvspan(low, high, color="firebrick", alpha=0.12)
    ax.axvline(demand, color="firebrick", label=f"the GPUs ask for {format_number(demand)}")
    ax.set_xscale("log")
    left, right = ax.get_xlim()
    ax.set(xlim=(left / 2, right * (right / left) ** 0.18), ylim=(len(rows) - 0.4, -0.6), xlabel="images/s at most")
    ax.set_yticks(range(len(rows)), rows["quantity"])
    for row, (value, end) in enumerate(zip(rows["value"], rows["high"], strict=True)):
        ax.annotate(
            format_number(value), (end, row), (5, 0), textcoords="offset points", va="center", fontsize=SMALL_PT
        )
    put_legend_below(ax)
    mark_simulated(ax, "predicted")
    write_title(ax, f"{data.title}: {_tell_scarcest(rows.iloc[0], demand, low, high)}")
    return ax


def _tell_scarcest(row: Any, demand: float, low: float, high: float) -> str:
    """Whether the scarcest resource gives what the GPUs ask for: inconclusive if the two intervals meet."""
    given, asked = format_number(row["value"]), format_number(demand)
    if row["high"] < low:
        return f"{row['quantity']} allow {given} of {asked} images/s"
    if row["low"] > high:
        return f"each resource allows the {asked} images/s that are asked for"
    return f"{row['quantity']} allow {given} where {asked} images/s are asked for: inconclusive"
