"""Train with several processes under torchrun, as on several GPUs, and look at what each rank gets and takes.

    python -m tests.hardening.ranks --world-sizes 2,4,8

The ranks train a small model with DistributedDataParallel over gloo, by each of three loaders. Each image has one
color, which is its number, so that a rank knows what it was given. In a second run, one rank kills itself.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import labkit as lk
from labkit.app.commands import Parser, call
from tests.image_files import encoded
from tests.paths import REPO

N_IMAGES, SIDE, BATCH_SIZE, N_EPOCHS = 640, 96, 8, 2
LOADERS = ("make_loader", "BatchLoader", "read_shards")


def make_set(root: Path) -> None:
    """The images as files, as raw pixels, and as shards, of which no number of ranks has equally many."""
    (root / "files" / "all").mkdir(parents=True)
    for number in range(N_IMAGES):
        image = Image.new("RGB", (SIDE, SIDE), (number % 256, number // 256, 0))
        (root / "files" / "all" / f"{number:05d}.png").write_bytes(encoded(image, "PNG"))
    files = lk.FolderStore(root / "files")
    lk.PixelStore.build(files, root / "pixels", short_side=SIDE)
    lk.write_shards(files, root / "shards", max_count=37, engine="threads", progress=False)


def make_loader(kind: str, root: Path, rank: int, world_size: int) -> Any:
    if kind == "read_shards":
        dataset = lk.read_shards(
            root / "shards", samples_per_rank=N_IMAGES // world_size, shuffle=True, shuffle_buffer=50
        )
        return DataLoader(dataset, BATCH_SIZE, num_workers=1, multiprocessing_context="fork", persistent_workers=True)
    sampler = DistributedSampler(range(N_IMAGES), num_replicas=world_size, rank=rank)
    if kind == "BatchLoader":
        pixels = lk.PixelStore(root / "pixels")
        return lk.BatchLoader(pixels, size=SIDE, batch_size=BATCH_SIZE, train=False, sampler=sampler)
    dataset = lk.ImageDataset(lk.FolderStore(root / "files"))
    return lk.make_loader(dataset, lk.LoaderConfig(batch_size=BATCH_SIZE, start_method="fork"), sampler=sampler)


def be_rank(root: Path, kind: str, kill_rank: int) -> None:
    """Train as one rank, and note what it was given, and what it took."""
    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    loader = make_loader(kind, root, rank, world_size)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    came: list[list[int]] = []
    n_batches = 0
    for epoch in range(N_EPOCHS):
        (loader.dataset if kind == "read_shards" else loader).set_epoch(epoch)
        came.append([])
        for images, _ in loader:
            if rank == kill_rank and n_batches == 5:
                (root / "killed_at").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            model(images[:, :, 0, 0].float()).mean().backward()  # all ranks exchange their gradients
            came[-1] += (images[:, 0, 0, 0].int() + 256 * images[:, 1, 0, 0].int()).tolist()
            n_batches += 1
    torch.distributed.barrier()
    memory = pss_of(root / "pixels")  # while all ranks have it mapped
    torch.distributed.barrier()
    found = {"came": came, "n_batches": n_batches, "pss": memory}
    (root / f"{kind} {rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def pss_of(path: Path) -> int:
    """This process' share of a mapped file, in bytes: each page divided by the number of processes that map it."""
    return sum(place.pss for place in psutil.Process().memory_maps() if place.path == str(path))


def torchrun(root: Path, world_size: int, kind: str, kill_rank: int = -1) -> tuple[float, str]:
    """Seconds to the end, from the kill on if there is one, and stderr. A rank that is killed must be an error."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    words += ["--log-dir", str(root / "logs")]
    words += ["-m", "tests.hardening.ranks", "--root", str(root), "--kind", kind, "--kill-rank", str(kill_rank)]
    start = time.time()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=300, env=environment)
    if (done.returncode == 0) != (kill_rank < 0):
        raise RuntimeError(f"torchrun ended with {done.returncode}: {done.stderr}")
    if kill_rank >= 0:
        start = float((root / "killed_at").read_text())
    return time.time() - start, done.stderr


def check(root: Path, world_size: int, kind: str) -> dict[str, Any]:
    """Train, then once more with a rank that is killed."""
    seconds, _ = torchrun(root, world_size, kind)
    ranks = [json.loads((root / f"{kind} {rank}.json").read_text()) for rank in range(world_size)]
    epochs = [Counter(number for rank in ranks for number in rank["came"][epoch]) for epoch in range(N_EPOCHS)]
    killed_s, said = torchrun(root, world_size, kind, kill_rank=world_size - 1)
    return {
        "run": f"{kind}, {world_size} ranks", "seconds": seconds,
        "each_once": all(epoch == Counter(range(N_IMAGES)) for epoch in epochs),
        "batches_of_a_rank": sorted({rank["n_batches"] for rank in ranks}),
        "pixels_mb": (root / "pixels").stat().st_size / 1e6, "pixels_pss_mb": sum(rank["pss"] for rank in ranks) / 1e6,
        "seconds_after_kill": killed_s, "kill_named": "Signal 9 (SIGKILL)" in said,
    }  # fmt: skip


def run(root: Path | None = None, kind: str = "", kill_rank: int = -1, world_sizes: str = "2,4,8") -> None:
    """Check all loaders with each number of ranks; with `--root`, be a rank."""
    if root:
        be_rank(root, kind, kill_rank)
        return
    with TemporaryDirectory() as folder:
        make_set(Path(folder))
        for world_size in map(int, world_sizes.split(",")):
            for loader in LOADERS:
                print(time.strftime("%H:%M:%S"), check(Path(folder), world_size, loader), flush=True)


if __name__ == "__main__":
    call(Parser().add(run).parse_args())
