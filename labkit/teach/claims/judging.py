"""claims(): the claims of the write-ups, compared with the runs of this machine."""

import os
from collections.abc import Iterable
from math import nan
from typing import Any

import pandas as pd

from labkit.teach.claims.frames import Frames, read_folder
from labkit.teach.claims.ledger import LEDGER, Claim, Test
from labkit.teach.claims.text import explain
from labkit.teach.claims.verdicts import (
    CONDITION,
    HOLDS,
    LARGER,
    MEASURED,
    MIXED,
    Reading,
    agreeing_range,
    outcome,
    together,
)

_FROM_TEST = ["claimed", "notebook", "experiment", "measured", "ci_low", "ci_high", "n_runs"]
_DECIDING = {CONDITION: HOLDS, MIXED: LARGER}


def claims(results: str | os.PathLike | None = None, *, runs: Iterable[pd.DataFrame] = ()) -> pd.DataFrame:
    """The ledger: each claim, its figure, what this machine's runs say, and a verdict.

    Times nothing. Runs come from frames that the notebooks have recorded; what needs no clock is tried once, now.

    Args:
        results: Folder of a tour's results. Default: where a running tour collects frames, else `results` here or
            beside the notebooks' folder, if it exists.
        runs: Frames measured just now; they replace stored runs of the same experiment.

    Returns:
        One row per claim: `id`, `claim`, `figure` (the write-up's), `claimed` (the ratio in it), `notebook` and
        `experiment` that test it, `measured` ratio with `ci_low` and `ci_high` (95 %), `n_runs`, `verdict`,
        `condition` (where it holds), `because` (a line per test, in words), `scale` and `device` of the runs.
        If a claim has several tests, `measured` is the first that supports the verdict, and `attrs["tests"]` holds a
        dict for each. Its `kind` is `measured`, `simulated`, `unequal work` or `beside the claim`: only measured ones
        are judged. `agrees_from` and `agrees_to` are the ratios that agree with the claimed one.

        Verdicts: `holds`, `larger here`, `smaller here` (right in direction, with another figure), `larger and smaller
        here` (in different settings), `holds under a condition`, `does not hold`, `inconclusive` (because of the
        interval, or of doubts about the runs), `needs a GPU`, `not measured yet`.

    Raises:
        FileNotFoundError: `results` holds no frames of this machine.
        ValueError: a file in it is not a frame, or runs come from another machine.

    Taught in: notebooks/14_claims.ipynb
    """
    return judged([*read_folder(results), *runs])


def judged(runs: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """The table of `claims`, from these runs alone."""
    frames = Frames(runs)
    rows = [_judge_claim(claim, frames) for claim in LEDGER]
    table = pd.DataFrame([row for row, _ in rows])
    table.attrs["tests"] = [test for _, tests in rows for test in tests]
    return table


def _judge_claim(claim: Claim, frames: Frames) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The claim's row, and its tests' rows."""
    tests = [_run_test(claim, test, frames) for test in claim.tests]
    judged_tests = [test for test in tests if test["kind"] == MEASURED]
    verdict = together([test["outcome"] for test in judged_tests])
    deciding = [test for test in judged_tests if test["outcome"] == _DECIDING.get(verdict, verdict)]
    condition = "; ".join(test["setting"] for test in deciding) if verdict == CONDITION else ""
    row = {
        "id": claim.id, "claim": claim.text, "figure": claim.figure, **{name: deciding[0][name] for name in _FROM_TEST},
        "verdict": verdict, "condition": condition, "because": explain(tests, claim.note),
        "scale": deciding[0]["scale"], "device": deciding[0]["device"],
    }  # fmt: skip
    return row, tests


def _run_test(claim: Claim, test: Test, frames: Frames) -> dict[str, Any]:
    found = test.read(frames)
    reading = found or Reading()
    agrees = None if claim.claimed is None else agreeing_range(claim.claimed, claim.up_to)
    return {
        "id": claim.id, "setting": test.setting, "kind": test.kind, "notebook": test.notebook,
        "experiment": reading.experiment, "claimed": nan if claim.claimed is None else claim.claimed,
        "agrees_from": agrees[0] if agrees else nan, "agrees_to": agrees[1] if agrees else nan,
        "measured": reading.ratio, "ci_low": reading.low, "ci_high": reading.high, "n_runs": reading.n_runs,
        "outcome": outcome(found, test.rule, agrees, needs_gpu=test.needs_gpu),
        "seen": str(reading), "doubt": reading.doubt, "scale": reading.scale, "device": reading.device,
    }  # fmt: skip
