"""Kill -9 a process that writes shards, at random moments, and go on from what it leaves.

    python tests/killed_shards.py 20

Prints for each kill how far the writing was, and whether the rerun gave the bytes of an undisturbed run.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from labkit import FolderStore, make_photos, write_shards

WRITE = """
import sys, labkit
if __name__ == "__main__":
    store, root, engine = labkit.FolderStore(sys.argv[1]), sys.argv[2], sys.argv[3]
    print("begins", flush=True)
    labkit.write_shards(store, root, max_count=2, engine=engine, num_workers=2, progress=False)
    print("ends", flush=True)
"""


def contents(root: Path) -> dict[str, bytes]:
    """Every file under `root`, hidden ones included."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def start(photos: Path, root: Path, engine: str) -> subprocess.Popen:
    """A process that writes shards of two images each, just about to begin."""
    command = [sys.executable, "-c", WRITE, str(photos), str(root), engine]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "begins\n"
    return process


def kill(process: subprocess.Popen) -> bool:
    """Kill it and its workers, and wait until they are dead; whether it had still been at work."""
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    while any(runs(worker) for worker in workers):
        time.sleep(0.001)
    return "ends" not in process.communicate()[0]


def runs(process: psutil.Process) -> bool:
    """Whether a process is neither gone nor a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def finish(photos: Path, root: Path) -> Path:
    """The rerun."""
    return write_shards(FolderStore(photos), root, max_count=2, engine="threads", progress=False)


def wait_for(root: Path) -> float:
    """When the folder was there: the writing begins."""
    while not root.exists():
        time.sleep(0.0005)
    return time.perf_counter()


def main(n_kills: int) -> None:
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        photos, whole_s = make_photos(Path(folder) / "photos", 600, progress=False), {}
        for engine in ("threads", "local"):
            process = start(photos, Path(folder) / engine, engine)
            began = wait_for(Path(folder) / engine)
            process.communicate()
            whole_s[engine] = time.perf_counter() - began
        expected = contents(Path(folder) / "threads")
        number = 0
        while number < n_kills:
            engine, root = ("threads", "local")[number % 2], Path(folder) / "killed"
            process = start(photos, root, engine)
            wait_for(root)
            time.sleep(draw.uniform(0, 0.6 * whole_s[engine]))
            at_work, left = kill(process), contents(root)
            whole = {name: data for name, data in left.items() if name.endswith(".tar")}
            half = sum(name.endswith(".partial") for name in left)
            true = whole.items() <= expected.items()
            same = contents(finish(photos, root)) == expected
            if at_work:  # else it had come to its end
                print(f"{number:2d} {engine:7} whole={len(whole):3d} {true=} {half=} rerun: {same=}", flush=True)
                number += 1
            assert true
            assert same
            shutil.rmtree(root)


if __name__ == "__main__":
    main(int(sys.argv[1]))
