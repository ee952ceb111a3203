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


def run_apart(module: str, *arguments: Any) -> list[dict[str, Any]]:
    """Run a module in its own process; returns the JSON lines that it prints.

    Memory that an earlier case or loader left must neither count nor be used again.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def run_cases(work: ModuleType, folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """Run a module's cases over `count` items made in `folder`; yields rows of the table."""
    work.make(folder, count)
    for case in work.CASES:
        yield from run_apart(work.__name__, case, folder, count)


def run_case(cases: dict[str, Callable[[Path, int], dict[str, Any]]], arguments: list[str]) -> None:
    """Run a case in this process and print its row."""
    case, folder, count = arguments
    unknown = dict.fromkeys(("seconds", "peak_mem_mb", "kept_mem_mb", "file_mb"))
    print(json.dumps({"what": case, "count": int(count), **unknown, **cases[case](Path(folder), int(count))}))
