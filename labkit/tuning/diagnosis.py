"""What `diagnose` found, as numbers, in words and as a picture."""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from labkit.tuning.advice import LITTLE, Costs, Recommendation

SHARES = ("compute", "fetch", "prepare", "copy", "hand-over", "start")


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        shares: Share of the wall time by cause, in sum 1: `compute`, and what training waits for: `fetch` (storage),
            `prepare` (decoding, augmenting, collating), `copy` (to the device), `hand-over` (from workers), `start` (of
            an epoch: workers that start again).
        ceiling: How much faster training would be if data were free (2.0: twice as fast).
        ceiling_low, ceiling_high: Its 95 % interval over the rounds.
        recommendation: The change with the largest expected gain.
        recommendations: All changes that are worth it, the best first.
        costs: Seconds per batch.
        gpu_utilization: Share of the time, 0 to 1, in which the GPU ran a kernel; None if NVML does not answer.
        cold: How many times as long the loader alone takes if its files are not in the page cache; None if they
            cannot be evicted.
        frame: The runs behind these numbers, as `compare` returns them.
        spans: The host's last round of training, what it waited for and its steps: `plot_timeline` draws it, and
            `save_trace` saves it. On a GPU a step may end here before its kernels do.
    """

    shares: dict[str, float]
    ceiling: float
    ceiling_low: float
    ceiling_high: float
    recommendations: list[Recommendation]
    costs: Costs
    gpu_utilization: float | None
    cold: float | None
    frame: pd.DataFrame
    spans: pd.DataFrame

    @property
    def recommendation(self) -> Recommendation:
        return self.recommendations[0]

    @property
    def sentences(self) -> list[str]:
        """The result in words."""
        return [describe_waiting(self.shares), _describe_ceiling(self), str(self.recommendation)]

    def plot(self, ax: Any = None) -> Any:
        """Where the time of a batch goes, beside the step alone. Returns the Axes."""
        return plot_costs(self.costs, f"ceiling: {self.ceiling:.2f}x", ax)

    def __repr__(self) -> str:
        return "\n".join(self.sentences)

    def _repr_html_(self) -> str:
        from html import escape

        from matplotlib.figure import Figure

        from labkit.core import png_base64
        from labkit.measure import WIDTH_IN

        figure = Figure(figsize=(WIDTH_IN, 2.6), layout="constrained")
        self.plot(ax=figure.add_subplot())
        words = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return f'<img alt="{escape(self.sentences[0])}" src="data:image/png;base64,{png_base64(figure)}">{words}'


def plot_costs(costs: Costs, title: str, ax: Any = None) -> Any:
    """Where the time of a batch goes, beside the step alone. Returns the Axes."""
    from labkit.measure import plot_stalls, write_title

    parts = {"compute": costs.step, **costs.lost_s}
    rows = [{"variant": "training", "stage": stage, "seconds": seconds} for stage, seconds in parts.items()]
    rows.append({"variant": "if data were free", "stage": "compute", "seconds": costs.step})
    ax = plot_stalls(pd.DataFrame(rows), ax=ax)
    ax.set(xlabel="seconds per batch")
    write_title(ax, title)
    return ax


def describe_waiting(shares: dict[str, float]) -> str:
    """A sentence on the shares of the time."""
    lost = {name: shares[name] for name in SHARES[1:]}
    total = sum(lost.values())
    if total < LITTLE:
        return f"Training does not wait for its data: {shares['compute']:.0%} of the time is the step itself."
    ordered = sorted(lost.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {share:.0%}" for name, share in ordered if share >= 0.005)
    return f"Training waits for its data {total:.0%} of the time: {parts}."


def _describe_ceiling(found: Diagnosis) -> str:
    within = f" [{found.ceiling_low:.2f}, {found.ceiling_high:.2f}]" if found.ceiling_low == found.ceiling_low else ""
    words = f"Were data free, it would be {found.ceiling:.2f}x{within} as fast"
    if found.gpu_utilization is not None:
        words += f"; the GPU was busy {found.gpu_utilization:.0%} of the time that was measured"
    if found.cold is not None and round(found.cold, 1) > 1:
        words += f"; from a cold page cache the loader takes {found.cold:.1f}x as long"
    return words + "."
