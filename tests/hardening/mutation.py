"""Mutation testing of labkit/measure and the tar index: mutmut, set up in pyproject.toml, with what it lacks.

    python -m tests.hardening.mutation run               # all mutants; stopped and started again, it goes on
    python -m tests.hardening.mutation run 'labkit.core.strings*' 'labkit.core.atomic*'
    MUTATION_SAMPLE=90 python -m ...                     # of each pattern's open ones a random sample
    python -m tests.hardening.mutation again [PATTERN]   # after tests were added: those that were not killed
    python -m tests.hardening.mutation show [PATTERN]    # survivors as diffs
    python -m tests.hardening.mutation record            # records/mutation.csv, records/mutation_survivors.csv

Run from the repository's root; the mutated copy is in `mutants/`. A mutant is one function with one change, chosen
by a variable in the environment, so that spawned processes run it too.
"""

import fnmatch
import gc
import importlib
import itertools
import os
import random
import signal
import sys
from pathlib import Path

import libcst as cst
import libcst.helpers
from mutmut import __main__ as mutmut
from mutmut.mutation import file_mutation, mutators
from mutmut.runners.harness import PytestRunner
from mutmut.state import state
from mutmut.stats import load_stats, status_by_exit_code
from mutmut.workers.isolation import ForkServerRunner

status_by_exit_code[255] = "suspicious"  # pytest could not start: mutmut takes that for a timeout

# mutmut leaves out decorated functions. With these decorators the mutants can be chosen below the decorator.
_DECORATORS = {"cached_property", "contextmanager", "property"}


def names_of(pattern: str = "*", *statuses: str) -> list[str]:
    """Mutants that match, of the given statuses (default: all)."""
    mutants, _ = mutmut.collect_source_file_mutation_data(mutant_names=())
    return [
        name
        for _, name, code in mutants
        if fnmatch.fnmatch(name, pattern) and (not statuses or status_by_exit_code[code] in statuses)
    ]


def _undecorated(function: cst.FunctionDef) -> bool:
    """Whether mutmut may take the function for an undecorated one."""
    return len(function.decorators) == 1 and cst.helpers.get_full_name_for_node(function.decorators[0]) in _DECORATORS


def _mutate_decorated_functions() -> None:
    visitor, arrange = file_mutation.MutationVisitor, file_mutation.function_trampoline_arrangement
    skips = visitor._skip_node_and_children

    def skips_node(self, node: cst.CSTNode) -> bool:
        plain = isinstance(node, cst.FunctionDef) and _undecorated(node)
        return skips(self, node.with_changes(decorators=()) if plain else node)

    def arranged(function: cst.FunctionDef, mutants, class_name: str | None):
        if not _undecorated(function):
            return arrange(function, mutants, class_name)
        declared, nodes, assigned, names = arrange(function.with_changes(decorators=()), mutants, class_name)
        chosen = nodes[0].with_changes(decorators=[*function.decorators, *nodes[0].decorators])
        return declared, [chosen, *nodes[1:]], assigned, names

    visitor._skip_node_and_children = skips_node
    file_mutation.function_trampoline_arrangement = arranged


def _change_strings_once() -> None:
    """A string in lower or upper case, too, is two more mutants of the same fate."""

    def operators(node: cst.BaseString):
        return itertools.islice(mutators.operator_string(node), 1)

    file_mutation.mutation_operators[:] = [
        (kind, operators if operator is mutators.operator_string else operator)
        for kind, operator in mutators.mutation_operators
    ]


def _run_as_a_process_of_its_own() -> None:
    """Quick tests first; and without the fork server's signal handlers, which would end its other children."""
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


def _sample(names: list[str]) -> list[str]:
    size = int(os.environ.get("MUTATION_SAMPLE", len(names)))
    return random.Random(0).sample(names, min(size, len(names)))


def _run(names: list[str], *, resumed: bool = False) -> None:
    os.environ["PYTHONPATH"] = str(Path("mutants").absolute())  # of the processes that tests start
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a third of the time of a short run
    os.environ["OMP_NUM_THREADS"] = "1"  # forks of a process whose threads have run would hang
    _mutate_decorated_functions()
    _change_strings_once()
    _run_as_a_process_of_its_own()
    if resumed:  # the tests have passed, else there would be no list of what they call
        ForkServerRunner.run_clean_tests = lambda self, tests: 0
        mutmut.run_forced_fail_test = lambda runner: None
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]  # those in mutants/ are meant
    mutmut._run(names, max_children=int(os.environ.get("MUTATION_PROCESSES", "1")))


def main(arguments: list[str]) -> None:
    command, pattern = arguments[0], (arguments[1:] or ["*"])[0]
    if command == "run":
        open_ones = [name for pattern in arguments[1:] for name in _sample(names_of(pattern, "not checked"))]
        _run(open_ones or arguments[1:], resumed=bool(open_ones))
    elif command == "again":
        if names := names_of(pattern, "survived", "no tests", "timeout", "suspicious", "segfault"):
            _run(names, resumed=True)  # of no names mutmut would run all
    else:
        from tests.hardening import mutation_record

        load_stats()
        getattr(mutation_record, command)(pattern)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ("run", "again", "show", "record"):
        sys.exit(__doc__)
    main(sys.argv[1:])
