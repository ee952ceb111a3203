"""Judges of what learners build in 03, 03b and 03c: a process's cores, draws of a sample, names that are not copied."""

import gc
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import tracemalloc
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from labkit.course.exercises import NotAnswered, _expect

_V1 = "cpu.cfs_quota_us", "cpu.cfs_period_us"
_UNLIMITED = {"cpu.max": "max 100000\n"}
# CPUs in the affinity, files of the cgroup, ranks, what is right, and what wrong answers have overlooked.
_CASES: tuple[tuple[int, Mapping[str, str], int, int, Mapping[int, str]], ...] = (
    (8, _UNLIMITED, 1, 8, {}),
    (8, {"cpu.max": "250000 100000\n"}, 1, 2,
     {8: "a quota in `cpu.max` limits the process, too", 3: "2.5 cores keep two workers busy, and no third one"}),
    (8, {"cpu.max": "50000 100000\n"}, 1, 1, {0: "half a core still needs one worker"}),
    (8, {"cpu.max": "400000 200000\n"}, 1, 2, {4: "the quota counts per period, and this period is another one"}),
    (2, {"cpu.max": "400000 100000\n"}, 1, 2, {4: "the affinity limits the process as well as the quota"}),
    (8, {"cpu.max": "350000 100000\n"}, 1, 3, {4: "3.5 cores keep three workers busy, and no fourth one"}),
    (8, {"cpu.max": "400000 100000\n"}, 2, 2, {4: "ranks share what the quota leaves, so divide after it"}),
    (8, dict(zip(_V1, ("300000\n", "100000\n"), strict=True)), 1, 3,
     {8: "cgroup v1 has its quota in `cpu.cfs_quota_us` and `cpu.cfs_period_us`"}),
    (8, dict(zip(_V1, ("300000\n", "50000\n"), strict=True)), 1, 6, {3: "the period is in `cpu.cfs_period_us`"}),
    (8, dict(zip(_V1, ("-1\n", "100000\n"), strict=True)), 1, 8,
     dict.fromkeys((-1, 0, 1), "a quota of -1 in cgroup v1 is none")),
    (8, _UNLIMITED, 4, 2, {8: "the ranks of a node share its cores"}),
    (7, _UNLIMITED, 4, 1, {2: "round down: four ranks of two workers would be one more than the cores"}),
    (2, {}, 4, 1, {0: "with more ranks than cores, each still needs one worker"}),
)  # fmt: skip


def cores_of_a_process(answer: Callable[[set[int], Path, int], Any]) -> None:
    """`answer(affinity, cgroup, n_ranks)` has to give the workers of a rank, at least one."""
    host = os.cpu_count() or 1
    n_allowed = 6 if host == 5 else 5
    of_host = {host: "os.cpu_count() counts the machine's CPUs, whatever the process may use"}
    for n_cpus, files, n_ranks, right, overlooked in ((n_allowed, {}, 1, n_allowed, of_host), *_CASES):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                Path(folder, name).write_text(text)
            held = ", ".join(f"{name} = {text.strip()!r}" for name, text in files.items()) or "no files of a quota"
            case = f"{n_cpus} CPUs, {held}, ranks: {n_ranks}"
            try:
                found = answer(set(range(4, 4 + n_cpus)), Path(folder), n_ranks)
            except ValueError as error:
                why = "`max` is no number, and means that there is no quota" if "max" in str(error) else str(error)
                raise AssertionError(f"{case}: {why}") from error
        if found != right or not isinstance(found, int):
            why = overlooked.get(found, "") if isinstance(found, int) else "workers are whole"
            raise AssertionError(f"{case}: gave {found!r}, and {right} is right{why and ': ' + why}")


_N_SAMPLES, _SEED = 24, 7
_N_MANY = 1_281_167  # ImageNet's
_SPARSE = (0, 1, *(10**power for power in range(1, 7)), *(2**power for power in range(1, 21)))
_SHARED = "so the epoch needs memory that they share: a tensor after `share_memory_()`, filled by `fill_`"


def draws_of_a_sample(answer: Callable[[int, int], Any]) -> None:
    """The data set `answer(n_samples, seed)` has to draw by seed, epoch and sample, whoever loads the sample."""
    dataset = answer(_N_SAMPLES, _SEED)
    if dataset[0] is ...:
        raise NotAnswered
    before = _generators()
    alone = _two_epochs(dataset)
    _expect(
        _generators() == before,
        "without workers, the training's own generators changed: `__getitem__` draws from a global generator or "
        "seeds it, as torch.manual_seed does",
    )
    _expect(not torch.equal(*alone), "each sample draws in epoch 1 what it drew in epoch 0")
    _expect(alone[0].shape == (_N_SAMPLES, 3), f"a sample is of shape {tuple(alone[0].shape[1:])}; draw three numbers")
    for epoch in alone:
        _expect(
            len(epoch.unique(dim=0)) == _N_SAMPLES,
            "samples of one epoch draw the same: the seed has to depend on the index",
        )
        _expect(all(len(each.unique()) == 3 for each in epoch), "a sample holds one number more than once: draw three")
    _expect_mixed(answer, torch.cat(alone))
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


def _expect_mixed(answer: Callable[[int, int], Any], alone: torch.Tensor) -> None:
    """No two of seed, epoch and sample give the same draws, also where a product of one could meet another."""
    _expect(
        len(alone.unique(dim=0)) == 2 * _N_SAMPLES,
        "a sample draws in epoch 1 what its neighbor drew in epoch 0, as seed + epoch + index does",
    )
    cure = "mix seed, epoch and index, as np.random.SeedSequence does"
    other = torch.cat([alone, _two_epochs(answer(_N_SAMPLES, _SEED + 1))[0]])
    _expect(
        len(other.unique(dim=0)) == 3 * _N_SAMPLES,
        f"a run with the next seed draws in epoch 0 what this one drew, as with seed + epoch: {cure}",
    )
    drawn = dict[tuple[float, ...], str]()
    for seed in (_SEED, _SEED + 1):
        dataset = answer(_N_MANY, seed)
        for epoch in range(2):
            dataset.set_epoch(epoch)
            for index in _SPARSE:
                case = f"sample {index:,} of epoch {epoch} with seed {seed}"
                same = drawn.setdefault(tuple(torch.as_tensor(dataset[index]).tolist()), case)
                _expect(same is case, f"in a data set of {_N_MANY:,}, {case} draws the same as {same}: {cure}")


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
            try:
                epochs.append(torch.cat(list(loader))[order.argsort()])
            except RuntimeError as error:
                _expect("SemLock" not in str(error), f"a Value with a lock reaches forked workers alone, {_SHARED}")
                raise
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
    n_references = sys.getrefcount(names[7])
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
    if sys.getrefcount(names[7]) > n_references:
        raise AssertionError("it still refers to the strings, whose reference counts change whenever they are read")
    try:
        n_pickled = len(pickle.dumps(packed))
    except Exception as error:
        raise AssertionError(f"a spawned worker gets it by pickle, which says: {error}") from error
    if n_pickled > n_bytes + _EACH_BYTES * len(names) + _OWN_BYTES:
        raise AssertionError(f"the names are {n_bytes:,} bytes, and it holds {n_pickled:,}")
    tracemalloc.start()
    packed[7]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if peak_bytes > n_bytes / 4:
        raise AssertionError(f"reading one name takes {peak_bytes:,} bytes, as if all were unpacked for it")


_KINDS_OF_ARRAY = {
    "U": "an array of str has 4 bytes for each character of the longest name, in every name",
    "S": "an array of bytes makes every name as long as the longest: put them end to end, and keep where each ends",
    "O": "an array of objects holds references to strings, as a list does, so that reading a name writes to it",
}


def _expect_few_objects(held: Any) -> None:
    """Walk all that an object refers to; many objects, or an array of one element per name, are a mistake."""
    seen, to_visit = set[int](), [held]
    while to_visit:
        each = to_visit.pop()
        if id(each) in seen or isinstance(each, type | types.ModuleType | types.FunctionType | torch.dtype):
            continue
        seen.add(id(each))
        if isinstance(each, np.ndarray) and each.dtype.kind in _KINDS_OF_ARRAY:
            raise AssertionError(_KINDS_OF_ARRAY[each.dtype.kind])
        if isinstance(each, list | tuple | dict | set | frozenset) and len(each) > _A_FEW:
            raise AssertionError(
                f"a {type(each).__name__} of {len(each):,} objects: reading one changes its reference count, so that a "
                "worker copies its page"
            )
        to_visit += gc.get_referents(each)
    if len(seen) > _A_FEW:
        raise AssertionError(f"it consists of {len(seen):,} Python objects, each with a reference count")


def _generators() -> tuple[str, ...]:
    return repr(random.getstate()), repr(np.random.get_state(legacy=False)), str(torch.get_rng_state().tolist())
