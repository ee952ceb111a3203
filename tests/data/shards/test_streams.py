"""Parts of what is left: together all of it, none twice, and no reader has two more than another."""

from itertools import product

import pytest
from hypothesis import given, strategies

from labkit.data.shards_read import Place, Stream, part_of

SMALL = strategies.integers(0, 9)
STREAMS = strategies.lists(strategies.builds(Stream, SMALL, SMALL, SMALL, SMALL), max_size=7)
COUNTS = strategies.integers(1, 4)


def listed(streams) -> list[tuple[int, int, int]]:
    return [(rank, worker, first + i) for rank, worker, first, n_left in streams for i in range(n_left)]


def parts(streams, world_size: int, num_workers: int, *, is_equal: bool) -> list[list[tuple[int, int, int]]]:
    readers = product(range(world_size), range(num_workers))
    places = [Place(rank, world_size, worker, num_workers) for rank, worker in readers]
    return [listed(part_of(streams, place, is_equal=is_equal)) for place in places]


@given(STREAMS, COUNTS, COUNTS)
def test_parts_are_all_and_none_comes_twice(streams, world_size, num_workers):
    came = parts(streams, world_size, num_workers, is_equal=False)
    assert [sample for part in came for sample in part] == listed(streams)
    assert max(map(len, came)) - min(map(len, came)) <= 1


@given(STREAMS, COUNTS, COUNTS)
def test_ranks_get_equally_many_and_so_do_their_workers(streams, world_size, num_workers):
    came, expected = parts(streams, world_size, num_workers, is_equal=True), listed(streams)
    whole = [sample for part in came for sample in part]
    assert whole[: len(expected)] == expected
    assert len(whole) == -(-len(expected) // world_size) * world_size
    sizes = [len(part) for part in came]
    assert sizes == sizes[:num_workers] * world_size


def test_what_comes_again_follows_the_last_stream():
    assert part_of([Stream(0, 0, 4, 3), Stream(1, 0, 2, 0)], Place(1, 2, 0, 1), is_equal=True) == [Stream(0, 0, 6, 2)]


def test_a_reader_that_is_none_is_named():
    with pytest.raises(ValueError, match="there is no worker 2 of 2 on rank 0 of 1"):
        part_of([Stream(0, 0, 4, 3)], Place(0, 1, 2, 2), is_equal=False)
