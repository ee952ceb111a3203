"""Exercises: a check prints whether an answer is right, or what is wrong and by how much. It never raises."""

import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import pandas as pd

from labkit.measure import summarize

# A function of the answer that returns None if it is right, else what is wrong with it.
Check = Callable[[Any], str | None]
_exercises: dict[str, tuple[str, Check]] = {}  # number, such as "00.1" -> hint for an empty answer, check


def exercise(name: str) -> Callable[[Check], Check]:
    """Register a function as the check of an exercise; its docstring is the hint for an empty answer."""

    def register(function: Check) -> Check:
        _exercises[name] = function.__doc__, function
        return function

    return register


def number_exercise(name: str, hint: str, expected: float, tolerance: float = 0.02) -> None:
    """Register an exercise whose answer is a number, right within a relative `tolerance`."""
    _exercises[name] = hint, lambda answer: number_error(answer, expected, tolerance)


def frame_exercise(name: str, hint: str, *, rounds: int, widest: float, speedup: float = 0) -> None:
    """Register an exercise whose answer is a frame of runs, as `frame_error` and `speedup_error` accept it."""
    _exercises[name] = (
        hint,
        lambda answer: (
            frame_error(answer, rounds=rounds, widest=widest) or (speedup_error(answer, speedup) if speedup else None)
        ),
    )


def check(name: str, answer: Any = ...) -> None:
    """Print whether an answer is right.

    Args:
        name: Number of the exercise, such as `"00.1"`.
        answer: The reader's answer; `...` means no answer yet.
    """
    if name not in exercises():
        print(f"{name}: there is no such exercise; there are {', '.join(exercises())}")
        return
    hint, find_error = _exercises[name]
    print(f"{name}: no answer yet. {hint}" if answer is ... else f"{name}: {_verdict(find_error, answer)}")


@cache
def exercises() -> list[str]:
    """Numbers of all exercises."""
    checks = import_module("labkit.teach.checks")  # by name, since its modules import this one
    for module in pkgutil.iter_modules(checks.__path__, f"{checks.__name__}."):
        import_module(module.name)
    return sorted(_exercises)


def number_error(answer: Any, expected: float, tolerance: float = 0.02) -> str | None:
    """None if `answer` is within `tolerance` (relative) of `expected`, else how far off it is."""
    ratio = float(answer) / expected
    return None if abs(ratio - 1) <= tolerance else f"{float(answer):g} is {ratio:.2f} times the right value"


def frame_error(frame: Any, *, rounds: int, widest: float) -> str | None:
    """None if a frame supports a conclusion: enough rounds, a verdict, and an interval no wider than `widest`."""
    if not isinstance(frame, pd.DataFrame) or "images_per_s" not in frame:
        return f"a {type(frame).__name__} is not a frame from lk.compare"
    if frame["experiment"].astype(str).str.match(r"\d\d ").any():
        return "this is an experiment of the notebook; run one of your own"
    summary = summarize(frame)
    others = summary[summary["verdict"] != "baseline"]
    if others.empty:
        return "it has only the baseline; add a variant to compare it with"
    if others["n_runs"].min() < rounds:
        return f"it has {others['n_runs'].min()} measured rounds; at least {rounds} are needed"
    conclusive = others[others["verdict"] != "inconclusive"]
    if conclusive.empty:
        return "every variant is inconclusive: measure longer, or choose variants that differ more"
    width = float(((conclusive["ci_high"] - conclusive["ci_low"]) / conclusive["speedup"]).min())
    if width > widest:
        return f"the narrowest interval is {width:.0%} wide; at most {widest:.0%} is needed: measure longer"
    return None


def speedup_error(frame: pd.DataFrame, speedup: float) -> str | None:
    """None if the fastest conclusive variant of a frame is at least `speedup` times as fast as its baseline."""
    summary = summarize(frame)
    best = summary.loc[summary["verdict"] == "faster", "speedup"].max()
    if pd.isna(best):
        return f"no variant is faster than the baseline; at least {speedup}x is needed"
    return None if best >= speedup else f"the fastest variant reaches {best:.2f}x; at least {speedup}x is needed"


def _verdict(find_error: Check, answer: Any) -> str:
    try:
        error = find_error(answer)
    except Exception as failure:
        return f"the answer could not be checked ({type(failure).__name__}: {failure})"
    return f"not yet: {error}" if error else "right"
