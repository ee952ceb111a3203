"""Start a process that writes shards, kill it with its workers, and go on from what it leaves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from labkit import FolderStore, write_shards

WRITE = """
import sys, labkit
if __name__ == "__main__":
    store, root, engine = labkit.FolderStore(sys.argv[1]), sys.argv[2], sys.argv[3]
    print("begins", flush=True)
    labkit.write_shards(store, root, max_count=2, engine=engine, num_workers=2, progress=False)
    print("ends", flush=True)
"""


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
