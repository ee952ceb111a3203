"""One loader over many epochs, in a process of its own: a row an epoch, its order and content checked."""

import json
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.hardening.soak.pictures import Oracle
from tests.hardening.soak.subjects import SUBJECTS, Places, Subject
from tests.hardening.soak.tree import settled

COLUMNS = [
    "loader", "epoch", "seconds", "pss_kb", "own_kb", "written_kb", "shm_kb", "n_processes", "fds_main",
    "fds_children", "threads", "shm_files", "log_bytes", "crc32", "is_right",
]  # fmt: skip
_HALF = 0.5 + 1e-3  # of a level: rounding


def soak(name: str, places: Places, n_epochs: int) -> Iterator[dict[str, Any]]:
    """Run a subject; a row as soon as its epoch is over."""
    subject = SUBJECTS[name]
    loader, oracle, state = subject.make(places), Oracle(places.photos), None
    for epoch in range(n_epochs):
        start = time.perf_counter()
        crc, right = _checked(subject, _batches(loader, subject, epoch), oracle, places)
        seconds = time.perf_counter() - start
        state = settled(state)
        yield {
            "loader": name, "epoch": epoch, "seconds": round(seconds, 4), **state, "log_bytes": _log_bytes(loader),
            "crc32": crc, "is_right": right,
        }  # fmt: skip


def _batches(loader: Iterable[Any], subject: Subject, epoch: int) -> Iterator[Any]:
    if subject.left_after:
        deque(islice(loader, subject.left_after), maxlen=0)
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    return iter(loader)


def _log_bytes(loader: Any) -> int:
    """The file in which workers note what they left out."""
    dataset = getattr(getattr(loader, "dataset", None), "_parts", (loader,))[0]
    log = getattr(dataset, "_skips", None)
    return log.path.stat().st_size if log else 0


def _checked(subject: Subject, batches: Iterator[Any], oracle: Oracle, places: Places) -> tuple[int, bool]:
    """CRC-32 of an epoch's bytes in their order, and whether it holds what it must."""
    if subject.shows == "depth":
        return _checked_depth(batches, places.depth)
    crc, parts, labels, mixed = 0, [], [], True
    for batch in batches:
        if subject.shows == "mixed":
            mixed = mixed and _is_mixed(*batch)
        images, classes = (part.numpy() for part in batch[:2])
        crc = zlib.crc32(classes.tobytes(), zlib.crc32(np.ascontiguousarray(images), crc))
        parts.append(images.astype(np.int16))
        labels.append(classes.copy())
    images, labels = np.concatenate(parts), np.concatenate(labels)
    rows = oracle.rows_of(images)
    once = len(np.unique(rows)) == len(rows) == len(oracle.keys) and (labels == oracle.labels[rows]).all()
    same = oracle.are_crops(images, rows) if subject.shows == "crops" else oracle.are_whole(images, rows)
    return crc, bool(once and same and mixed)


def _is_mixed(images: Any, labels: Any, draws: dict, blended: tuple, pasted: tuple) -> bool:
    """By NumPy from the draws; where none were given, by what is true of any draw."""
    x, classes = images.numpy().astype(np.float32), np.eye(4, dtype=np.float32)[labels.numpy()]
    sums = [np.abs(targets.sum(1).numpy() - 1).max() for _, targets in (blended, pasted)]
    if max(sums) > 1e-5:
        return False
    if not draws:
        inside = (blended[0].min() >= x.min() - _HALF) and (blended[0].max() <= x.max() + _HALF)
        return bool(inside and np.isin(pasted[0].numpy(), images.numpy()).all())
    share, partner = draws["lam"].item(), draws["partner"].numpy()
    height, width = x.shape[2:]
    reach = 0.5 * (1 - share) ** 0.5
    box = np.zeros((height, width), bool)
    top, left = (max(0, size // 2 - int(reach * size)) for size in (height, width))
    box[top : height // 2 + int(reach * height), left : width // 2 + int(reach * width)] = True
    expected = np.where(box, x[partner], x)
    by_area = classes + box.mean() * (classes[partner] - classes)
    return bool(
        np.abs(blended[0].numpy() - (share * x + (1 - share) * x[partner])).max() < 1e-2
        and np.abs(blended[1].numpy() - (share * classes + (1 - share) * classes[partner])).max() < 1e-5
        and (pasted[0].numpy() == expected).all()
        and np.abs(pasted[1].numpy() - by_area).max() < 1e-5
    )


def _checked_depth(batches: Iterator[dict[str, Any]], root: Path) -> tuple[int, bool]:
    crc, right, seen = 0, True, []
    for batch in batches:
        rgb, metres = batch["rgb_int"].numpy(), batch["depth_raw_linear"].numpy()
        crc = zlib.crc32(metres.tobytes(), zlib.crc32(rgb.tobytes(), crc))
        seen += batch["index"].tolist()
        for picture, depth, key in zip(rgb, metres, batch["rgb_relative_path"], strict=True):
            photo = np.asarray(Image.open(root / key)).transpose(2, 0, 1)
            truth = np.asarray(Image.open(root / key.replace("rgb", "depth"))).astype(np.float32) / 1000
            mirrored = not (picture == photo).all()
            photo, truth = (photo[..., ::-1], truth[..., ::-1]) if mirrored else (photo, truth)
            right = right and (picture == photo).all() and np.abs(depth[0] - truth).max() < 1e-5
    return crc, bool(right and sorted(seen) == list(range(len(seen))) and len(seen) == _n_lines(root / "list.txt"))


def _n_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    found = Places(Path(given["root"]), given["url"], given["s3"])
    for row in soak(given["name"], found, given["epochs"]):
        print(json.dumps(row), flush=True)
