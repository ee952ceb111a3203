"""An error in a loader or a step under `lk.diagnose` and `lk.tune`: it comes through as it is, and nothing stays."""

import multiprocessing
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import labkit as lk


def diagnose(data, step):
    return lk.diagnose(DataLoader(data, 2, num_workers=1), step, batches=3, rounds=1)


class Broken(ArithmeticError):
    """Known nowhere else."""


class Samples(Dataset):
    def __init__(self, check):
        self.check = check

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.check("loader")
        return torch.zeros(3, 4, 4)


@pytest.mark.parametrize("where", ["loader", "step"])
def test_an_error_keeps_its_type_and_text_and_leaves_nothing_behind(tmp_path, where):
    def check(place):
        if (tmp_path / place).exists():  # workers see a file that comes and goes
            raise Broken(f"the {place} is broken")

    (tmp_path / where).touch()
    threads, processes = set(threading.enumerate()), set(multiprocessing.active_children())
    with pytest.raises(Broken, match=f"the {where} is broken") as caught:
        diagnose(Samples(check), lambda batch: check("step"))
    assert caught.tb  # it holds no workers
    assert set(multiprocessing.active_children()) <= processes
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=10)
        assert not thread.is_alive(), thread
    (tmp_path / where).unlink()
    found = diagnose(Samples(check), lambda batch: check("step"))
    assert found.frame["images_per_s"].gt(0).all()


WARNING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import labkit as lk
data = TensorDataset(torch.arange(8.0))
with lk.watch():
    list(DataLoader(data, 2, num_workers=1, multiprocessing_context="fork"))
"""


def test_no_file_of_a_watched_worker_is_warned_of(tmp_path):
    """Also where two watch at once: the second takes the place of the first in each worker."""
    (tmp_path / "train.py").write_text(WARNING)
    command = [sys.executable, "-W", "always::ResourceWarning", "-m", "labkit", "watch", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert "ResourceWarning" not in done.stderr
