"""What a process tree holds: memory, open files, threads, shared memory. Read from /proc."""

import contextlib
import os
import re
import time
from pathlib import Path

from labkit.measure.processes import _descendants

EXACT = ("n_processes", "fds_main", "fds_children", "threads", "shm_files")  # flat means equal
_PATIENCE_S = 2.0


def held() -> dict[str, int]:
    """Of this process and its descendants, now.

    Returns:
        pss_kb: PSS, in units of 1000 bytes. own_kb: its anonymous and shared-memory part; the rest are pages of files,
        which are divided among all processes of the machine that map the same libraries, and so change with theirs.
        written_kb: anonymous pages of each process, those that it still shares with its parent included. A leak raises
        all three. That a forked worker gets its own copy of a page, which it shared until one of the two wrote to it,
        raises PSS alone: it is bounded by what was shared, and goes on, ever slower, for hundreds of epochs.
        shm_kb: PSS of shared memory. n_processes, fds_main, fds_children (sum), threads. shm_files: files in /dev/shm
        that are open or, named after one of these processes, left there.
    """
    pids = [os.getpid(), *_descendants()]
    sizes = [_read_smaps_rollup(pid) for pid in pids]
    fds = [_open_files(pid) for pid in pids]
    return {
        "pss_kb": sum(size["Pss"] for size in sizes) // 1000,
        "own_kb": sum(size["Pss_Anon"] + size["Pss_Shmem"] for size in sizes) // 1000,
        "written_kb": sum(size["Anonymous"] for size in sizes) // 1000,
        "shm_kb": sum(size["Pss_Shmem"] for size in sizes) // 1000,
        "n_processes": len(pids),
        "fds_main": len(fds[0]),
        "fds_children": sum(map(len, fds[1:])),
        "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
        "shm_files": len(_shared(pids, fds)),
    }


def settled(last: dict[str, int] | None) -> dict[str, int]:
    """`held()`, as soon as all that is counted is as it was: a worker may be closing what it has just handed over."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        now = held()
        if last is None or all(now[name] == last[name] for name in EXACT) or time.monotonic() > deadline:
            return now
        time.sleep(0.02)


def _read_smaps_rollup(pid: int) -> dict[str, int]:
    """Sizes in bytes, summed by the kernel over all mappings of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def _open_files(pid: int) -> list[str]:
    files = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this very listing
            files.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return files


def _shared(pids: list[int], fds: list[list[str]]) -> set[str]:
    """Names in /dev/shm, those of unlinked files included: each is random."""
    opened = {name.partition("/dev/shm/")[2].removesuffix(" (deleted)") for names in fds for name in names}
    theirs = re.compile(rf"_({'|'.join(map(str, pids))})_")  # as torch calls its files
    return {name for name in opened if name} | {name for name in os.listdir("/dev/shm") if theirs.search(name)}
