"""Mutation testing of the modules that pyproject.toml names, with mutmut and what it lacks.

    python -m tests.hardening.mutation run               # all mutants; a second run goes on
    python -m tests.hardening.mutation run 'labkit.core.strings*' 'labkit.core.atomic*'
    MUTATION_SAMPLE=90 python -m ...                     # a random sample of each pattern's untried ones
    python -m tests.hardening.mutation again [PATTERN]   # those that were not killed, after tests were added
    python -m tests.hardening.mutation show [PATTERN]    # survivors as diffs
    python -m tests.hardening.mutation record [PATTERN]  # write rows of records/mutation.csv

Run it from the repository's root; the mutated copy is in `mutants/`. A mutant is one function with one change. An
environment variable chooses it, so that spawned processes run it too.
"""

import fnmatch
import gc
import importlib
import itertools
import os
import random
import signal
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import libcst as cst
import libcst.helpers
from mutmut import __main__ as mutmut
from mutmut.mutation import file_mutation, mutators
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.runners.harness import PytestRunner
from mutmut.state import state
from mutmut.stats import load_stats, status_by_exit_code
from mutmut.workers.isolation import ForkServerRunner

from tests.hardening.tables import RECORDS, update_table

status_by_exit_code[255] = "suspicious"  # pytest could not start: mutmut takes that for a timeout

# mutmut leaves out decorated functions. With these decorators, mutants can be chosen below the decorator.
_SURVIVED = ("survived", "suspicious")
_DECORATORS = {"cached_property", "contextmanager", "property"}


class Mutant(NamedTuple):
    """A mutant of a module, and what became of it."""

    module: str  # its path
    name: str
    status: str


def find_mutants(pattern: str, *statuses: str) -> list[Mutant]:
    """Return the mutants whose name matches, of these statuses (default: all)."""
    found, _ = mutmut.collect_source_file_mutation_data(mutant_names=())
    mutants = [Mutant(str(data.path), name, status_by_exit_code[code]) for data, name, code in found]
    matching = [mutant for mutant in mutants if fnmatch.fnmatch(mutant.name, pattern)]
    return [mutant for mutant in matching if not statuses or mutant.status in statuses]


def show(pattern: str) -> None:
    """Print the survivors, each with the changed lines: `-` old, `+` new."""
    for module, name, status in find_mutants(pattern, *_SURVIVED):
        lines = get_diff_for_mutant(name, path=module).splitlines()[2:]
        change = " ".join(f"{line[0]} {line[1:].strip()}" for line in lines if line[:1] in ("-", "+"))
        print(f"{status}: {name.rpartition('.')[2]}\n    {change}")


def record(pattern: str) -> None:
    """Write a row for each module of which a mutant was tried."""
    counts: defaultdict[str, Counter] = defaultdict(Counter)
    for module, _, status in find_mutants(pattern):
        counts[module][status] += 1
    rows = [count_statuses(module, count) for module, count in sorted(counts.items())]
    if tried := [row for row in rows if row["mutants"]]:
        update_table(RECORDS / "mutation.csv", tried)


def count_statuses(module: str, count: Counter) -> dict[str, str | int]:
    """Return a module's row. no_tests: No test of the selection in pyproject.toml calls the function."""
    killed = count["killed"] + count["segfault"] + count["timeout"]
    survived = sum(count[status] for status in _SURVIVED)
    return {
        "module": module, "mutants": killed + survived, "killed": killed, "survived": survived,
        "no_tests": count["no tests"], "not_tried": count["not checked"] + count["check was interrupted by user"],
    }  # fmt: skip


def _has_known_decorator(function: cst.FunctionDef) -> bool:
    """Whether mutants of a decorated function can be chosen below its decorator."""
    return len(function.decorators) == 1 and cst.helpers.get_full_name_for_node(function.decorators[0]) in _DECORATORS


def _mutate_decorated_functions() -> None:
    visitor, arrange = file_mutation.MutationVisitor, file_mutation.function_trampoline_arrangement
    skips = visitor._skip_node_and_children

    def skips_node(self, node: cst.CSTNode) -> bool:
        plain = isinstance(node, cst.FunctionDef) and _has_known_decorator(node)
        return skips(self, node.with_changes(decorators=()) if plain else node)

    def arranged(function: cst.FunctionDef, mutants, class_name: str | None):
        if not _has_known_decorator(function):
            return arrange(function, mutants, class_name)
        declared, nodes, assigned, names = arrange(function.with_changes(decorators=()), mutants, class_name)
        chosen = nodes[0].with_changes(decorators=[*function.decorators, *nodes[0].decorators])
        return declared, [chosen, *nodes[1:]], assigned, names

    visitor._skip_node_and_children = skips_node
    file_mutation.function_trampoline_arrangement = arranged


def _change_strings_once() -> None:
    """Leave out the mutants with a string in lower or upper case: they fare as the first one."""

    def operators(node: cst.BaseString):
        return itertools.islice(mutators.operator_string(node), 1)

    file_mutation.mutation_operators[:] = [
        (kind, operators if operator is mutators.operator_string else operator)
        for kind, operator in mutators.mutation_operators
    ]


def _run_in_clean_processes() -> None:
    """Run quick tests first, without the fork server's signal handlers, which would end its other children."""
    run_tests, warm_up = PytestRunner.run_tests, PytestRunner.warm_up

    def with_slow_imports(self) -> None:
        warm_up(self)
        for name in ("IPython.core.interactiveshell", "matplotlib.pyplot", "scipy.stats"):
            importlib.import_module(name)  # else every child would
        gc.freeze()

    def with_default_signals(self, *, mutant_name: str | None, tests) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        seconds = state().duration_by_test
        return run_tests(self, mutant_name=mutant_name, tests=sorted(tests, key=lambda test: seconds.get(test, 0)))

    PytestRunner.warm_up = with_slow_imports
    PytestRunner.run_tests = with_default_signals


def _names(pattern: str, *statuses: str) -> list[str]:
    return [mutant.name for mutant in find_mutants(pattern, *statuses)]


def _sample(names: list[str]) -> list[str]:
    size = int(os.environ.get("MUTATION_SAMPLE", len(names)))
    return random.Random(0).sample(names, min(size, len(names)))


def _run(names: list[str], *, resumed: bool = False) -> None:
    os.environ["PYTHONPATH"] = str(Path("mutants").absolute())  # of the processes that tests start
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a third of the time of a short run
    os.environ["OMP_NUM_THREADS"] = "1"  # forks of a process whose threads have run would hang
    _mutate_decorated_functions()
    _change_strings_once()
    _run_in_clean_processes()
    if resumed:  # the tests have passed before
        ForkServerRunner.run_clean_tests = lambda self, tests: 0
        mutmut.run_forced_fail_test = lambda runner: None
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]  # those in mutants/ are meant
    mutmut._run(names, max_children=int(os.environ.get("MUTATION_PROCESSES", "1")))


def main(arguments: list[str]) -> None:
    command, pattern = arguments[0], (arguments[1:] or ["*"])[0]
    if command == "run":
        untried = [name for pattern in arguments[1:] for name in _sample(_names(pattern, "not checked"))]
        _run(untried or arguments[1:], resumed=bool(untried))
    elif command == "again":
        if names := _names(pattern, "survived", "no tests", "timeout", "suspicious", "segfault"):
            _run(names, resumed=True)  # without names mutmut would run all
    else:
        load_stats()
        {"show": show, "record": record}[command](pattern)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ("run", "again", "show", "record"):
        sys.exit(__doc__)
    main(sys.argv[1:])
