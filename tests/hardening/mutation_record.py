"""What became of the mutants: shown as diffs, and recorded. Used by tests/hardening/mutation.py."""

import csv
import fnmatch
from collections import Counter
from pathlib import Path

from mutmut import __main__ as mutmut
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

RECORDS = Path(__file__).parent / "records"
_SCORES, _SURVIVORS = RECORDS / "mutation.csv", RECORDS / "mutation_survivors.csv"
_FIELDS = ("module", "function", "change", "class", "reason")
_NOT_KILLED = ("survived", "suspicious")


def show(pattern: str) -> None:
    """Survivors, with the place that each one changes."""
    for module, name, status in _mutants(pattern):
        if status in _NOT_KILLED:
            print(f"{status}: {name.rpartition('.')[2]}\n    {_change(module, name)}")


def record(pattern: str) -> None:
    """Write both tables; a module of which an earlier run tried more mutants keeps that one's row and survivors.

    What was written by hand about a survivor, its class and the reason, is kept. `no_tests`: no test of the selection
    in pyproject.toml calls their function.
    """
    before = _rows(_SURVIVORS)
    read = {tuple(row[name] for name in _FIELDS[:3]): row for row in before}
    counts: dict[str, Counter] = {}
    survivors = []
    for module, name, status in _mutants(pattern):
        count = counts.setdefault(module, Counter())
        count[status] += 1
        if status in _NOT_KILLED:
            key = (module, _function(name), _change(module, name))
            known = read.get(key, {})
            survivors.append({**dict(zip(_FIELDS, key, strict=False)), "class": known.get("class") or "unread",
                              "reason": known.get("reason", "")})  # fmt: skip
            count[survivors[-1]["class"]] += 1
    rows = {module: _row(module, count) for module, count in counts.items()}
    kept = {row["module"]: row for row in _rows(_SCORES)}
    kept = {n: row for n, row in kept.items() if n not in rows or int(row["mutants"]) > rows[n]["mutants"]}
    survivors = [row for row in survivors if row["module"] not in kept]
    survivors += [row for row in before if row["module"] in kept]
    _write(_SURVIVORS, survivors)
    columns = list(_row("", Counter()))
    _write(_SCORES, [{name: row.get(name, 0) for name in columns} for _, row in sorted({**rows, **kept}.items())])


def _row(module: str, count: Counter) -> dict:
    killed, survived = count["killed"] + count["segfault"], sum(count[status] for status in _NOT_KILLED)
    tried = killed + count["timeout"] + survived
    caught = killed + count["timeout"] + count["elsewhere"]
    telling = tried - count["equivalent"]
    return {
        "module": module, "mutants": tried, "killed": killed, "timed_out": count["timeout"], "survived": survived,
        "equivalent": count["equivalent"], "text_only": count["text"], "performance_only": count["performance"],
        "killed_elsewhere": count["elsewhere"],
        "hole": count["hole"], "unread": count["unread"],
        "score": round(caught / telling, 3) if telling else "",
        "no_tests": count["no tests"], "not_tried": count["not checked"] + count["check was interrupted by user"],
    }  # fmt: skip


def _mutants(pattern: str) -> list[tuple[str, str, str]]:
    """Path of the module, the mutant's name, its status."""
    mutants, _ = mutmut.collect_source_file_mutation_data(mutant_names=())
    return [
        (str(data.path), name, status_by_exit_code[code])
        for data, name, code in mutants
        if fnmatch.fnmatch(name, pattern)
    ]


def _function(name: str) -> str:
    return name.rpartition(".")[2].rpartition("__mutmut")[0].removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")


def _change(path: str, name: str) -> str:
    """The changed lines, the old ones after `-`, the new ones after `+`."""
    lines = get_diff_for_mutant(name, path=path).splitlines()[2:]
    return " ".join(f"{line[0]} {line[1:].strip()}" for line in lines if line[:1] in ("-", "+"))


def _rows(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, rows: list[dict]) -> None:
    RECORDS.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else _FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
