"""Try a recommendation: run the script with other loader settings and as it is, in turns, and compare."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from labkit.errors import CannotTry
from labkit.measure.statistics import speedup_interval
from labkit.util.files import ScratchFolder
from labkit.watching.observe import Settings

_PAIRS = 3


@dataclass(frozen=True)
class Tried:
    """What following the advice brought.

    Attributes:
        settings: What was set.
        speedup: Of the steps, as the median of the pairs of runs.
        speedup_low, speedup_high: Its 95 % interval.
        promised_low, promised_high: What the recommendation had said.
        seconds: Per batch, of the runs in their order: `(unchanged, changed)`.
    """

    settings: dict[str, Any]
    speedup: float
    speedup_low: float
    speedup_high: float
    promised_low: float
    promised_high: float
    seconds: list[tuple[float, float]]

    def __repr__(self) -> str:
        names = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return (
            f"With {names} set from outside, training is {self.speedup:.2f}x "
            f"[{self.speedup_low:.2f}, {self.speedup_high:.2f}] as fast; promised were {self.promised_low:.2f}x to "
            f"{self.promised_high:.2f}x."
        )


def try_settings(command: Sequence[str], n_steps: int, say: Any = print) -> Tried:
    """Run the script as it is and with the recommended settings, in turns, for `n_steps` each.

    Every run ends before it saves anything.

    Args:
        command: Script and arguments, with `-m` before them for a module.
        n_steps: Batches of each run.
        say: Called with a line about each run.

    Raises:
        CannotTry: the recommendation is no setting of a loader, or a run failed.
    """
    with ScratchFolder() as folder:
        first = _run(command, n_steps, Settings(), folder / "report.json")
        arguments = _recommended(first)
        changed = Settings(_trained_loaders(first), arguments)
        say(f"labkit watch: as it is {1e3 * _seconds(first):.1f} ms a batch; now with {arguments}")
        pairs = []
        for number in range(_PAIRS):
            after = _run(command, n_steps, changed, folder / "report.json")
            before = first if number == 0 else _run(command, n_steps, Settings(), folder / "report.json")
            pairs.append((_seconds(before), _seconds(after)))
            say(f"labkit watch: {1e3 * pairs[-1][0]:.1f} ms a batch as it is, {1e3 * pairs[-1][1]:.1f} ms changed")
    ratios = np.array([before / after for before, after in pairs])
    low, high = speedup_interval(ratios)
    best = first["recommendation"]
    return Tried(arguments, float(np.median(ratios)), low, high, best["speedup_low"], best["speedup"], pairs)


def _recommended(found: dict[str, Any]) -> dict[str, Any]:
    if arguments := found["recommendation"]["settings"]:
        return arguments
    raise CannotTry(f"no setting of a loader to try: {found['recommendations'][0]}")


def _trained_loaders(found: dict[str, Any]) -> list[int]:
    return [row["made"] for row in found["loaders"] if row["role"].startswith("training") and row["made"] is not None]


def _seconds(found: dict[str, Any]) -> float:
    return found["costs_s"]["together"]


def _run(command: Sequence[str], n_steps: int, settings: Settings, path: Path) -> dict[str, Any]:
    path.unlink(missing_ok=True)
    words = [sys.executable, "-m", "labkit", "watch", "--steps", str(n_steps), "--end", "--json", str(path), *command]
    done = subprocess.run(words, env={**os.environ, **settings.environment()}, capture_output=True, check=False)
    if done.returncode or not path.is_file():
        said = done.stderr.decode(errors="replace").strip().splitlines()[-12:]
        raise CannotTry("\n".join([f"the script ended with status {done.returncode}:", *said]))
    return json.loads(path.read_bytes())
