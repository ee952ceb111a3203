"""Kill loaders with SIGKILL at random batches, resume each in a new process, and compare with the undisturbed epoch.

    python -m tests.hardening.resume --kills 200

After each batch of an epoch, a child process writes the batch's checksum and the loader's state to a file. Killed at a
random place, it is followed by another that begins with that state, on another number of workers or threads; and that
one may be killed, too. In the end, the checksums must be those of an epoch without kills. Where `read_shards` goes on,
it is with as many workers as before: a state is of one of them.
"""

import json
import os
import random
import signal
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import labkit as lk
from labkit.app.commands import Parser, call
from labkit.util.files import write_atomic

N_PHOTOS, BATCH_SIZE = 96, 4
KINDS = ("make_loader", "BatchLoader", "read_shards", "read_shards, samples_per_rank")


def crop(image: Any) -> Any:
    return image[:, :32, :32].contiguous()


def make_loader(kind: str, root: Path, n_helpers: int) -> Any:
    """A loader of a kind; `n_helpers` workers or threads."""
    photos = lk.FolderStore(root / "photos")
    if kind == "make_loader":
        config = lk.LoaderConfig(batch_size=BATCH_SIZE, num_workers=n_helpers, oversubscribe=True, start_method="fork")
        return lk.make_loader(lk.ImageDataset(photos, transform=crop), config, shuffle=True)
    if kind == "BatchLoader":
        return lk.BatchLoader(photos, size=32, batch_size=BATCH_SIZE, num_threads=n_helpers)
    from torchdata.stateful_dataloader import StatefulDataLoader

    options = {"samples_per_rank": 80} if "samples_per_rank" in kind else {}
    dataset = lk.read_shards(
        root / "shards", shuffle=True, shuffle_buffer=20, shuffle_initial=5, transform=crop, **options
    )
    return StatefulDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=2, multiprocessing_context="fork")


def load(kind: str, root: Path, n_helpers: int, state_file: Path, pipe: int) -> None:
    """Load an epoch, from the state in the file on, which is written anew after each batch; tell the pipe of each."""
    loader, state = make_loader(kind, root, n_helpers), read_state(state_file)
    if state["loader"]:
        loader.load_state_dict(state["loader"])
        if state["loader"].get("epoch"):  # killed behind the last batch, where the next epoch begins
            return
    for images, labels in loader:
        state["came"].append(zlib.crc32(images.contiguous().numpy().tobytes(), int(labels.sum())))
        write_atomic(state_file, json.dumps({**state, "loader": loader.state_dict()}).encode())
        os.write(pipe, b".")


def read_state(state_file: Path) -> dict[str, Any]:
    return json.loads(state_file.read_text()) if state_file.exists() else {"came": [], "loader": None}


def load_until_killed(kind: str, root: Path, n_helpers: int, state_file: Path, n_batches: int, pause_s: float) -> bool:
    """Load in a child and kill it `pause_s` after so many batches; whether it came to the end before."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()  # its workers die with it
        tempfile.tempdir = str(root)  # where those who are killed leave files
        os.close(read_end)
        load(kind, root, n_helpers, state_file, write_end)
        os._exit(0)
    os.close(write_end)
    n_came = 0
    while n_came < n_batches and (got := os.read(read_end, n_batches - n_came)):
        n_came += len(got)
    time.sleep(pause_s)  # a random place between two batches
    if n_came == n_batches:
        os.killpg(pid, signal.SIGKILL)
    os.close(read_end)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def check_kind(kind: str, root: Path, n_kills: int, seed: int) -> dict[str, Any]:
    draw, n_done, expected, epochs = random.Random(f"{seed} {kind}"), 0, root / f"{kind}.json", list[list[int]]()
    load_until_killed(kind, root, 2, expected, 10_000, 0)
    while n_done < n_kills:
        state_file, has_ended = root / f"{kind} {len(epochs)}.json", False
        while not has_ended:
            place = draw.randrange(1, 14), draw.uniform(0, 0.02)
            has_ended = load_until_killed(kind, root, draw.choice([1, 2, 3]), state_file, *place)
            n_done += not has_ended
        epochs.append(read_state(state_file)["came"])
    right = read_state(expected)["came"]
    return {
        "loader": kind, "kills": n_done, "epochs": len(epochs), "batches_per_epoch": len(right),
        "wrong_epochs": sum(epoch != right for epoch in epochs), "state_bytes": len(expected.read_bytes()),
    }  # fmt: skip


def make_sources(root: Path) -> None:
    lk.make_photos(root / "photos", N_PHOTOS, profile="imagenet", progress=False)
    lk.write_shards(lk.FolderStore(root / "photos"), root / "shards", max_count=9, engine="threads", progress=False)


def run(kills: int = 200, seed: int = 0, only: str = "") -> None:
    """Kill each kind of loader so often; `only` those whose name has this in it."""
    with tempfile.TemporaryDirectory() as folder:
        make_sources(Path(folder))
        for kind in KINDS:
            if only in kind:
                print(time.strftime("%H:%M:%S"), check_kind(kind, Path(folder), kills, seed), flush=True)


if __name__ == "__main__":
    call(Parser().add(run).parse_args())
