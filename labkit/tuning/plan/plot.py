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
    import matplotlib.pyplot as plt

    from labkit.measure import mark_simulated

    rows = data.frame.query("group == 'ceiling' and name != 'gpu_ceiling'").sort_values("value")
    ax = ax or plt.subplots(figsize=(7.5, 0.9 + 0.45 * len(rows)), layout="constrained")[1]
    spread = [rows["value"] - rows["low"], rows["high"] - rows["value"]]
    style = {"height": 0.6, "color": "mediumpurple", "hatch": "//", "edgecolor": "white", "capsize": 3, **kwargs}
    ax.barh(range(len(rows)), rows["value"], xerr=spread, **style)
    demand, low, high = data.value("demand")
    ax.axvspan(low, high, color="firebrick", alpha=0.12)
    ax.axvline(demand, color="firebrick", label=f"the GPUs ask for {format_number(demand)}")
    ax.set_xscale("log")
    left, right = ax.get_xlim()
    ax.set(xlim=(left / 2, right * 4), ylim=(len(rows) - 0.4, -0.6), xlabel="images/s at most")
    ax.set_yticks(range(len(rows)), rows["quantity"])
    for row, (value, end) in enumerate(zip(rows["value"], rows["high"], strict=True)):
        ax.annotate(format_number(value), (end, row), (5, 0), textcoords="offset points", va="center", fontsize="small")
    ax.legend(loc="upper right", frameon=False)
    ax.set_title(data.title, loc="left", fontsize="medium")
    mark_simulated(ax, "predicted")
    return ax
