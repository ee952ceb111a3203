"""Loaders whose samples can be told apart, and scripts that several ranks run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import labkit as lk
from tests.paths import REPO


class Drawn(Dataset):
    """Items are (index, a random number)."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


def loader_of(num_workers: int = 0, **options):
    config = lk.LoaderConfig(batch_size=4, num_workers=num_workers, seed=3)
    return lk.make_loader(Drawn(), config, **{"shuffle": True} | options)


def shards_loader(folder: str, **options) -> DataLoader:
    return DataLoader(lk.read_shards(folder, transform=lambda image: image.double().sum(), **options), batch_size=2)


# What makes a loader, of a number of workers and a folder.
LOADERS = {
    "make_loader": lambda num_workers, folder: loader_of(num_workers),
    "BatchLoader": lambda num_workers, folder: lk.BatchLoader(lk.FolderStore(folder), size=32, batch_size=3),
    "read_shards": lambda num_workers, folder: shards_loader(folder),
}


def rows(batches) -> list[tuple[float, ...]]:
    """Each sample's numbers; of an image, their sum."""
    found = []
    for batch in batches:
        items = batch[0] if isinstance(batch, tuple | list) else batch
        numbers = items.reshape(len(items), -1)
        found += map(tuple, (numbers if numbers.shape[1] <= 2 else numbers.double().sum(1, keepdim=True)).tolist())
    return found


def run_script(folder: Path, code: str, *arguments: object, n_ranks: int = 0) -> list:
    """What each rank's `result` was, of a script; with `n_ranks`, torchrun starts it."""
    (folder / "script.py").write_text(code)
    # torchrun leaves its logs, and torch the folders of workers that it ends: here.
    environment = {**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": str(folder)}
    environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"] if n_ranks else []
    command = [sys.executable, *torchrun, "script.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def save(result: object) -> None:
    Path(f"rank-{os.environ.get('RANK') or os.environ.get('LOCAL_RANK', 0)}.json").write_text(json.dumps(result))


def assert_shared_out(ranks: list, own) -> None:
    """Each epoch of a loader came once, in two parts."""
    for first, second in zip(*ranks, strict=True):
        assert len(first) == len(second)
        assert sorted(map(tuple, first + second)) == sorted(rows(own))
