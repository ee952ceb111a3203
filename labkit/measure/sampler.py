"""The memory of a process tree, sampled from a process of its own.

A thread of the measured process would fight it for Python's global lock, and show up in what it measures. Run as a
script with a process id; it needs the standard library alone, so that it starts in milliseconds. Commands come as
lines on its standard input: `begin` starts to sample, `now` samples at once, `end` prints the peak in bytes;
`begin:12,34` leaves out the trees of the processes 12 and 34.
"""

import os
import select
import sys
import time
from collections.abc import Collection

_INTERVAL_S = 0.05
_MAX_SHARE = 0.02  # of one core's time that sampling may take: reading PSS costs milliseconds in a large process


def descendants(pid: int, apart: Collection[int] = ()) -> list[int]:
    """Process ids of all live descendants of `pid`, without those in `apart` and theirs.

    Raises OSError where the kernel does not list children.
    """
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/children") as file:
                children = [int(child) for child in file.read().split()]
        except (FileNotFoundError, ProcessLookupError):
            if not os.path.exists("/proc/thread-self/children"):
                raise OSError("this kernel does not list children") from None
            continue  # the thread ended meanwhile
        for child in children:
            if child in apart:
                continue
            found.append(child)
            try:
                found += descendants(child, apart)
            except (FileNotFoundError, ProcessLookupError):
                continue  # the process ended meanwhile
    return found


def pss_bytes(pid: int) -> int:
    """PSS of one process: a page shared by n processes counts 1/n. Raises OSError where the kernel does not say."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def tree_pss_bytes(pid: int, apart: Collection[int]) -> int:
    """PSS of `pid` and its descendants, without the trees of the processes in `apart`."""
    total = 0
    for member in (pid, *descendants(pid, apart)):
        try:
            total += pss_bytes(member)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return total


def serve(pid: int) -> None:
    """Sample `pid`'s tree between `begin` and `end`, until standard input is closed."""
    peak, pause, waiting, apart = 0, None, [], {os.getpid()}
    while True:
        if waiting or select.select([0], [], [], pause)[0]:
            # os.read, since a buffered reader would hide a second command from select.
            waiting = waiting or os.read(0, 4096).decode().split()
            if not waiting:
                return
            command, _, pids = waiting.pop(0).partition(":")
            if command == "begin":
                apart = {os.getpid(), *map(int, filter(None, pids.split(",")))}
                peak, pause = 0, _INTERVAL_S
            elif command == "end" or not waiting:  # else the next command is late already, and reads the same
                peak = max(peak, tree_pss_bytes(pid, apart))
            if command == "end":
                print(peak, flush=True)
                pause = None
        else:
            start = time.process_time()
            peak = max(peak, tree_pss_bytes(pid, apart))
            pause = max(_INTERVAL_S, (time.process_time() - start) / _MAX_SHARE)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
