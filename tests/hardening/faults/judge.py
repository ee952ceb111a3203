"""Verdicts: is what lies there whole, is what was said clear, is anybody or anything left behind?

Files are read by others' readers: Pillow, tarfile, NumPy, csv, json; and compared with those of an undisturbed run.
"""

import csv
import fnmatch
import json
import os
import re
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

Tree = dict[str, bytes | None]  # path below the root -> contents, None for a folder

SCRATCH = "labkit-scratch-"  # what a killed run leaves until the next
_TEMPORARY = re.compile(
    r"(^|/)\.[^/]*\.(partial|lock)$|(^|/)[^/]*\.parts(/|$)|(^|/)\.[^/]*\.partial/|/unfinished(/|$)|/\.extract(/|$)"
    rf"|/photos/{SCRATCH}[^/]+/"
)
_EXTRACTING = re.compile(r"/\.extract/([^/]+)/tree/(.*)")


def tree_of(root: Path, parts: tuple[str, ...]) -> Tree:
    """All files and folders below some folders, hidden ones too."""
    found: Tree = {}
    for part in parts:
        for folder, names, files in os.walk(root / part):
            here = Path(folder)
            found |= {str((here / name).relative_to(root)): None for name in names}
            found |= {str((here / name).relative_to(root)): _contents(here / name) for name in files}
    return found


def _contents(path: Path) -> bytes:
    return b"-> " + os.readlink(path).encode() if path.is_symlink() else path.read_bytes()


def after_fault(root: Path, found: Tree, wanted: Tree, evolves: tuple[str, ...] = (), timed: bool = False) -> list[str]:
    """What is wrong with what a disturbed run has left."""
    wrong = []
    for name, data in found.items():
        if data is None:
            continue
        member = _EXTRACTING.search(name)
        if member:  # a file in the making lies beside `tree`: what is in it counts as whole
            final = _EXTRACTING.sub(r"/\1/\2", name)
            if final not in wanted or data != wanted[final]:
                wrong.append(f"half file among the whole ones: {name}")
        elif not _TEMPORARY.search(name):
            may_differ = timed or any(fnmatch.fnmatch(name, pattern) for pattern in evolves)
            if name not in wanted:
                wrong.append(f"a file that no whole run has: {name}")
            elif not may_differ and data != wanted[name]:
                wrong.append(f"half file under a final name: {name}")
            elif problem := unreadable(root / name):
                wrong.append(f"half file under a final name: {name} ({problem})")
    return wrong


def after_rerun(root: Path, found: Tree, wanted: Tree, timed: bool = False) -> list[str]:
    """What is wrong with what a run left that came to its end, after another one had been disturbed."""
    wrong = [f"left over: {name}" for name in found if name not in wanted]
    wrong += [f"missing: {name}" for name in wanted if name not in found]
    if not timed:
        both = found.keys() & wanted.keys()
        wrong += [f"not as in an undisturbed run: {name}" for name in sorted(both) if found[name] != wanted[name]]
    for name in found:
        if found[name] is not None and (problem := unreadable(root / name)):
            wrong.append(f"unreadable: {name} ({problem})")
    return wrong


def unreadable(path: Path) -> str:
    """Why an independent reader refuses a file; "" where none does."""
    try:
        if path.suffix in (".jpg", ".png", ".JPEG"):
            with Image.open(path) as image:
                image.load()
        elif path.suffix == ".tar":
            with tarfile.open(path) as tar:
                assert all(len(tar.extractfile(member).read()) == member.size for member in tar if member.isfile())
            whole = path.stat().st_size % 512 == 0 and path.read_bytes().endswith(bytes(1024))
            assert whole, "no end"  # tarfile does not miss it
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                assert all(arrays[name] is not None for name in arrays)
        elif path.suffix == ".json":
            json.loads(path.read_bytes())
        elif path.suffix == ".csv":
            widths = {len(row) for row in csv.reader(path.read_text().splitlines())}
            assert len(widths) == 1, f"rows of {sorted(widths)} fields"
        elif path.suffix == ".html":
            assert path.read_text().rstrip().endswith("</html>"), "no end"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wrong_frame(path: Path, n_rows: int, experiment: str) -> list[str]:
    """What is wrong with a frame that `compare` recorded: rows lost or doubled, or figures that cannot be."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    wrong = []
    if len(rows) != n_rows or len({(row["variant"], row["round"]) for row in rows}) != n_rows:
        wrong.append(f"wrong frame: {path.name} has {len(rows)} rows, not {n_rows}, one for each run")
    if any(row["experiment"] != experiment for row in rows):
        wrong.append(f"wrong frame: {path.name} holds another experiment")
    for row in rows:
        n_images, steady, first, rate = (
            float(row[name] or "nan") for name in ("n_images", "steady_s", "first_batch_s", "images_per_s")
        )
        if not (steady > 0 and first > 0 and abs(rate * (steady + first) / n_images - 1) < 1e-6):
            wrong.append(f"wrong frame: {path.name} says {rate} images/s for {n_images} in {first} + {steady} s")
    return wrong


def wrong_rows(found: bytes, wanted: bytes) -> list[str]:
    """What is wrong with a table of sizes whose source was harmed: each row is right, or says that it is not."""
    rows = list(csv.DictReader(found.decode().splitlines()))
    right = {row["path"]: row for row in csv.DictReader(wanted.decode().splitlines())}
    wrong = [f"wrong row: {row}" for row in rows if row != right.get(row["path"]) and not row["error"]]
    if len(rows) < len(right) - 1:
        wrong.append(f"wrong table: {len(rows)} rows, not {len(right)}")
    return wrong


def unclear(said: str, names: tuple[str, ...], prefix: str) -> list[str]:
    """What is wrong with an error message of a command, its stderr: one line that names what it is about."""
    wrong = []
    if "Traceback" in said:
        wrong.append(f"a traceback: {said.strip().splitlines()[-1][:200]}")
    elif not said.startswith(f"{prefix}: ") or said.count("\n") != 1:
        wrong.append(f"not one line after {prefix!r}: {said.strip()[:200]!r}")
    elif not any(name in said for name in names):
        wrong.append(f"names no file: {said.strip()[:200]!r}")
    return wrong


def left_over(processes: dict[int, str], segments: set[str], temporary: Path, others: tuple = ()) -> list[str]:
    """Violations by what outlived a trial: processes, shared memory, files in its temporary folder.

    others: Beginnings of names that are not labkit's to remove, beside torch's own caches.
    """
    theirs = ("torchinductor_", *others)
    return [
        *(f"orphan: {command}" for command in processes.values()),
        *(f"leaked in /dev/shm: {name}" for name in sorted(segments)),
        *(f"leaked in TMPDIR: {name}" for name in sorted(os.listdir(temporary)) if not name.startswith(theirs)),
    ]
