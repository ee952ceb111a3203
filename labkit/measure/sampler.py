"""The memory of a process tree, sampled from a separate process.

A thread of the measured process would compete for Python's global lock and count as part of the measurement. Run as a
script with a process id; it needs only the standard library, so that it starts in milliseconds. Commands are lines of
standard input: `begin` starts sampling, `now` samples at once, `end` prints the peak in bytes; `begin:12,34` leaves out
the processes 12 and 34 and their descendants.
"""

import os
import select
import sys
import time
from collections.abc import Collection
from contextlib import suppress

_INTERVAL_S = 0.05
_ENDED = FileNotFoundError, ProcessLookupError  # what reading about a process or thread that has ended raises
_MAX_SHARE = 0.02  # of one core's time that sampling may take: reading PSS costs milliseconds in a large process


def descendants(pid: int, apart: Collection[int] = ()) -> list[int]:
    """Process ids of all live descendants of `pid`, without those in `apart` and their descendants."""
    found = []
    with suppress(*_ENDED):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(*_ENDED), open(f"/proc/{pid}/task/{task}/children") as file:
                for child in map(int, file.read().split()):
                    if child not in apart:
                        found += [child, *descendants(child, apart)]
    return found


def pss_bytes(pid: int) -> int:
    """PSS of one process: a page shared by n processes counts 1/n. Raises OSError if the kernel does not report it."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)


def tree_pss_bytes(pid: int, apart: Collection[int]) -> int:
    """PSS of `pid` and its descendants, without the processes in `apart` and their descendants."""
    total = 0
    for member in (pid, *descendants(pid, apart)):
        with suppress(*_ENDED):
            total += pss_bytes(member)
    return total


def serve(pid: int) -> None:
    """Sample the tree of `pid` between `begin` and `end`, until standard input is closed."""
    peak, pause, apart = 0, None, {os.getpid()}
    while True:
        # os.read, since a buffered reader would hide a second command from select.
        commands = os.read(0, 4096).decode().split() if select.select([0], [], [], pause)[0] else ["now"]
        if not commands:
            return
        for command, _, pids in (text.partition(":") for text in commands):
            if command == "begin":
                apart = {os.getpid(), *map(int, filter(None, pids.split(",")))}
                peak, pause = 0, _INTERVAL_S
            elif command == "end" or "end" not in commands:  # otherwise one sample, at the end, is enough
                start = time.process_time()
                peak = max(peak, tree_pss_bytes(pid, apart))
                pause = max(_INTERVAL_S, (time.process_time() - start) / _MAX_SHARE)
            if command == "end":
                print(peak, flush=True)
                pause = None


if __name__ == "__main__":
    serve(int(sys.argv[1]))
