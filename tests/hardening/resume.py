"""Kill loaders with SIGKILL at random batches, resume each in a new process, and compare with the undisturbed epoch.

    python -m tests.hardening.resume --kills 200 --record results/hardening/resume.csv

A child process loads an epoch. After each batch it writes the loader's state to a file and the batch's checksum to a
pipe. Killed at a random place, it is followed by another that begins with the last state in the file, on another number
of workers or threads; and that one may be killed, too. In the end, the checksums that came before each state must be
those of an epoch without kills: none missing, none twice, all in their order. Where `read_shards` goes on with other
workers, batches and order are others: there, it is the samples' checksums that must be the same.
"""

import json
import os
import random
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

import labkit as lk
from labkit.util.files import write_atomic
from tests.hardening.tables import RECORDS, update_table

N_PHOTOS, BATCH_SIZE = 96, 4


def make_loader(kind: str, root: Path, n_helpers: int) -> Any:
    """A loader of a kind; `n_helpers` workers, threads or processes."""
    if kind == "make_loader":
        dataset = lk.ImageDataset(lk.FolderStore(root / "photos"), transform=_crop)
        config = lk.LoaderConfig(batch_size=BATCH_SIZE, num_workers=n_helpers, oversubscribe=True, start_method="fork")
        return lk.make_loader(dataset, config, shuffle=True)
    if kind.startswith("BatchLoader"):
        counts = {"num_processes": n_helpers, "num_threads": 2} if "processes" in kind else {"num_threads": n_helpers}
        return lk.BatchLoader(lk.FolderStore(root / "photos"), size=32, batch_size=BATCH_SIZE, **counts)
    from torchdata.stateful_dataloader import StatefulDataLoader

    options = {"samples_per_rank": 80} if "samples_per_rank" in kind else {}
    dataset = lk.read_shards(root / "shards", shuffle=20, shuffle_initial=5, transform=_crop, **options)
    # As many workers as before: a state is of one of them.
    return StatefulDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=2, multiprocessing_context="fork")


KINDS = [
    "make_loader", "BatchLoader, threads", "BatchLoader, processes", "read_shards", "read_shards, samples_per_rank",
]  # fmt: skip


def _crop(image: Any) -> Any:
    return image[:, :32, :32].contiguous()


def load(kind: str, root: Path, n_helpers: int, state_file: Path | None) -> Iterator[str]:
    """Checksums of the batches of an epoch, from the state in the file on, which is written anew after each."""
    loader = make_loader(kind, root, n_helpers)
    state = json.loads(state_file.read_text()) if state_file and state_file.exists() else None
    came, n_batches = (state["came"], state["n_batches"]) if state else ([], 0)
    if state:
        loader.load_state_dict(state["loader"])
    for images, labels in loader:
        came = [*came, _checksum(images, labels)]
        n_batches += 1
        if state_file:
            content = {"came": came, "n_batches": n_batches, "loader": loader.state_dict()}
            write_atomic(state_file, json.dumps(content).encode())
        yield came[-1]


def _checksum(images: Any, labels: Any) -> str:
    return f"{zlib.crc32(images.contiguous().numpy().tobytes(), int(labels.sum())):08x}"


def run_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Fork a process that writes a byte for each batch; returns its id and the pipe's end."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()  # its workers die with it
        os.close(read_end)
        work(write_end)
        os._exit(0)
    os.close(write_end)
    return pid, read_end


def load_until_killed(kind: str, root: Path, n_helpers: int, state_file: Path, n_batches: int, pause_s: float) -> bool:
    """Load in a child and kill it `pause_s` after so many batches; whether it came to the end before."""

    def work(pipe: int) -> None:
        for _ in load(kind, root, n_helpers, state_file):
            os.write(pipe, b".")

    pid, pipe = run_child(work)
    n_came = 0
    while n_came < n_batches and (got := os.read(pipe, n_batches - n_came)):
        n_came += len(got)
    time.sleep(pause_s)  # a random place between two batches
    os.killpg(pid, signal.SIGKILL) if n_came == n_batches else None
    os.close(pipe)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def check_kind(kind: str, root: Path, n_kills: int, seed: int) -> dict[str, Any]:
    draw, n_wrong, n_done, n_epochs = random.Random(f"{seed} {kind}"), 0, 0, 0
    expected_file = root / "expected.json"
    load_until_killed(kind, root, 2, expected_file, 10_000, 0)
    expected = json.loads(expected_file.read_text())
    expected_file.unlink()
    while n_done < n_kills:
        state_file, n_epochs = root / f"{kind} {n_epochs}.json", n_epochs + 1
        has_ended = False
        while not has_ended:
            place = draw.randrange(1, 14), draw.uniform(0, 0.02)
            has_ended = load_until_killed(kind, root, draw.choice([1, 2, 3]), state_file, *place)
            n_done += not has_ended
        n_wrong += json.loads(state_file.read_text())["came"] != expected["came"]
    state_bytes = len(json.dumps(expected["loader"]))
    return {
        "loader": kind, "kills": n_done, "epochs": n_epochs, "batches_per_epoch": expected["n_batches"],
        "wrong_epochs": n_wrong, "state_bytes": state_bytes,
    }  # fmt: skip


def run(kills: int = 200, seed: int = 0, only: str = "", record: Path = RECORDS / "resume.csv") -> None:
    """Kill each kind of loader so often; `only` those whose name has this in it."""
    rows = []
    with TemporaryDirectory() as folder:
        root = Path(folder)
        lk.make_photos(root / "photos", N_PHOTOS, profile="imagenet")
        lk.write_shards(lk.FolderStore(root / "photos"), root / "shards", max_count=9, engine="threads", progress=False)
        for kind in filter(lambda kind: only in kind, KINDS):
            rows.append(check_kind(kind, root, kills, seed))
            print(time.strftime("%H:%M:%S"), rows[-1], flush=True)
    update_table(record, rows)


if __name__ == "__main__":
    typer.run(run)
