"""Judges of what learners build in 03, 03b and 03c: a process's cores, draws of a sample, names that are not copied."""

import gc
import multiprocessing
import os
import pickle
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from labkit.course.exercises import NotAnswered, _expect, global_generators

_V2, _V1 = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
_AFFINITY, _ROUNDED = "the affinity limits the process as well as the quota", "round down, but no rank to 0"
_UNLIMITED, _AFTER = "`max` in version 2 and -1 in version 1 are no quota", "ranks share what the quota leaves"
_PERIOD = "the quota counts per period, and this period is another one"
# CPUs in the affinity, the names and contents of the cgroup's files, ranks, what is right, and what to look at.
_CASES: tuple[tuple[int, tuple[str, ...], tuple[str, ...], int, int, str], ...] = (
    (8, _V2, ("max 100000\n",), 1, 8, _UNLIMITED),
    (8, _V2, ("250000 100000\n",), 1, 2, f"a quota in `cpu.max` limits the process, too; {_ROUNDED}"),
    (8, _V2, ("50000 100000\n",), 1, 1, _ROUNDED),
    (8, _V2, ("400000 200000\n",), 1, 2, _PERIOD),
    (2, _V2, ("400000 100000\n",), 1, 2, _AFFINITY),
    (8, _V2, ("350000 100000\n",), 1, 3, _ROUNDED),
    (8, _V2, ("400000 100000\n",), 2, 2, _AFTER),
    (8, _V1, ("300000\n", "50000\n"), 1, 6, "cgroup v1 has its quota in `cpu.cfs_quota_us` and `cpu.cfs_period_us`"),
    (8, _V1, ("-1\n", "100000\n"), 1, 8, _UNLIMITED),
    (7, _V2, ("max 100000\n",), 4, 1, f"{_AFTER}; {_ROUNDED}"),
    (2, (), (), 4, 1, _ROUNDED),
)


def cores_of_a_process(answer: Callable[[set[int], Path, int], Any]) -> None:
    """`answer(affinity, cgroup, n_ranks)` has to give the workers of a rank, at least one."""
    host = os.cpu_count() or 1
    n_allowed = 6 if host == 5 else 5
    of_host = "os.cpu_count() counts CPUs that the process may not use"
    for n_cpus, names, texts, n_ranks, right, hint in ((n_allowed, (), (), 1, n_allowed, of_host), *_CASES):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in zip(names, texts, strict=True):
                Path(folder, name).write_text(text)
            held = ", ".join(map("{} = {!r}".format, names, map(str.strip, texts))) or "no files of a quota"
            case = f"{n_cpus} CPUs, {held}, ranks: {n_ranks}"
            try:
                found = answer(set(range(4, 4 + n_cpus)), Path(folder), n_ranks)
            except ValueError as error:
                raise AssertionError(f"{case}: {error}: {hint}") from error
        _expect(found == right and isinstance(found, int), f"{case}: gave {found!r}, and {right} is right: {hint}")


_N_SAMPLES, _SEED = 24, 7
_SHARED = "so the epoch needs memory that they share: a tensor after `share_memory_()`, filled by `fill_`"


def draws_of_a_sample(answer: Callable[[int, int], Any]) -> None:
    """The data set `answer(n_samples, seed)` has to draw by seed, epoch and sample, whoever loads the sample."""
    dataset = answer(_N_SAMPLES, _SEED)
    if dataset[0] is ...:
        raise NotAnswered
    before = global_generators()
    alone = _two_epochs(dataset)
    _expect(
        global_generators() == before,
        "without workers, the training's own generators changed: `__getitem__` draws from a global generator or "
        "seeds it, as torch.manual_seed does",
    )
    _expect(not torch.equal(*alone), "each sample draws in epoch 1 what it drew in epoch 0")
    is_three = alone[0].shape == (_N_SAMPLES, 3) and all(len(each.unique()) == 3 for each in alone[0])
    _expect(is_three, f"a sample is {alone[0][0]}; draw three numbers")
    draws = torch.cat([*alone, _two_epochs(answer(_N_SAMPLES, _SEED + 1))[0]])
    _expect(
        len(draws.unique(dim=0)) == len(draws),
        "two samples of an epoch, of neighboring epochs or of runs with neighboring seeds draw the same, as with "
        "seed + epoch + index: mix all three, as np.random.SeedSequence does",
    )
    for method, num_workers in (("fork", 2), ("forkserver", 3)):
        if method not in multiprocessing.get_all_start_methods():
            continue
        first, second = _two_epochs(answer(_N_SAMPLES, _SEED), method, num_workers)
        _expect(
            torch.equal(first, alone[0]),
            f"in another order and with num_workers={num_workers}, samples draw otherwise than without workers: "
            "the seed may depend on the index, but on no worker's id, and on no earlier draw",
        )
        _expect(
            not torch.equal(first, second),
            f"kept workers, started by {method}, draw in epoch 1 as in epoch 0: a global variable, a plain attribute "
            f"or a tensor of its own changes in the training process alone, {_SHARED}",
        )
        told = f"with num_workers={num_workers}, epoch 1 is another one than without workers"
        _expect(torch.equal(second, alone[1]), told)


def _two_epochs(dataset: Any, method: str = "", num_workers: int = 0) -> list[torch.Tensor]:
    """The draws of each sample in two epochs, which kept workers load in an order that depends on their number."""
    multiprocessing.set_forkserver_preload(["torch"])  # its workers import the class anew, as spawned ones, but sooner
    workers: dict[str, Any] = {"multiprocessing_context": method, "persistent_workers": True} if num_workers else {}
    order = torch.randperm(_N_SAMPLES, generator=torch.Generator().manual_seed(num_workers))
    own = torch.Generator()  # else a loader draws from the training's
    epochs = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*worker processes in total")  # three, also on two cores
        loader = DataLoader(dataset, 4, sampler=order.tolist(), num_workers=num_workers, generator=own, **workers)
        for epoch in range(2):
            dataset.set_epoch(epoch)
            epochs.append(torch.cat(list(loader))[order.argsort()])
    return epochs


_NAMES = (
    *(f"train/n{number % 97:08d}/n{number:08d}.JPEG" for number in range(3000)),
    *("é.jpg", "写真 1.jpg", os.fsdecode(b"\xff\xfe.jpg"), " b.jpg", "c.jpg ", "two\nlines.jpg", "long/" * 200, "end"),
)
_EACH_BYTES, _OWN_BYTES = 16, 5000  # that a name's place, and the object itself, may take
_A_FEW = 100  # objects
_ANY_BYTES = "names of files may be any bytes; os.fsencode and os.fsdecode keep them"


def shared_names(answer: Callable[[list[str]], Any]) -> None:
    """`answer(names)` has to give each name by its number, from a few objects that hold the bytes of all names."""
    names = [os.fsdecode(os.fsencode(name)) for name in _NAMES]  # strings that nothing else refers to
    n_bytes = sum(len(os.fsencode(name)) for name in names)
    try:
        packed = answer(names)
        if packed[0] is ...:
            raise NotAnswered
        found = [packed[number] for number in range(len(names))]
    except UnicodeError as error:
        raise AssertionError(f"{error}: {_ANY_BYTES}") from error
    for number, (name, got) in enumerate(zip(names, found, strict=True)):
        if got != name:
            why = ""
            if isinstance(got, bytes):
                why = ": names are strings, which os.fsdecode makes of bytes"
            elif any("\ud800" <= character <= "\udfff" for character in name):
                why = f": {_ANY_BYTES}"
            elif not name.isascii():
                why = ": `é` is one character, and two bytes"
            raise AssertionError(f"name {number} is {name!r:.60}, and {got!r:.60} came back{why}")
    del found, got
    _expect_few_objects(packed)
    try:
        n_pickled = len(pickle.dumps(packed))
    except Exception as error:
        raise AssertionError(f"a spawned worker gets it by pickle, which says: {error}") from error
    if n_pickled > n_bytes + _EACH_BYTES * len(names) + _OWN_BYTES:
        raise AssertionError(f"the names are {n_bytes:,} bytes, and it holds {n_pickled:,}")


_OF_EACH = (
    "an array with an element for each name refers to strings, or makes every name as long as the longest: put their "
    "bytes end to end, and keep where each ends"
)


def _expect_few_objects(held: Any) -> None:
    """Walk all that an object refers to; many objects, or an array of one element per name, are a mistake."""
    seen, to_visit = set[int](), [held]
    while to_visit:
        each = to_visit.pop()
        if id(each) in seen or isinstance(each, type | types.ModuleType | types.FunctionType | torch.dtype):
            continue
        seen.add(id(each))
        if isinstance(each, np.ndarray) and each.dtype.kind in "USO":
            raise AssertionError(_OF_EACH)
        if isinstance(each, list | tuple | dict | set | frozenset) and len(each) > _A_FEW:
            raise AssertionError(
                f"a {type(each).__name__} of {len(each):,} objects: reading one changes its reference count, so that a "
                "worker copies its page"
            )
        to_visit += gc.get_referents(each)
    if len(seen) > _A_FEW:
        raise AssertionError(f"it consists of {len(seen):,} Python objects, each with a reference count")
