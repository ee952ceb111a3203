"""The ledger in words: why a claim has its verdict, and the whole table as plain text for a terminal or a pipe."""

import textwrap
from collections.abc import Iterator, Sequence
from math import isnan
from typing import Any

import pandas as pd

from labkit.teach.claims.verdicts import (
    MEASURED,
    MISSING,
    NEEDS_GPU,
    NOT_JUDGED,
    OPEN,
    VERDICTS,
    format_interval,
    format_ratio,
)  # fmt: skip

_MIN_WIDTH, _MAX_WIDTH = 80, 120


def lines_of(table: pd.DataFrame, width: int) -> Iterator[str]:
    """Lines of at most `width` characters (80 to 120): a paragraph per claim, then the number of each verdict."""
    width = min(max(width, _MIN_WIDTH), _MAX_WIDTH)
    for row in table.itertuples():
        yield f"{row.id:<20} {row.verdict.upper():<24} {ratios(row)}".rstrip()
        for text in (row.claim, f"Theirs: {row.figure}.", row.condition and f"Condition: {row.condition}."):
            yield from textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
        for text in row.because.splitlines():
            yield from textwrap.wrap(text, width, initial_indent="    - ", subsequent_indent="      ")
        yield ""
    counts = table["verdict"].value_counts()
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if verdict in counts)
    yield from textwrap.wrap(f"{len(table)} claims: {summary}.", width)


def ratios(row: Any) -> str:
    """Measured ratio, interval and claimed ratio of a row; "" if nothing was measured."""
    if isnan(row.measured):
        return ""
    claimed = "" if isnan(row.claimed) else f", claimed {format_ratio(row.claimed)}x"
    return f"{format_ratio(row.measured)}x{format_interval(row.ci_low, row.ci_high)}{claimed}"


def explain(tests: Sequence[dict[str, Any]], note: str) -> str:
    """A line for each test, those that are not judged last, then what is missing, and the claim's note."""
    seen = sorted((test for test in tests if test["outcome"] not in (MISSING, NEEDS_GPU)), key=_is_beside)
    lines = [_explain_test(test) for test in seen]
    if any(test["outcome"] == NEEDS_GPU for test in tests):
        lines.append("No runs on a CUDA device, here or stored: `python -m labkit reference` records them.")
    missing = pd.DataFrame(
        [test for test in tests if test["outcome"] == MISSING and not _is_beside(test)], columns=["notebook", "setting"]
    )
    for notebook, settings in missing.groupby("notebook", sort=False)["setting"]:
        lines.append(f"Not measured yet: {'; '.join(settings)}: `python -m labkit tour --only {notebook}`.")
    return "\n".join([*lines, note]).rstrip()


def _is_beside(test: dict[str, Any]) -> bool:
    return test["kind"] != MEASURED


def _explain_test(test: dict[str, Any]) -> str:
    if _is_beside(test):
        return f"{test['kind'].capitalize()}, {test['setting']}: {test['seen']}: {NOT_JUDGED}."
    setting = test["setting"][0].upper() + test["setting"][1:]
    reason = f" ({test['doubt']})" if test["doubt"] else ""
    if not reason and test["outcome"] == OPEN and test["claimed"] > 1 and test["ci_low"] > 1:
        reason = ", though faster is certain"
    return f"{setting}: {test['seen']}: {test['outcome']}{reason}."
