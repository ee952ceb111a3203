"""Measure heavy work, each piece in its own process."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit.measure.processes import PeakMemory, tree_memory


def measured(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Run `work`.

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


def run_cases(work: ModuleType, folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """Run a module's cases over `count` items made in `folder`; yields rows of the table.

    Each runs in its own process: memory that an earlier one left must neither count nor be used again.
    """
    work.make(folder, count)
    for case in work.CASES:
        command = [sys.executable, "-m", work.__name__, case, str(folder), str(count)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        yield json.loads(done.stdout)


def run_case(cases: dict[str, Callable[[Path, int], dict[str, Any]]], arguments: list[str]) -> None:
    """Run a case in this process and print its row."""
    case, folder, count = arguments
    row = {
        "what": case,
        "count": int(count),
        "seconds": None,
        "peak_mem_mb": None,
        "kept_mem_mb": None,
        "file_mb": None,
    }
    print(json.dumps(row | cases[case](Path(folder), int(count))))
