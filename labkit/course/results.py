"""What each notebook found, in sentences: computed by its last cell, collected and stored by `labkit tour --store`."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.errors import ArgumentError
from labkit.measure.recorder import RESULTS_VARIABLE, current_recorder
from labkit.util.machine import IS_CLONE, NOTEBOOK_FOLDER, env_id, environment, scale, told_of_own_photos

STORED = NOTEBOOK_FOLDER / "results.json"
HERE = "this machine"


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one variant is as another, with its 95 % interval; a plain number has none."""

    value: float
    low: float = float("nan")
    high: float = float("nan")

    @property
    def at_least(self) -> float:
        """The lower end of the interval; of a plain number, the number."""
        return self.value if pd.isna(self.low) else self.low

    def __str__(self) -> str:
        value, low, high = (f"{n:,.0f}" if n >= 100 else f"{n:.3g}" for n in (self.value, self.low, self.high))
        return value if pd.isna(self.low) else f"{value} [{low}, {high}]"


@dataclass(frozen=True)
class Result:
    """What a notebook found.

    Args:
        notebook: Its name, such as `"03_persistent_workers"`.
        sentences: The first one answers the notebook's question.
        not_here: Those of the sentences that this run does not bear out.
        figures: Name -> ratio or number, for the tables that read the results of several notebooks.
        machine: What it was measured on, in words.
        scale: The scale of the run.
        origin: Whose run it was, in words.
    """

    notebook: str
    sentences: tuple[str, ...]
    not_here: tuple[str, ...]
    figures: Mapping[str, Ratio]
    machine: str
    scale: str
    origin: str = HERE

    def __str__(self) -> str:
        told = [
            f"{text} (This run does not confirm all of this.)" if text in self.not_here else text
            for text in self.sentences
        ]
        trial = "; a trial at `ci` scale, no measurement" if self.scale == "ci" else ""
        return f"{' '.join(told)} *({self.machine}{trial})*"

    def to_record(self) -> dict[str, Any]:
        """As JSON holds it, which has no NaN: such a figure is left out."""
        figures = {
            name: [float(f"{number:.4g}") for number in (ratio.value, ratio.low, ratio.high) if not pd.isna(number)]
            for name, ratio in self.figures.items()
            if not pd.isna(ratio.value)
        }
        return {
            "sentences": list(self.sentences), "not_here": list(self.not_here), "figures": figures,
            "machine": self.machine, "scale": self.scale,
        }  # fmt: skip

    @classmethod
    def from_record(cls, notebook: str, record: Mapping[str, Any], origin: str) -> "Result":
        """The inverse of `to_record`.

        Raises:
            KeyError, TypeError: it is no record.
        """
        figures = {name: Ratio(*numbers) for name, numbers in record["figures"].items()}
        sentences, not_here = tuple(record["sentences"]), tuple(record["not_here"])
        return cls(notebook, sentences, not_here, figures, record["machine"], record["scale"], origin)


class Shown:
    """A result of this run beside the stored one, for the end of a notebook."""

    def __init__(self, result: Result, stored: Result | None):
        self.result, self.stored = result, stored

    def _repr_markdown_(self) -> str:
        told = f"**Result of this run.** {self.result}"
        return f"{told}\n\n**Stored run.** {self.stored}" if self.stored else told

    def __repr__(self) -> str:
        return self._repr_markdown_().replace("**", "").replace("*(", "(").replace(")*", ")")


def result(
    notebook: str, *sentences: str | tuple[str, bool], figures: Mapping[str, Any] | None = None, **values: Any
) -> Shown:
    """State what a notebook found: the last line of its last cell.

    A run of `labkit tour` keeps it; `labkit tour --store` refuses to store one whose conditions do not hold.

    Args:
        notebook: The notebook's name, such as `"03_persistent_workers"`.
        sentences: One to three, of 60 words and three numbers together. The first one answers the notebook's question.
            One that names a direction is a pair: the sentence, and whether this run bears it out.
        figures: Name -> row of `lk.summarize` or a number, for `course.claims` and `course.where_to_start`.
        values: What stands in braces in the sentences, as for `str.format`. A row of `lk.summarize` is told as how many
            times as fast it is, `{row}`, or with its interval, `{row:interval}`.

    Returns:
        An object that shows itself: the sentences, the machine, and the stored run's sentences.

    Raises:
        ValueError: `notebook` is no notebook's name.

    Example: `course.result("01_naive_pil", ("Decoding takes {share:.0%} of the time.", share > 0.5), share=share)`
    """
    if not re.fullmatch(r"\d\d[a-z]?_\w+", notebook):
        raise ArgumentError(
            f"notebook must be a notebook's name, such as '03_persistent_workers', got {notebook!r:.100}"
        )
    pairs = [(item, True) if isinstance(item, str) else item for item in sentences]
    if values:
        told = {name: _Times(_ratio_of(value)) if _is_row(value) else value for name, value in values.items()}
        pairs = [(text.format(**told), holds) for text, holds in pairs]
    not_here = tuple(text for text, holds in pairs if not holds)
    found = {name: _ratio_of(value) for name, value in (figures or {}).items()}
    own = Result(notebook, tuple(text for text, _ in pairs), not_here, found, describe_machine(), scale().name)
    if recorder := current_recorder():
        recorder.record_result(notebook, own.to_record())
    return Shown(own, stored_results().get(notebook))


def describe_machine() -> str:
    """This machine in a few words: its cores, GPU and torch; and whether the photos are the reader's own."""
    facts = environment()
    parts: list[Any] = [
        f"{facts['usable_cores']} cores of {facts['cpu']}",
        facts["gpu"] or "no GPU",
        f"torch {facts['torch']}",
    ]
    return ", ".join([*parts, *filter(None, [told_of_own_photos()])])


def stored_results(path: Path = STORED) -> dict[str, Result]:
    """The results of the stored run, by notebook; none where none are stored.

    Raises:
        ValueError: the file is damaged; says what to do.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
        origin = f"the stored run on {content['machine']}"
        return {name: Result.from_record(name, record, origin) for name, record in content["notebooks"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"{path} holds no results ({type(error).__name__}: {error}): restore it with git, or install labkit again"
        ) from error


def recorded_results(folder: Path) -> dict[str, Result]:
    """The results that a tour has recorded in a folder, by notebook.

    Raises:
        ValueError: a file is damaged; names it.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.stem] = Result.from_record(path.stem, json.loads(path.read_text()), HERE)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(f"{path} holds no result: delete it, and run its notebook again") from error
    return found


def known_results() -> dict[str, Result]:
    """The results of this machine's tours, and the stored run's for notebooks that have not run here.

    They are where a running tour records, else in `results` here or next to the notebooks' folder. Runs at scale `ci`
    are too short to count.

    Raises:
        ValueError: a file is damaged; names it.
    """
    if collected := os.environ.get(RESULTS_VARIABLE):
        folders = [Path(collected).with_name("results")]
    else:
        beside = NOTEBOOK_FOLDER.parent if IS_CLONE else Path("..")  # a wheel's run as copies, in a folder
        folders = [root / "results" / env_id() / "results" for root in (Path(), beside)]
    folder = next(filter(Path.is_dir, folders), None)
    own = recorded_results(folder) if folder else {}
    return stored_results() | {name: found for name, found in own.items() if found.scale != "ci"}


def _is_row(value: Any) -> bool:
    return isinstance(value, Ratio) or (isinstance(value, pd.Series | Mapping) and "speedup" in value)


class _Times:
    """A ratio as a sentence tells it: `1.51`, or `1.51 [1.47, 1.55]` by the format `interval`."""

    def __init__(self, ratio: Ratio):
        self._ratio = ratio

    def __format__(self, how: str) -> str:
        numbers = [self._ratio.value, self._ratio.low, self._ratio.high]
        value, low, high = (f"{n:.0f}" if n >= 10 else f"{n:.1f}" if n >= 2.95 else f"{n:.2f}" for n in numbers)
        if how not in ("", "interval"):
            return format(self._ratio.value, how)
        return f"{value} [{low}, {high}]" if how and not pd.isna(numbers[1]) else value


def _ratio_of(value: Any) -> Ratio:
    if isinstance(value, Ratio):
        return value
    if isinstance(value, pd.Series | Mapping):
        return Ratio(*(float(value[name]) for name in ("speedup", "ci_low", "ci_high")))
    return Ratio(float(value))
