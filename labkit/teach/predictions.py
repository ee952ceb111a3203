"""Guess first: a prediction made before the measurement is drawn beside it."""

from dataclasses import dataclass

import pandas as pd

from labkit.measure import plots


@dataclass(frozen=True)
class Prediction:
    """A reader's guess of a variant's speed-up."""

    label: str
    speedup: float
    because: str = ""

    def __repr__(self) -> str:
        return f"{self.label}: you expect {self.speedup:g}x" + (f", because {self.because}" if self.because else "")


_made: dict[str, Prediction] = {}


def predict(label: str, speedup: float, because: str = "") -> Prediction:
    """Write down a guess; `plot_speedup` marks it at the variant of that label. A new guess replaces the old one.

    Args:
        label: The variant's label.
        speedup: Expected rate over the baseline's: 2.0 is twice as fast, 0.5 half as fast.
        because: The reason, in a few words.

    Raises:
        ValueError: `speedup` is not a positive number.
    """
    if not speedup > 0:
        raise ValueError(f"speedup={speedup!r}: a speed-up is a positive ratio; 1.0 means no change")
    prediction = _made[label] = Prediction(label, float(speedup), because)
    plots.guesses[label] = prediction.speedup
    return prediction


def predictions() -> pd.DataFrame:
    """All guesses of this session: label, speedup, because."""
    return pd.DataFrame([vars(made) for made in _made.values()], columns=["label", "speedup", "because"])
