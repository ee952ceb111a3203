"""Coverage-guided fuzzing (atheris) of every entry of labkit that takes bytes from outside.

    python -m tests.hardening.fuzz all --minutes 10 --record tests/hardening/records/fuzz.csv
    python -m tests.hardening.fuzz tar_index --minutes 1 --corpus /tmp/corpus

Each target runs in a process of its own, which a native crash may kill and which has a bound on the time of an input
and on memory. labkit's modules and the Python parsers behind them guide the search; the decoders' native code is not
instrumented, so of that only crashes are seen, not coverage. What is found is made small and kept under
`tests/hardening/fuzz/found/<target>/`, where tests/hardening/test_fuzz.py runs it ever after.
"""

import argparse
import csv
import hashlib
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.hardening.fuzz.registry import TARGETS

FOUND = Path(__file__).with_name("found")
_COLUMNS = (
    "date", "target", "minutes", "executions", "executions_per_s", "edges", "features", "corpus", "peak_rss_mb",
    "findings", "what", "versions",
)  # fmt: skip
_SECONDS_AN_INPUT, _RSS_MB, _LONGEST = 20, 4096, 1 << 16
_SAME_AGAIN = 3  # a finding that comes so often ends the run: it hides what lies behind it
_MINIMIZE_S = 60
_SHOWN = ("atheris", "numpy", "opencv-python-headless", "pandas", "pillow", "simplejpeg", "torchcodec", "torchvision")


def fuzz(name: str, minutes: float, corpus: Path) -> dict:
    """Run a target for so long, however often it dies; returns its row of the record."""
    end, lines, found = time.monotonic() + 60 * minutes, [], []
    row = {"executions": 0, "edges": 0, "features": 0, "corpus": 0, "peak_rss_mb": 0}
    corpus.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    while (left := int(end - time.monotonic())) > 0 and not _repeats(found):
        with TemporaryDirectory(prefix="labkit-fuzz-") as folder:
            lines = _run(name, left, corpus, Path(folder))
            _add(row, lines)
            artifacts = sorted(path for path in Path(folder).glob("*-*") if path.is_file())
            found += [_keep(name, path) for path in artifacts]
        if not artifacts:
            break
    seconds = time.monotonic() - start
    if not row["executions"]:
        raise RuntimeError(f"{name} did not run:\n" + "\n".join(lines[-30:]))
    distinct = sorted(set(found))
    return row | {
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "target": name, "minutes": round(seconds / 60, 1),
        "executions_per_s": round(row["executions"] / seconds), "findings": len(distinct), "what": "; ".join(distinct),
        "versions": " ".join([f"python {sys.version.split()[0]}", *(f"{each} {version(each)}" for each in _SHOWN)]),
    }  # fmt: skip


def _repeats(found: list[str]) -> bool:
    return any(found.count(what) >= _SAME_AGAIN for what in found)


def _run(name: str, seconds: int, corpus: Path, folder: Path) -> list[str]:
    """One life of the child: its last words, line by line."""
    options = {
        "max_total_time": seconds, "timeout": _SECONDS_AN_INPUT, "rss_limit_mb": _RSS_MB, "max_len": _LONGEST,
        "artifact_prefix": f"{folder}/", "print_final_stats": 1, "close_fd_mask": 3,
    }  # fmt: skip
    command = [*_child(name), *(f"-{key}={value}" for key, value in options.items())]
    (folder / "files").mkdir()
    environment = {**os.environ, "LABKIT_FUZZ_CORPUS": str(corpus), "LABKIT_HOME": f"{folder}/files"}
    with open(folder / "log", "w+b") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            process.wait(seconds + 10 * _SECONDS_AN_INPUT)
        finally:
            process.kill()
        log.seek(max(0, log.seek(0, os.SEEK_END) - 200_000))
        lines = log.read().decode(errors="replace").splitlines()
    if process.returncode and not list(folder.glob("*-*")):
        print(f"{name}: ended with {process.returncode}", *lines[-10:], sep="\n", file=sys.stderr)
    return lines


def _child(name: str) -> list[str]:
    return [sys.executable, "-m", "tests.hardening.fuzz.child", name]


def _add(row: dict, lines: list[str]) -> None:
    """What libFuzzer said of one life."""
    text = "\n".join(lines)
    counts = [int(number) for number in re.findall(r"^#(\d+)\s", text, re.MULTILINE)]
    row["executions"] += max(counts, default=0)
    for column, word in {"edges": "cov", "features": "ft", "corpus": "corp"}.items():
        row[column] = max([row[column], *map(int, re.findall(rf"{word}: (\d+)", text))])
    row["peak_rss_mb"] = max([row["peak_rss_mb"], *map(int, re.findall(r"peak_rss_mb: +(\d+)", text))])


def _keep(name: str, artifact: Path) -> str:
    """Put an input that was found with the others, as small as it gets; returns what it does."""
    what, data = _outcome(name, artifact.read_bytes()), artifact.read_bytes()
    if what == "nothing, alone":
        what = f"{what} ({artifact.name.partition('-')[0]})"
    else:
        data = _minimized(name, data, what)
    kept = FOUND / name / hashlib.sha256(data).hexdigest()[:12]
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(data)
    print(f"{name}: {what}: {kept}", flush=True)
    return what


def _outcome(name: str, data: bytes) -> str:
    """How a process of its own ends on an input: the error and where it was raised, or the signal."""
    with TemporaryDirectory(prefix="labkit-fuzz-") as folder:
        path = Path(folder) / "input"
        path.write_bytes(data)
        command = [*_child(name), "--replay", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)
        except subprocess.TimeoutExpired:
            return "hangs"
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}"
    if done.returncode == 0:
        return "nothing, alone"
    raised = re.findall(r"^([\w.]+)(?:: |$)", done.stderr, re.MULTILINE)
    places = re.findall(r'File ".*?/(labkit/[\w/]+\.py|tests/hardening/fuzz/\w+\.py)", line (\d+)', done.stderr)
    return f"{raised[-1] if raised else 'error'} at {':'.join(places[-1]) if places else 'start'}"


def _minimized(name: str, data: bytes, what: str) -> bytes:
    """`data` with pieces left out, ever smaller ones, as long as a process ends on it in the same way."""
    end, piece = time.monotonic() + _MINIMIZE_S, len(data) // 2
    while piece and time.monotonic() < end:
        at = 0
        while at < len(data) and time.monotonic() < end:
            smaller = data[:at] + data[at + piece :]
            if _outcome(name, smaller) == what:
                data = smaller
            else:
                at += piece
        piece //= 2
    return data


def _append(record: Path, row: dict) -> None:
    is_new = not record.exists()
    record.parent.mkdir(parents=True, exist_ok=True)
    with open(record, "a", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=["all", *TARGETS])
    parser.add_argument("--minutes", type=float, default=10, help="for each target (default 10)")
    parser.add_argument("--record", type=Path, help="CSV file to which a row for each target is appended")
    parser.add_argument("--corpus", type=Path, help="folder where inputs that reach new code are kept between runs")
    arguments = parser.parse_args()
    findings = 0
    with TemporaryDirectory(prefix="labkit-fuzz-") as temporary:
        for name in TARGETS if arguments.target == "all" else [arguments.target]:
            row = fuzz(name, arguments.minutes, (arguments.corpus or Path(temporary)) / name)
            print({key: row[key] for key in ("target", "executions", "edges", "findings", "what")}, flush=True)
            findings += row["findings"]
            if arguments.record:
                _append(arguments.record, row)
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
