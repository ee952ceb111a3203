"""Soak every loader for hundreds of epochs; and load: a million names, 100,000 samples.

    python -m tests.hardening.soak loaders --epochs 400 --record tests/hardening/records/soak.csv
    python -m tests.hardening.soak names --count 1000000 --record tests/hardening/records/load.csv
    python -m tests.hardening.soak samples --count 100000 --record tests/hardening/records/load.csv

Every loader and every piece of work runs in its own process. `loaders --only NAME` replaces some rows. Files are made
in a temporary folder (`TMPDIR` moves it); a million names take 1 GB there.
"""

import argparse
import tempfile
from pathlib import Path

from tests.hardening.soak import names, samples
from tests.hardening.soak.epochs import soak_loaders
from tests.hardening.soak.load import run_cases
from tests.hardening.soak.subjects import SUBJECTS
from tests.hardening.tables import RECORDS, update_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    loaders = commands.add_parser("loaders")
    loaders.add_argument("--epochs", type=int, default=200)
    loaders.add_argument("--only", nargs="+", metavar="NAME", default=list(SUBJECTS))
    loaders.add_argument("--record", type=Path, default=RECORDS / "soak.csv")
    for name, count in (("names", 1_000_000), ("samples", 100_000)):
        load = commands.add_parser(name)
        load.add_argument("--count", type=int, default=count)
        load.add_argument("--record", type=Path, default=RECORDS / "load.csv")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="labkit-soak-") as folder:
        if options.command == "loaders":
            rows = soak_loaders(Path(folder), options.epochs, options.only)
        else:
            rows = run_cases({"names": names, "samples": samples}[options.command], Path(folder), options.count)
        for row in rows:
            print(row, flush=True)
            update_table(options.record, [row])


if __name__ == "__main__":
    main()
