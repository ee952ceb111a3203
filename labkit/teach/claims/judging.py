"""claims(): what the write-ups claim, held against the runs of this machine."""

import os
from collections.abc import Iterable
from math import isnan, nan
from typing import Any

import pandas as pd

from labkit.teach.claims.frames import Frames, read_folder
from labkit.teach.claims.ledger import LEDGER
from labkit.teach.claims.rows import Claim, Test
from labkit.teach.claims.verdicts import CONDITION, FAILS, HOLDS, MISSING, NEEDS_GPU, Reading, outcome, together

_RESTS_ON = {CONDITION: HOLDS}  # which outcome a verdict takes its measured figure from; else its own


def claims(results: str | os.PathLike | None = None, *, runs: Iterable[pd.DataFrame] = ()) -> pd.DataFrame:
    """The ledger: each claim, its figure, what this machine's runs say, and a verdict.

    Nothing is timed here. Runs come from the frames that the notebooks have recorded; what needs no clock is tried on
    the spot, once.

    Args:
        results: Folder of a tour's results; default: where a running tour collects, else `results` here or in the
            clone, and no runs where there is none.
        runs: Frames measured just now; they replace stored runs of the same experiment.

    Returns:
        One row a claim: `id`, `claim`, `figure` (the write-up's), `claimed` (the ratio in it), `notebook` and
        `experiment` that test it, `measured` ratio with `ci_low` and `ci_high` (95 %), `n_runs`, `verdict`,
        `condition` (where it holds), `because` (every test in words, a line each), `scale` and `device` of the runs.
        A claim may have more than one test: `measured` is the first that the verdict rests on, and `attrs["tests"]`
        holds them all, a dict each.

        Verdicts: `holds`, `holds under a condition`, `does not hold`, `inconclusive` (the interval, or what the runs
        are, does not allow one), `needs a GPU`, `not measured yet`.

    Raises:
        FileNotFoundError: `results` holds no frames of this machine.
        ValueError: a file there is no frame, or runs come from another machine.

    Taught in: notebooks/14_claims.ipynb
    """
    return judged([*read_folder(results), *runs])


def judged(runs: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """The table of `claims`, from these runs alone."""
    frames = Frames(runs)
    rows = [_judge(claim, frames) for claim in LEDGER]
    table = pd.DataFrame([row for row, _ in rows])
    table.attrs["tests"] = [test for _, tests in rows for test in tests]
    return table


def _judge(claim: Claim, frames: Frames) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The claim's row, and its tests' rows."""
    tests = [_tested(claim, test, frames) for test in claim.tests]
    verdict = together([test["outcome"] for test in tests])
    rests_on = next(test for test in tests if test["outcome"] == _RESTS_ON.get(verdict, verdict))
    held = [test["setting"] for test in tests if test["outcome"] == HOLDS]
    row = {
        "id": claim.id, "claim": claim.text, "figure": claim.figure, "claimed": rests_on["claimed"],
        **{name: rests_on[name] for name in _SHARED},
        "verdict": verdict,
        "condition": "; ".join(held) if verdict == CONDITION else "",
        "because": _because(claim, tests, frames),
        "scale": rests_on["scale"], "device": rests_on["device"],
    }  # fmt: skip
    return row, tests


_SHARED = ("notebook", "experiment", "measured", "ci_low", "ci_high", "n_runs")


def _tested(claim: Claim, test: Test, frames: Frames) -> dict[str, Any]:
    reading = test.read(frames)
    found = reading or Reading()
    return {
        "id": claim.id, "setting": test.setting, "notebook": test.notebook, "experiment": found.experiment,
        "claimed": nan if claim.claimed is None else claim.claimed,
        "measured": found.ratio, "ci_low": found.low, "ci_high": found.high, "n_runs": found.n_runs,
        "outcome": outcome(reading, test.rule, claim.claimed, needs_gpu=test.needs_gpu),
        "seen": str(found), "doubt": found.doubt, "scale": found.scale, "device": found.device,
    }  # fmt: skip


def _because(claim: Claim, tests: list[dict[str, Any]], frames: Frames) -> str:
    """A line for each test, then what is beside the claim, what is missing, and what has to be known."""
    lines = [_in_words(test) for test in tests if test["outcome"] not in (MISSING, NEEDS_GPU)]
    if any(test["outcome"] == NEEDS_GPU for test in tests):
        lines.append("No runs on a CUDA device, here or stored: `python -m labkit reference` records them.")
    asides = [(test.setting, test.read(frames)) for test in claim.asides]
    lines += [f"Beside the claim, {setting}: {reading}." for setting, reading in asides if reading]
    lines += _missing([test for test in tests if test["outcome"] == MISSING])
    return "\n".join([*lines, *([claim.note] if claim.note else [])])


def _in_words(test: dict[str, Any]) -> str:
    why = f" ({test['doubt']})" if test["doubt"] else _gap(test)
    return f"{test['setting'][0].upper()}{test['setting'][1:]}: {test['seen']}: {test['outcome']}{why}."


def _gap(test: dict[str, Any]) -> str:
    """A direction that is right although the figure is not."""
    short = test["outcome"] == FAILS and not isnan(test["claimed"]) and test["claimed"] > 1 and test["ci_low"] > 1
    return ", though the direction does" if short else ""


def _missing(tests: list[dict[str, Any]]) -> list[str]:
    """One line a notebook: what it would measure."""
    settings: dict[str, list[str]] = {}
    for test in tests:
        settings.setdefault(test["notebook"], []).append(test["setting"])
    return [
        f"Not measured yet: {'; '.join(some)}: `python -m labkit tour --only {notebook}`."
        for notebook, some in settings.items()
    ]
