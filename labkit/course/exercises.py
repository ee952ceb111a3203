"""Exercises: a check prints whether an answer is right, or what is wrong and by how much. It never raises.

What is not answered yet prints nothing.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import pandas as pd

from labkit.measure.statistics import summarize

Check = Callable[[Any], None]  # raises if an answer is not right
_exercises: dict[str, tuple[str, Check]] = {}  # number, such as "00.1" -> form of the answer, check


class WrongAnswer(Exception):
    """An answer is not right; the message says what is wrong with it."""


def expect(condition: Any, message: str) -> None:
    """Refuse an answer unless the condition holds.

    Raises:
        WrongAnswer: it does not; with this message.
    """
    if not condition:
        raise WrongAnswer(message)


def exercise(name: str) -> Callable[[Check], Check]:
    """Register a function as the check of an exercise; its docstring names the form of the answer."""

    def register(function: Check) -> Check:
        _exercises[name] = function.__doc__ or "", function
        return function

    return register


def number_exercise(name: str, hint: str, expected: float, tolerance: float = 0.02) -> None:
    """Register an exercise whose answer is a number, right within a relative `tolerance`."""

    def check_number(answer: Any) -> None:
        ratio = float(answer) / expected
        expect(abs(ratio - 1) <= tolerance, f"{float(answer):g} is {ratio:.2f} times the right value")

    _exercises[name] = hint, check_number


def frame_exercise(name: str, hint: str, **needed: Any) -> None:
    """Register an exercise whose answer is a frame of runs; what is needed, as in `expect_frame`."""
    _exercises[name] = hint, partial(expect_frame, **needed)


def check(name: str, answer: Any = ...) -> None:
    """Print whether an answer is right, and nothing for `...`, which stands where an answer is still missing.

    Args:
        name: Number of the exercise, such as `"00.1"`.
        answer: The reader's answer.
    """
    if name not in exercises():
        print(f"{name}: there is no such exercise; there are {', '.join(exercises())}")
        return
    if answer is not ...:
        print(f"{name}: {_judge_answer(*_exercises[name], answer)}")


@cache
def exercises() -> list[str]:
    """Numbers of all exercises."""
    import_module("labkit.course.checks")  # by name, since it imports this module
    return sorted(_exercises)


def expect_frame(frame: Any, *, rounds: int = 3, widest: float = 0.5, speedup: float = 0) -> None:
    """Refuse what is no frame of the reader's own runs, or a frame that supports no conclusion.

    Args:
        frame: The answer.
        rounds: Measured rounds that each variant needs.
        widest: Width of the narrowest conclusive interval, as a share of its speed-up.
        speedup: How many times as fast as the baseline the fastest conclusive variant has to be.
    """
    others = expect_runs(frame, rounds=rounds)
    conclusive = others[others["verdict"].isin(["faster", "slower"])]
    expect(len(conclusive), "every variant is inconclusive: measure longer, or choose variants that differ more")
    width = float(((conclusive["ci_high"] - conclusive["ci_low"]) / conclusive["speedup"]).min())
    too_wide = f"the narrowest interval is {width:.0%} wide; at most {widest:.0%} is needed: measure longer"
    expect(width <= widest, too_wide)
    best = conclusive["speedup"].max()
    expect(best >= speedup, f"the fastest conclusive variant reaches {best:.2f}x; at least {speedup}x is needed")


def expect_runs(frame: Any, *, rounds: int = 3) -> pd.DataFrame:
    """Refuse what is no frame of the reader's own runs, or one with too few of them.

    Args:
        frame: The answer.
        rounds: Measured rounds that each variant needs.

    Returns:
        `summarize` of its variants, without the baseline.

    Raises:
        WrongAnswer: says what is wrong.
    """
    is_frame = isinstance(frame, pd.DataFrame) and "images_per_s" in frame
    expect(is_frame, f"a {type(frame).__name__} is not a frame from lk.compare")
    is_ours = frame["experiment"].astype(str).str.match(r"\d\d ").any()
    expect(not is_ours, "this is an experiment of the notebook; run one of your own")
    summary = summarize(frame)
    others = summary[summary["verdict"] != "baseline"]
    expect(len(others), "it has only the baseline; add a variant to compare it with")
    n_runs = others["n_runs"].min()
    expect(n_runs >= rounds, f"it has {n_runs} measured rounds; at least {rounds} are needed")
    return others


def expect_settled(frame: Any, *, speedup: float, rounds: int = 3) -> None:
    """Refuse a frame that leaves open whether a variant is `speedup` times as fast as the baseline.

    It passes where one is, and where none is: so it can be answered with any data.

    Args:
        frame: The answer.
        speedup: The ratio that is asked about.
        rounds: Measured rounds that each variant needs.
    """
    others = expect_runs(frame, rounds=rounds)
    highest = others["ci_high"].idxmax()
    low, high = others.loc[highest, ["ci_low", "ci_high"]]
    is_settled = (others["ci_low"] >= speedup).any() or high < speedup
    expect(is_settled, f"{speedup}x lies in the interval of {highest!r}, {low:.2f} to {high:.2f}: measure longer")


def expect_pair(answer: Any, parts: str) -> tuple[Any, Any]:
    """The two parts of an answer; `parts` says what they are.

    Raises:
        WrongAnswer: it is no tuple or list of two.
    """
    is_pair = isinstance(answer, tuple | list) and len(answer) == 2
    expect(is_pair, f"a {type(answer).__name__} is not the pair {parts}")
    return answer[0], answer[1]


def _judge_answer(form: str, judge: Check, answer: Any) -> str:
    try:
        judge(answer)
    except WrongAnswer as error:
        return f"not yet: {error}"
    except Exception as failure:
        return f"the answer could not be checked ({type(failure).__name__}: {failure}). What is asked for: {form}"
    return "right"
