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
# The first looks are for what is clear at once, and spend little of the error; the last one is left the most.
_SPENDING_POWER = 1.5


@dataclass
class Stopping:
    """Rounds until every speed-up is known precisely enough, or until the time is spent.

    The runs are looked at three times at most. When is planned once, from the time that the first rounds took and not
    from what they showed. Each look spends a part of the error that an interval is allowed, as `spend_error` says, so
    the intervals of `speedup_interval` stay valid with the share of the look at which a variant stops.

    Args:
        min_rounds: Rounds before the first look.
        precision: Half-width of a 95 % interval that is narrow enough, as a share: 0.05 is 5 %. A tenth of the effect,
            on a logarithmic scale, is enough too.
        budget_s: Seconds after which no round is started that would not be looked at.
        clock: Returns seconds.

    Attributes:
        error_shares: Label -> share of the error at the look at which the variant stopped.
    """

    min_rounds: int
    precision: float
    budget_s: float
    clock: Callable[[], float] = time.perf_counter
    error_shares: dict[str, float] = field(default_factory=dict)
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
        if n_rounds not in self._looks:
            return labels
        share = spend_error(self._looks)[self._looks.index(n_rounds)]
        left = [] if n_rounds == self._looks[-1] else self._vague(rows, labels, baseline, share)
        self.error_shares |= {label: share for label in labels if label not in left}
        return left

    def _vague(self, rows: list[dict], labels: list[str], baseline: str, share: float) -> list[str]:
        others = [label for label in labels if label != baseline]
        vague = [label for label in others if not self._is_precise(rows, label, baseline, share)]
        return [label for label in labels if label in (baseline, *vague)] if vague else []

    def _plan(self, n_rounds: int) -> list[int]:
        """Numbers of rounds after which to look: now, at the end of the time, and between them."""
        elapsed_s = self.clock() - self._started_s
        n_more = (self.budget_s - elapsed_s) * n_rounds / elapsed_s if elapsed_s > 0 else math.inf
        last = n_rounds + max(0, int(min(n_more, (_MAX_GROWTH - 1) * n_rounds)))
        between = round(math.sqrt(n_rounds * last))
        return sorted({n_rounds, between, last}) if last > n_rounds + 1 else [last]

    def _is_precise(self, rows: list[dict], label: str, baseline: str, share: float) -> bool:
        frame = pd.DataFrame(rows).assign(experiment="")
        own, base = (frame[frame["variant"] == name] for name in (label, baseline))
        ratios = paired_ratios(own, base)["speedup"].to_numpy(float)
        low, high = speedup_interval(ratios, error_share=share)
        enough = max(math.log1p(self.precision), _SHARE_OF_EFFECT * abs(math.log(speedup_of(ratios))))
        return bool(np.log(high / low) / 2 <= enough)


def spend_error(looks: list[int]) -> list[float]:
    """Shares of the error for looks after so many rounds, which add up to 1.

    Of the error, (n / last) ** 1.5 is spent by the look after n rounds: the power family of Kim and DeMets 1987. Their
    bounds use how looks depend on each other; `speedup_interval` adds the shares up, which no dependence can break.
    """
    spent = [(n / looks[-1]) ** _SPENDING_POWER for n in looks]
    return [after - before for before, after in zip([0.0, *spent], spent, strict=False)]


@dataclass
class FixedRounds:
    """So many rounds, whatever they show."""

    rounds: int
    error_shares: dict[str, float] = field(default_factory=dict)  # none: the runs are looked at once

    def begin(self) -> None:
        """Nothing depends on the time."""

    def next_round(self, rows: list[dict], labels: list[str], baseline: str, n_rounds: int) -> list[str]:
        return labels if n_rounds < self.rounds else []
