"""A plan: its lines with their formulas and sources, what limits the training, and what helps."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.core import write_atomic
from labkit.tuning.plan.ceilings import RESOURCES
from labkit.tuning.plan.cures import Cure, find_cures
from labkit.tuning.plan.estimate import format_number, of_draws
from labkit.tuning.plan.inputs import INPUTS
from labkit.tuning.plan.page import Page
from labkit.tuning.plan.setup import Setup

_COLUMNS = ("group", "name", "quantity", "value", "low", "high", "unit", "formula", "sources", "status")
_CLOSE = 1.25  # two ceilings so close that queues cost
_MOST_CURES = 8


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """What `plan` predicts.

    Attributes:
        setup: What it was computed from.
        title: The training.
    """

    setup: Setup
    title: str
    own_notes: Sequence[str] = field(default_factory=tuple)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row for each quantity.

        `group` (`input`, `need`: to keep the GPUs busy, `ceiling`: images/s at most, `result`), `name`, `quantity`,
        `value` (median), `low` and `high` (95 % interval), `unit`, `formula`, `sources` (of all inputs that it comes
        from, a list of `INPUT: SOURCE`), and `status`: of an input one of `KINDS`, of all others `predicted`.
        """
        sources = self._sources()
        rows = [
            (
                "input",
                name,
                INPUTS[name].label,
                each.value,
                *each.interval,
                INPUTS[name].unit,
                "",
                sources[name],
                each.kind,
            )
            for name, each in self.setup.inputs.items()
            if name in INPUTS and self._is_used(name)
        ]
        rows += [
            (line.group, line.name, line.label, *of_draws(self.setup.draws[line.name]), line.unit, line.formula,
             sources[line.name], "predicted")
            for line in self.setup.lines
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=_COLUMNS)

    def _is_used(self, name: str) -> bool:
        return any(name in line.uses for line in self.setup.lines)

    def _sources(self) -> dict[str, list[str]]:
        """Every input and line -> where it comes from, through all the lines that it uses."""
        found = {name: [f"{name}: {each.source}"] for name, each in self.setup.inputs.items()}
        found["n_storages"] = [] if self.setup.is_remote else found["n_nodes"]
        for line in self.setup.lines:
            used = [source for name in line.uses for source in found.get(name, [])]
            found[line.name] = list(dict.fromkeys(used))
        return found

    def value(self, name: str) -> tuple[float, float, float]:
        """Median and 95 % interval of a quantity, by its `name` in the frame. Raises KeyError."""
        row = self.frame.set_index("name").loc[name]
        return row["value"], row["low"], row["high"]

    @property
    def bottleneck(self) -> str:
        """The resource that gives the fewest images/s, in most of the draws."""
        return RESOURCES[self.setup.scarcest]

    @cached_property
    def cures(self) -> list[Cure]:
        """Changes against the bottleneck, the cheapest first; those of unknown effect last."""
        return find_cures(self.setup)

    def after(self, cure: Cure) -> "Plan":
        """The plan after a cure. Raises ValueError: its effect is not known."""
        if cure.setup is None:
            raise ValueError(f"the effect of {cure.action!r} is not known: measure lk.loader_costs")
        return Plan(cure.setup, self.title, self.own_notes)

    @cached_property
    def steps(self) -> list[Cure]:
        """The cheapest cure, then the cheapest after it, until the GPUs are the bottleneck."""
        found: list[Cure] = []
        plan = self
        while len(found) < _MOST_CURES and (known := [cure for cure in plan.cures if cure.is_known]):
            found.append(known[0])
            plan = plan.after(known[0])
        return found

    @property
    def sentences(self) -> list[str]:
        """The result in words."""
        said = [self._describe_bottleneck()]
        said += [f"{'Then' if number else 'Cheapest cure'}: {cure}." for number, cure in enumerate(self.steps)]
        said += [f"Perhaps: {cure}." for cure in self.cures if not cure.is_known]
        return said

    def _describe_bottleneck(self) -> str:
        draws, setup = self.setup.draws, self.setup
        rate, low, high = map(format_number, of_draws(setup.rate))
        share = of_draws(draws["busy_share"])
        often = [f"{RESOURCES[name]} in {share:.0%}" for name, share in setup.scarcities.items() if share >= 0.01]
        words = f"Bottleneck: {', '.join(often)} of the draws. "
        demand = format_number(setup.median("demand"))
        return words + (
            f"Predicted are {rate} [{low}, {high}] images/s of the {demand} that the GPUs ask for: they train "
            f"{share[0]:.0%} [{share[1]:.0%}, {share[2]:.0%}] of the time."
        )

    @property
    def notes(self) -> list[str]:
        """What the plan does not know."""
        setup = self.setup
        notes = list(self.own_notes)
        if setup.inputs["cpu_ms_per_image"].kind == "measured here":
            notes.append("Core times are those of the machine that measured them: other cores differ.")
        if "lock_ceiling" not in setup.draws and not self.own_notes:
            notes.append("gil_us_per_image is not known, so Python's lock is left out.")
        if setup.is_remote and "network_ceiling" not in setup.draws:
            notes.append("network_gbit_per_node is not known, so the network has no limit here.")
        medians = sorted(setup.median(name) for name in setup.apart)
        if medians[1] < _CLOSE * medians[0]:
            notes.append(
                "Two ceilings are close to each other: with few batches ahead and times that vary, the rate can be a "
                "third below the smaller one."
            )
        return notes

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return {
            "title": self.title, "storage": self.setup.storage, "data": self.setup.data,
            "bottleneck": self.bottleneck,
            "scarcest": {RESOURCES[name]: share for name, share in self.setup.scarcities.items()},
            "sentences": self.sentences, "notes": self.notes,
            "cures": [
                {"action": each.action, "effort": each.effort, "gain": each.gain, "images_per_s": each.images_per_s,
                 "then": RESOURCES[each.then], "is_known": each.is_known}
                for each in self.cures
            ],
            "lines": self.frame.to_dict(orient="records"),
        }  # fmt: skip

    def save_json(self, path: str | os.PathLike) -> Path:
        """Write the plan as JSON."""
        write_atomic(Path(path), (json.dumps(self.to_dict(), indent=1) + "\n").encode())
        return Path(path)

    def __repr__(self) -> str:
        return str(Page.of(self))

    def _repr_html_(self) -> str:
        words = "".join(f"<p>{escape(sentence)}</p>" for sentence in [*self.sentences, *self.notes])
        table = self.frame.drop(columns=["name", "sources"]).to_html(index=False, border=0, float_format=format_number)
        return f"<h3>{escape(self.title)}</h3>{words}{table}"
