"""Kill -9 a process that writes shards, at random moments, and go on from what it leaves.

    python tests/killed_shards.py 20

Prints for each kill how far the writing was, and whether the rerun gave the bytes of an undisturbed run.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
    """Kill it and its workers; whether it had still been at work."""
    os.killpg(process.pid, signal.SIGKILL)
    return "ends" not in process.communicate()[0]


def finish(photos: Path, root: Path) -> Path:
    """The rerun."""
    return write_shards(FolderStore(photos), root, max_count=2, engine="threads", progress=False)


def main(n_kills: int) -> None:
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        photos = make_photos(Path(folder) / "photos", 600, progress=False)
        began = time.perf_counter()
        process = start(photos, Path(folder) / "undisturbed", "threads")
        process.wait()
        whole_s, expected = time.perf_counter() - began, contents(Path(folder) / "undisturbed")
        for number in range(n_kills):
            root = Path(folder) / f"killed-{number}"
            process = start(photos, root, "threads")
            time.sleep(draw.uniform(0, whole_s / 2))
            at_work = kill(process)
            left = contents(root)
            whole = sum(name.endswith(".tar") for name in left)
            half = sum(name.endswith(".partial") for name in left)
            assert all(expected[name] == data for name, data in left.items() if name.endswith(".tar"))
            same = contents(finish(photos, root)) == expected
            print(f"{number:2d}: killed={at_work} whole={whole} half={half} manifest={'manifest.json' in left} {same=}")
            assert same


if __name__ == "__main__":
    main(int(sys.argv[1]))
