"""The checks of the exercises in notebook 08: shard formats."""

from itertools import product
from typing import Any

from labkit.teach.exercises import exercise, judge, near, reaches


@exercise("08.1")
def hours_of_round_trips(answer: Any) -> str | None:
    """A number, in hours."""
    return near(answer, 1_280_000 * 0.030 / 16 / 3600)


@exercise("08.2")
def samples_that_one_rank_has_more(answer: Any) -> str | None:
    """A whole number of samples."""
    return near(answer, 1000, tolerance=0)


@exercise("08.3")
def key_of_a_member(answer: Any) -> str | None:
    """A function of a member's name that returns its sample's key."""
    names = {
        "dog/a.jpg": "dog/a", "dog/a.cls": "dog/a", "v1.0/dog/a.seg.png": "v1.0/dog/a", "a.b.c": "a",
        "v1.0/a.jpg": "v1.0/a",
    }  # fmt: skip
    for name, key in names.items():
        found = answer(name)
        if found != key:
            return f"{name!r} belongs to the sample {key!r}; it says {found!r}"
    return None


@exercise("08.4")
def a_part_of_the_shards(answer: Any) -> str | None:
    """A function of (shards, rank, world_size, worker, num_workers) that returns a list of shards."""
    for n_shards, world_size, num_workers in product((1, 3, 7, 16), (1, 2, 3), (1, 2, 4)):
        shards = [f"shard-{number:06d}.tar" for number in range(n_shards)]
        places = list(product(range(world_size), range(num_workers)))
        parts = [list(answer(list(shards), rank, world_size, worker, num_workers)) for rank, worker in places]
        where = f"of {n_shards} shards on {world_size} ranks x {num_workers} workers"
        given = sorted(shard for part in parts for shard in part)
        if given != shards:
            often = max(given.count(shard) for shard in shards)
            return f"{where}, {len(set(shards) - set(given))} are read by nobody, and one {often} times"
        if max(map(len, parts)) - min(map(len, parts)) > 1:
            return f"{where}, one reader has {max(map(len, parts))} and another {min(map(len, parts))}"
    return None


@exercise("08.5")
def a_storage_that_pays(answer: Any) -> str | None:
    """A frame from lk.compare of at least two ways to store or read the same images."""
    return judge(answer, rounds=3, widest=0.5) or reaches(answer, 1.2)
