"""Predictions: a guess before each measurement is drawn next to it, and scored over all notebooks."""

from dataclasses import dataclass
from html import escape
from types import EllipsisType
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from labkit.measure.plots import GUESS, SMALL_PT, write_title
from labkit.measure.recorder import OUTCOME_COLUMNS, Prediction, current_recorder, guesses, session_outcomes
from labkit.measure.statistics import speedup_interval
from labkit.util.arguments import require_positive
from labkit.util.pictures import png_base64

_NEAR = 1.25  # a guess within this factor is a good one


def predict(label: str, speedup: float | EllipsisType | None, because: str = "") -> Prediction | None:
    """Note a guess, which `plot_speedup` marks at the variant of that label; it replaces an earlier guess.

    Args:
        label: The variant's label.
        speedup: Expected rate divided by the baseline's: 2.0 is twice as fast, 0.5 half as fast. `...` or None: the
            reader has not guessed yet, and nothing is printed, marked or scored.
        because: The reason, in a few words.

    Raises:
        ValueError: `speedup` is not a positive number.
    """
    is_open = speedup is None or speedup is ...
    guesses[label] = None if is_open else Prediction(label, float(require_positive("speedup", speedup)), because)
    return guesses[label]


def predictions() -> pd.DataFrame:
    """All guesses of this session: label, speedup, because."""
    return pd.DataFrame([guess for guess in guesses.values() if guess], columns=["label", "speedup", "because"])


@dataclass(frozen=True)
class Score:
    """The result of `score`.

    Attributes:
        frame: One row per guess about the chosen experiments: `experiment`, `label`, `guess`, `measured`, `ci_low`,
            `ci_high`, `because`, `error` (guess over measured) and `inside` (the guess lies in the interval).
        walk: The same for all guesses.
        experiment: Start of the chosen experiments' names; empty: all.
    """

    frame: pd.DataFrame
    walk: pd.DataFrame
    experiment: str = ""

    @property
    def inside(self) -> float:
        """Share of all guesses inside the 95 % interval of what was measured."""
        return float(self.walk["inside"].mean())

    @property
    def near(self) -> float:
        """Share of all guesses within a factor of 1.25 of what was measured."""
        return float((np.log(self.walk["error"]).abs() <= np.log(_NEAR)).mean())

    @property
    def bias(self) -> float:
        """Geometric mean of guess over measured, over all guesses: 1.2 means a fifth too high, an optimist."""
        return float(np.exp(np.log(self.walk["error"]).mean()))

    @property
    def bias_interval(self) -> tuple[float, float]:
        """The 95 % interval of the bias; (nan, nan) for a single guess."""
        return speedup_interval(self.walk["error"].to_numpy())

    @property
    def spread(self) -> float:
        """Factor by which a single guess is off, the bias removed: from the standard deviation of the log ratios."""
        return float(np.exp(np.log(self.walk["error"]).std()))

    @property
    def sentences(self) -> list[str]:
        """The result in words: one sentence per guess, then all guesses together."""
        if self.walk.empty:
            return ["There is no guess to compare yet: write one into course.predict(label, ...), and plot the runs."]
        sentences = [_describe_guess(row) for row in self.frame.itertuples()]
        return [*(sentences or ["None of these experiments has a guess."]), *_describe_all(self)]

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw guessed against measured; returns the Axes."""
        return plot_guesses(self.frame, ax=ax)

    def __repr__(self) -> str:
        return "\n".join(self.sentences)

    def _ipython_display_(self) -> None:
        """Show nothing where there is no guess to score, and else the words and, for all notebooks, the picture."""
        from IPython.display import display

        if len(self.walk):
            display({"text/html": self._repr_html_(), "text/plain": repr(self)}, raw=True)

    def _repr_html_(self) -> str:
        words = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        if self.experiment or self.walk.empty:
            return words
        figure, ax = plt.subplots(figsize=(5, 5), layout="constrained")
        self.plot(ax)
        plt.close(figure)
        return f'<img alt="Guessed against measured speed-ups" src="data:image/png;base64,{png_base64(figure)}">{words}'


def score(experiment: str = "") -> Score:
    """Score the guesses that `plot_speedup` has marked, in this notebook and in earlier ones.

    `python -m labkit tour` and `python -m labkit lab` keep guesses and measurements in `results/`; elsewhere only
    those of this session count. A guess that is changed and plotted again replaces the old one.

    Args:
        experiment: Start of the experiments' names, such as `"07"` for notebook 07. Empty: all.

    Returns:
        A `Score`; a notebook shows it in words, and without `experiment` also as a picture.

    Raises:
        ValueError: a file of recorded guesses is damaged; names it.
    """
    recorder = current_recorder()
    rows = [*session_outcomes.values(), *(recorder.recorded_outcomes() if recorder else ())]
    latest = {(row["experiment"], row["label"]): row for row in rows}  # a recorded one may be newer
    walk = pd.DataFrame(list(latest.values()), columns=list(OUTCOME_COLUMNS)).sort_values("experiment", kind="stable")
    walk["error"] = walk["guess"] / walk["measured"]
    walk["inside"] = walk["guess"].between(walk["ci_low"], walk["ci_high"])
    return Score(walk[walk["experiment"].str.startswith(experiment)], walk, experiment)


def plot_guesses(data: pd.DataFrame, *, ax: Axes | None = None, **kwargs: Any) -> Axes:
    """Draw guessed against measured speed-ups on logarithmic axes; guesses on the diagonal were right.

    Args:
        data: One row per guess, as in `Score.frame`; the interval of each measurement is drawn as a line.
        ax: Axes to draw on; default: a new figure.
        **kwargs: Passed on to `Axes.scatter`.
    """
    ax = ax or plt.subplots(figsize=(5, 5), layout="constrained")[1]
    ax.hlines(data["guess"], data["ci_low"], data["ci_high"], color="0.6", zorder=2)
    style = {"marker": "v", "s": 70, "color": GUESS, "edgecolor": "black", "zorder": 3}
    ax.scatter(data["measured"], data["guess"], **{**style, **kwargs})
    for row in data.itertuples():
        place: dict[str, Any] = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": SMALL_PT}
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
    inside = data["guess"].between(data["ci_low"], data["ci_high"]).sum()
    write_title(ax, f"{inside} of {len(data)} guesses lie inside the interval of what was measured")
    return ax


def _describe_guess(row: Any) -> str:
    found = f"{row.label} ({row.experiment}): {row.guess:.3g}x guessed, {row.measured:.3g}x measured"
    return f"{found}: inside the interval." if row.inside else f"{found}: {_describe_ratio(row.error)}."


def _describe_ratio(ratio: float) -> str:
    factor = max(ratio, 1 / ratio)
    return f"{factor:.3g} times too {'high' if ratio > 1 else 'low'}" if factor >= 1.005 else "right to within 0.5 %"


def _describe_all(found: Score) -> list[str]:
    if len(found.walk) == 1:
        return ["It is the only guess so far."]
    low, high = found.bias_interval
    kind = "an optimist" if low > 1 else "a pessimist" if high < 1 else "no leaning that these guesses could prove"
    return [
        f"Of {len(found.walk)} guesses so far, {found.inside:.0%} lie inside the 95 % interval of what was measured, "
        f"and {found.near:.0%} within a factor of {_NEAR:g} of it.",
        f"On average they are {_describe_ratio(found.bias)} "
        f"(guess over measured {found.bias:.2f} [{low:.2f}, {high:.2f}]): {kind}. "
        f"A single guess is off by a further factor of {found.spread:.2f}.",
    ]
