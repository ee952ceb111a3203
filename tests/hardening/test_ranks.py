"""Two processes of DistributedDataParallel under torchrun: each image once, equal batches, pixels in memory once.

`python tests/hardening/test_ranks.py FOLDER KILLED` is one rank. Each image has one color, which is its number.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

import labkit as lk
from tests.image_files import encoded
from tests.memory_store import MemoryStore
from tests.paths import REPO

N_IMAGES, SIDE, N_EPOCHS, N_RANKS = 640, 96, 2, 2


def be_rank(pixels: Path, killed: int) -> None:
    """Train as one rank, and note what it was given, and its share of the mapped file."""
    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    sampler = DistributedSampler(range(N_IMAGES), num_replicas=world_size, rank=rank)
    loader = lk.BatchLoader(lk.PixelStore(pixels), size=SIDE, batch_size=8, train=False, sampler=sampler)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    came = []
    for epoch in range(N_EPOCHS):
        loader.set_epoch(epoch)
        came.append([])
        for images, _ in loader:
            if rank == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            model(images[:, :, 0, 0].float()).mean().backward()  # all ranks exchange their gradients
            came[-1].append((images[:, 0, 0, 0].int() + 256 * images[:, 1, 0, 0].int()).tolist())
    torch.distributed.barrier()  # while all ranks have it mapped, each page is divided by their number
    pss = sum(place.pss for place in psutil.Process().memory_maps() if place.path == str(pixels))
    torch.distributed.barrier()
    (pixels.parent / f"{rank}.json").write_text(json.dumps({"came": came, "pss": pss}))
    torch.distributed.destroy_process_group()


def torchrun(pixels: Path, killed: int) -> subprocess.CompletedProcess:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(N_RANKS), __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    command = [sys.executable, *words, str(pixels), str(killed)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.exhaustive
def test_two_ranks_share_each_epoch_and_the_memory_of_its_pixels(tmp_path):
    colors = {f"all/{number:03}.png": (number % 256, number // 256, 0) for number in range(N_IMAGES)}
    files = {key: encoded(Image.new("RGB", (SIDE, SIDE), color), "PNG") for key, color in colors.items()}
    pixels = lk.PixelStore.build(MemoryStore(files), tmp_path / "pixels", short_side=SIDE, progress=False).path
    done = torchrun(pixels, -1)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(N_RANKS)]
    for epochs in zip(*(rank["came"] for rank in ranks), strict=True):
        assert [len(batches) for batches in epochs] == [N_IMAGES // 8 // N_RANKS] * N_RANKS
        assert Counter(number for batches in epochs for batch in batches for number in batch) == Counter(
            range(N_IMAGES)
        )
    assert sum(rank["pss"] for rank in ranks) == pytest.approx(pixels.stat().st_size, rel=0.05)
    done = torchrun(pixels, 1)
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stderr


if __name__ == "__main__":
    be_rank(Path(sys.argv[1]), int(sys.argv[2]))
