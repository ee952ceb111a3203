"""How good were the guesses: over one notebook, and over the whole walk."""

from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from labkit.core import png_base64
from labkit.measure import outcomes, speedup_interval

_NEAR = 1.25  # a guess within this factor is a good one
_NONE = "No guess has met its measurement yet: lk.predict(label, speedup), then lk.plot_speedup(runs)."


@dataclass(frozen=True)
class Score:
    """What `score` found.

    Attributes:
        frame: One row a guess of the asked experiments: `experiment`, `label`, `guess`, `measured`, `ci_low`,
            `ci_high`, `because`, `error` (guess over measured) and `inside` (the guess lies in the interval).
        walk: The same of all guesses.
        experiment: What was asked for; empty: all.
    """

    frame: pd.DataFrame
    walk: pd.DataFrame
    experiment: str = ""

    @property
    def inside(self) -> float:
        """Share of all guesses that lie in the 95 % interval of what was measured."""
        return float(self.walk["inside"].mean())

    @property
    def near(self) -> float:
        """Share of all guesses within a factor of 1.25 of what was measured."""
        return float((np.log(self.walk["error"]).abs() <= np.log(_NEAR)).mean())

    @property
    def bias(self) -> float:
        """Geometric mean of guess over measured, of all guesses: 1.2 is a fifth too high, an optimist."""
        return float(np.exp(np.log(self.walk["error"]).mean()))

    @property
    def bias_interval(self) -> tuple[float, float]:
        """The bias' 95 % interval; (nan, nan) for a single guess."""
        return speedup_interval(self.walk["error"].to_numpy())

    @property
    def spread(self) -> float:
        """Factor by which a single guess is off besides the bias: the standard deviation of the log ratios."""
        return float(np.exp(np.log(self.walk["error"]).std()))

    @property
    def sentences(self) -> list[str]:
        """The result in words: one sentence a guess, then the walk."""
        if self.walk.empty:
            return [_NONE]
        own = [_sentence(row) for row in self.frame.itertuples()] or ["None of these experiments has a guess."]
        return [*own, _shares(self), *([_leaning(self)] if len(self.walk) > 1 else [])]

    def plot(self, ax: Axes | None = None) -> Axes:
        """Guessed against measured. Returns the Axes."""
        return plot_guesses(self.frame, ax=ax)

    def __repr__(self) -> str:
        return "\n".join(self.sentences)

    def _repr_html_(self) -> str:
        from html import escape

        words = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        if self.experiment or self.walk.empty:
            return words
        figure, ax = plt.subplots(figsize=(5, 5), layout="constrained")
        self.plot(ax)
        plt.close(figure)
        return f'<img alt="Guessed against measured speed-ups" src="data:image/png;base64,{png_base64(figure)}">{words}'


def score(experiment: str = "") -> Score:
    """Score the guesses that `plot_speedup` has marked, in this notebook and in those before it.

    `python -m labkit tour` and `python -m labkit lab` keep guesses and what they met in `results/`; elsewhere only this
    session's count. A guess that is changed and plotted anew replaces the old one.

    Args:
        experiment: Beginning of the experiments' names, such as `"07"` for notebook 07. Empty: all.

    Returns:
        A `Score`; a notebook shows it in words, and with no `experiment` as a picture too.
    """
    walk = outcomes()
    walk["error"] = walk["guess"] / walk["measured"]
    walk["inside"] = walk["guess"].between(walk["ci_low"], walk["ci_high"])
    return Score(walk[walk["experiment"].str.startswith(experiment)], walk, experiment)


def plot_guesses(data: pd.DataFrame, *, ax: Axes | None = None, **kwargs: Any) -> Axes:
    """Guessed against measured speed-ups, both on logarithmic axes; on the diagonal a guess was right.

    Args:
        data: One row a guess, as `Score.frame` has them; their interval is drawn as a line.
        **kwargs: To the guesses' `Axes.scatter`.
    """
    ax = ax or plt.subplots(figsize=(5, 5), layout="constrained")[1]
    ax.hlines(data["guess"], data["ci_low"], data["ci_high"], color="0.6", zorder=2)
    style = {"marker": "v", "s": 70, "color": sns.color_palette("colorblind")[1], "edgecolor": "black", "zorder": 3}
    ax.scatter(data["measured"], data["guess"], **{**style, **kwargs})
    for row in data.itertuples():
        place = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": "small"}
        ax.annotate(row.experiment.split()[0], (row.measured, row.guess), **place)
    both = data[["guess", "measured"]].to_numpy()
    ends = [both.min() / 1.5, both.max() * 1.5] if len(data) else [0.5, 2]
    ax.plot(ends, ends, color="0.3", linewidth=1.2, zorder=1)
    ax.text(0.03, 0.97, "guessed too high", transform=ax.transAxes, va="top", color="0.3")
    ax.text(0.97, 0.03, "guessed too low", transform=ax.transAxes, ha="right", color="0.3")
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    ax.set(xlabel="measured speed-up (x)", ylabel="guessed speed-up (x)")
    return ax


def _sentence(row: Any) -> str:
    found = f"{row.label} ({row.experiment}): {row.guess:.3g}x guessed, {row.measured:.3g}x measured"
    return f"{found}: inside the interval." if row.inside else f"{found}: {_times(row.error)}."


def _times(ratio: float) -> str:
    """How far off a ratio of guess over measured is, in words."""
    high, factor = ratio > 1, max(ratio, 1 / ratio)
    return f"{factor:.3g} times too {'high' if high else 'low'}" if factor >= 1.005 else "right to within 0.5 %"


def _shares(found: Score) -> str:
    if len(found.walk) == 1:
        return "It is the only guess so far."
    return (
        f"Of {len(found.walk)} guesses so far, {found.inside:.0%} lie inside the 95 % interval of what was measured, "
        f"and {found.near:.0%} within a factor of {_NEAR:g} of it."
    )


def _leaning(found: Score) -> str:
    low, high = found.bias_interval
    kind = "an optimist" if low > 1 else "a pessimist" if high < 1 else "no leaning that these guesses could prove"
    ratio = f"guess over measured {found.bias:.2f} [{low:.2f}, {high:.2f}]"
    further = f"A single guess is off by a further factor of {found.spread:.2f}."
    return f"On average they are {_times(found.bias)} ({ratio}): {kind}. {further}"
