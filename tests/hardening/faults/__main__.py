"""Inject faults into everything that labkit writes, reads and starts, and judge what happened.

    python -m tests.hardening.faults --count 500 --seed 0 --record tests/hardening/records/faults.csv
    python -m tests.hardening.faults --count 20 --only "make_shards.*SIGKILL" --scratch /tmp/faults

A record that is there is gone on with. Exit status 1 where a fault had a result that it must not have. As root on
Linux it also fills small disks and takes permissions away, in mounts of its own; else it says what it leaves out.
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
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.hardening.faults import bad_server, sandbox
from tests.hardening.faults.launch import REPO
from tests.hardening.faults.plan import Injection, drawn
from tests.hardening.faults.record import LATE, add_row, read_rows, table
from tests.hardening.faults.sources import make_sources
from tests.hardening.faults.trial import Place, Verdict

_DRAWS = 4  # of a moment, where a run came to its end before it
_SHOWN = 200  # characters of a message


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500, help="faults to inject")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="CSV file; a rerun goes on with it")
    parser.add_argument("--only", default="", help="regular expression: 'case / fault'")
    parser.add_argument("--part", default="0/1", help="1/2: every second fault, beside a process that does the others")
    parser.add_argument("--now", default="", help="as --only, of the faults that are due: leave the others for later")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which to stop, and to be run again")
    parser.add_argument("--scratch", type=Path, help="folder to work in (default: a temporary one)")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and its children, ignore it
    part, parts = map(int, given.part.split("/"))
    rows, started = [], time.monotonic()
    with places(given.scratch) as place:
        for number, pair in enumerate(drawn(place, given.count, partial(_is_named, given.only))):
            done = {int(row["number"]) for row in read_rows(given.record)} if given.record else set()
            if number in done or number % parts != part or not _is_named(given.now, pair):
                continue
            if time.monotonic() - started > given.limit:
                break
            rows.append(_injected(pair, number, given.seed, place))
            if given.record:
                add_row(given.record, rows[-1])
    if given.record:
        rows = read_rows(given.record)
    print(table(rows))
    return int(any(row["violations"] for row in rows))


def _is_named(pattern: str, pair: Injection) -> bool:
    return re.search(pattern, f"{pair.case} / {pair.fault}") is not None


def _injected(pair: Injection, number: int, seed: int, place: Place) -> dict[str, str]:
    """The row of one fault; says what came of it."""
    began = time.monotonic()
    draw = random.Random(f"{seed}:{number}:{pair.case}:{pair.fault}")
    for _ in range(_DRAWS):
        verdict = pair.run(place, draw=draw)
        if verdict.violations or verdict.outcome != LATE:
            break
    seconds = time.monotonic() - began
    print(
        f"{number:4d} {seconds:6.2f} s  {pair.case} / {pair.fault} at {verdict.moment}: {verdict.outcome}", flush=True
    )
    for violation in verdict.violations:
        print(f"      VIOLATION {violation}", flush=True)
    row = {"number": str(number), "seed": str(seed), "case": pair.case, "fault": pair.fault}
    return row | _row(verdict, seconds, place)


def _row(verdict: Verdict, seconds: float, place: Place) -> dict:
    def shown(text: str) -> str:
        plain = text
        for folder in (place.root, REPO, sys.prefix, sys.base_prefix):
            plain = plain.replace(f"{folder}/", "")
        return re.sub(r"\b0x[0-9a-f]+|:\d{4,5}\b", "*", " ".join(plain.split()))[:_SHOWN]

    return {
        "moment": verdict.moment, "outcome": verdict.outcome, "seconds": f"{seconds:.2f}",
        "message": shown(verdict.message), "violations": " | ".join(map(shown, verdict.violations)),
    }  # fmt: skip


@contextmanager
def places(scratch: Path | None = None) -> Iterator[Place]:
    """A place to run trials in, with sources and the server; everything is imported that a fork shall have."""
    own = sandbox.own_mounts()
    if not own:
        print("not root, or mounts are not allowed: no full disks, and /dev/shm is shared with others")
    _import_all()
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir=scratch))  # TemporaryDirectory's would go with a fork's end
    try:
        sources = make_sources(folder / "sources")
        with bad_server.serving(sources) as port:
            yield Place(folder, sources, port, own)
    finally:
        shutil.rmtree(folder)


def _import_all() -> None:
    import cv2  # noqa: F401
    import nbclient  # noqa: F401
    import s3fs  # noqa: F401
    import scipy.stats  # noqa: F401
    import skimage.data  # noqa: F401
    import torchvision.datasets.utils
    import torchvision.transforms.v2  # noqa: F401

    import labkit

    for name in labkit.__all__:
        getattr(labkit, name)
    from labkit import cli, report, tour  # noqa: F401
    from labkit.data import download, pixel_build  # noqa: F401


if __name__ == "__main__":
    os.chdir(REPO)
    sys.exit(main())
