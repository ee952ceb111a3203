"""A data set whose samples tell their index and their draws, and loaders of it; scripts of several ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset

import labkit as lk
from tests.paths import REPO


class Drawn(Dataset):
    """Items are (index, a random number)."""

    def __init__(self, n_samples: int = 24):
        self.n_samples = n_samples

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


def loader_of(num_workers: int = 0, **options):
    config = lk.LoaderConfig(batch_size=4, num_workers=num_workers, seed=3)
    return lk.make_loader(Drawn(), config, **{"shuffle": True} | options)


def rows(batches) -> list[tuple[float, ...]]:
    return [tuple(row) for batch in batches for row in batch.tolist()]


_END = """
import json, os, torch
json.dump(result, open(f"{os.environ['RANK']}.json", "w"))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


def run_ranks(folder: Path, code: str, *arguments: object, n_ranks: int = 2) -> list:
    """What each rank's `result` was: a script under torchrun."""
    script = folder / "rank.py"
    script.write_text(code + _END)
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    done = subprocess.run(
        [*command, str(script), *map(str, arguments)], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(n_ranks)]
