"""Coverage of the unit tests, line and branch, a module, with why the rest is uncovered.

    python -m tests.hardening.coverage_table run [TEST_FILE ...]   # default: all; goes on where it stopped
    python -m tests.hardening.coverage_table record                # records/coverage.csv

Run from the repository's root; set up in pyproject.toml. Each test file runs in a process of its own, so that one which
ends its process badly loses its own measurement alone. The reasons are kept in coverage_reasons.csv, by hand.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from coverage import Coverage

HERE = Path(__file__).parent
_DATA = Path(".coverage.d")  # a folder for the data of each test file
# They run notebooks, in kernels; its processes have a bound on files that coverage's own exceed.
_LEFT_OUT = {"test_stored_notebooks.py", "test_jupyter.py", "test_faults.py"}
_PYTEST = ["-m", "pytest", "-o", "addopts=", "--import-mode=importlib", "-q", "-p", "no:cacheprovider"]


def run(files: list[str]) -> None:
    """Measure each test file that has not been measured, or that is named."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and its children, ignore it
    for file in [Path(name) for name in files] or sorted(Path("tests").glob("test_*.py")):
        folder = (_DATA / file.stem).absolute()
        if file.name in _LEFT_OUT or (folder.exists() and not files):
            continue
        with tempfile.TemporaryDirectory(dir=_made(_DATA)) as partial:
            environment = {
                **os.environ,
                "COVERAGE_FILE": str(Path(partial).absolute() / "data"),
                "PYTHONPATH": os.getcwd(),
            }
            ended = subprocess.run([sys.executable, "-m", "coverage", "run", *_PYTEST, str(file)], env=environment)
            if ended.returncode not in (0, 5):
                sys.exit(f"{file} failed: nothing of it is recorded")
            combined = Coverage(data_file=str(_made(folder) / "data"), data_suffix=False)
            combined.combine([partial])
            combined.save()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def record() -> None:
    """Write the table of what `run` has measured."""
    with tempfile.TemporaryDirectory() as folder:
        coverage = Coverage(data_file=f"{folder}/data", data_suffix=False)
        coverage.combine([str(path) for path in _DATA.glob("*/data")], keep=True)
        coverage.json_report(outfile=f"{folder}/report.json")
        files = json.loads(Path(folder, "report.json").read_text())["files"]
    with (HERE / "coverage_reasons.csv").open(newline="") as file:
        reasons = {row["module"]: row["why"] for row in csv.DictReader(file)}
    rows = [_row(path, found, reasons) for path, found in sorted(files.items())]
    with (HERE / "records" / "coverage.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*rows, _total(rows)])


def _row(path: str, found: dict, reasons: dict[str, str]) -> dict:
    summary = found["summary"]
    branches = [f"{start}->{'exit' if end < 0 else end}" for start, end in found["missing_branches"]]
    return {
        "module": path,
        "lines": summary["num_statements"], "lines_pct": _percent(summary["covered_lines"], summary["num_statements"]),
        "branches": summary["num_branches"],
        "branches_pct": _percent(summary["covered_branches"], summary["num_branches"]),
        "uncovered_lines": ranges(found["missing_lines"]),
        "uncovered_branches": " ".join(branches),
        "why": reasons.get(path, "") if found["missing_lines"] or branches else "",
    }  # fmt: skip


def _total(rows: list[dict]) -> dict:
    def mean(of: str) -> float:
        total = sum(row[of] for row in rows)
        return round(sum(row[of] * row[f"{of}_pct"] for row in rows) / total, 1)

    sums = {of: sum(row[of] for row in rows) for of in ("lines", "branches")}
    return {"module": "all", **sums, "lines_pct": mean("lines"), "branches_pct": mean("branches")}


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 1) if whole else 100.0


def ranges(lines: list[int]) -> str:
    """Line numbers, ascending, as `3-5 9`."""
    starts = [line for before, line in pairwise([-1, *lines]) if line != before + 1]
    ends = [line for line, after in pairwise([*lines, 1 << 60]) if after != line + 1]
    return " ".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2:])
    elif sys.argv[1:] == ["record"]:
        record()
    else:
        sys.exit(__doc__)
