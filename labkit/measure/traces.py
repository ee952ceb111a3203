"""Timelines as files that trace viewers open."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit.errors import ArgumentError
from labkit.util.arguments import require_a
from labkit.util.files import write_atomic

_COLUMNS = ("lane", "kind", "start_s", "end_s")


def save_trace(spans: pd.DataFrame, path: Path | str) -> Path:
    """Write a timeline in the Trace Event Format, for https://ui.perfetto.dev, chrome://tracing or speedscope.

    Each lane becomes a thread, in the order of the frame, and each span a complete event, to an eighth of a
    microsecond; further columns, such as `batch`, become its arguments. If the frame says `simulated`, so does the name
    of the process.

    Args:
        spans: One row per span: `lane`, `kind`, `start_s`, `end_s`, as of `lk.diagnose`.
        path: File to write, as a whole; a former one is replaced.

    Returns:
        `path`.

    >>> lk.save_trace(found.spans, "trace.json")  # of lk.diagnose  # doctest: +SKIP

    Raises:
        ValueError: a column is missing, or a span has no finite start, or ends before it.

    Source: Trace Event Format (Google), "Complete Events" and "Metadata Events"
    """
    require_a(pd.DataFrame, "spans", spans, "a frame of spans, as lk.diagnose has it")
    missing = [name for name in _COLUMNS if name not in spans]
    if missing:
        raise ArgumentError(f"spans must have the columns {', '.join(_COLUMNS)}; missing: {', '.join(missing)}")
    times = spans[["start_s", "end_s"]].astype(float)
    bad = spans[~(np.isfinite(times).all(axis=1) & (times["end_s"] >= times["start_s"]))]
    if len(bad):
        raise ArgumentError(f"a span must end at or after its start: {bad.iloc[0].to_dict()}")
    simulated = "simulated" in spans and bool(spans["simulated"].any())
    names: list[Any] = [("process_name", 0, {"name": "labkit (simulated)" if simulated else "labkit"})]
    threads = {lane: number for number, lane in enumerate(dict.fromkeys(spans["lane"]), start=1)}
    for lane, thread in threads.items():
        names += [("thread_name", thread, {"name": str(lane)}), ("thread_sort_index", thread, {"sort_index": thread})]
    events = [{"name": what, "ph": "M", "pid": 1, "tid": thread, "args": args} for what, thread, args in names]
    for number, span in enumerate(spans.to_dict("records")):
        # To an eighth of a microsecond: sums of these are exact, and so no span ends after the next one begins.
        # Perfetto drops a complete event that overlaps another one, be it by a nanosecond of rounding.
        start_us, end_us = (round(8e6 * span[name]) / 8 for name in ("start_s", "end_s"))
        further = {name: value for name, value in span.items() if name not in _COLUMNS and not pd.isna(value)}
        event = {"name": str(span["kind"]), "cat": str(span["lane"]), "ts": start_us, "pid": 1}
        # The number: speedscope takes events that are alike for one, and one that took no time to end with the next.
        event |= {"tid": threads[span["lane"]], "args": {**further, "span": number}}
        takes_time = {"ph": "X", "dur": end_us - start_us}
        events.append({**event, **(takes_time if end_us > start_us else {"ph": "i", "s": "t"})})
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)
    write_atomic(Path(path), text.encode())
    return Path(path)
