"""Inject faults into the commands that write, and judge the results.

    python -m tests.hardening.faults --count 640 --seed 0
    python -m tests.hardening.faults --count 20 --only "make_shards.*SIGKILL" --scratch /tmp/faults

The exit status is 1 if a fault had a forbidden result.
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
from collections import Counter
from itertools import cycle, islice
from pathlib import Path

import labkit as lk
from tests.children import in_children
from tests.hardening.faults.commands import COMMANDS, LATE, Command, Place, disturb, make_own_shm, make_sources
from tests.paths import REPO

_MAX_DRAWS = 4  # draws of a moment, if the run ended before the fault

Injection = tuple[Command, str]  # with its fault


def make_plan(pattern: str) -> list[Injection]:
    """All faults in all commands, in an order of which any part has all kinds."""
    plan = [(command, fault) for command in COMMANDS for fault in command.faults]
    random.Random(0).shuffle(plan)
    return [(command, fault) for command, fault in plan if re.search(pattern, f"{command.name} / {fault}")]


def inject(injection: Injection, number: int, seed: int, place: Place) -> tuple[str, bool]:
    """Inject one fault and print the verdict; returns the outcome, and whether it is forbidden."""
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
    return verdict.outcome, bool(verdict.violations)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500, help="number of faults to inject, round after round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="regular expression for 'command / fault'")
    parser.add_argument("--scratch", type=Path, help="working folder (default: a temporary one)")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    make_own_shm()
    for name in lk.__all__:  # loaded once, for all forks
        getattr(lk, name)
    root, verdicts = Path(tempfile.mkdtemp(prefix="faults-", dir=options.scratch)), []
    try:
        [sources] = in_children("fork", make_sources, (root / "sources",))  # so that forks inherit no threads
        place = Place(root, sources)
        plan = make_plan(options.only)
        for number, injection in enumerate(islice(cycle(plan), options.count)):
            verdicts.append(inject(injection, number, options.seed, place))
    finally:
        shutil.rmtree(root)
    print(dict(Counter(outcome for outcome, _ in verdicts)))
    return int(any(is_forbidden for _, is_forbidden in verdicts))


if __name__ == "__main__":
    os.chdir(REPO)
    sys.exit(main())
