"""Timelines as files that trace viewers open."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.errors import ArgumentError
from labkit.util.files import write_atomic

_COLUMNS = ("lane", "kind", "start_s", "end_s")


def save_trace(spans: pd.DataFrame, path: Path | str) -> Path:
    """Write a timeline in the Trace Event Format, for https://ui.perfetto.dev, chrome://tracing or speedscope.

    Each lane becomes a thread, in the order of the frame, and each span a complete event, to an eighth of a
    microsecond; further columns, such as `batch`, become its arguments. If the frame says `simulated`, so does the name
    of the process.

    Args:
        spans: One row per span: `lane`, `kind`, `start_s`, `end_s`, as `course.trace` gives them.
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
        raise ArgumentError(f"spans must have the columns {', '.join(_COLUMNS)}; missing: {', '.join(missing)}")
    threads = {lane: number for number, lane in enumerate(dict.fromkeys(spans["lane"]), start=1)}
    simulated = "simulated" in spans and bool(spans["simulated"].any())
    events = [_named("process_name", 0, "labkit (simulated)" if simulated else "labkit")]
    for lane, number in threads.items():
        events += [_named("thread_name", number, str(lane)), _sorted(number)]
    rows = enumerate(spans.to_dict("records"))
    events += [_event(row, threads[row["lane"]], number) for number, row in rows]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)
    write_atomic(Path(path), text.encode())
    return Path(path)


def _event(span: dict[str, Any], thread: int, number: int) -> dict[str, Any]:
    """A complete event; an instant one if it took no time, which speedscope reads as ending with the next."""
    start_us, end_us = _on_grid(span["start_s"]), _on_grid(span["end_s"])
    if not (math.isfinite(start_us) and math.isfinite(end_us) and span["end_s"] >= span["start_s"]):
        raise ArgumentError(
            f"a span must end at or after its start, got {span['start_s']} to {span['end_s']} s: {span}"
        )
    arguments = {name: value for name, value in span.items() if name not in _COLUMNS and not pd.isna(value)}
    length = {"ph": "X", "dur": end_us - start_us} if end_us > start_us else {"ph": "i", "s": "t"}
    return {
        "name": str(span["kind"]),
        "cat": str(span["lane"]),
        "ts": start_us,
        "pid": 1,
        "tid": thread,
        "args": {**arguments, "span": number},
        **length,  # the number: speedscope takes events that are alike for one
    }


def _on_grid(seconds: float) -> float:
    """Microseconds, to an eighth: sums of these are exact, and so no span ends after the next one begins.

    Perfetto drops a complete event that overlaps another one, be it by a nanosecond of rounding.
    """
    return round(8e6 * seconds) / 8 if math.isfinite(seconds) else seconds


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}}


def _sorted(thread: int) -> dict[str, Any]:
    return {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": thread, "args": {"sort_index": thread}}
