"""The checks of the exercises in notebook 08: shard formats."""

from itertools import product
from typing import Any

from labkit.teach.exercises import exercise, frame_exercise, number_exercise

number_exercise("08.1", "A number, in hours.", 1_280_000 * 0.030 / 16 / 3600)
number_exercise("08.2", "A whole number of samples.", 1000, tolerance=0)
frame_exercise(
    "08.5", "A frame from lk.compare of at least two ways to store or read the same images.",
    rounds=3, widest=0.5, speedup=1.2,
)  # fmt: skip


@exercise("08.3")
def check_sample_key(answer: Any) -> str | None:
    """A function of a member's name that returns its sample's key."""
    names = {
        "dog/a.jpg": "dog/a", "dog/a.cls": "dog/a", "v1.0/dog/a.seg.png": "v1.0/dog/a", "a.b.c": "a",
        "v1.0/a.jpg": "v1.0/a",
    }  # fmt: skip
    for name, key in names.items():
        found = answer(name)
        if found != key:
            return f"{name!r} belongs to the sample {key!r}; it returned {found!r}"
    return None


@exercise("08.4")
def check_shard_split(answer: Any) -> str | None:
    """A function of (shards, rank, world_size, worker, num_workers) that returns a list of shards."""
    for n_shards, world_size, num_workers in product((1, 3, 7, 16), (1, 2, 3), (1, 2, 4)):
        shards = [f"shard-{number:06d}.tar" for number in range(n_shards)]
        readers = product(range(world_size), range(num_workers))
        parts = [list(answer(list(shards), rank, world_size, worker, num_workers)) for rank, worker in readers]
        where = f"of {n_shards} shards on {world_size} ranks x {num_workers} workers"
        read = sorted(shard for part in parts for shard in part)
        if read != shards:
            most = max(read.count(shard) for shard in shards)
            return f"{where}, {len(set(shards) - set(read))} are never read, and one is read {most} times"
        sizes = [len(part) for part in parts]
        if max(sizes) - min(sizes) > 1:
            return f"{where}, one reader gets {max(sizes)} and another {min(sizes)}"
    return None
