"""Run the test suite with other versions and extras, each in a virtual environment that uv makes for it.

    python -m tests.hardening.versions lowest  # the lowest that pyproject.toml allows
    python -m tests.hardening.versions newest
    python -m tests.hardening.versions bare    # the newest, without extras: only labkit and what runs tests
    python -m tests.hardening.versions newest tests/data/test_decoders.py --durations=5

Run it from the repository's root. Further arguments go to pytest; uv's own variables work too. A run of the whole suite
replaces its row of results/hardening/versions.csv.
"""

import os
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from tests.hardening.tables import RECORDS, update_table

_PYTEST = ["-m", "pytest", "-q"]
_RUNNERS = ["pytest", "pytest-timeout", "pytest-xdist", "nbval", "hypothesis", "mypy"]
_INSTALLED = {
    "lowest": ["--resolution", "lowest-direct", "-e", ".[test]"],
    "newest": ["-e", ".[test]"],
    "bare": ["-e", ".", *_RUNNERS],
}
_NAMED = ("torch", "torchvision", "torchcodec", "numpy", "pandas", "scipy", "pillow")
_UNSET = ("PYTHONPATH", "VIRTUAL_ENV", "LABKIT_SCALE")  # in the environment of the tests
_COUNTS = ("passed", "failed", "errors", "skipped")


def main() -> int:
    """Make the environment, run pytest in it, record the result."""
    if len(sys.argv) < 2 or sys.argv[1] not in _INSTALLED:
        sys.exit(__doc__)
    which, given = sys.argv[1], sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "venv", "bin", "python")
        _uv("venv", "--python", sys.executable, f"{folder}/venv")
        _uv("pip", "install", "--python", python, *_INSTALLED[which])
        settings = {name: value for name, value in os.environ.items() if name not in _UNSET}
        settings |= {"LABKIT_HOME": f"{folder}/home", "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
        if which == "bare":
            settings["LABKIT_LIBTURBOJPEG"] = os.devnull  # else the system's own would be found
        process = subprocess.Popen([python, *_PYTEST, *given], env=settings, stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            print(line, end="", flush=True)
        if not given:
            _record(which, line, python)
        return process.wait()


def _uv(*arguments: str | Path) -> None:
    subprocess.run(["uv", "--quiet", *arguments], check=True)


def _record(which: str, summary: str, python: Path) -> None:
    """Record pytest's last line, such as `1 failed, 20 passed in 3.00s`."""
    counts = {name: re.search(rf"(\d+) {name.rstrip('s')}", summary) for name in _COUNTS}
    code = f"from importlib.metadata import version; print(*(f'{{n}} {{version(n)}}' for n in {_NAMED!r}))"
    versions = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    row = {"versions": which, "date": date.today().isoformat()}
    row |= {name: int(found[1]) if found else 0 for name, found in counts.items()}
    update_table(RECORDS / "versions.csv", [row | {"with": versions}])


if __name__ == "__main__":
    sys.exit(main())
