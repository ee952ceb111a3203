"""Writing the small tables of runs by hand, in results/hardening."""

from pathlib import Path

import pandas as pd

from labkit.util.files import file_lock, write_atomic

RECORDS = Path("results") / "hardening"


def update_table(path: Path, rows: list[dict]) -> None:
    """Write rows to a CSV table. A row replaces the old one with the same value in the first column."""
    new = pd.DataFrame(rows)
    key = new.columns[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_name(f".{path.name}.lock")):  # another command may update the same table
        if path.exists():
            old = pd.read_csv(path)
            order = list(dict.fromkeys([*old[key], *new[key]]))
            new = pd.concat([old[~old[key].isin(new[key])], new]).set_index(key).loc[order].reset_index()
        write_atomic(path, new.round(3).to_csv(index=False).encode())
