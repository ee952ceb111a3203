"""Judges of what a reader builds in notebooks 12, 13 and 15: a slow line mended, a loader's adapter, a plan.

Each is passed to `course.check`, and raises AssertionError with a sentence that says what is wrong.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit.course.exercises import _expect
from labkit.errors import PeerError
from labkit.peers.check import check_peer
from labkit.peers.peer import JPEG_FILES, Peer, Work
from labkit.util.files import ScratchFolder

_N_PHOTOS = 12


def mended_loader(answer: Callable[..., Any]) -> None:
    """Judge `answer(names, read_photo, read_labels)`: a loader of (photos, labels) that reads all labels once.

    Counts the calls of `read_labels` in every process, and times nothing.
    """
    names = [f"photos/{number:02}.jpg" for number in range(_N_PHOTOS)]
    labels = {name: (7 * number) % 10 for number, name in enumerate(names)}
    with ScratchFolder() as scratch:
        read_photo, read_labels, log = _counted(scratch / "log", names, labels)
        loader = answer(names, read_photo, read_labels)
        _expect(
            "photo" not in log(),
            "photos are read before the loop asks for them; those of a large data set would not fit into memory",
        )
        in_advance = log().count("labels")
        epochs = [list(loader) for _ in range(2)]
        for batches in epochs:
            _expect_same_work(batches, labels)
        later = Counter(log(with_process=True))
        del loader
    _expect(later["photo", False], "it has to read photos in worker processes: `num_workers=2`")
    here, workers = later["labels", True] - in_advance, later["labels", False]
    _expect(
        here < 2,
        f"the work only moved into the training loop: the training process called `read_labels` {here} more times "
        "while it asked for batches",
    )
    _expect(
        not workers,
        f"`read_labels` was called {workers} times in worker processes, for {2 * _N_PHOTOS} photos: read the labels "
        "before workers start, each of which else reads them again",
    )
    total = in_advance + here
    _expect(total <= 1, f"`read_labels` was called {total} times; once is enough")


def _counted(path: Path, names: Sequence[str], labels: Mapping[str, int]) -> tuple[Callable, Callable, Callable]:
    """A reader of photos, one of labels, and what was called in any process, whether by this one."""
    this_process = os.getpid()

    def note(what: str) -> None:
        with path.open("a") as file:  # one short line at a time, which processes do not tear apart
            file.write(f"{what} {os.getpid()}\n")

    def read_photo(name: str) -> Tensor:
        note("photo")
        return torch.full((3, 2, 2), 1 + list(names).index(name), dtype=torch.uint8)

    def read_labels() -> dict[str, int]:
        note("labels")
        return {name: labels[name] for name in sorted(labels, reverse=True)}  # in another order than the photos

    def log(with_process: bool = False) -> list:
        pairs = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(what, int(pid) == this_process) if with_process else what for what, pid in pairs]

    return read_photo, read_labels, log


def _expect_same_work(batches: Sequence[Any], labels: Mapping[str, int]) -> None:
    """Refuse an epoch in which a photo is missing or has another label."""
    is_right = all(isinstance(batch, list | tuple) and len(batch) == 2 for batch in batches)
    _expect(batches and is_right, "it has to give pairs of photos and labels")
    numbers = [int(image.flatten()[0]) - 1 for images, _ in batches for image in images]
    found = [int(label) for _, told in batches for label in told]
    _expect(
        sorted(numbers) == list(range(_N_PHOTOS)) and len(found) == _N_PHOTOS,
        f"the result changed: an epoch has {len(numbers)} photos, not each of {_N_PHOTOS} once",
    )
    wanted = [list(labels.values())[number] for number in numbers]
    n_wrong = sum(one != other for one, other in zip(found, wanted, strict=True))
    _expect(
        not n_wrong,
        f"the result changed: {n_wrong} of {_N_PHOTOS} photos have the label of another; `read_labels` gives them by "
        "name, in no order",
    )


def peer_adapter(answer: Callable[[Work], Any]) -> None:
    """Judge `answer(work)`, an epoch of pairs (images, labels): what it gives is read from pictures made for it."""
    with ScratchFolder() as scratch:
        try:
            check_peer(Peer("mine", JPEG_FILES, True, "", (), answer), Work(scratch, scratch, num_workers=2))
        except PeerError as error:
            raise AssertionError(f"the loader's work: {error}") from None


# Images/s of a GPU, core ms and KB of an image, ms of a request; such that no product is a whole number.
_MEASURED = ((2500, 2.2, 115, 30), (800, 7.3, 90, 181), (60, 1.9, 2600, 4), (11_300, 0.7, 31, 95))


def training_plan(answer: Callable[..., Any]) -> None:
    """Judge `answer(images_per_s, core_ms, kb, request_ms)`: cores, requests in flight and Gbit/s."""
    for images_per_s, core_ms, kb, request_ms in _MEASURED:
        found = answer(images_per_s, core_ms, kb, request_ms)
        _expect(isinstance(found, tuple | list) and len(found) == 3, "it has to return cores, requests and Gbit/s")
        cores, in_flight, gbit_per_s = map(float, found)
        case = f"for {images_per_s} images/s, {core_ms} ms of a core, {kb} KB and requests of {request_ms} ms"
        exact = images_per_s * Fraction(str(core_ms)) / 1000 + 1
        told = f"{case}, {float(exact):.2f} cores are needed, rounded up {math.ceil(exact)}, not {cores:g}"
        _expect(cores == math.ceil(exact), told)
        flying = images_per_s * request_ms / 1e3
        is_near = 0.98 * flying <= in_flight <= 1.02 * math.ceil(flying)
        _expect(is_near, f"{case}, {math.ceil(flying)} requests are in flight, not {in_flight:g}; latencies are in ms")
        gbit = images_per_s * kb * 8 / 1e6
        is_near = math.isclose(gbit_per_s, gbit, rel_tol=0.02)
        _expect(is_near, f"{case}, {gbit:.3g} Gbit/s are needed, not {gbit_per_s:g}; a byte has 8 bits")
