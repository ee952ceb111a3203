"""explore(): ask a frame of runs one's own questions, with menus in a notebook and a picture everywhere else."""

import base64
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.core import png_bytes
from labkit.teach.factors import METRICS, factors_of, levels_of, plot_runs, pooled_over, varies_within

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class Explorer:
    """A picture of runs, and the menus that change it.

    Attributes:
        x, hue, metric: What is drawn now; `hue` may be None.
        where: Factor -> the level that is drawn, of the factors that are held.
        ax: The axes as they are now.
        controls: Menus by name, `x`, `hue`, `metric` and `where <factor>`; empty where ipywidgets is not installed.
    """

    def __init__(self, runs: pd.DataFrame, x: str, hue: str | None, metric: str):
        self.runs, self.x, self.hue, self.metric = runs, x, hue, metric
        self.where: dict[str, Any] = {}
        self.controls: dict[str, Any] = {}
        self.draw()
        self._box = self._picture = None
        try:
            import ipywidgets
        except ImportError:
            return
        self._make_controls(ipywidgets)

    def draw(self) -> Axes:
        """Draw anew what is chosen now."""
        runs = self.runs
        for factor, level in self.where.items():
            runs = runs[runs[factor] == level]
        n_names = len(levels_of(self.runs, self.x))
        n_groups = n_names * (len(levels_of(self.runs, self.hue)) if self.hue else 1)
        width = max(6.5, min(12, max(1.1 * n_names, 0.4 * n_groups)))
        figure = Figure(figsize=(width, 4), layout="constrained")
        self.ax = plot_runs(runs, x=self.x, hue=self.hue, metric=self.metric, ax=figure.add_subplot())
        self.ax.set_title(self._title(runs), loc="left", fontsize="medium")
        return self.ax

    def _title(self, runs: pd.DataFrame) -> str:
        held = [f"{factor}: {level}" for factor, level in self.where.items()]
        pooled = pooled_over(runs, [self.x, self.hue])
        return "; ".join([*held, *([f"pooled over {', '.join(pooled)}"] if pooled else [])])

    def _make_controls(self, widgets: Any) -> None:
        factors = factors_of(self.runs)
        chosen = {
            "x": widgets.Dropdown(options=factors, value=self.x),
            "hue": widgets.Dropdown(options=[("none", None), *[(name, name) for name in factors]], value=self.hue),
            "metric": widgets.Dropdown(
                options=[(METRICS[name], name) for name in _metrics(self.runs)], value=self.metric
            ),
        }
        for factor in factors:
            levels = [(str(level), level) for level in levels_of(self.runs, factor)]
            chosen[f"where {factor}"] = widgets.Dropdown(options=[("all", None), *levels], value=None)
        for name, menu in chosen.items():
            menu.description, menu.style = name, {"description_width": "initial"}
            menu.observe(lambda change, name=name: self._choose(name, change["new"]), names="value")
        self.controls = chosen
        self._picture = widgets.Image(value=png_bytes(self.ax.figure), format="png", layout={"max_width": "100%"})
        menus = widgets.Box(list(chosen.values()), layout={"flex_flow": "row wrap"})
        self._box = widgets.VBox([menus, self._picture])

    def _choose(self, name: str, value: Any) -> None:
        if not name.startswith("where "):
            setattr(self, name, value)
        elif value is None:
            self.where.pop(name.removeprefix("where "), None)
        else:
            self.where[name.removeprefix("where ")] = value
        self.draw()
        self._picture.value = png_bytes(self.ax.figure)

    def __repr__(self) -> str:
        by = f"{self.x} and {self.hue}" if self.hue and self.hue != self.x else self.x
        text = f"{METRICS[self.metric]} by {by}, {len(self.runs)} runs"
        menus = "" if self.controls else " (no menus: ipywidgets is not installed)"
        return f"{text}. Another view{menus}: lk.explore(frame, x=..., hue=..., metric=...)"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The menus, and for readers without a kernel the picture in the same output."""
        bundle = {"text/plain": repr(self), "image/png": base64.b64encode(png_bytes(self.ax.figure)).decode()}
        if self._box is not None:
            bundle[WIDGET_VIEW] = self._box._repr_mimebundle_()[WIDGET_VIEW]
        return bundle


def explore(
    frame: pd.DataFrame, *, x: str | None = None, hue: str | None = None, metric: str = "images_per_s"
) -> Explorer:
    """Look at runs by any of the factors that vary in them: every run as a dot, their median over it.

    In a notebook menus choose the factor along the axis, the colored one, what is measured, and the levels to keep.
    Where there are no menus (a stored notebook, HTML, a script, no ipywidgets) it is the picture of its arguments.

    Args:
        frame: Runs of one machine, as `compare` gives them; of several experiments, concatenated.
        x: Column along the axis. None: `variant`, or what varies.
        hue: Column in colors and markers. None: the first other one that varies within `x`.
        metric: Measured column, such as `first_batch_s`, `cpu_s` or `peak_mem_mb`.

    Returns:
        An `Explorer`; a notebook shows it. `explore(frame).ax.figure.savefig(path)` keeps the picture.

    Raises:
        ValueError: no runs, runs of different machines, nothing that varies, or an unknown column.

    Taught in: notebooks/08_shard_formats.ipynb
    """
    runs = frame[~frame["is_warmup"].astype(bool)]
    factors = _checked_factors(runs)
    x = x or ("variant" if "variant" in factors else factors[0])
    for name, known in ((x, factors), (hue or x, factors), (metric, _metrics(runs))):
        if name not in known:
            raise ValueError(f"{name!r} cannot be drawn: choose from {', '.join(known)}")
    hue = hue or next((name for name in factors if varies_within(runs, name, x)), None)
    return Explorer(_without_gaps(runs, factors), x, hue, metric)


def _checked_factors(runs: pd.DataFrame) -> list[str]:
    machines = runs["env_id"].unique()
    if len(machines) != 1:
        raise ValueError(f"runs of one machine are wanted; there are {', '.join(map(str, machines)) or 'no runs'}")
    factors = factors_of(runs)
    if not factors:
        raise ValueError("nothing varies between these runs: explore() needs two variants, or two levels of a factor")
    return factors


def _metrics(runs: pd.DataFrame) -> list[str]:
    return [name for name in METRICS if name in runs and runs[name].replace(np.inf, np.nan).notna().any()]


def _without_gaps(runs: pd.DataFrame, factors: list[str]) -> pd.DataFrame:
    """Runs whose factors all have a level that a menu can name."""
    filled = {name: runs[name].astype(object).where(runs[name].notna(), "not stated") for name in factors}
    return runs.assign(**filled).reset_index(drop=True)
