"""Stored runs of machines with a CUDA GPU, for readers without one: `<env_id>.csv` (runs) and `.json` (machine).

`python -m labkit reference` on such a machine adds its two files.
"""

import json
from pathlib import Path

import pandas as pd

FOLDER = Path(__file__).resolve().parent
COMMAND = "python -m labkit reference"


def reference_runs(experiment: str, folder: Path = FOLDER) -> dict[str, pd.DataFrame]:
    """Stored runs of one experiment: name of the machine's GPU -> frame, as `compare` returns it.

    A rehearsal on a CPU has the CPU's name; a second machine with the same GPU has its file's name added.

    Raises:
        ValueError: a stored file is damaged; names it.
    """
    from labkit.measure import load_frame

    found = {}
    for path in sorted(folder.glob("*.csv")):
        frame = load_frame(path)
        runs = frame[frame["experiment"] == experiment].reset_index(drop=True)
        if len(runs):
            machine = _read_machine(path.with_suffix(".json"))
            found[machine if machine not in found else f"{machine} ({path.stem})"] = runs
    return found


def show_reference(*experiments: str, folder: Path = FOLDER) -> None:
    """Plot stored runs, one picture per experiment and machine; if there are none, print once how to record them."""
    from labkit.measure import plot_speedup

    missing = []
    for experiment in experiments:
        found = reference_runs(experiment, folder)
        for machine, runs in found.items():
            plot_speedup(runs, about=f"{experiment}: reference run on {machine}")
        missing += [] if found else [f"'{experiment}'"]
    if missing:
        print(
            f"No reference run of {', '.join(missing)} is stored: nobody has recorded one on a CUDA machine yet.\n"
            f"`{COMMAND}` does, on a machine with a CUDA GPU."
        )


def _read_machine(path: Path) -> str:
    try:
        environment = json.loads(path.read_text())["environment"]
        return environment["gpu"] or environment["cpu"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not name the machine of its runs: record them again with `{COMMAND}`") from error
