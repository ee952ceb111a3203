"""When a comparison has run long enough: its intervals are narrow, or its time is spent."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from labkit.measure.intervals import speedup_interval, speedup_of
from labkit.measure.summary import paired_ratios

_MAX_GROWTH = 4  # times the rounds before the first look: more would narrow an interval by less than half again
_SHARE_OF_EFFECT = 0.1  # "ten times, within a quarter" is precise enough


@dataclass
class Stopping:
    """Rounds until every speed-up is known precisely enough, or until the time is spent.

    The runs are looked at three times at most. When is planned once, from the time that the first rounds took and not
    from what they showed, so the intervals of `speedup_interval` stay valid with that number of looks.

    Args:
        min_rounds: Rounds before the first look.
        precision: Half-width of a 95 % interval that is narrow enough, as a share: 0.05 is 5 %. A tenth of the effect,
            on a logarithmic scale, is enough too.
        budget_s: Seconds after which no round is started that would not be looked at.
        clock: Returns seconds.

    Attributes:
        n_looks: Looks planned. 1 until the first rounds have been timed.
    """

    min_rounds: int
    precision: float
    budget_s: float
    clock: Callable[[], float] = time.perf_counter
    n_looks: int = 1
    _looks: list[int] = field(default_factory=list)

    def begin(self) -> None:
        self._started_s = self.clock()

    def next_round(self, rows: list[dict], labels: list[str], baseline: str, n_rounds: int) -> list[str]:
        """The variants that go on after `n_rounds` rounds; none: the comparison is over.

        Args:
            rows: The runs so far that are no warm-ups.
            labels: The variants of the last round.
            baseline: Runs in every round.
        """
        if n_rounds == self.min_rounds:
            self._looks = self._plan(n_rounds)
            self.n_looks = len(self._looks)
        if n_rounds not in self._looks:
            return labels
        if n_rounds == self._looks[-1]:
            return []
        return self._vague(rows, labels, baseline)

    def _vague(self, rows: list[dict], labels: list[str], baseline: str) -> list[str]:
        others = [label for label in labels if label != baseline]
        vague = [label for label in others if not self._is_precise(rows, label, baseline)]
        return [label for label in labels if label in (baseline, *vague)] if vague else []

    def _plan(self, n_rounds: int) -> list[int]:
        """Numbers of rounds after which to look: now, at the end of the time, and between them."""
        elapsed_s = self.clock() - self._started_s
        n_more = (self.budget_s - elapsed_s) * n_rounds / elapsed_s if elapsed_s > 0 else math.inf
        last = n_rounds + max(0, int(min(n_more, (_MAX_GROWTH - 1) * n_rounds)))
        between = round(math.sqrt(n_rounds * last))
        return sorted({n_rounds, between, last}) if last > n_rounds + 1 else [last]

    def _is_precise(self, rows: list[dict], label: str, baseline: str) -> bool:
        frame = pd.DataFrame(rows).assign(experiment="")
        own, base = (frame[frame["variant"] == name] for name in (label, baseline))
        ratios = paired_ratios(own, base)["speedup"].to_numpy(float)
        low, high = speedup_interval(ratios, n_looks=self.n_looks)
        enough = max(math.log1p(self.precision), _SHARE_OF_EFFECT * abs(math.log(speedup_of(ratios))))
        return bool(np.log(high / low) / 2 <= enough)


@dataclass
class FixedRounds:
    """So many rounds, whatever they show."""

    rounds: int
    n_looks: int = 1

    def begin(self) -> None:
        """Nothing depends on the time."""

    def next_round(self, rows: list[dict], labels: list[str], baseline: str, n_rounds: int) -> list[str]:
        return labels if n_rounds < self.rounds else []
