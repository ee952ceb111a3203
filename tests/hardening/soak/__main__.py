"""Load and soak: what does labkit hold after 200 epochs, and what do a million names and 100,000 samples cost?

    python -m tests.hardening.soak loaders --epochs 200 --record tests/hardening/records/soak.csv.gz
    python -m tests.hardening.soak names --count 1000000 --record tests/hardening/records/load.csv
    python -m tests.hardening.soak samples --count 100000 --record tests/hardening/records/load.csv
    python -m tests.hardening.soak plot tests/hardening/records/soak.csv.gz

Every loader, and every piece of heavy work, runs in a process of its own. `loaders --only NAME` measures some anew and
keeps the other rows. Whatever is made lies in a temporary folder (`TMPDIR` moves it); a million names take 1 GB there.
"""

import argparse
import tempfile
from pathlib import Path

from tests.hardening.soak import names, samples
from tests.hardening.soak.load import record, rows
from tests.hardening.soak.plot import draw
from tests.hardening.soak.record import run_loaders, table

_RECORDS = Path("tests/hardening/records")


def main() -> None:
    arguments = _arguments()
    if arguments.command == "plot":
        draw(arguments.record)
        print(table(arguments.record).to_string(index=False))
        return
    with tempfile.TemporaryDirectory(prefix="labkit-soak-") as folder:
        if arguments.command == "loaders":
            run_loaders(Path(folder), arguments.epochs, arguments.record, arguments.only)
            print(table(arguments.record).to_string(index=False))
        else:
            work = {"names": names, "samples": samples}[arguments.command]
            for row in rows(work, Path(folder), arguments.count):
                record(arguments.record, row)
                print(row, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    loaders = commands.add_parser("loaders")
    loaders.add_argument("--epochs", type=int, default=200)
    loaders.add_argument("--only", nargs="+", metavar="NAME", default=[])
    for name, count in (("names", 1_000_000), ("samples", 100_000)):
        load = commands.add_parser(name)
        load.add_argument("--count", type=int, default=count)
        load.add_argument("--record", type=Path, default=_RECORDS / "load.csv")
    loaders.add_argument("--record", type=Path, default=_RECORDS / "soak.csv.gz")
    commands.add_parser("plot").add_argument("record", type=Path, nargs="?", default=_RECORDS / "soak.csv.gz")
    return parser.parse_args()


if __name__ == "__main__":
    main()
