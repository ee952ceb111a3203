"""What watching a training showed: as numbers, in words, as a picture, and as files."""

import json
import math
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.core import png_base64, write_atomic
from labkit.tuning.advice import Costs, Recommendation
from labkit.tuning.diagnosis import describe_waiting, plot_costs

_NO_STEP = 1000  # times the step: a ceiling beyond it is no rate that training could reach


@dataclass(frozen=True)
class WatchReport:
    """What a training waited for.

    Attributes:
        shares: Share of the time by cause, in sum 1, as `Diagnosis` has them.
        ceiling: How much faster training would be if data were free.
        ceiling_low, ceiling_high: Its 95 % interval.
        is_bound: The ceiling was not measured by replaying batches. While workers and the step share the cores, the
            step looks longer than it is, and free data would bring at least this much.
        recommendations: All changes that are worth it, the best first.
        costs: Seconds per batch.
        n_batches: Batches that the figures are from.
        loader_s: Seconds per batch of the loader alone; None if it was not measured.
        loaders: One row per loader: what it is, how many batches it gave, how long they were waited for, and how a
            batch was made.
        spans: The host's waits and steps, and the workers' batches: `plot_timeline` draws them.
        cpu_share: Share of the usable cores that were busy, with whatever else ran on them.
        gpu_utilization: Share of the time in which the GPU ran a kernel; None if NVML does not answer.
        notes: What else should be known.
        command: The script and its arguments, without secrets.
        ranks: One row per process of a distributed training; None for a single one.
    """

    shares: dict[str, float]
    ceiling: float
    ceiling_low: float
    ceiling_high: float
    is_bound: bool
    recommendations: list[Recommendation]
    costs: Costs
    n_batches: int
    loader_s: float | None
    loaders: pd.DataFrame
    spans: pd.DataFrame
    cpu_share: float | None
    gpu_utilization: float | None
    notes: list[str] = field(default_factory=list)
    command: str = ""
    ranks: pd.DataFrame | None = None

    @property
    def recommendation(self) -> Recommendation:
        return self.recommendations[0]

    @property
    def sentences(self) -> list[str]:
        """The result in words."""
        return [describe_waiting(self.shares), self._describe_ceiling(), str(self.recommendation), *self.notes]

    def _describe_ceiling(self) -> str:
        if self.ceiling > _NO_STEP:
            return f"Were data free, hardly anything would be left: the step is less than 1/{_NO_STEP} of the time."
        within = "" if math.isnan(self.ceiling_low) else f" [{self.ceiling_low:.2f}, {self.ceiling_high:.2f}]"
        words = f"Were data free, it would be {self.ceiling:.2f}x{within} as fast"
        if self.is_bound:
            words = f"Were data free, it would be at least {self._least:.2f}x as fast"
            words += f" (as it was seen, {self.ceiling:.2f}x{within})" if within else ""
        if self.cpu_share is not None:
            words += f"; the cores were busy {self.cpu_share:.0%} of the time"
        if self.gpu_utilization is not None:
            words += f"; the GPU was busy {self.gpu_utilization:.0%} of it"
        return words + "."

    def plot(self, ax: Any = None) -> Any:
        """Where the time of a batch goes, beside the step alone. Returns the Axes."""
        ceiling = f"at least {self._least:.2f}x" if self.is_bound else f"{self.ceiling:.2f}x"
        ceiling = f"over {_NO_STEP}x" if self.ceiling > _NO_STEP else ceiling
        return plot_costs(self.costs, f"ceiling: {ceiling}", ax)

    @property
    def _least(self) -> float:
        """What the ceiling is at least, if it is a bound: free data slow down nothing."""
        return self.ceiling if math.isnan(self.ceiling_low) else max(1.0, self.ceiling_low)

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, for JSON."""
        best = self.recommendation
        return {
            "shares": self.shares, "ceiling": self.ceiling, "ceiling_low": _finite(self.ceiling_low),
            "ceiling_high": _finite(self.ceiling_high), "ceiling_is_bound": self.is_bound,
            "recommendation": {
                "rung": best.rung, "action": best.action, "why": best.why, "speedup": best.speedup,
                "speedup_low": best.speedup_low, "notebook": best.notebook, "settings": dict(best.settings),
            },
            "recommendations": [str(each) for each in self.recommendations], "n_batches": self.n_batches,
            "costs_s": {name: getattr(self.costs, name) for name in self.costs.__dataclass_fields__},
            "loader_s": self.loader_s, "cpu_share": self.cpu_share, "gpu_utilization": self.gpu_utilization,
            "loaders": json.loads(self.loaders.to_json(orient="records")), "notes": self.notes,
            "command": self.command,
            "ranks": None if self.ranks is None else json.loads(self.ranks.to_json(orient="records")),
        }  # fmt: skip

    def save_json(self, path: Path | str) -> Path:
        """Write the figures as JSON."""
        write_atomic(Path(path), (json.dumps(self.to_dict(), indent=1) + "\n").encode())
        return Path(path)

    def save_html(self, path: Path | str) -> Path:
        """Write one page that needs no other file, with the timeline."""
        title = escape(self.command or "labkit watch")
        style = "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}img{max-width:100%}"
        page = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{style}'
            f"td,th{{padding:.2em .8em;text-align:right}}</style><h1>{title}</h1>{self._repr_html_()}"
            f"{_picture(self._plot_timeline, 'Timeline of the last steps')}"
            f"{self.loaders.to_html(index=False, border=0, float_format='{:.4g}'.format, na_rep='')}</html>"
        )
        write_atomic(Path(path), page.encode())
        return Path(path)

    def _plot_timeline(self, ax: Any) -> None:
        from labkit.measure import plot_timeline

        plot_timeline(last_spans(self.spans), ax=ax)

    def __repr__(self) -> str:
        return "\n".join(self.sentences)

    def _repr_html_(self) -> str:
        words = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return _picture(lambda ax: self.plot(ax=ax), self.sentences[0]) + words


def last_spans(spans: pd.DataFrame, n_batches: int = 12) -> pd.DataFrame:
    """The spans from the beginning of the last batches on, from time 0."""
    hosts = spans[spans["lane"] == "host"]
    if hosts.empty:
        return spans
    begin_s = hosts.loc[hosts["batch"] > hosts["batch"].max() - n_batches, "start_s"].min()
    kept = spans[spans["end_s"] > begin_s]
    return kept.assign(start_s=(kept["start_s"] - begin_s).clip(lower=0), end_s=kept["end_s"] - begin_s)


def _picture(draw: Any, words: str) -> str:
    from matplotlib.figure import Figure

    from labkit.measure import WIDTH_IN

    figure = Figure(figsize=(WIDTH_IN, 2.6), layout="constrained")
    draw(figure.add_subplot())
    return f'<img alt="{escape(words)}" src="data:image/png;base64,{png_base64(figure)}">'


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
