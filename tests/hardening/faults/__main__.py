"""Inject faults into everything that labkit writes, reads and starts, and judge the results.

    python -m tests.hardening.faults --count 640 --seed 0 --record results/hardening/faults.csv
    python -m tests.hardening.faults --count 20 --only "make_shards.*SIGKILL" --scratch /tmp/faults

The exit status is 1 if a fault had a forbidden result. As root on Linux the harness also fills small disks and removes
permissions, in mounts of its own; otherwise it prints what it leaves out.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pandas as pd

from labkit.util.files import write_atomic
from tests.hardening.faults import bad_server, sandbox
from tests.hardening.faults.judge import LATE, OUTCOMES
from tests.hardening.faults.launch import REPO
from tests.hardening.faults.plan import Injection, iter_injections
from tests.hardening.faults.sources import make_sources
from tests.hardening.faults.trial import Place, Verdict

_MAX_DRAWS = 4  # draws of a moment, if the run ended before the fault
_MAX_MESSAGE = 200  # characters
_FAMILIES = ("server", "source", "thread", "worker")  # one row each in the table


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500, help="number of faults to inject")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="CSV file for the summary, written after each fault")
    parser.add_argument("--only", default="", help="regular expression for 'case / fault'")
    parser.add_argument("--first", type=int, default=0, help="number of the first fault; skip those before it")
    parser.add_argument("--scratch", type=Path, help="working folder (default: a temporary one)")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    rows = []
    with prepare_place(options.scratch) as place:
        for number, injection in enumerate(iter_injections(place, options.count, options.only)):
            if number >= options.first:
                rows.append(_inject(injection, number, options.seed, place))
                if options.record:
                    write_atomic(options.record, summarize_rows(rows).to_csv(index=False).encode())
    print(summarize_rows(rows).to_string(index=False))
    return int(any(row["violated"] for row in rows))


def _inject(injection: Injection, number: int, seed: int, place: Place) -> dict:
    """Inject one fault, print the verdict, and return a row for `summarize_rows`."""
    start = time.monotonic()
    draw = random.Random(f"{seed}:{number}:{injection.case}:{injection.fault}")
    for _ in range(_MAX_DRAWS):
        verdict = injection.run(place, draw=draw)
        if verdict.violations or verdict.outcome != LATE:
            break
    title = f"{number:4d} {time.monotonic() - start:6.2f} s  {injection.case} / {injection.fault}"
    _print_verdict(title, verdict, place)
    return {"fault": injection.fault, "outcome": verdict.outcome, "violated": bool(verdict.violations)}


def _print_verdict(title: str, verdict: Verdict, place: Place) -> None:
    def shorten(text: str) -> str:
        for folder in (place.root, REPO, sys.prefix, sys.base_prefix):
            text = text.replace(f"{folder}/", "")
        return " ".join(text.split())[:_MAX_MESSAGE]

    print(f"{title} at {verdict.moment}: {verdict.outcome}: {shorten(verdict.message)}", flush=True)
    for violation in verdict.violations:
        print(f"      VIOLATION {shorten(violation)}", flush=True)


def summarize_rows(rows: list[dict]) -> pd.DataFrame:
    """Count the outcomes by kind of fault; the last row is the total."""
    frame = pd.DataFrame(rows, columns=["fault", "outcome", "violated"])
    kind = frame["fault"].map(_kind_of)
    counts = pd.crosstab(kind, frame["outcome"]).reindex(columns=list(OUTCOMES), fill_value=0)
    counts.insert(0, "injected", counts.sum(axis=1))
    counts["violations"] = frame["violated"].groupby(kind).sum()
    return pd.concat([counts, counts.sum().to_frame("all").T]).rename_axis("fault").reset_index()


def _kind_of(fault: str) -> str:
    name = fault.removesuffix(" fresh")
    return next((family for family in _FAMILIES if name.startswith(f"{family} ")), name)


@contextmanager
def prepare_place(scratch: Path | None = None) -> Iterator[Place]:
    """Yield a place for trials, with sources and the bad server. Imports everything that forks use."""
    own_mounts = sandbox.make_own_mounts()
    if not own_mounts:
        print("not root, or mounts are not allowed: no full disks, and /dev/shm is shared with other processes")
    _import_all()
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir=scratch))  # a fork that ends would remove a TemporaryDirectory
    try:
        sources = make_sources(folder / "sources")
        with bad_server.run_server(sources) as port:
            yield Place(folder, sources, port, own_mounts)
    finally:
        shutil.rmtree(folder)


def _import_all() -> None:
    for name in (
        "cv2", "nbclient", "s3fs", "scipy.stats", "skimage.data", "torchvision.datasets.utils",
        "torchvision.transforms.v2", "labkit.app.cli", "labkit.app.tour_page", "labkit.app.tour",
        "labkit.data.pixels",
    ):  # fmt: skip
        import_module(name)
    import labkit

    for name in labkit.__all__:
        getattr(labkit, name)


if __name__ == "__main__":
    os.chdir(REPO)
    sys.exit(main())
