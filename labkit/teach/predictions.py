"""Guess first: a prediction made before the measurement is drawn beside it, and scored."""

import pandas as pd

from labkit.measure import Prediction, guesses


def predict(label: str, speedup: float, because: str = "") -> Prediction:
    """Write down a guess; `plot_speedup` marks it at the variant of that label. A new guess replaces the old one.

    Args:
        label: The variant's label.
        speedup: Expected rate over the baseline's: 2.0 is twice as fast, 0.5 half as fast.
        because: The reason, in a few words.

    Raises:
        ValueError: `speedup` is not a positive number.
    """
    if not 0 < speedup < float("inf"):
        raise ValueError(f"speedup={speedup!r}: a speed-up is a positive ratio; 1.0 means no change")
    guesses[label] = Prediction(label, float(speedup), because)
    return guesses[label]


def predictions() -> pd.DataFrame:
    """All guesses of this session: label, speedup, because."""
    return pd.DataFrame([vars(made) for made in guesses.values()], columns=["label", "speedup", "because"])
