"""`python -m labkit reference`: check, measure and store the experiments that need a CUDA GPU. Without Jupyter."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import torch

from labkit.core import Scale, env_id, environment, photo_root, scale, write_atomic
from labkit.data.samples import make_photos
from labkit.data.stores import FolderStore
from labkit.teach.reference import experiments, fast_path
from labkit.teach.reference.experiments import Experiment
from labkit.teach.reference.runs import FOLDER

_MOST_ROUNDS = 7  # so that all of it stays under eight minutes


def record_reference(
    folder: Path = FOLDER, *, device: str = "cuda", say: Callable[[str], None] = lambda line: None
) -> Path:
    """Measure at the current scale; write `<env_id>.csv`, then `.json`, each whole or not at all.

    Args:
        folder: Where the pair of files goes; the package's own folder takes CUDA runs only.
        device: `"cuda"`; `"cpu"` rehearses, into a folder of your own.
        say: Called with a line on what is being done.

    Returns:
        The CSV's path.

    Raises:
        RuntimeError: no such device here, or an experiment's variants do not do the same work.
        ValueError: a CPU's runs for the package's own folder.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device here: run this on a machine that has one")
    if device != "cuda" and folder.resolve() == FOLDER:
        raise ValueError(f"runs of device={device!r} are no reference: choose another folder")
    frames, seconds = [], {}
    for experiment in _experiments(torch.device(device), scale()):
        rounds = min(_MOST_ROUNDS, scale().rounds)
        say(f"{experiment.name}: checking, then {rounds} rounds of {len(experiment.variants)} variants")
        start = time.perf_counter()
        frames.append(experiment.run(rounds, progress=False))
        seconds[experiment.name] = round(time.perf_counter() - start, 1)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{env_id()}.csv"
    facts = {"environment": environment(), "scale": scale().name, "seconds": seconds}
    # The machine first: runs without it could not be told whose they are.
    write_atomic(path.with_suffix(".json"), json.dumps(facts, indent=1).encode())
    write_atomic(path, pd.concat(frames, ignore_index=True).to_csv(index=False).encode())
    return path


def _experiments(device: torch.device, size: Scale) -> Iterator[Experiment]:
    """One at a time: their models and batches need not lie in memory together."""
    store = FolderStore(make_photos(photo_root("imagenet"), size.n_photos))
    compiled = device.type == "cuda"  # on a rehearsal, compiling would take longer than all the rest
    yield experiments.pinning(store, device, size)
    yield experiments.augment_on_device(device, size, "light", compiled=compiled)
    yield experiments.augment_on_device(device, size, "heavy", compiled=compiled)
    yield experiments.mixing(device, size)
    yield experiments.who_augments(store, device, size)
    yield experiments.overlap(store, device, size)
    yield fast_path.copying(device, size)
    yield fast_path.nvjpeg(store, device, size)
    yield fast_path.peers_on_gpu(store, device, size)
