"""Coverage-guided fuzzing (atheris) of everything in labkit that reads bytes from outside.

    python -m tests.hardening.fuzz all --minutes 10 --record results/hardening/fuzz.csv
    python -m tests.hardening.fuzz tar_index --minutes 1 --corpus /tmp/corpus

Each target runs in its own process, with limits on memory and on the time of an input; a native crash may kill it. The
coverage of labkit's modules and of the Python parsers below them guides the search. Native decoders are not
instrumented: only their crashes are seen. Inputs that fail are made small and kept in
`tests/hardening/fuzz/found/<target>/`, where tests/hardening/test_fuzz.py runs them again.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.hardening.fuzz.registry import TARGETS
from tests.hardening.tables import update_table

FOUND = Path(__file__).with_name("found")
_INPUT_LIMIT_S, _RSS_MB, _MAX_BYTES = 20, 4096, 1 << 16
_MAX_REPEATS = 3  # a finding that comes this often ends the run: it hides what lies behind it
_MINIMIZE_S = 60


def fuzz(name: str, minutes: float, corpus: Path) -> dict:
    """Run a target for so long, however often its process dies; returns a row for the table."""
    end, lines, found = time.monotonic() + 60 * minutes, [], []
    row = {"target": name, "minutes": 0, "executions": 0, "edges": 0, "features": 0, "peak_rss_mb": 0}
    corpus.mkdir(parents=True, exist_ok=True)
    while (left := int(end - time.monotonic())) > 0 and not _has_repeats(found):
        with TemporaryDirectory(prefix="labkit-fuzz-") as folder:
            lines = _run(name, left, corpus, Path(folder))
            _add_counts(row, lines)
            artifacts = sorted(path for path in Path(folder).glob("*-*") if path.is_file())
            found += [_keep(name, path) for path in artifacts]
        if not artifacts:
            break
    if not row["executions"]:
        raise RuntimeError(f"{name} did not run:\n" + "\n".join(lines[-30:]))
    return row | {"minutes": minutes - (end - time.monotonic()) / 60, "findings": len(set(found))}


def _has_repeats(found: list[str]) -> bool:
    return any(found.count(what) >= _MAX_REPEATS for what in found)


def _run(name: str, seconds: int, corpus: Path, folder: Path) -> list[str]:
    """Run the child until it ends; returns the last lines of its output."""
    options = {
        "max_total_time": seconds, "timeout": _INPUT_LIMIT_S, "rss_limit_mb": _RSS_MB, "max_len": _MAX_BYTES,
        "artifact_prefix": f"{folder}/", "print_final_stats": 1, "close_fd_mask": 3,
    }  # fmt: skip
    command = [*_child_command(name), *(f"-{key}={value}" for key, value in options.items())]
    (folder / "files").mkdir()
    environment = {**os.environ, "LABKIT_FUZZ_CORPUS": str(corpus), "LABKIT_HOME": f"{folder}/files"}
    with open(folder / "log", "w+b") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            process.wait(seconds + 10 * _INPUT_LIMIT_S)
        finally:
            process.kill()
        log.seek(max(0, log.seek(0, os.SEEK_END) - 200_000))
        lines = log.read().decode(errors="replace").splitlines()
    if process.returncode and not list(folder.glob("*-*")):
        print(f"{name}: ended with {process.returncode}", *lines[-10:], sep="\n", file=sys.stderr)
    return lines


def _child_command(name: str) -> list[str]:
    return [sys.executable, "-m", "tests.hardening.fuzz.child", name]


def _add_counts(row: dict, lines: list[str]) -> None:
    """Add what libFuzzer printed in one run of the child."""
    text = "\n".join(lines)
    counts = [int(number) for number in re.findall(r"^#(\d+)\s", text, re.MULTILINE)]
    row["executions"] += max(counts, default=0)
    for column, word in {"edges": "cov", "features": "ft"}.items():
        row[column] = max([row[column], *map(int, re.findall(rf"{word}: (\d+)", text))])
    row["peak_rss_mb"] = max([row["peak_rss_mb"], *map(int, re.findall(r"peak_rss_mb: +(\d+)", text))])


def _keep(name: str, artifact: Path) -> str:
    """Minimize an input and put it with the found ones; returns what it does."""
    what, data = _run_input(name, artifact.read_bytes()), artifact.read_bytes()
    if what == "nothing, alone":
        what = f"{what} ({artifact.name.partition('-')[0]})"
    else:
        data = _minimize(name, data, what)
    kept = FOUND / name / hashlib.sha256(data).hexdigest()[:12]
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(data)
    print(f"{name}: {what}: {kept}", flush=True)
    return what


def _run_input(name: str, data: bytes) -> str:
    """Run an input in its own process; returns the error and its place, or the signal."""
    with TemporaryDirectory(prefix="labkit-fuzz-") as folder:
        path = Path(folder) / "input"
        path.write_bytes(data)
        command = [*_child_command(name), "--replay", str(path)]
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


def _minimize(name: str, data: bytes, what: str) -> bytes:
    """Leave out ever smaller pieces of `data` as long as a process ends on it in the same way."""
    end, piece = time.monotonic() + _MINIMIZE_S, len(data) // 2
    while piece and time.monotonic() < end:
        at = 0
        while at < len(data) and time.monotonic() < end:
            smaller = data[:at] + data[at + piece :]
            if _run_input(name, smaller) == what:
                data = smaller
            else:
                at += piece
        piece //= 2
    return data


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=["all", *TARGETS])
    parser.add_argument("--minutes", type=float, default=10, help="for each target (default 10)")
    parser.add_argument("--record", type=Path, help="CSV file with a row for each target")
    parser.add_argument("--corpus", type=Path, help="folder that keeps inputs which reach new code")
    arguments = parser.parse_args()
    findings = 0
    with TemporaryDirectory(prefix="labkit-fuzz-") as temporary:
        for name in TARGETS if arguments.target == "all" else [arguments.target]:
            row = fuzz(name, arguments.minutes, (arguments.corpus or Path(temporary)) / name)
            print(row, flush=True)
            findings += row["findings"]
            if arguments.record:
                update_table(arguments.record, [row])
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
