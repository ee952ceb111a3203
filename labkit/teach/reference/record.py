"""`python -m labkit reference`: check, measure and store the experiments that need a CUDA GPU; needs no Jupyter."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import torch

from labkit.core import Scale, env_id, environment, photo_root, scale, write_atomic
from labkit.data.samples import make_photos
from labkit.data.stores import FolderStore
from labkit.pipeline.simulation import is_simulated, simulated_cuda
from labkit.teach.reference.experiments import Experiment, augment_on_device, mixing, overlap, pinning, who_augments
from labkit.teach.reference.fast_path import copying, nvjpeg, peers_on_gpu
from labkit.teach.reference.runs import FOLDER

_MAX_ROUNDS = 7  # all experiments together take less than eight minutes


def record_reference(
    folder: Path = FOLDER,
    *,
    device: str = "cuda",
    simulated: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Measure at the current scale; write `<env_id>.json` and `<env_id>.csv`, each as a whole.

    Args:
        folder: Folder for the two files; the package's own folder takes CUDA runs only.
        device: `"cuda"`, or `"cpu"` to rehearse, with a folder of your own.
        simulated: Rehearse the CUDA code on `lk.simulated_cuda()`, with a smaller model and without what only a real
            device has (nvJPEG, torch.compile). The times are those of the simulation's own work: they say nothing.
        say: Called with a line for each experiment.

    Returns:
        Path of the CSV.

    Raises:
        RuntimeError: no CUDA device, or the variants of an experiment do not do the same work.
        ValueError: `folder` is the package's own, and `device` is not `"cuda"`, or simulated.
    """
    if (device != "cuda" or simulated) and folder.resolve() == FOLDER:
        kind = "a simulated device" if simulated else f"device={device!r}"
        raise ValueError(f"runs with {kind} are not reference runs: choose another folder than {folder}")
    with simulated_cuda() if simulated else nullcontext():
        if device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                "no CUDA device found: run this on a machine that has one, or rehearse it with --simulated and a "
                "--folder of your own"
            )
        return _record(folder, torch.device(device), 1 if simulated else min(_MAX_ROUNDS, scale().rounds), say)


def _record(folder: Path, device: torch.device, rounds: int, say: Callable[[str], None]) -> Path:
    frames, seconds = [], {}
    for experiment in _make_experiments(device, scale()):
        say(f"{experiment.name}: checking, then {rounds} rounds of {len(experiment.variants)} variants")
        start = time.perf_counter()
        frames.append(experiment.run(rounds, progress=False))
        seconds[experiment.name] = round(time.perf_counter() - start, 1)
    path = folder / f"{env_id()}.csv"
    facts = {"environment": environment(), "scale": scale().name, "seconds": seconds}
    # The machine first: without it, nobody could tell where the runs come from.
    write_atomic(path.with_suffix(".json"), json.dumps(facts, indent=1).encode())
    write_atomic(path, pd.concat(frames, ignore_index=True).to_csv(index=False).encode())
    return path


def _make_experiments(device: torch.device, size: Scale) -> Iterator[Experiment]:
    """Makes one at a time, so that memory holds the models and batches of one only."""
    store = FolderStore(make_photos(photo_root("imagenet"), size.n_photos))
    is_real = device.type == "cuda" and not is_simulated()
    compiled = is_real  # in a rehearsal, compiling would take longer than everything else
    yield pinning(store, device, size)
    yield augment_on_device(device, size, "light", compiled=compiled)
    yield augment_on_device(device, size, "heavy", compiled=compiled)
    yield mixing(device, size)
    yield who_augments(store, device, size)
    yield overlap(store, device, size)
    yield copying(device, size)
    if is_real or device.type == "cpu":
        yield nvjpeg(store, device, size)
    yield peers_on_gpu(store, device, size)
