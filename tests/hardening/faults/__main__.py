"""Inject faults into all that labkit writes and reads, and judge the results.

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
from collections.abc import Callable
from functools import partial
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
    Place,
    Verdict,
    disturb,
    make_own_mounts,
    make_sources,
)  # fmt: skip
from tests.hardening.faults.drills import DRILLS, run_drill
from tests.hardening.faults.server import run_server
from tests.paths import REPO

_MAX_DRAWS = 4  # draws of a moment, if the run ended before the fault
_FAMILIES = ("server", "source")  # one row each in the table

Injection = tuple[str, str, Callable[[Place, random.Random], Verdict]]  # a case, its fault, and what runs both


def make_plan(pattern: str, has_own_mounts: bool) -> list[Injection]:
    """All faults in all that is tried, in an order of which any part has all kinds."""
    plan: list[Injection] = [
        (command.name, fault, partial(disturb, command=command, fault=fault))
        for command in COMMANDS
        for fault in command.faults
        if fault != "full disk" or has_own_mounts
    ]
    plan += [(case, fault, partial(run_drill, drill=drill)) for case, fault, drill in DRILLS]
    random.Random(0).shuffle(plan)
    return [injection for injection in plan if re.search(pattern, f"{injection[0]} / {injection[1]}")]


def inject(injection: Injection, number: int, seed: int, place: Place) -> dict:
    """Inject one fault, print the verdict, and return a row for `summarize`."""
    case, fault, run = injection
    start, draw = time.monotonic(), random.Random(f"{seed}:{number}:{case}:{fault}")
    for _ in range(_MAX_DRAWS):
        verdict = run(place, draw)
        if verdict.violations or verdict.outcome != LATE:
            break

    def shorten(text: str) -> str:
        return " ".join(text.replace(f"{place.root}/", "").replace(f"{REPO}/", "").split())[:200]

    title = f"{number:4d} {time.monotonic() - start:6.2f} s  {case} / {fault} at {verdict.moment}"
    print(f"{title}: {verdict.outcome}: {shorten(verdict.message)}", flush=True)
    for violation in verdict.violations:
        print(f"      VIOLATION {shorten(violation)}", flush=True)
    return {"fault": fault, "outcome": verdict.outcome, "violated": bool(verdict.violations)}


def summarize(rows: list[dict]) -> pd.DataFrame:
    """Count the outcomes by kind of fault; the last row is the total."""
    frame = pd.DataFrame(rows, columns=["fault", "outcome", "violated"])
    kind = frame["fault"].map(lambda fault: next((each for each in _FAMILIES if fault.startswith(f"{each} ")), fault))
    counts = pd.crosstab(kind, frame["outcome"]).reindex(columns=list(OUTCOMES), fill_value=0)
    counts.insert(0, "injected", counts.sum(axis=1))
    counts["violations"] = frame["violated"].groupby(kind).sum()
    return pd.concat([counts, counts.sum().to_frame("all").T]).rename_axis("fault").reset_index()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500, help="number of faults to inject, round after round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="CSV file for the summary, written after each fault")
    parser.add_argument("--only", default="", help="regular expression for 'case / fault'")
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
        with run_server(sources) as server:
            place = Place(root, sources, server)
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
