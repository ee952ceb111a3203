"""A plan as one page of text: its result, then every line with its formula and the numbers of its sources."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from labkit.tuning.plan.estimate import format_number

GROUPS = {
    "result": "Result (predicted)",
    "ceiling": "At most (predicted)",
    "need": "To keep the GPUs busy (predicted)",
    "input": "Inputs",
}


@dataclass(frozen=True)
class Page:
    """title, sentences, notes: In words.

    sections: Heading -> rows of (quantity, value, 95 % interval, formula or kind, numbers of sources).
    sources: In the order of their numbers, from 1.
    """

    title: str
    sentences: list[str]
    notes: list[str]
    sections: dict[str, list[tuple[str, str, str, str, str]]]
    sources: list[str]

    @classmethod
    def of(cls, plan: Any) -> "Page":
        """The page of a `Plan`."""
        frame = plan.frame
        numbers = {each: at for at, each in enumerate(dict.fromkeys(frame["sources"].explode().dropna()), 1)}
        sections = {
            heading: [page_row(row, numbers) for _, row in frame[frame["group"] == group].iterrows()]
            for group, heading in GROUPS.items()
        }
        return cls(plan.title, plan.sentences, plan.notes, sections, list(numbers))

    def __str__(self) -> str:
        lines = [self.title, "", *self.sentences, *self.notes]
        for heading, rows in self.sections.items():
            widths = [max(len(row[column]) for row in rows) for column in range(3)]
            lines += ["", heading]
            for quantity, value, interval, how, refs in rows:
                start = f"  {quantity:<{widths[0]}}  {value:>{widths[1]}}  {interval:<{widths[2]}}"
                lines.append(f"{start}  {how} {refs}".rstrip())
        return "\n".join([*lines, "", "Sources", *(f"  [{at}] {each}" for at, each in enumerate(self.sources, 1))])


def page_row(row: Mapping[str, Any] | pd.Series, numbers: Mapping[str, int]) -> tuple[str, str, str, str, str]:
    """A row of a plan's frame as texts: quantity, value, 95 % interval, formula or kind, numbers of its sources."""
    is_exact = row["low"] == row["high"]
    digits = f"{row['value']:,.10g}" if is_exact and row["group"] == "input" else format_number(row["value"])
    value = f"{digits} {row['unit']}".strip()
    interval = "" if is_exact else f"[{format_number(row['low'])}, {format_number(row['high'])}]"
    refs = ",".join(str(numbers[each]) for each in row["sources"])
    how = row["formula"] or row["status"]
    return row["quantity"], value, interval, how, f"[{refs}]" if refs else ""
