"""The ledger as plain text, for a terminal or a pipe."""

import textwrap
from collections.abc import Iterator
from math import isnan

import pandas as pd

from labkit.teach.claims.verdicts import VERDICTS, shown

_NARROWEST, _WIDEST = 80, 120


def lines_of(table: pd.DataFrame, width: int) -> Iterator[str]:
    """Lines of at most `width` characters (80 to 120): a paragraph a claim, then how many have which verdict."""
    width = min(max(width, _NARROWEST), _WIDEST)
    for row in table.itertuples():
        yield f"{row.id:<20} {row.verdict.upper():<24} {ratios(row)}".rstrip()
        for text in (row.claim, f"Theirs: {row.figure}.", row.condition and f"Condition: {row.condition}."):
            yield from textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
        for text in row.because.splitlines():
            yield from textwrap.wrap(text, width, initial_indent="    - ", subsequent_indent="      ")
        yield ""
    counts = table["verdict"].value_counts()
    said = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if verdict in counts]
    yield from textwrap.wrap(f"{len(table)} claims: {', '.join(said)}.", width)


def ratios(row) -> str:
    """Measured ratio, interval and claimed ratio of a row; "" where there is none."""
    if isnan(row.measured):
        return ""
    interval = "" if isnan(row.ci_low) else f" [{shown(row.ci_low)}, {shown(row.ci_high)}]"
    claimed = "" if isnan(row.claimed) else f", claimed {shown(row.claimed)}x"
    return f"{shown(row.measured)}x{interval}{claimed}"
