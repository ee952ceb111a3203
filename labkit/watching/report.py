"""What watching or diagnosing a training showed: as numbers, in words, as a picture, and as files.

It needs the standard library alone. Where the program has imported pandas, the tables of a report are frames.
"""

import json
import math
import os
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from labkit.errors import NothingSeen
from labkit.util.arguments import REPORT_BEGINNINGS, REPORT_VERSION
from labkit.util.files import write_atomic
from labkit.util.machine import environment
from labkit.watching.accounts import Accounts, Spent, costs_of, find_accounts
from labkit.watching.advice import CAUSES, MIN_SHARE, Costs, Recommendation, advise, advise_on_loop
from labkit.watching.batches import BatchFacts
from labkit.watching.diff import blocks_of, ceiling_interval
from labkit.watching.drawings import Box, draw_rows
from labkit.watching.epochs import describe_pace, figures_of
from labkit.watching.lines import MAKING, STEP, Line, lines_of, short_path
from labkit.watching.record import Record, describe_nothing
from labkit.watching.resources import Resources, place_of
from labkit.watching.seen import FEW, REPLAY, Epoch
from labkit.watching.worker import read_threads

SHARES = ("compute", *CAUSES)
_affinity: Callable[[int], Iterable[int]] = getattr(os, "sched_getaffinity", lambda pid: ())  # macOS has none


def describe_waiting(shares: dict[str, float]) -> str:
    """A sentence on the shares of the time."""
    lost = {name: shares[name] for name in SHARES[1:]}
    total = sum(lost.values())
    if total < MIN_SHARE:
        return f"Training does not wait for its data: {shares['compute']:.0%} of the time is the step itself."
    ordered = sorted(lost.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {share:.0%}" for name, share in ordered if share >= 0.005)
    return f"Training waits for its data {total:.0%} of the time: {parts}."


_LEAST_SHOWN = 0.085  # share of a bar that a number fits into
_NO_STEP = 1000  # times the step: a ceiling beyond it is no rate that training could reach


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
    observed_s: tuple[float, float] = (0.0, 0.0)

    loaders, spans, samples, epochs, ranks = _Table(), _Table(), _Table(), _Table(), _Table()
    lines = _Table("part", "share", *Line._fields[1:])
    _few = FEW  # batches: with fewer it has no ceiling and no advice

    def __post_init__(self) -> None:
        if self.ceiling_low < 1 < self.ceiling:
            object.__setattr__(self, "recommendations", [_left_open(change) for change in self.recommendations])

    @property
    def recommendation(self) -> Recommendation:
        """The change with the largest expected gain."""
        return self.recommendations[0]

    def __repr__(self) -> str:
        return "\n".join(self.all_sentences)

    def _repr_html_(self) -> str:
        words = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.all_sentences)
        return self._draw_costs() + words

    @property
    def all_sentences(self) -> list[str]:
        """The result, the lines that the time goes into, and the machine, in words."""
        return [*self.sentences, *self.line_sentences, *self.resource_sentences]

    @property
    def sentences(self) -> list[str]:
        """The result in words."""
        if self.n_batches < self._few:
            seen = "1 batch was" if self.n_batches == 1 else f"{self.n_batches} batches were"
            few = f"Only {seen} seen without the first ones of each epoch: too few for a ceiling or advice."
            few += f" Let the training take more steps, so that {FEW} are left."
            return [describe_waiting(self.shares), few, *self.notes]
        told = [describe_waiting(self.shares), *self._spare, self._describe_ceiling(), str(self.recommendation)]
        return [*told, *self.pace_sentences, *self.batch_sentences, *self.notes]

    @property
    def _spare(self) -> list[str]:
        """What workers could give beyond what a training that does not wait for data takes; a sentence, or none."""
        num_workers, making_s = self.settings.get("num_workers") or 0, self.costs.making
        if not num_workers or not making_s or 1 - self.shares["compute"] >= MIN_SHARE:
            return []
        factor = num_workers * self.costs.together / making_s
        enough = math.ceil((1 + MIN_SHARE) * making_s / self.costs.together)
        fewer = f": {enough} of {num_workers} workers would do" * (enough < num_workers)
        return [f"The loader could feed {factor:.1f} times this rate{fewer}."] * (factor >= 1 + MIN_SHARE)

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
            for part in (MAKING, STEP) if (rows := self._lines_of(part))
        ]  # fmt: skip
        return told + [self.slow] * bool(self.slow)

    def _lines_of(self, part: str) -> list[dict[str, Any]]:
        return [row for row in self.tables.get("lines", []) if row["part"] == part]

    @property
    def resource_sentences(self) -> list[str]:
        """What the training had of its machine, and what of it was scarce."""
        return self.resources.sentences(self.shares, self.others_share)

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

    def _draw_costs(self) -> str:
        """Where the time of a batch goes, compared with the step alone."""
        ceiling = f"at least {self._least:.2f}x" if self.is_bound else f"{self.ceiling:.2f}x"
        ceiling = f"over {_NO_STEP}x" if self.ceiling > _NO_STEP else ceiling
        parts, boxes, end_s = {"compute": self.costs.step, **self.costs.lost_s}, list[Box](), 0.0
        for name, seconds in parts.items():
            share = seconds / self.costs.together
            boxes.append(Box(name, end_s, end_s + seconds, f"{share:.0%}" * (share > _LEAST_SHOWN)))
            end_s += seconds
        rows = {"training": boxes, "if data were free": [Box("compute", 0.0, self.costs.step)]}
        told = {"title": f"ceiling: {ceiling}", "label": "seconds per batch", "words": self.sentences[0]}
        return draw_rows(rows, [*parts], **told)

    @property
    def _least(self) -> float:
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
        return [{column: _plain(row.get(column)) for column in _columns(rows)} for row in rows]

    def save_json(self, path: Path | str) -> Path:
        """Write the figures as JSON."""
        path = Path(path).expanduser()
        write_atomic(path, (json.dumps(self.to_dict(), indent=1) + "\n").encode())
        return path

    def save_html(self, path: Path | str) -> Path:
        """Write one page that needs no other file, with the timeline."""
        title = escape(self.command or "labkit watch")
        style = (
            "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}img{max-width:100%;height:auto}"
        )
        page = (
            f"{REPORT_BEGINNINGS['html']}<title>{title}</title><style>{style}"
            f"td,th{{padding:.2em .8em;text-align:right}}</style><h1>{title}</h1>{self._repr_html_()}"
            f"{_draw_timeline(last_spans(self.tables['spans']))}{self._lines_html()}"
            f"{_html_of(self.tables['loaders'])}{_html_of(self.tables.get('samples', []))}</html>"
        )
        path = Path(path).expanduser()
        write_atomic(path, page.encode())
        return path

    def _lines_html(self) -> str:
        """The lines of each part."""
        found = ""
        for part in (MAKING, STEP):
            if rows := self._lines_of(part):
                shown = [{**row, "path": short_path(row["path"])} for row in rows]
                found += f"<h2>What {part} is</h2>{_html_of(shown, without='part')}"
        return found


@dataclass(frozen=True, repr=False, kw_only=True)
class Diagnosis(WatchReport):
    """What `diagnose` found: a `WatchReport`, whose ceiling is measured.

    Attributes:
        frame: The loop and the step alone, round by round, as `compare` returns runs.
    """

    frame: Any

    _few = 0  # it has seen as many as it was asked to


_LEAST_S = 0.2  # of what is told, in all: less is a matter of chance, and of little weight
_LEAST_OF_LINES, _MOST_LINES, _LINES_TOLD = 0.01, 20, 4


def lines_table(seconds: Mapping[Line, float]) -> list[dict[str, Any]]:
    """The lines of each part that are at least a hundredth of it, the largest first."""
    rows = []
    for part in (MAKING, STEP):
        of_part = {line: each for line, each in seconds.items() if line.part == part}
        total = sum(of_part.values())
        for line, each in sorted(of_part.items(), key=lambda item: -item[1])[:_MOST_LINES]:
            if total >= _LEAST_S and each >= _LEAST_OF_LINES * total:
                rows.append({"part": part, "share": each / total, **line._asdict()})
    return rows


def _told_line(row: dict[str, Any]) -> str:
    """A row in words."""
    return f"{row['share']:.0%} {row['what']}, {short_path(row['path'])}:{row['number']}"


_N_SLOWEST = 20
_SLOW, _OF_SLOWEST = 3.0, 0.1  # a slow sample: so many times the median, and so much of the slowest one


def slow_samples(seconds: list[tuple[Any, float]], name_of: Callable[[Any], str]) -> tuple[list[dict[str, Any]], str]:
    """`samples` and `slow` of a report.

    Args:
        seconds: Index and seconds of each time that a sample was made.
        name_of: The file or key of a sample, by its index.
    """
    if not seconds:
        return [], ""
    by_sample = defaultdict[Any, list[float]](list)
    for index, each_s in seconds:
        by_sample[index].append(each_s)
    known = sorted(by_sample.items(), key=lambda item: -statistics.fmean(item[1]))
    means_s = [statistics.fmean(times) for _, times in known]
    all_s = math.fsum(each_s for _, each_s in seconds) or 1.0
    rows = [
        {
            "sample": (name := name_of(index)),
            "seconds": mean_s,
            "share": sum(times) / all_s,
            **_image_facts(name),
        }
        for (index, times), mean_s in zip(known[:_N_SLOWEST], means_s, strict=False)
    ]
    least_s = max(_SLOW * statistics.median(means_s), _OF_SLOWEST * means_s[0])
    n_slow = sum(mean_s > least_s for mean_s in means_s)
    slow_s, slow = sum(sum(times) for _, times in known[:n_slow]), ""
    share = slow_s / all_s
    if share >= MIN_SHARE and slow_s >= _LEAST_S:
        told = ", ".join(map(_told_sample, rows[: min(n_slow, 3)]))
        take = "takes" if n_slow == 1 else "take"
        slow = f"{n_slow} of {len(known)} samples {take} {share:.0%} of the time in which samples are made: {told}."
    return rows, slow


def _image_facts(name: str) -> dict[str, Any]:
    """What the header of an image file says; nothing if it is none that is there, or Pillow is not."""
    if not os.path.isfile(name):  # opening a pipe waits for who writes to it
        return {}
    with suppress(ImportError, OSError, ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an image that Pillow finds too large
        from PIL import Image

        n_bytes = os.path.getsize(name)
        with Image.open(name) as image:
            kind = f"progressive {image.format}" if image.info.get("progressive") else image.format
            return {"bytes": n_bytes, "format": kind, "width": image.width, "height": image.height}
    return {}


def _told_sample(row: dict[str, Any]) -> str:
    told = f"{short_path(row['sample'])} {1e3 * row['seconds']:.3g} ms"
    if "format" not in row:
        return told
    return f"{told} ({row['format']}, {row['width']} x {row['height']}, {row['bytes'] / 1e6:.2g} MB)"


def last_spans(spans: list[dict[str, Any]], n_batches: int = 12) -> list[dict[str, Any]]:
    """The spans from the beginning of the last batches on, from time 0."""
    hosts = [span for span in spans if span["lane"] == "host"]
    if not hosts:
        return spans
    last = max(span["batch"] for span in hosts)
    begin_s = min(span["start_s"] for span in hosts if span["batch"] > last - n_batches)
    return _from(begin_s, [span for span in spans if span["end_s"] > begin_s])


def _from(begin_s: float, spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The spans with this time as 0."""
    return [
        {**span, "start_s": max(0.0, span["start_s"] - begin_s), "end_s": span["end_s"] - begin_s} for span in spans
    ]


def _draw_timeline(spans: list[dict[str, Any]]) -> str:
    rows = defaultdict[str, list[Box]](list)
    for span in spans:
        rows[span["lane"]].append(Box(span["kind"], span["start_s"], span["end_s"]))
    total_s = max((span["end_s"] for span in spans), default=0.0)
    steps_s = sum(box.end_s - box.start_s for box in rows["host"] if box.kind == "step")
    title = f"host: step {steps_s / total_s if total_s else 0:.0%} of {total_s:.3g} s"
    return draw_rows(rows, ["load", "wait", "step"], title=title, label="time (s)", words="Timeline of the last steps")


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    return [*dict.fromkeys(column for row in rows for column in row)]


def _plain(value: Any) -> Any:
    return _finite(value) if isinstance(value, float) else value


def _html_of(rows: list[dict[str, Any]], without: str = "") -> str:
    columns = [column for column in _columns(rows) if column != without]
    if not columns:
        return ""
    header = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(row.get(column))}</td>' for column in columns)}</tr>" for row in rows)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    known = _plain(value)
    return "" if known is None else escape(f"{known:.4g}" if isinstance(known, float) else str(known))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_SPAN_BATCHES = 200  # of the end of the training, in the timeline


def make_report(
    record: Record, *, cpu_share: float | None, others_share: float, epochs: list[dict[str, float]], **known: Any
) -> WatchReport:
    """What the training waited for.

    Args:
        record: What it noted.
        cpu_share, others_share: Of the cores, since it began.
        epochs: The figures of each finished epoch.
        known: Further fields of `WatchReport`.

    Raises:
        NothingSeen: fewer than two batches were asked for.
    """
    accounts = find_accounts(record)
    if accounts is None or not accounts.of("training"):
        raise NothingSeen(describe_nothing(record))
    costs = costs_of(accounts, record.device)
    blocks = blocks_of(accounts, costs)
    low, high = ceiling_interval(accounts, costs, blocks)
    batch = accounts.loader.batch
    if batch is not None and accounts.loader.n_pinned:
        batch = replace(batch, pin_s=accounts.loader.pinned_s / accounts.loader.n_pinned)
    import torch  # by now the script has imported it

    samples, slow = slow_samples(record.samples(accounts.loader, settled=True), accounts.loader.name_of)
    busy, loader, n_threads = record.device.busy, accounts.loader, torch.get_num_threads()
    shares = {"compute": costs.step / costs.together, **costs.lost}
    resources = record.resources.read(
        torch_threads=n_threads, num_workers=loader.traits.num_workers or 0,
        worker_threads=read_threads(loader.folder), step_queued=accounts.step_queued,
        making_queued=accounts.making_queued, **place_of(loader.places),
    )  # fmt: skip
    most_workers = resources.most_workers(shares, others_share)
    advice = advise(costs, loader.traits, accounts.in_line_s, most_workers=most_workers)
    if loader.is_sampled:
        advice = [advise_on_loop(costs, loader.kind)]
    return WatchReport(
        shares=shares, ceiling=costs.together / costs.step,
        ceiling_low=low, ceiling_high=high, is_bound=not accounts.of(REPLAY),
        recommendations=advice, costs=costs,
        in_line_s=accounts.in_line_s,
        n_batches=len(accounts.of("training")), tables={
            "loaders": _table(record, accounts), "spans": _spans(accounts), "epochs": epochs,
            "lines": lines_table(lines_of(record.stacks())), "samples": samples,
        }, slow=slow, cpu_share=cpu_share, others_share=others_share,
        gpu_utilization=statistics.fmean(busy) if busy else None,
        notes=[*_notes(accounts), *_not_covered(record, accounts), *record.failed, *record.hung],
        blocks_s=blocks, settings={**asdict(loader.traits), "torch_threads": n_threads},
        batch=batch, pace=figures_of(record, accounts),
        resources=resources, **known,
    )  # fmt: skip


def _left_open(change: Recommendation) -> Recommendation:
    """The change, with what it brings left open."""
    if change.speedup <= 1:
        return change
    return replace(change, speedup=1.0, why=f"{change.why}; what it brings, more steps would tell")


def _idle_workers(accounts: Accounts) -> str:
    """Workers that made no batch, and why; empty if all did, or if some may yet."""
    loader, made = accounts.loader, accounts.made_by
    idle, busy = ([each for each in sorted(made) if each >= 0 and bool(made[each]) is has] for has in (False, True))
    n_ahead = (loader.traits.num_workers or 0) * (loader.traits.prefetch_factor or 1)
    is_over = any(epoch.ended_s is not None or len(epoch.batches) > n_ahead for epoch in loader.epochs)
    if not (idle and busy and is_over):
        return ""
    names = f"Worker {idle[0]}" if len(idle) == 1 else f"Workers {', '.join(map(str, idle[:-1]))} and {idle[-1]}"
    said = f"{names} of {len(idle) + len(busy)} made no batch: num_workers={len(busy)} does the same"
    if loader.traits.n_batches is not None:
        return f"{said}, as an epoch has {loader.traits.n_batches} batch{'es' * (loader.traits.n_batches != 1)}."
    return f"{said}, or give the data set more shards, and each worker its own by torch.utils.data.get_worker_info()."


def _notes(accounts: Accounts) -> list[str]:
    notes = [idle] if (idle := _idle_workers(accounts)) else []
    if accounts.loader.is_sampled:
        notes.append(
            f"These are the figures of {accounts.loader.kind}, of whose loader nothing is known: where the loop stood "
            "was sampled every 5 ms, and batches are counted by its calls of backward()."
        )
    if not accounts.loader.trains and not accounts.of(REPLAY):
        notes.append(
            "Neither backward() nor an optimizer of torch ran between batches: this may be no training's loader."
        )
    threads = {epoch.thread for epoch in accounts.loader.epochs}
    if len(threads) > 1:
        notes.append("A thread of the script reads ahead of the training, which may hide part of these waits.")
    return notes


def _not_covered(record: Record, accounts: Accounts) -> Iterator[str]:
    """What the figures leave out of the training, as far as it was seen."""
    main = accounts.loader
    spans = Spent(
        (epoch.began_s, epoch.ended_s or epoch.batches[-1].received_s) for epoch in main.epochs if epoch.batches
    )
    others = [
        each for each in record.training if each is not main and each.n_batches
        and not any(spans.meets(epoch.began_s, epoch.batches[-1].received_s) for epoch in each.epochs if epoch.batches)
    ]  # fmt: skip
    if others and record.main is None:
        n_all = main.n_batches + sum(each.n_batches for each in others)
        yield (
            f"These figures are of {main.n_batches} of {n_all} batches of the training: those of {main.kind} "
            f"{main.number}, one of {len(others) + 1} loaders that it takes one after the other."
        )
    for each in record.loaders:
        if each.has_gradients and each not in (*record.training, main) and each.n_batches > main.n_batches:
            yield (
                f"{each.kind} {each.number} gave {each.n_batches} batches, and the loader of these figures "
                f"{main.n_batches}, but neither backward() nor an optimizer of torch ran between "
                "them: the training may be there."
            )


def _table(record: Record, accounts: Accounts) -> list[dict[str, Any]]:
    """Of each loader what it is, how long a batch was waited for, but for the first of epochs, and how one was made."""
    rows = []
    for loader in (each for each in record.loaders if each.n_batches):
        is_main, is_training = loader is accounts.loader, loader.trains and loader in record.training
        made = accounts.made if is_main else [made for epoch in loader.epochs for made in epoch.made_here]
        batches = [batch for epoch in loader.epochs for batch in epoch.batches[1:] or epoch.batches]
        wall_s, collate_s = _mean(each.end_s - each.start_s for each in made), _mean(each.collate_s for each in made)
        storage_s = max(0.0, wall_s - _mean(each.busy_s for each in made))
        rows.append({
            "loader": f"{loader.kind} {loader.number}",
            "role": "training" if is_main else "training, too" if is_training else "other",
            "num_workers": loader.traits.num_workers, "n_batches": loader.n_batches,
            "wait_ms": 1e3 * _mean(each.received_s - each.asked_s for each in batches),
            "ready": _mean(each.ready for each in batches if each.ready is not None),
            "storage_ms": 1e3 * storage_s if made else math.nan,
            "getitem_ms": 1e3 * max(0.0, wall_s - collate_s - storage_s) if made else math.nan,
            "collate_ms": 1e3 * collate_s,
        })  # fmt: skip
    return rows


def _mean(values: Iterable[float]) -> float:
    known = [*values]
    return statistics.fmean(known) if known else math.nan


def _spans(accounts: Accounts) -> list[dict[str, Any]]:
    """The last batches, as the host and those that made them saw them."""
    epochs = accounts.loader.epochs
    kept = [(epoch, number) for epoch in epochs for number in range(len(epoch.batches))][-_SPAN_BATCHES:]
    began_s = kept[0][0].batches[kept[0][1]].asked_s
    rows = [
        {"lane": f"worker {worker}", "kind": "load", "start_s": made.start_s, "end_s": made.end_s, "batch": -1}
        for worker, of_worker in sorted(accounts.made_by.items())
        for made in of_worker if worker >= 0 and made.start_s >= began_s
    ]  # fmt: skip
    rows += [row for count, (epoch, number) in enumerate(kept) for row in _host_spans(epoch, number, count)]
    return _from(began_s, rows)


def _host_spans(epoch: Epoch, number: int, count: int) -> Iterator[dict[str, Any]]:
    batch = epoch.batches[number]
    following = epoch.batches[number + 1].asked_s if number + 1 < len(epoch.batches) else epoch.ended_s
    kind = "load" if batch.worker == -1 and epoch.made_here else "wait"
    yield {"lane": "host", "kind": kind, "start_s": batch.asked_s, "end_s": batch.received_s, "batch": count}
    if following is not None:
        yield {"lane": "host", "kind": "step", "start_s": batch.received_s, "end_s": following, "batch": count}
