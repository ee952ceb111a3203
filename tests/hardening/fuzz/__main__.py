"""Coverage-guided fuzzing (atheris) of everything in labkit that reads bytes from outside.

    python -m tests.hardening.fuzz all --minutes 10
    python -m tests.hardening.fuzz tar_index --minutes 1 --corpus /tmp/corpus
    python -m tests.hardening.fuzz tar_index --replay FILE

Each target runs in its own process, with limits on memory and on the time of an input; a native crash may kill it. The
coverage of labkit's modules and of the Python parsers below them guides the search. Native decoders are not
instrumented: only their crashes are seen. A target ends with its time or with its first finding, which is kept in
`tests/hardening/fuzz/found/<target>/`: tests/hardening/test_fuzz.py runs it again.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.hardening.fuzz.oracle import FOUND, TARGETS, bounded_memory, load

_LIMITS = ["-timeout=20", "-rss_limit_mb=4096", "-max_len=65536", "-print_final_stats=1", "-close_fd_mask=3"]


def fuzz(name: str, minutes: float, corpus: Path) -> dict:
    """Run a target in a process of its own; returns what is printed of it."""
    corpus.mkdir(parents=True, exist_ok=True)
    (FOUND / name).mkdir(parents=True, exist_ok=True)
    before, start = set((FOUND / name).iterdir()), time.monotonic()
    command = [sys.executable, "-m", "tests.hardening.fuzz", name, "--minutes", str(minutes), "--corpus", str(corpus)]
    with TemporaryDirectory(prefix="labkit-fuzz-") as home:
        child = subprocess.run(
            [*command, "--here"], env={**os.environ, "LABKIT_HOME": home}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=60 * minutes + 300, check=False,
        )  # fmt: skip
    found = set((FOUND / name).iterdir()) - before
    counts = [int(number) for number in re.findall(r"^#(\d+)\s", child.stdout, re.MULTILINE)]
    if not found and (child.returncode or not counts):
        raise RuntimeError(f"{name} ended with {child.returncode}:\n{child.stdout[-3000:]}")
    for path in found:
        print(f"{name}: {path}", flush=True)
    edges = max(map(int, re.findall(r"cov: (\d+)", child.stdout)), default=0)
    return {
        "target": name, "minutes": (time.monotonic() - start) / 60, "executions": max(counts, default=0),
        "edges": edges, "findings": len(found),
    }  # fmt: skip


def fuzz_here(name: str, minutes: float, corpus: Path) -> None:
    """Search in this process."""
    import atheris

    modules = ["labkit", *TARGETS[name][1:]]
    for loaded in list(sys.modules):  # what is imported already would not be instrumented, and would know old classes
        if any(loaded == module or loaded.startswith(f"{module}.") for module in modules):
            del sys.modules[loaded]
    with atheris.instrument_imports(include=modules):
        target = load(name)
        for number, data in enumerate(target.seeds().values()):
            (corpus / f"seed-{number:03d}").write_bytes(data)
            with contextlib.suppress(Exception):  # what is loaded on first use is no memory of an input's
                target(data)
    with bounded_memory():
        options = [*_LIMITS, f"-max_total_time={int(60 * minutes)}", f"-artifact_prefix={FOUND / name}/"]
        atheris.Setup([sys.argv[0], *options, str(corpus)], target)
        atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=["all", *TARGETS])
    parser.add_argument("--minutes", type=float, default=10, help="for each target (default 10)")
    parser.add_argument("--corpus", type=Path, help="folder that keeps inputs which reach new code")
    parser.add_argument("--replay", type=Path, help="run one input, without atheris")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        fuzz_here(options.target, options.minutes, options.corpus)
    if options.replay:
        target = load(options.target)
        with bounded_memory():
            target(options.replay.read_bytes())
    if options.here or options.replay:
        return 0
    rows = []
    with TemporaryDirectory(prefix="labkit-fuzz-") as temporary:
        for name in TARGETS if options.target == "all" else [options.target]:
            rows.append(fuzz(name, options.minutes, (options.corpus or Path(temporary)) / name))
            print(rows[-1], flush=True)
    return int(any(row["findings"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
