"""Exercises: a check prints whether an answer is right, or what is wrong with it. It never raises.

What is not answered yet prints nothing. A prediction is a guess before a measurement, drawn beside it.
"""

import math
import random
from collections.abc import Callable, Mapping
from numbers import Real
from types import EllipsisType
from typing import Any

import numpy as np
import pandas as pd
import torch

from labkit.measure.frames import COLUMNS
from labkit.measure.recorder import Prediction, guesses, unmarked
from labkit.measure.statistics import summarize
from labkit.util.arguments import require_a, require_positive

Judge = Callable[[Any], object]


_RTOL = 0.02  # how far a number may be off, relative to the right one


class NotAnswered(BaseException):
    """A skeleton returned `...`. No exception that a judge may catch."""


def check(answer: Any, expected: Any) -> None:
    """Print whether an answer is right, and nothing while it is `...`, or a function that returns `...`.

    Args:
        answer: The reader's answer: a value or a function.
        expected: What is right. For a function: arguments -> result, where a tuple holds several arguments. A function
            `expected(answer)` judges for itself: an `assert` that fails says what is wrong. Otherwise a value.

    Example: `course.check(area, {(2, 3): 6, (1, 1): 1})`
    """
    if answer is ...:
        return
    asked = _until_answered(answer) if callable(answer) else answer
    try:
        if isinstance(expected, Mapping) and not isinstance(answer, Mapping):
            for case, right in expected.items():
                arguments = case if isinstance(case, tuple) else (case,)
                found = asked(*arguments)
                shown = f"{_name_of(answer)}({', '.join(map(repr, arguments))})"
                _expect(is_close(found, right), f"{shown} gave {found!r}; {right!r} is right")
        elif callable(expected):
            expected(asked)
        else:
            _expect(is_close(answer, expected), f"{answer!r} is not {expected!r}")
    except NotAnswered:
        return
    except AssertionError as error:
        print(f"not yet: {error}")
    except Exception as failure:
        is_no_function = not callable(answer) and isinstance(failure, TypeError) and "not callable" in str(failure)
        raised = f"the answer raised {type(failure).__name__}: {failure}"
        print(f"not yet: {_no_function(answer) if is_no_function else raised}")
    else:
        print("right")


def _no_function(answer: Any) -> str:
    return f"the answer has to be a function, and {answer!r:.100} is a {type(answer).__name__}"


def _name_of(function: Callable[..., Any]) -> str:
    """A function's name, that of what a `functools.partial` calls, or that of an object's class."""
    function = getattr(function, "func", function)
    return getattr(function, "__name__", type(function).__name__)


def is_close(found: Any, right: Any) -> bool:
    """Whether two values are equal: numbers and arrays within 2 %, whole numbers exactly."""
    if isinstance(right, bool | str) or (isinstance(found, int) and isinstance(right, int)):
        return bool(found == right)
    if isinstance(right, int | float):
        return isinstance(found, Real | np.generic) and math.isclose(float(found), right, rel_tol=_RTOL)
    if hasattr(right, "shape"):
        one, other = np.asarray(found), np.asarray(right)
        return one.shape == other.shape and bool(np.allclose(one, other, rtol=_RTOL))
    if isinstance(right, tuple | list) and isinstance(found, tuple | list):
        return len(found) == len(right) and all(map(is_close, found, right))
    return bool(found == right)


def own_runs(*, rounds: int = 3, widest: float = 0.5, speedup: float = 0) -> Judge:
    """A judge for `check`: the answer is a frame of the reader's own runs, which supports a conclusion.

    Args:
        rounds: Measured rounds that each variant needs.
        widest: Width of the narrowest conclusive interval, as a share of its speed-up.
        speedup: How many times as fast as the baseline the fastest conclusive variant has to be.
    """

    def judge(frame: Any) -> None:
        is_frame = isinstance(frame, pd.DataFrame) and set(COLUMNS) <= set(frame)
        is_summary = isinstance(frame, pd.DataFrame) and "verdict" in frame
        _expect(not is_summary, "this is a summary: pass the frame from lk.compare itself")
        _expect(is_frame, f"a {type(frame).__name__} is not a frame from lk.compare")
        is_ours = frame["experiment"].astype(str).str.match(r"\d\d ").any()
        _expect(not is_ours, "this is an experiment of the notebook; run one of your own")
        summary = summarize(frame)
        others = summary[summary["verdict"] != "baseline"]
        _expect(len(others), "it has only the baseline; add a variant to compare it with")
        n_runs = others["n_runs"].min()
        _expect(n_runs >= rounds, f"it has {n_runs} measured rounds; at least {rounds} are needed")
        conclusive = others[others["verdict"].isin(["faster", "slower"])]
        _expect(len(conclusive), "every variant is inconclusive: measure longer, or choose variants that differ more")
        width = float(((conclusive["ci_high"] - conclusive["ci_low"]) / conclusive["speedup"]).min())
        _expect(
            width <= widest,
            f"the narrowest interval is {width:.0%} wide; at most {widest:.0%} is needed: measure longer",
        )
        best = conclusive["speedup"].max()
        _expect(best >= speedup, f"the fastest conclusive variant reaches {best:.2f}x; at least {speedup}x is needed")

    return judge


def predict(label: str, speedup: float | EllipsisType | None, because: str = "") -> Prediction | None:
    """Note a guess, which `plot_speedup` marks at the variant of that label; it replaces an earlier guess.

    Args:
        label: The variant's label; a plot that has only a similar one warns.
        speedup: Expected rate divided by the baseline's: 2.0 is twice as fast, 0.5 half as fast. `...` or None: the
            reader has not guessed yet, and nothing is printed or marked.
        because: The reason, in a few words.

    Raises:
        ValueError: `speedup` is not a positive number.
        TypeError: `because` is no text, as where 1,5 is written for 1.5.
    """
    is_open = speedup is None or speedup is ...
    require_a(str, "because", because, "a reason in words (a number has a decimal point: 1.5, not 1,5)")
    guesses[label] = None if is_open else Prediction(label, float(require_positive("speedup", speedup)), because)
    if not is_open:
        unmarked.add(label)
    return guesses[label]


def _expect(holds: object, message: str) -> None:
    """`assert`, also under `python -O`."""
    if not holds:
        raise AssertionError(message)


def global_generators() -> tuple[str, ...]:
    """The states of the generators of Python, NumPy and torch, to compare."""
    return repr(random.getstate()), repr(np.random.get_state(legacy=False)), str(torch.get_rng_state().tolist())


def _until_answered(answer: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*args: Any, **kwargs: Any) -> Any:
        found = answer(*args, **kwargs)
        if found is ...:
            raise NotAnswered
        return found

    return asked
