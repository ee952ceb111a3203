"""Judge a run: are its files whole, is its error message clear, did it leave anything behind?

Files are read by other readers than labkit's (Pillow, tarfile, NumPy, csv, json) and compared with those of an
undisturbed run.
"""

import csv
import fnmatch
import json
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

CLEAR, STOPPED, RIGHT = "clear error", "stopped", "right all the same"
LATE, NO_END = "completed before the fault", "no end"
OUTCOMES = (CLEAR, STOPPED, RIGHT, LATE, NO_END)

Tree = dict[str, bytes | None]  # path below the root -> contents, None for a folder

SCRATCH = "labkit-scratch-"  # a folder that a killed run leaves until the next run
_TEMPORARY = re.compile(
    r"(^|/)\.[^/]*\.(partial|lock)$|(^|/)[^/]*\.parts(/|$)|(^|/)\.[^/]*\.partial/|/unfinished(/|$)|/\.extract(/|$)"
    rf"|/photos/{SCRATCH}[^/]+/"
)
_EXTRACTED = re.compile(r"/\.extract/([^/]+)/tree/(.*)")


def read_tree(root: Path, parts: tuple[str, ...]) -> Tree:
    """Read all files and folders below some folders, hidden ones too."""
    found: Tree = {}
    for part in parts:
        for folder, names, files in os.walk(root / part):
            here = Path(folder)
            found |= {str((here / name).relative_to(root)): None for name in names}
            found |= {str((here / name).relative_to(root)): _read_contents(here / name) for name in files}
    return found


def _read_contents(path: Path) -> bytes:
    return b"-> " + os.readlink(path).encode() if path.is_symlink() else path.read_bytes()


def judge_files(
    root: Path, found: Tree, expected: Tree, evolves: tuple[str, ...] = (), timed: bool = False
) -> list[str]:
    """Return what is wrong with the files that a disturbed run has left."""
    violations = []
    for name, data in found.items():
        if data is None:
            continue
        if member := _EXTRACTED.search(name):  # unfinished files lie beside `tree`: those in it must be whole
            if data != expected.get(_EXTRACTED.sub(r"/\1/\2", member.string)):
                violations.append(f"half file among the whole ones: {name}")
        elif not _TEMPORARY.search(name):
            may_differ = timed or any(fnmatch.fnmatch(name, pattern) for pattern in evolves)
            violations += _judge_file(root / name, name, data, expected, may_differ)
    return violations


def _judge_file(path: Path, name: str, data: bytes, expected: Tree, may_differ: bool) -> list[str]:
    if name not in expected:
        return [f"a file that no whole run has: {name}"]
    problem = find_damage(path) or ("not that of a whole run" if not may_differ and data != expected[name] else "")
    return [f"half file under a final name: {name} ({problem})"] if problem else []


def judge_final_files(root: Path, found: Tree, expected: Tree, timed: bool = False) -> list[str]:
    """Return what is wrong with the files of a completed run that followed a disturbed one."""
    violations = [f"left over: {name}" for name in found.keys() - expected.keys()]
    violations += [f"missing: {name}" for name in expected.keys() - found.keys()]
    for name, data in found.items():
        if not timed and name in expected and data != expected[name]:
            violations.append(f"not as in an undisturbed run: {name}")
        if data is not None and (problem := find_damage(root / name)):
            violations.append(f"unreadable: {name} ({problem})")
    return violations


def _load_tar(path: Path) -> None:
    with tarfile.open(path) as tar:
        assert all(len(tar.extractfile(member).read()) == member.size for member in tar if member.isfile())
    # tarfile accepts a tar without its end.
    assert path.stat().st_size % 512 == 0 and path.read_bytes().endswith(bytes(1024)), "no end"  # noqa: PT018


def _load_csv(path: Path) -> None:
    widths = {len(row) for row in csv.reader(path.read_text().splitlines())}
    assert len(widths) == 1, f"rows of {sorted(widths)} fields"


def _load_html(path: Path) -> None:
    assert path.read_text().rstrip().endswith("</html>"), "no end"


_LOADERS: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys((".jpg", ".png", ".JPEG"), lambda path: Image.open(path).load()), ".tar": _load_tar,
    ".npz": lambda path: dict(np.load(path, allow_pickle=False)), ".json": lambda path: json.loads(path.read_bytes()),
    ".csv": _load_csv, ".html": _load_html,
}  # fmt: skip


def find_damage(path: Path) -> str:
    """Return why an independent reader refuses a file; "" if it does not."""
    try:
        _LOADERS.get(path.suffix, bool)(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def judge_frame(path: Path, n_rows: int, experiment: str) -> list[str]:
    """Return what is wrong with a frame that `compare` recorded: missing or repeated rows, impossible figures."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    violations = []
    if len(rows) != n_rows or len({(row["variant"], row["round"]) for row in rows}) != n_rows:
        violations.append(f"wrong frame: {path.name} has {len(rows)} rows, not {n_rows}, one for each run")
    if any(row["experiment"] != experiment for row in rows):
        violations.append(f"wrong frame: {path.name} holds another experiment")
    return violations + [f"wrong frame: {path.name} {problem}" for row in rows if (problem := _check_rate(row))]


def _check_rate(row: dict[str, str]) -> str:
    names = ("n_images", "steady_s", "first_batch_s", "images_per_s")
    n_images, steady, first, rate = (float(row[name] or "nan") for name in names)
    if steady > 0 and first > 0 and abs(rate * (steady + first) / n_images - 1) < 1e-6:
        return ""
    return f"says {rate} images/s for {n_images} in {first} + {steady} s"


def judge_size_rows(found: bytes, expected: bytes) -> list[str]:
    """Return what is wrong with a table of sizes of a harmed source: each row is right, or has an error."""
    rows = list(csv.DictReader(found.decode().splitlines()))
    right = {row["path"]: row for row in csv.DictReader(expected.decode().splitlines())}
    violations = [f"wrong row: {row}" for row in rows if row != right.get(row["path"]) and not row["error"]]
    if len(rows) < len(right) - 1:
        violations.append(f"wrong table: {len(rows)} rows, not {len(right)}")
    return violations


def judge_message(err: str, names: tuple[str, ...], prefix: str) -> list[str]:
    """Return what is wrong with the stderr of a failed command: it must be one line that names a file."""
    if "Traceback" in err:
        return [f"a traceback: {err.strip().splitlines()[-1][:200]}"]
    if not err.startswith(f"{prefix}: ") or err.count("\n") != 1:
        return [f"not one line after {prefix!r}: {err.strip()[:200]!r}"]
    return [] if any(name in err for name in names) else [f"names no file: {err.strip()[:200]!r}"]


def judge_leftovers(processes: dict[int, str], segments: set[str], temporary: Path, others: tuple = ()) -> list[str]:
    """Return violations by what outlived a trial: processes, shared memory, files in its temporary folder.

    others: Prefixes of names that are not labkit's to remove, besides torch's own caches.
    """
    allowed = ("torchinductor_", *others)
    return [
        *(f"orphan: {command}" for command in processes.values()),
        *(f"leaked in /dev/shm: {name}" for name in sorted(segments)),
        *(f"leaked in TMPDIR: {name}" for name in sorted(os.listdir(temporary)) if not name.startswith(allowed)),
    ]
