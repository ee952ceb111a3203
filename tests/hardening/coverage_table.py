"""Line and branch coverage of the unit tests, by room of the package.

    python -m tests.hardening.coverage_table run [TEST_FILE ...]   # default: all; a second run goes on
    python -m tests.hardening.coverage_table record                # write records/coverage.csv

Run it from the repository's root; pyproject.toml has the settings. Each test file runs in its own process, so that one
which ends its process badly loses only its own measurement. `record` also prints every module with uncovered lines or
branches, with the reason that coverage_reasons.csv gives.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
from coverage import Coverage

from labkit.core import write_atomic
from tests.hardening.tables import RECORDS

REASONS = Path(__file__).with_name("coverage_reasons.csv")
_DATA = Path(".coverage.d")  # a folder for the data of each test file
# They run notebooks in kernels; or limit the size of files, which coverage's own exceed.
_LEFT_OUT = {"test_stored_notebooks.py", "test_jupyter.py", "test_faults.py"}
_PYTEST = ["-m", "pytest", "-o", "addopts=", "--import-mode=importlib", "-q", "-p", "no:cacheprovider"]


def run(files: list[str]) -> None:
    """Measure each test file that has not been measured, or those named."""
    _DATA.mkdir(exist_ok=True)
    for file in [Path(name) for name in files] or sorted(Path("tests").rglob("test_*.py")):
        folder = (_DATA / "-".join(file.with_suffix("").parts[1:])).absolute()
        if file.name in _LEFT_OUT or (folder.exists() and not files):
            continue
        with tempfile.TemporaryDirectory(dir=_DATA) as partial:
            data = str(Path(partial).absolute() / "data")
            environment = {**os.environ, "COVERAGE_FILE": data, "PYTHONPATH": os.getcwd()}
            ended = subprocess.run([sys.executable, "-m", "coverage", "run", *_PYTEST, str(file)], env=environment)
            if ended.returncode not in (0, 5):
                sys.exit(f"{file} failed: its coverage is not recorded")
            folder.mkdir(exist_ok=True)
            combined = Coverage(data_file=str(folder / "data"), data_suffix=False)
            combined.combine([partial])
            combined.save()


def record() -> None:
    """Write the table of what `run` has measured."""
    with tempfile.TemporaryDirectory() as folder:
        coverage = Coverage(data_file=f"{folder}/data", data_suffix=False)
        coverage.combine([str(path) for path in _DATA.glob("*/data")], keep=True)
        coverage.json_report(outfile=f"{folder}/report.json")
        files = json.loads(Path(folder, "report.json").read_text())["files"]
    reasons = pd.read_csv(REASONS, index_col="module")["why"]
    for path, found in sorted(files.items()):
        if found["missing_lines"] or found["missing_branches"]:
            print(f"{path}: {found['missing_lines']} {found['missing_branches']} {reasons.get(path, '')}")
    table = summarize_files({path: found["summary"] for path, found in files.items()})
    write_atomic(RECORDS / "coverage.csv", table.to_csv(index=False).encode())


def summarize_files(summaries: dict[str, dict[str, int]]) -> pd.DataFrame:
    """Sum coverage's counts by room (`labkit/core`); the last row is the total."""
    frame = pd.DataFrame(summaries).T.assign(modules=1)
    rooms = ["/".join(path.split("/")[:-1][:2]) for path in frame.index]
    sums = frame.groupby(rooms).sum()
    sums.loc["all"] = frame.sum()
    table = pd.DataFrame({"modules": sums["modules"]})
    for kind, whole in (("lines", "num_statements"), ("branches", "num_branches")):
        table[kind] = sums[whole]
        table[f"{kind}_pct"] = (100 * sums[f"covered_{kind}"] / sums[whole].clip(1)).round(1)
    return table.rename_axis("room").reset_index()


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2:])
    elif sys.argv[1:] == ["record"]:
        record()
    else:
        sys.exit(__doc__)
