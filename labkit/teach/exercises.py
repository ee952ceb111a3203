"""Exercises: a check prints whether an answer is right, what is wrong and how far off. It never raises."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pandas as pd

from labkit.measure import summarize

# id, such as "00.1" -> function of the answer that returns None if it is right, else what is wrong with it.
Check = Callable[[Any], str | None]
_checks: dict[str, Check] = {}


def exercise(name: str) -> Callable[[Check], Check]:
    """Register the check of an exercise; its docstring is the hint for an empty answer."""

    def register(function: Check) -> Check:
        _checks[name] = function
        return function

    return register


def check(name: str, answer: Any = ...) -> None:
    """Print the verdict on an answer.

    Args:
        name: Number of the exercise, such as `"00.1"`.
        answer: What the reader found; `...` stands for no answer yet.
    """
    _register_all()

    if name not in _checks:
        print(f"{name}: there is no such exercise; there are {', '.join(sorted(_checks))}")
    elif answer is ...:
        print(f"{name}: no answer yet. {_checks[name].__doc__}")
    else:
        print(f"{name}: {_verdict(_checks[name], answer)}")


def exercises() -> list[str]:
    """Numbers of all exercises."""
    _register_all()

    return sorted(_checks)


def _register_all() -> None:
    for module in (
        "measuring", "loading", "shards", "depth", "sizes", "pixels",
        "peers", "stalls", "claims",
    ):  # fmt: skip
        import_module(f"labkit.teach.checks.{module}")


def near(answer: Any, expected: float, tolerance: float = 0.02) -> str | None:
    """None where `answer` is within `tolerance` (relative) of `expected`, else how far off it is."""
    ratio = float(answer) / expected
    return None if abs(ratio - 1) <= tolerance else f"{float(answer):g} is {ratio:.2f} times the right value"


def judge(frame: Any, *, rounds: int, widest: float) -> str | None:
    """Whether a frame supports a conclusion: enough rounds, a verdict, and an interval narrower than `widest`."""
    if not isinstance(frame, pd.DataFrame) or "images_per_s" not in frame:
        return f"a {type(frame).__name__} is not a frame from lk.compare"
    if frame["experiment"].astype(str).str.match(r"\d\d ").any():
        return "this is an experiment of the notebook; make one of your own"
    summary = summarize(frame)
    others = summary[summary["verdict"] != "baseline"]
    if others.empty:
        return "it has no variant besides the baseline"
    if others["n_runs"].min() < rounds:
        return f"{others['n_runs'].min()} rounds count; {rounds} are wanted"
    conclusive = others[others["verdict"] != "inconclusive"]
    if conclusive.empty:
        return "every variant is inconclusive: measure longer, or choose variants further apart"
    width = float(((conclusive["ci_high"] - conclusive["ci_low"]) / conclusive["speedup"]).min())
    return None if width <= widest else f"the narrowest interval is {width:.0%} wide; {widest:.0%} is wanted"


def reaches(frame: pd.DataFrame, speedup: float) -> str | None:
    """None where the fastest conclusive variant of a frame is at least `speedup` times as fast as its baseline."""
    summary = summarize(frame)
    best = summary.loc[summary["verdict"] == "faster", "speedup"].max()
    return None if best >= speedup else f"the fastest variant reaches {best:.2f}x; {speedup}x is wanted"


def _verdict(function: Check, answer: Any) -> str:
    try:
        wrong = function(answer)
    except Exception as error:
        return f"the answer could not be checked ({type(error).__name__}: {error})"
    return f"not yet: {wrong}" if wrong else "right"
