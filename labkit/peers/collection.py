"""One CSV of comparisons: several classes, several machines, each run whole."""

import os
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from labkit.core import NOTEBOOK_FOLDER, name_run
from labkit.measure import MEASURE_VERSION, load_frame, save_frame

STORED = "13_peers.csv"  # beside the notebook


def append_runs(frame: pd.DataFrame, path: str | os.PathLike) -> pd.DataFrame:
    """Add a comparison to a CSV, which is created if it is not there.

    A run of the same class on the same machine replaces the one before. Runs of other machines stay beside it:
    nothing is compared across machines, since `lk.summarize` refuses that.

    Args:
        frame: Runs of one comparison, as `compare_peers` returns them.
        path: The CSV.

    Returns:
        The whole collection, with the columns `run`, which names each comparison, and `measure`, the version of what
        its figures mean.

    Raises:
        ValueError: the file holds something else, or figures of another meaning; names it and the remedy.
    """
    path, added = Path(path), frame.assign(run=name_run(), measure=MEASURE_VERSION)
    if path.exists():
        stored = read_collection(path)
        same = [stored[name] == added[name].iloc[0] for name in ("env_id", "peer_class")]
        added = pd.concat([stored[~(same[0] & same[1])], added], ignore_index=True)
    save_frame(added, path)
    return added


def read_collection(path: str | os.PathLike) -> pd.DataFrame:
    """Read a collection; errors as for `append_runs`."""
    stored = load_frame(path)
    if not {"run", "measure", "peer_class"} <= set(stored):
        raise ValueError(f"{path} is no collection of peers' runs: name another file, which will be created")
    if (stored["measure"] != MEASURE_VERSION).any():
        raise ValueError(
            f"{path} holds figures of measure {sorted(set(stored['measure']))}, and this version writes "
            f"{MEASURE_VERSION}: name another file, or run all classes again"
        )
    return stored


def stored_runs() -> pd.DataFrame:
    """The collection that is stored beside notebook 13: every class, on the machine of the stored notebooks.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: its figures have another meaning than this version's.

    Taught in: notebooks/13_peers.ipynb
    """
    return read_collection(NOTEBOOK_FOLDER / STORED)


def comparisons(collection: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Machine (`env_id`), class and runs of each comparison in a collection, in their order."""
    for (machine, name), runs in collection.groupby(["env_id", "peer_class"], sort=False):
        yield str(machine), str(name), runs
