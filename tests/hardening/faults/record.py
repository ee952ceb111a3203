"""The record of injected faults, a row each, and the table of what happened."""

import csv
from pathlib import Path

COLUMNS = ("number", "seed", "case", "fault", "moment", "outcome", "seconds", "message", "violations")
LATE = "completed before the fault"
OUTCOMES = ("clear error", "stopped", "right all the same", LATE, "no end")


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows so far, by number; none where there is no record."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return sorted(csv.DictReader(file), key=lambda row: int(row["number"]))


def add_row(path: Path, row: dict) -> None:
    """Append a row, and the header before the first."""
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def table(rows: list[dict[str, str]]) -> str:
    """Case x kind of fault: how often, and what came of it."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["fault"].split(",")[0].removesuffix(" fresh")), []).append(row)
    lines = [_line("case", "fault", "n", *OUTCOMES[:4], "violations")]
    lines += [_line(*key, *_counts(group)) for key, group in sorted(groups.items())]
    return "\n".join([*lines, _line("all", "", *_counts(rows))])


def _counts(rows: list[dict[str, str]]) -> list[int]:
    outcomes = [row["outcome"] for row in rows]
    return [len(rows), *map(outcomes.count, OUTCOMES[:4]), sum(bool(row["violations"]) for row in rows)]


def _line(case: str, fault: str, *counts) -> str:
    widths = (4, 12, 8, 19, 27, 11)
    return f"{case:<34} {fault:<20}" + "".join(f" {n!s:>{width}}" for n, width in zip(counts, widths, strict=True))
