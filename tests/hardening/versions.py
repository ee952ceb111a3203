"""The test suite with other versions and extras than one's own, each in a virtual environment made for it by uv.

    python -m tests.hardening.versions lowest  # what pyproject.toml admits at the least
    python -m tests.hardening.versions newest
    python -m tests.hardening.versions bare    # the newest, no extras: besides labkit only what runs tests
    python -m tests.hardening.versions newest tests/data/test_decoders.py --durations=5

Run from the repository's root. What follows goes to pytest. UV_INDEX_STRATEGY and uv's other variables count. A run of
the whole suite is added to records/versions.csv.
"""

import csv
import os
import re
import signal
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

RECORD = Path(__file__).parent / "records" / "versions.csv"
_PYTEST = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
_RUNNERS = ["pytest", "pytest-timeout", "pytest-xdist", "nbval", "hypothesis"]
_WANTED = {
    "lowest": ["--resolution", "lowest-direct", "-e", ".[test]"],
    "newest": ["-e", ".[test]"],
    "bare": ["-e", ".", *_RUNNERS],
}
_NAMED = ("torch", "torchvision", "torchcodec", "numpy", "pandas", "scipy", "pillow")
_COUNTS = ("passed", "failed", "errors", "skipped")


def main() -> int:
    """Make the environment, run pytest in it, keep what it said."""
    if sys.argv[1:2] == [] or sys.argv[1] not in _WANTED:
        sys.exit(__doc__)
    which, given = sys.argv[1], sys.argv[2:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and its children, ignore it
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "venv"
        _uv("venv", "--python", sys.executable, str(environment))
        _uv("pip", "install", "--python", str(environment / "bin" / "python"), *_WANTED[which])
        settings = {**os.environ, "LABKIT_HOME": str(Path(folder) / "home")}
        settings["PATH"] = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "LABKIT_SCALE"):
            settings.pop(name, None)
        if which == "bare":
            settings["LABKIT_LIBTURBOJPEG"] = os.devnull  # a system's own would be found
        python = environment / "bin" / "python"
        process = subprocess.Popen([python, *_PYTEST, *given], env=settings, stdout=subprocess.PIPE, text=True)
        said = []
        for line in process.stdout:
            print(line, end="", flush=True)
            said.append(line)
        if not given:
            _keep(which, said[-1], python)
        return process.wait()


def _uv(*arguments: str) -> None:
    subprocess.run(["uv", "--quiet", *arguments], check=True)


def _keep(which: str, summary: str, python: Path) -> None:
    """Add what pytest's last line says, such as `1 failed, 20 passed in 3.00s`."""
    counts = {name: re.search(rf"(\d+) {name.rstrip('s')}", summary) for name in _COUNTS}
    seconds = re.search(r"in ([\d.]+)s", summary)
    code = f"from importlib.metadata import version; print(*(f'{{n}} {{version(n)}}' for n in {_NAMED!r}))"
    versions = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    row = {
        "date": date.today().isoformat(), "versions": which,
        **{name: found[1] if found else 0 for name, found in counts.items()},
        "seconds": seconds[1] if seconds else "", "with": versions,
    }  # fmt: skip
    is_new = not RECORD.exists()
    with RECORD.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    sys.exit(main())
