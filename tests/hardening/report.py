"""What the recorded runs say, as tables: writes records/README.md from the CSV files beside it.

    python -m tests.hardening.report

No figure in that page is typed in by hand; a test fails where it is not what the records say.
"""

from math import isnan
from pathlib import Path

import pandas as pd

from labkit.core.atomic import write_atomic
from tests.hardening import noise
from tests.hardening.faults.record import OUTCOMES
from tests.hardening.soak.record import table as soak_table

RECORDS = Path(__file__).parent / "records"
PAGE = RECORDS / "README.md"

_HEAD = """# Recorded runs

What the tools of `tests/hardening/` found when they ran for long. `python -m tests.hardening.report` writes this page
from the CSV files beside it, whose rows are runs, faults and epochs. The extra `harden` installs what the tools need.
"""


def page(records: Path = RECORDS) -> str:
    """The page of all records that are there, in Markdown."""
    sections = [
        section(pd.read_csv(records / name)) if section is not _soak else _soak(records / name)
        for name, section in _SECTIONS.items()
        if (records / name).exists()
    ]
    return "\n".join([_HEAD, *sections])


def _faults(rows: pd.DataFrame) -> str:
    kind = rows["fault"].str.split(",").str[0].str.removesuffix(" fresh")
    by_kind = _counted(rows, kind.rename("fault"))
    return f"""## Faults

`python -m tests.hardening.faults --count 640 --seed 0 --record tests/hardening/records/faults.csv`

{len(rows)} faults injected, {int(rows["violations"].notna().sum())} with a result that they must not have: a half
file under a final name, an orphan, a leak, a wrong figure, a wrong rerun, or no clear error. "stopped": killed, and the
rerun gave the same bytes as an undisturbed run. "right all the same": a retry, or a fault that did not matter.

{markdown(by_kind)}
{markdown(_counted(rows, rows["case"]))}"""


def _counted(rows: pd.DataFrame, by: pd.Series) -> pd.DataFrame:
    counts = pd.crosstab(by, rows["outcome"]).reindex(columns=list(OUTCOMES), fill_value=0)
    counts = counts.loc[:, counts.any()]
    counts.insert(0, "n", counts.sum(axis=1))
    counts["violations"] = rows["violations"].notna().groupby(by).sum()
    return pd.concat([counts, counts.sum().to_frame("all").T]).rename_axis(by.name).reset_index()


def _fuzz(rows: pd.DataFrame) -> str:
    by_target = rows.groupby("target", as_index=False).agg(
        runs=("minutes", "size"), hours=("minutes", lambda minutes: round(minutes.sum() / 60, 2)),
        executions=("executions", "sum"), edges=("edges", "max"), features=("features", "max"),
        peak_rss_mb=("peak_rss_mb", "max"), findings=("findings", "sum"),
    )  # fmt: skip
    total = by_target[["runs", "hours", "executions", "findings"]].sum().to_frame("all").T.rename_axis("target")
    return f"""## Fuzzing

`python -m tests.hardening.fuzz all --minutes 10 --record tests/hardening/records/fuzz.csv`

Guided by the coverage of labkit's own code and of the Python parsers below it; native decoders are not instrumented.

{markdown(pd.concat([by_target, total.reset_index()]))}"""


def _soak(path: Path) -> str:
    return f"""## Soak

`python -m tests.hardening.soak loaders --record tests/hardening/records/soak.csv.gz`

Slopes in kB an epoch with their 95 % interval over the second half of the epochs: `pss` of all processes, `written` of
the pages that they alone hold. "zero": the interval holds 0; "flat": it does not, and ends below a page an epoch (for
`pss`: and process). `pss_before`, of the second quarter, is what a leak's slope would still be; memory that fills, such
as pages that a fork shares until one of the two writes to them, grows ever more slowly. Open files, threads and shared
memory: least and most, from the fourth epoch on.

![Memory and open files of every loader over the epochs](soak.png)

{markdown(soak_table(path))}"""


def _load(rows: pd.DataFrame) -> str:
    return f"""## Load

`python -m tests.hardening.soak names --count 1000000` and `python -m tests.hardening.soak samples --count 100000`

{markdown(rows)}"""


def _noise(rows: pd.DataFrame) -> str:
    return f"""## Verdicts beside CPU hogs

`python -m tests.hardening.noise --repetitions 100 --record tests/hardening/records/noise.csv`

Comparisons at their defaults of variants that are equal (truth 1.0) or 1.2 times apart. A verdict is wrong where equal
variants are called different, or the faster one slower. In percent; `wrong_at_most` is the 95 % bound of that rate,
`interval` the ratio of the 95 % interval's ends.

{markdown(noise.table(rows).reset_index())}"""


def _mutation(rows: pd.DataFrame) -> str:
    tried = rows[(rows["mutants"] > 0) | (rows["no_tests"] > 0)]
    return f"""## Mutation testing

`python -m tests.hardening.mutation run` and `python -m tests.hardening.mutation record`

Mutants of a module that its tests kill; `score` leaves out those that change nothing, and
`no_tests`, which no test of the selection calls (tests outside it may). Each survivor, read:
[mutation_survivors.csv](mutation_survivors.csv).

{markdown(tried)}"""


def _coverage(rows: pd.DataFrame) -> str:
    return f"""## Coverage of the unit tests

`python -m tests.hardening.coverage_table run` and `python -m tests.hardening.coverage_table record`

Modules that are not covered to the last line and branch, and why; {len(rows)} were measured.

{markdown(rows[(rows["lines_pct"] < 100) | (rows["branches_pct"] < 100)])}"""


def _versions(rows: pd.DataFrame) -> str:
    return f"""## Versions

`python -m tests.hardening.versions lowest` (and `newest`, and `bare`, without extras)

{markdown(rows)}"""


_SECTIONS = {
    "faults.csv": _faults, "fuzz.csv": _fuzz, "soak.csv.gz": _soak, "load.csv": _load, "noise.csv": _noise,
    "mutation.csv": _mutation, "coverage.csv": _coverage, "versions.csv": _versions,
}  # fmt: skip


def markdown(frame: pd.DataFrame) -> str:
    """A frame as a table of Markdown."""
    lines = [frame.columns, ["---"] * len(frame.columns), *frame.itertuples(index=False)]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines) + "\n"


def _cell(value: object) -> str:
    if isinstance(value, float):
        value = "" if isnan(value) else int(value) if value == int(value) else round(value, 3)
    text = f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
    return text.replace("|", r"\|").replace("\n", " ")


if __name__ == "__main__":
    write_atomic(PAGE, page().encode())
    print(PAGE)
