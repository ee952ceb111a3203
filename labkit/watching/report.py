"""What watching or diagnosing a training showed: as numbers, in words, as a picture, and as files.

In come the figures that `findings` makes; out go the summary, sentences, JSON and HTML. It needs the standard library
alone. Where the program has imported pandas, the tables of a report are frames.
"""

import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from labkit.util.arguments import REPORT_VERSION
from labkit.util.files import write_atomic
from labkit.util.machine import environment
from labkit.watching.accounts import LEAST_S, describe_pace
from labkit.watching.advice import (
    CAUSES,
    MIN_SHARE,
    NO_STEP,
    SHORT_NAMES,
    Costs,
    Recommendation,
)
from labkit.watching.lines import MAKING, STEP, Line, short_path
from labkit.watching.loaders import FEW, BatchFacts
from labkit.watching.page import columns_of, draw_costs, make_page
from labkit.watching.resources import Resources

SHARES = ("compute", *CAUSES)
_affinity: Callable[[int], Iterable[int]] = getattr(os, "sched_getaffinity", lambda pid: ())  # macOS has none


class _Table:
    """A table of a report: a list of dicts, or a DataFrame where the program has imported pandas."""

    def __init__(self, *columns: str):
        self._columns = columns  # those that it has also without rows

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, report: "WatchReport | None", owner: type) -> Any:
        if report is None:
            return self
        rows, pandas = report.tables.get(self._name), sys.modules.get("pandas")
        if self._name == "ranks" and rows is None:
            return None
        return (rows or []) if pandas is None else pandas.DataFrame(rows or [], columns=[*self._columns] or None)


@dataclass(frozen=True, repr=False)
class WatchReport:
    """What a training waited for.

    Attributes:
        shares: Share of the wall time by cause, in sum 1: `compute`, and what training waits for: `fetch` (storage),
            `prepare` (decoding, augmenting, collating), `copy` (to the device), `hand-over` (from workers), `start` (of
            an epoch: workers that start again).
        ceiling: How much faster training would be if data were free.
        ceiling_low, ceiling_high: Its 95 % interval.
        is_bound: The ceiling was not measured by replaying batches. While workers and the step share the cores, the
            step looks longer than it is, and free data would bring at least this much.
        recommendations: All changes that are worth it, the best first. What they bring is left open where even free
            data may bring nothing.
        costs: Seconds per batch.
        n_batches: Batches that the figures are from.
        loader_s: Seconds per batch of the loader alone; None if it was not measured.
        tables: The rows of the tables below, by name.
        loaders: One row per loader: what it is, how many batches it gave, how long they were waited for, and how a
            batch was made.
        spans: The host's waits and steps, and the workers' batches: the page draws them.
        cpu_share: Share of the usable cores that were busy, with whatever else ran on them.
        gpu_utilization: Share of the time in which the GPU ran a kernel; None if NVML does not answer.
        notes: What else should be known.
        command: The script and its arguments, without secrets.
        ranks: One row per process of a distributed training; None for a single one.
        others_share: Share of the cores that other programs used.
        lines: One row per line of code that the making of batches or the step was seen in, the largest first: `part`,
            `share` of it, `what` (a transform, or a function that the line calls or is in), `path` and `number`.
        samples: One row per sample of the slowest twenty: `sample` (its file or key, or its number), `seconds` (mean),
            `share` of the making of all, and where it is an image file `bytes`, `format`, `width` and `height`.
        slow: How many samples of how many are slow, and their share of the making; in a sentence, or empty.
        blocks_s: Seconds per batch, by cause, of blocks of neighboring batches: by them runs are compared.
        settings: Of the loader and the process, by name.
        resources: What the training had of its machine.
        batch: What a batch of the training is; None if it could not be looked at.
        pace: `ready` (share of the batches that were, when they were asked for), percentiles of the step, `step_p50_ms`
            and so on, and the seconds of its pauses, `validation_s` and `checkpoint_s`, which no other figure contains.
        epochs: One row per finished epoch, as `Watched.epochs` gives them.
        affinity: The cores that the process may use: others of the training share them, if they may use them, too.
        in_line_s: Seconds per batch that training waited for one while a later one was ready.
        is_sampled: It is of a loop over what is not known, from samples of where its code stood.
        observed_s: When it was observed from and until, by `time.perf_counter`, one clock for all processes on Linux.
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
    tables: dict[str, list[dict[str, Any]]]
    cpu_share: float | None
    gpu_utilization: float | None
    notes: list[str] = field(default_factory=list)
    command: str = ""
    others_share: float = 0.0
    slow: str = ""
    blocks_s: dict[str, list[float]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    resources: Resources = field(default_factory=Resources)
    batch: BatchFacts | None = None
    pace: dict[str, float] = field(default_factory=dict)
    affinity: frozenset[int] = field(default_factory=lambda: frozenset(_affinity(0)))
    in_line_s: float = 0.0
    is_sampled: bool = False
    observed_s: tuple[float, float] = (0.0, 0.0)

    loaders, spans, samples, epochs, ranks = _Table(), _Table(), _Table(), _Table(), _Table()
    lines = _Table("part", "share", *Line._fields[1:])
    title = "labkit watch"
    _few = FEW  # batches: with fewer it has no ceiling and no advice

    def __post_init__(self) -> None:
        if self.ceiling_low < 1 < self.ceiling or self.has_few_batches:
            object.__setattr__(self, "recommendations", [_left_open(change) for change in self.recommendations])

    @property
    def recommendation(self) -> Recommendation:
        """The change with the largest expected gain."""
        return self.recommendations[0]

    def __repr__(self) -> str:
        return "\n".join(summarize_report(self))

    def _repr_html_(self) -> str:
        return f"{self._draw_costs()}<pre>{escape(repr(self))}</pre>"

    @property
    def details(self) -> list[str]:
        """What the report says beside its summary: pace, batch, other changes, lines of code, and the machine."""
        others = [] if self.has_few_batches else self.recommendations[1:]
        then = [f"Then: {other}" for other in others]
        result = [*self._busy_sentences, *self.pace_sentences, *self.batch_sentences, *then]
        return [*result, *self.line_sentences, *self.resource_sentences]

    @property
    def has_few_batches(self) -> bool:
        """Whether it has too few for a ceiling and for advice."""
        return self.n_batches < self._few

    @property
    def spare(self) -> str:
        """What workers could give beyond what a training that does not wait for data takes; empty: unknown, or none."""
        num_workers, making_s = self.settings.get("num_workers") or 0, self.costs.making
        together_s = self.costs.together
        if not num_workers or not making_s or 1 - self.shares["compute"] >= MIN_SHARE:
            return ""
        cores = self.resources.usable_cores / self.resources.n_sharing - self.costs.step_cpu / together_s
        making_cpu_s = max(LEAST_S, making_s * (1 - self.costs.waiting))
        factor = together_s * min(num_workers / making_s, cores / making_cpu_s)
        enough = math.ceil((1 + MIN_SHARE) * making_s / together_s)
        fewer = f": {enough} of {num_workers} workers would do" * (enough < num_workers)
        return f"the loader could feed {factor:.1f} times this rate{fewer}" * (factor >= 1 + MIN_SHARE)

    @property
    def batch_sentences(self) -> list[str]:
        """What a batch is, and what to change of it."""
        if self.batch is None:
            return []
        pin_share = (self.batch.pin_s or 0.0) / self.costs.together
        is_dear = pin_share + self.shares["hand-over"] + self.shares["copy"] >= MIN_SHARE
        has_workers, pins = bool(self.settings.get("num_workers")), bool(self.settings.get("pin_memory"))
        return [*self.batch.sentences(is_dear=is_dear, pin_share=pin_share, has_workers=has_workers, pins=pins)]

    @property
    def pace_sentences(self) -> list[str]:
        """How long steps take, how often a batch is ready, and what pauses took; one sentence, or none."""
        ready = [epoch["ready"] for epoch in self.tables.get("epochs", [])]
        works_ahead = self.settings.get("num_workers") != 0
        told = describe_pace(self.pace, ready, works_ahead=works_ahead) if self.pace else ""
        return [told] * bool(told)

    @property
    def line_sentences(self) -> list[str]:
        """A sentence on the lines of each part, and one on slow samples."""
        told = [
            f"{part.capitalize()} is {'; '.join(map(_told_line, rows[:_LINES_TOLD]))}."
            for part in (MAKING, STEP) if (rows := self.lines_of(part))
        ]  # fmt: skip
        return told + [self.slow] * bool(self.slow)

    def lines_of(self, part: str) -> list[dict[str, Any]]:
        """The rows of `lines` of making a batch, or of the step."""
        return [row for row in self.tables.get("lines", []) if row["part"] == part]

    @property
    def resource_sentences(self) -> list[str]:
        """What the training had of its machine, and what of it was scarce."""
        return self.resources.sentences(self.shares, self.others_share)

    @property
    def warnings(self) -> list[str]:
        """A sentence for each resource that was scarce, with what to do."""
        return self.resources.warnings(self.shares, self.others_share)

    @property
    def memory_words(self) -> str:
        """The memory of the training process and of its workers; empty: unknown."""
        return self.resources.memory_words(self.shares, self.others_share)

    @property
    def _busy_sentences(self) -> list[str]:
        known = {"cores": self.cpu_share, "GPU": self.gpu_utilization}
        told = [f"the {what} {share:.0%}" for what, share in known.items() if share is not None]
        return [f"Busy, of the time: {', '.join(told)}."] * bool(told)

    def _draw_costs(self) -> str:
        """Where the time of a batch goes, compared with the step alone."""
        ceiling = f"at least {self.least_ceiling:.2f}x" if self.is_bound else f"{self.ceiling:.2f}x"
        ceiling = f"over {NO_STEP}x" if self.ceiling > NO_STEP else ceiling
        parts_s = {SHORT_NAMES[name]: each for name, each in {"compute": self.costs.step, **self.costs.lost_s}.items()}
        return draw_costs(parts_s, self.costs.together, ceiling=ceiling, words=f"waiting for data: {_waiting(self)}")

    @property
    def least_ceiling(self) -> float:
        """What the ceiling is at least, if it is a bound: free data slow down nothing."""
        return self.ceiling if math.isnan(self.ceiling_low) else max(1.0, self.ceiling_low)

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, for JSON."""
        return {
            "schema_version": REPORT_VERSION,
            "shares": self.shares, "ceiling": self.ceiling, "ceiling_low": _finite(self.ceiling_low),
            "ceiling_high": _finite(self.ceiling_high), "ceiling_is_bound": self.is_bound,
            "recommendation": asdict(self.recommendation),
            "recommendations": [str(each) for each in self.recommendations], "n_batches": self.n_batches,
            "costs_s": asdict(self.costs),
            "loader_s": self.loader_s, "cpu_share": self.cpu_share, "gpu_utilization": self.gpu_utilization,
            "loaders": self._records("loaders"), "notes": self.notes,
            "command": self.command, "blocks_s": self.blocks_s, "settings": {"command": self.command, **self.settings},
            "lines": self._records("lines"), "samples": self._records("samples"), "slow": self.slow,
            "batch": None if self.batch is None else asdict(self.batch),
            "pace": {name: _finite(value) for name, value in self.pace.items()},
            "epochs": self._records("epochs"), "machine": environment(),
            "others_share": self.others_share, "resources": asdict(self.resources),
            "ranks": self._records("ranks") if "ranks" in self.tables else None,
        }  # fmt: skip

    def _records(self, name: str) -> list[dict[str, Any]]:
        """The rows of a table as plain data: all with each column, and None for what is not a number."""
        rows = self.tables.get(name, [])
        return [{column: _plain(row.get(column)) for column in columns_of(rows)} for row in rows]

    def save_json(self, path: Path | str) -> Path:
        """Write the figures as JSON."""
        path = Path(path).expanduser()
        write_atomic(path, (json.dumps(self.to_dict(), indent=1) + "\n").encode())
        return path

    def save_html(self, path: Path | str) -> Path:
        """Write one page that needs no other file, with the timeline."""
        page = make_page(
            self.command or "labkit watch", self._repr_html_(), self.details, spans=self.tables["spans"],
            lines={part: self.lines_of(part) for part in (MAKING, STEP)},
            tables=[self.tables["loaders"], self.tables.get("samples", [])],
        )  # fmt: skip
        path = Path(path).expanduser()
        write_atomic(path, page.encode())
        return path


@dataclass(frozen=True, repr=False, kw_only=True)
class Diagnosis(WatchReport):
    """What `diagnose` found: a `WatchReport`, whose ceiling is measured.

    Attributes:
        frame: The loop and the step alone, round by round, as `compare` returns runs.
    """

    frame: Any

    title = "labkit diagnose"
    _few = 0  # it has seen as many as it was asked to


def _told_line(row: dict[str, Any]) -> str:
    """A row in words."""
    return f"{row['share']:.0%} {row['what']}, {short_path(row['path'])}:{row['number']}"


def _plain(value: Any) -> Any:
    return _finite(value) if isinstance(value, float) else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _left_open(change: Recommendation) -> Recommendation:
    """The change, with what it brings left open."""
    if change.speedup <= 1:
        return change
    return replace(change, speedup=1.0, why=f"{change.why}; too few steps were seen to say what it brings")


_LINES_TOLD = 4  # by a sentence
_WIDTH, _LABEL = 90, 18  # of the summary: as wide as JupyterLab shows without wrapping
_LINES_SHOWN, _LEAST_OF_LINES = 4, 0.05  # lines of code, and the smallest share of one, unless all are smaller
_RANKS_SHOWN = 8


def summarize_report(report: WatchReport) -> list[str]:
    """The lines of the summary; the first names it, and of the others each has a label on the left."""
    steps = f"{report.n_batches:,} step{'s' * (report.n_batches != 1)}"
    device = {"cuda": " on a GPU", "cpu": " on the CPU"}.get(report.settings.get("device") or "", "")
    rows = [
        ("waiting for data", _waiting(report)),
        *_under("because", _reasons(report)),
        ("headroom", report.spare),
        *_code(report),
        ("slow files", report.slow * _waits_for_making(report)),
        ("change first", _change(report)),
        ("memory", report.memory_words),
        *_under("machine", report.warnings),
        *_under(*_ranks(report)),
        *_under("note", report.notes),
    ]
    shown = [format_row(label, text) for label, text in rows if text]
    took = _time(report.n_batches * report.costs.together)
    return [f"{report.title}: {steps} in {took}{device}, warm-up excluded", *shown]


def _under(label: str, texts: list[str]) -> list[tuple[str, str]]:
    """A row for each text, of which the first has the label."""
    return [(label * (number == 0), text) for number, text in enumerate(texts)]


def format_row(label: str, text: str) -> str:
    """The label, and beside it the text, on as many lines as it needs."""
    lines = textwrap.wrap(text, _WIDTH - _LABEL - 2, break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"  {label * (number == 0):<{_LABEL}}{line}" for number, line in enumerate(lines))


def _waiting(report: WatchReport) -> str:
    share = max(0.0, 1 - report.shares["compute"])
    of_run = f"{share:.0%} of the run"
    if report.has_few_batches:
        return f"{of_run}; advice needs {FEW} steps after the warm-up"
    if report.is_sampled and not share:
        return f"{of_run}, as far as can be seen: a batch may be made within the step"
    if share < MIN_SHARE:
        return f"{of_run}: the loader keeps up"
    if report.ceiling > NO_STEP:
        return f"{of_run}: the step is hardly anything beside it"
    low, high = report.ceiling_low, report.ceiling_high
    within = "" if math.isnan(low) else f" [{_factor(low)}, {_factor(high)}]"
    times = f"{_factor(report.ceiling)} times{within}"
    if report.is_bound:
        times = f"at least {_factor(report.least_ceiling)} times"
        if report.least_ceiling < 1 + MIN_SHARE:
            return f"{of_run}; too few steps were seen to say what that costs"
    return f"{of_run}; without waiting, {times} as fast"


def _factor(value: float) -> str:
    """`1.09`, `2.7`, `123`."""
    return f"{value:.2f}" if value < 1.95 else f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def _reasons(report: WatchReport) -> list[str]:
    """What training waits for, the largest share first; nothing where it does not wait, or that is all one knows."""
    if 1 - report.shares["compute"] < MIN_SHARE or report.is_sampled:
        return []
    lost = sorted(((report.shares[cause], cause) for cause in CAUSES), reverse=True)
    shown = [each for each in lost if each[0] >= MIN_SHARE] or lost[:1]
    told = [f"{share:.0%} of the run: waiting for {CAUSES[cause][0]}" for share, cause in shown]
    rest = 1 - report.shares["compute"] - sum(share for share, _ in shown)
    return told + [f"{rest:.0%} of the run: other reasons"] * (rest >= 0.01)


def _waits_for_making(report: WatchReport) -> bool:
    """Whether it pays to make batches faster: not where training waits for new workers, or for copies."""
    return report.shares["fetch"] + report.shares["prepare"] >= MIN_SHARE


def _code(report: WatchReport) -> Iterator[tuple[str, str]]:
    """The slowest lines of making batches where training waits for that, and of the step where it never waits."""
    if _waits_for_making(report):
        part, head = MAKING, ("slow lines", "as shares of the time to make a batch:")
    elif 1 - report.shares["compute"] < MIN_SHARE:
        part, head = STEP, ("the step", "its slowest lines:")
    else:
        return
    if not (rows := report.lines_of(part)[:_LINES_SHOWN]):
        return
    shown = [row for row in rows if row["share"] >= _LEAST_OF_LINES] or rows[:1]
    names = [row["what"] + " (decoding)" * (row["kind"] == "decoding") for row in shown]
    width = max(map(len, names))
    yield head
    for row, name in zip(shown, names, strict=True):
        yield "", f"{row['share']:4.0%}  {name:<{width}}  {short_path(row['path'])}:{row['number']}"


def _change(report: WatchReport) -> str:
    change = report.recommendation
    if report.has_few_batches:
        return ""
    waits = 1 - report.shares["compute"] >= MIN_SHARE
    why = f" ({change.why})" * (waits and change.rung == "none")
    gain = f" This alone: up to {_factor(change.speedup)} times as fast." * (change.speedup >= 1 + MIN_SHARE)
    return f"{change.action}{why}.{gain}" + f" See notebooks/{change.notebook}.ipynb." * bool(change.notebook)


def _ranks(report: WatchReport) -> tuple[str, list[str]]:
    """How long each process of a distributed training waits, or the least and the most of many."""
    rows: list[dict[str, Any]] = report.tables.get("ranks", [])
    if not rows:
        return "", []
    kind = next(iter(rows[0]))
    waits = [(1 - row["compute"], row[kind]) for row in rows]
    shown = waits if len(rows) <= _RANKS_SHOWN else [min(waits), max(waits)]
    told = ", ".join(f"{share:.0%} of {kind} {name}" for share, name in shown)
    told += f" (the least and the most of {len(rows)})" * (len(shown) < len(rows))
    return {"process": "processes"}.get(kind, f"{kind}s"), [f"waiting takes {told}"]


def _time(seconds: float) -> str:
    """`50.4 ms`, `9.84 s`, `10 min 4 s`, `2 h 5 min`."""
    if seconds < 0.9995:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
