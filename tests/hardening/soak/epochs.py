"""Soak loaders, each in its own process: run many epochs, check their order and content, measure memory and files."""

import json
import sys
import zlib
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from tests.hardening.soak.load import run_apart
from tests.hardening.soak.pictures import COUNT, Oracle
from tests.hardening.soak.places import served_places
from tests.hardening.soak.slope import slopes_of
from tests.hardening.soak.subjects import SUBJECTS, Places, Subject
from tests.hardening.soak.tree import settled

_FILLED = 3  # epochs, after which what is counted must not change any more
_HALF = 0.5 + 1e-3  # of a level: rounding


def soak_loaders(folder: Path, n_epochs: int, names: list[str]) -> Iterator[dict[str, Any]]:
    """Soak each of these subjects in its own process; yields rows of the table."""
    sums: dict[str, pd.Series] = {}  # of the first subject of each order
    with served_places(folder) as places:
        for name in names:
            given = [name, str(places.root), places.url, places.s3, n_epochs]
            epochs = pd.DataFrame(run_apart("tests.hardening.soak.epochs", json.dumps(given)))
            subject = SUBJECTS[name]
            expected = sums.setdefault(subject.order_of or name, epochs["crc32"])
            order = _judge_order(epochs["crc32"], subject, expected)
            yield {"loader": name, **summarize_epochs(epochs), "order": order}


def summarize_epochs(epochs: pd.DataFrame) -> dict[str, Any]:
    """Summarize a soak: the slopes of memory in kB per epoch, and what must be equal in each epoch."""
    pss, written = slopes_of(epochs)
    counts = epochs.assign(fds=epochs["fds_main"] + epochs["fds_children"])[["fds", "threads", "shm_files"]][_FILLED:]
    ranges = {name: sorted({values.min(), values.max()}) for name, values in counts.items()}
    return {
        "epochs": len(epochs), "pss": str(pss), "written": str(written),
        **{name: " to ".join(map(str, ends)) for name, ends in ranges.items()}, "right": epochs["is_right"].all(),
    }  # fmt: skip


def _judge_order(sums: pd.Series, subject: Subject, expected: pd.Series) -> str:
    """Whether epochs differ from one another, but not from those of the first loader with the same order."""
    if sums.nunique() != (1 if subject.repeats else len(sums)):
        return "epochs differ" if subject.repeats else "epochs repeat"
    return "right" if sums.equals(expected) else "differs from the first loader of this order"


def soak(name: str, places: Places, n_epochs: int) -> Iterator[dict[str, Any]]:
    """Run a subject; yields a row after each epoch."""
    subject = SUBJECTS[name]
    loader, oracle, state = subject.make(places), Oracle(places.photos), None
    for epoch in range(n_epochs):
        if subject.left_after:
            deque(islice(loader, subject.left_after), maxlen=0)
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        crc, right = check_epoch(subject, iter(loader), oracle, places)
        state = settled(state)
        yield {"epoch": epoch, **state, "crc32": crc, "is_right": right}


def check_epoch(subject: Subject, batches: Iterator[Any], oracle: Oracle, places: Places) -> tuple[int, bool]:
    """Return the CRC-32 of an epoch's bytes in their order, and whether its content is right."""
    if subject.shows == "depth":
        return _check_depth(batches, places.depth)
    crc, parts, labels, mixed = 0, [], [], True
    for batch in batches:
        if subject.shows == "mixed":
            mixed = mixed and _is_mixed_right(*batch)
        images, classes = (part.numpy() for part in batch[:2])
        crc = zlib.crc32(classes.tobytes(), zlib.crc32(np.ascontiguousarray(images), crc))
        parts.append(images.astype(np.int16))
        labels.append(classes.copy())
    images, labels = np.concatenate(parts), np.concatenate(labels)
    rows = oracle.rows_of(images)
    once = len(np.unique(rows)) == len(rows) == len(oracle.keys) and (labels == oracle.labels[rows]).all()
    same = oracle.are_crops(images, rows) if subject.shows == "crops" else oracle.are_whole(images, rows)
    return crc, bool(once and same and mixed)


def _is_mixed_right(images: Any, labels: Any, draws: dict, blended: tuple, pasted: tuple) -> bool:
    """Compare with NumPy's result; without given draws, check what is true of any draw."""
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


def _check_depth(batches: Iterator[dict[str, Any]], root: Path) -> tuple[int, bool]:
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
    return crc, bool(right and sorted(seen) == list(range(len(seen))) and len(seen) == COUNT)


if __name__ == "__main__":
    name, root, url, s3, n_epochs = json.loads(sys.argv[1])
    for row in soak(name, Places(Path(root), url, s3), n_epochs):
        print(json.dumps(row), flush=True)
