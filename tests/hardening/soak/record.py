"""The record of a soak: a row an epoch and loader, and what follows from it, a row a loader."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.core.atomic import write_atomic
from labkit.core.locks import file_lock
from tests.hardening.soak import epochs
from tests.hardening.soak.places import served_places
from tests.hardening.soak.slope import slopes_of, warm_up
from tests.hardening.soak.subjects import SUBJECTS, Places

_FILLED = 3  # epochs, after which what is counted must not change any more


def run_loaders(folder: Path, n_epochs: int, path: Path, only: list[str]) -> None:
    """Soak every subject, or those named, and add their rows to the record."""
    with served_places(folder) as places:
        for name in only or SUBJECTS:
            rows = in_own_process(name, places, n_epochs)
            _add(path, pd.DataFrame(rows, columns=epochs.COLUMNS))
            print(f"{name}: {len(rows)} epochs, right: {all(row['is_right'] for row in rows)}", flush=True)


def in_own_process(name: str, places: Places, n_epochs: int) -> list[dict[str, Any]]:
    """Rows of a subject."""
    about = {"name": name, "root": str(places.root), "url": places.url, "s3": places.s3, "epochs": n_epochs}
    command = [sys.executable, "-m", epochs.__name__, json.dumps(about)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _add(path: Path, new: pd.DataFrame) -> None:
    order = {name: number for number, name in enumerate(SUBJECTS)}
    with file_lock(path.with_name(f".{path.name}.lock")):  # another command may soak other loaders meanwhile
        old = pd.read_csv(path) if path.exists() else new.iloc[:0]
        kept = old[~old["loader"].isin(new["loader"]) & old["loader"].isin(order)]
        frame = pd.concat([kept, new]) if len(kept) else new
        frame = frame.sort_values("loader", key=lambda names: names.map(order), kind="stable")
        data = frame.to_csv(index=False).encode()
        write_atomic(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def table(path: Path) -> pd.DataFrame:
    """A row a loader: the slopes of memory, kB an epoch, with interval and verdict; and what must be equal in each."""
    frame = pd.read_csv(path)
    rows = []
    for name, runs in frame.groupby("loader", sort=False):
        pss, written = slopes_of(runs)
        rows.append({
            "loader": name, "epochs": len(runs), "pss_before": _before(runs), "pss": str(pss),
            "written": str(written),
            "fds": _spread(runs, "fds_main", "fds_children"), "threads": _spread(runs, "threads"),
            "shm": _spread(runs, "shm_files"), "shm_kb": _spread(runs, "shm_kb"), "log": _spread(runs, "log_bytes"),
            "right": runs["is_right"].all(),
            "order": _order(name, runs, frame),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _before(runs: pd.DataFrame) -> str:
    """PSS's slope in the epochs before those that are judged, the first ones left out: a leak's is the same."""
    early = runs[runs["epoch"] < warm_up(runs["epoch"])]
    return str(slopes_of(early)[0]).rpartition(" ")[0] if len(early) >= 200 else ""


def _spread(runs: pd.DataFrame, *columns: str) -> str:
    """The number, and between which it moved."""
    after = runs.loc[runs["epoch"] >= _FILLED, list(columns)].sum(axis=1)
    return str(after.min()) if after.min() == after.max() else f"{after.min()} to {after.max()}"


def _order(name: str, runs: pd.DataFrame, frame: pd.DataFrame) -> str:
    """Whether epochs differ from one another, and not from those of the loaders that must give the same."""
    subject, sums = SUBJECTS[name], runs.set_index("epoch")["crc32"]
    if sums.nunique() != (1 if subject.repeats else len(sums)):
        return "epochs repeat" if not subject.repeats else "epochs differ"
    same = [other for other, its in SUBJECTS.items() if its.order_of == subject.order_of and subject.order_of]
    others = frame[frame["loader"].isin(same)]
    return "right" if (others.groupby("epoch")["crc32"].nunique() == 1).all() else "differs from its like"
