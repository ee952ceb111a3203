"""One piece of heavy work, measured in a process of its own: a row of `load.csv`."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from labkit.core.atomic import write_atomic
from labkit.measure.processes import PeakMemory, tree_memory

COLUMNS = ["what", "count", "seconds", "peak_mem_mb", "kept_mem_mb", "file_mb", "is_right"]


def measured(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What `work` gives, and what it cost.

    Returns:
        Its result, kept alive while memory is read; and `seconds`, `peak_mem_mb` and `kept_mem_mb`: PSS of the process
        tree above what it had before, in MB (1e6 bytes), at most and at the end. Pages of a mapped file count.
    """
    with PeakMemory() as peak:
        before = tree_memory()["pss_mb"].sum()
        peak.begin()
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
        costs = {"seconds": seconds, "peak_mem_mb": peak.end() - before}
        return result, {**costs, "kept_mem_mb": tree_memory()["pss_mb"].sum() - before}


def rows(work: ModuleType, folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """A row for each of a module's cases, over `count` items, which are made in `folder`.

    Each runs in a process of its own: memory that an earlier one left must not count, nor be used again.
    """
    work.make(folder, count)
    for case in work.CASES:
        command = [sys.executable, "-m", work.__name__, case, str(folder), str(count)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        yield json.loads(done.stdout)


def run_case(cases: dict[str, Callable[[Path, int], dict[str, Any]]], arguments: list[str]) -> None:
    """In that process: run a case and print its row."""
    case, folder, count = arguments
    print(json.dumps({"what": case, "count": int(count), **cases[case](Path(folder), int(count))}))


def record(path: Path, row: dict[str, Any]) -> None:
    """Add a row to a record; that of the same work is replaced."""
    new = pd.DataFrame([row], columns=COLUMNS)
    old = pd.read_csv(path) if path.exists() else new.iloc[:0]
    kept = old[~old["what"].isin(new["what"])]
    frame = pd.concat([kept, new]) if len(kept) else new
    write_atomic(path, frame.round(3).to_csv(index=False).encode())
