"""Inject faults into the commands that write, and judge the results.

    python -m tests.hardening.faults --count 640 --seed 0 --record results/hardening/faults.csv
    python -m tests.hardening.faults --count 20 --only "make_shards.*SIGKILL" --scratch /tmp/faults

The exit status is 1 if a fault had a forbidden result. As root on Linux the harness also fills small disks, in
mounts of its own; otherwise it prints what it leaves out.
"""

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

import pandas as pd

import labkit as lk
from labkit.util.files import write_atomic
from tests.children import in_children
from tests.hardening.faults.commands import (
    COMMANDS,
    LATE,
    OUTCOMES,
    Command,
    Place,
    disturb,
    make_own_mounts,
    make_sources,
)  # fmt: skip
from tests.paths import REPO

_MAX_DRAWS = 4  # draws of a moment, if the run ended before the fault

Injection = tuple[Command, str]  # with its fault


def make_plan(pattern: str, has_own_mounts: bool) -> list[Injection]:
    """All faults in all commands, in an order of which any part has all kinds."""
    plan = [
        (command, fault) for command in COMMANDS for fault in command.faults if fault != "full disk" or has_own_mounts
    ]
    random.Random(0).shuffle(plan)
    return [(command, fault) for command, fault in plan if re.search(pattern, f"{command.name} / {fault}")]


def inject(injection: Injection, number: int, seed: int, place: Place) -> dict:
    """Inject one fault, print the verdict, and return a row for `summarize`."""
    command, fault = injection
    start, draw = time.monotonic(), random.Random(f"{seed}:{number}:{command.name}:{fault}")
    for _ in range(_MAX_DRAWS):
        verdict = disturb(place, draw, command, fault)
        if verdict.violations or verdict.outcome != LATE:
            break

    def shorten(text: str) -> str:
        return " ".join(text.replace(f"{place.root}/", "").replace(f"{REPO}/", "").split())[:200]

    title = f"{number:4d} {time.monotonic() - start:6.2f} s  {command.name} / {fault} at {verdict.moment}"
    print(f"{title}: {verdict.outcome}: {shorten(verdict.message)}", flush=True)
    for violation in verdict.violations:
        print(f"      VIOLATION {shorten(violation)}", flush=True)
    return {"fault": fault, "outcome": verdict.outcome, "violated": bool(verdict.violations)}


def summarize(rows: list[dict]) -> pd.DataFrame:
    """Count the outcomes by kind of fault; the last row is the total."""
    frame = pd.DataFrame(rows, columns=["fault", "outcome", "violated"])
    counts = pd.crosstab(frame["fault"], frame["outcome"]).reindex(columns=list(OUTCOMES), fill_value=0)
    counts.insert(0, "injected", counts.sum(axis=1))
    counts["violations"] = frame["violated"].groupby(frame["fault"]).sum()
    return pd.concat([counts, counts.sum().to_frame("all").T]).rename_axis("fault").reset_index()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500, help="number of faults to inject, round after round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="CSV file for the summary, written after each fault")
    parser.add_argument("--only", default="", help="regular expression for 'command / fault'")
    parser.add_argument("--scratch", type=Path, help="working folder (default: a temporary one)")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    has_own_mounts = make_own_mounts()
    if not has_own_mounts:
        print("not root, or mounts are not allowed: no full disks, and /dev/shm is shared with other processes")
    for name in lk.__all__:  # loaded once, for all forks
        getattr(lk, name)
    root, rows = Path(tempfile.mkdtemp(prefix="faults-", dir=options.scratch)), []
    try:
        [sources] = in_children("fork", make_sources, (root / "sources",))  # so that forks inherit no threads
        place = Place(root, sources)
        plan = make_plan(options.only, has_own_mounts)
        for number, injection in enumerate(islice(cycle(plan), options.count)):
            rows.append(inject(injection, number, options.seed, place))
            if options.record:
                write_atomic(options.record, summarize(rows).to_csv(index=False).encode())
    finally:
        shutil.rmtree(root)
    print(summarize(rows).to_string(index=False))
    return int(any(row["violated"] for row in rows))


if __name__ == "__main__":
    os.chdir(REPO)
    sys.exit(main())
