"""One process of the fuzzer: `python -m tests.hardening.fuzz.child TARGET [libFuzzer's arguments]`.

With `--replay FILE` in place of the arguments one input is run, without atheris.
"""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.hardening.fuzz.registry import TARGETS

_ROOM = 1 << 30  # bytes that labkit may allocate for an input, in addition to what the process has at its start


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Turn an excessive allocation into a MemoryError, even if its pages are never touched."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + _ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def replay(name: str, file: Path) -> None:
    """Run one input; raises where there is a bug."""
    function, _ = TARGETS[name].load()
    with bounded_memory():
        function(file.read_bytes())


def _fuzz(name: str, arguments: list[str]) -> None:
    import atheris

    for module in TARGETS[name].parsers:  # what is imported already would not be instrumented
        for loaded in [each for each in sys.modules if each == module or each.startswith(f"{module}.")]:
            del sys.modules[loaded]
    with atheris.instrument_imports(include=["labkit", *TARGETS[name].parsers]):
        function, seeds = TARGETS[name].load()
    corpus = Path(os.environ["LABKIT_FUZZ_CORPUS"])
    for number, data in enumerate(seeds.values()):
        (corpus / f"seed-{number:03d}").write_bytes(data)
    for seed in seeds.values():  # what is loaded on first use is no coverage, and no memory of an input's
        with contextlib.suppress(Exception):
            function(seed)
    with bounded_memory():
        atheris.Setup([sys.argv[0], *arguments, str(corpus)], function)
        atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[2] == "--replay":
        replay(sys.argv[1], Path(sys.argv[3]))
    else:
        _fuzz(sys.argv[1], sys.argv[2:])
