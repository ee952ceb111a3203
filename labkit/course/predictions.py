"""Predictions: a guess before a measurement is drawn beside it."""

from types import EllipsisType

from labkit.measure.recorder import Prediction, guesses, unmarked
from labkit.util.arguments import require_a, require_positive


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
