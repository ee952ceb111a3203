"""Parts of what is left: together all of it, none twice, and no reader has two more than another."""

from itertools import product

from hypothesis import given, strategies

from labkit.data.shards_read import ReaderRank, RemainingSamples, part_of

SMALL = strategies.integers(0, 9)
RUNS = strategies.lists(strategies.builds(RemainingSamples, SMALL, SMALL, SMALL, SMALL), max_size=7)
COUNTS = strategies.integers(1, 4)


def listed(runs) -> list[tuple[int, int, int]]:
    return [(rank, worker, first + i) for rank, worker, first, n_left in runs for i in range(n_left)]


def parts(runs, world_size: int, num_workers: int, *, is_equal: bool) -> list[list[tuple[int, int, int]]]:
    readers = product(range(world_size), range(num_workers))
    readers = [ReaderRank(rank, world_size, worker, num_workers) for rank, worker in readers]
    return [listed(part_of(runs, place, is_equal=is_equal)) for place in readers]


@given(RUNS, COUNTS, COUNTS)
def test_parts_are_all_and_none_comes_twice(runs, world_size, num_workers):
    came = parts(runs, world_size, num_workers, is_equal=False)
    assert [sample for part in came for sample in part] == listed(runs)
    assert max(map(len, came)) - min(map(len, came)) <= 1


@given(RUNS, COUNTS, COUNTS)
def test_ranks_get_equally_many_and_so_do_their_workers(runs, world_size, num_workers):
    came, expected = parts(runs, world_size, num_workers, is_equal=True), listed(runs)
    whole = [sample for part in came for sample in part]
    assert whole[: len(expected)] == expected
    assert len(whole) == -(-len(expected) // world_size) * world_size
    sizes = [len(part) for part in came]
    assert sizes == sizes[:num_workers] * world_size


def test_what_comes_again_follows_the_last_run():
    assert part_of(
        [RemainingSamples(0, 0, 4, 3), RemainingSamples(1, 0, 2, 0)], ReaderRank(1, 2, 0, 1), is_equal=True
    ) == [RemainingSamples(0, 0, 6, 2)]
