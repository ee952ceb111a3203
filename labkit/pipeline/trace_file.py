"""Timelines as files that trace viewers open."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.core import write_atomic

_COLUMNS = ("lane", "kind", "start_s", "end_s")


def save_trace(spans: pd.DataFrame, path: Path | str) -> Path:
    """Write a timeline in the Trace Event Format, for https://ui.perfetto.dev, chrome://tracing or speedscope.

    Each lane becomes a thread, in the order of the frame, and each span a complete event; further columns, such as
    `batch`, become its arguments. If the frame says `simulated`, so does the name of the process.

    Args:
        spans: One row per span: `lane`, `kind`, `start_s`, `end_s`, as `lk.trace` and `Simulation.timeline` give them.
        path: File to write, as a whole; a former one is replaced.

    Returns:
        `path`.

    Raises:
        ValueError: a column is missing, or a span has no finite start, or ends before it.

    Source: Trace Event Format (Google), "Complete Events" and "Metadata Events"
    Taught in: notebooks/07_cuda_prefetch.ipynb
    """
    missing = [name for name in _COLUMNS if name not in spans]
    if missing:
        raise ValueError(f"spans must have the columns {', '.join(_COLUMNS)}; missing: {', '.join(missing)}")
    threads = {lane: number for number, lane in enumerate(dict.fromkeys(spans["lane"]), start=1)}
    simulated = "simulated" in spans and bool(spans["simulated"].any())
    events = [_named("process_name", 0, "labkit (simulated)" if simulated else "labkit")]
    for lane, number in threads.items():
        events += [_named("thread_name", number, str(lane)), _sorted(number)]
    events += [_event(row, threads[row["lane"]]) for row in spans.to_dict("records")]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)
    write_atomic(Path(path), text.encode())
    return Path(path)


def _event(span: dict[str, Any], thread: int) -> dict[str, Any]:
    start_us, duration_us = 1e6 * span["start_s"], 1e6 * (span["end_s"] - span["start_s"])
    if not (math.isfinite(start_us) and math.isfinite(duration_us) and duration_us >= 0):
        raise ValueError(f"a span must end at or after its start, got {span['start_s']} to {span['end_s']} s: {span}")
    arguments = {name: value for name, value in span.items() if name not in _COLUMNS and not pd.isna(value)}
    return {
        "name": str(span["kind"]), "cat": str(span["lane"]), "ph": "X", "ts": round(start_us, 3),
        "dur": round(duration_us, 3), "pid": 1, "tid": thread, "args": arguments,
    }  # fmt: skip


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}}


def _sorted(thread: int) -> dict[str, Any]:
    return {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": thread, "args": {"sort_index": thread}}
