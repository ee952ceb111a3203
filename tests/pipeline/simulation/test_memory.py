import pytest
import torch

from labkit.simulation.engine import Engine, Operation
from labkit.simulation.memory import Access, Allocator, Block, Memory


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def allocator(engine):
    return Allocator(engine)


def kernel(engine, queue, seconds=1.0, after=None):
    return engine.submit(Operation(queue, "kernel", "compute", seconds), after=after)


def test_a_freed_block_goes_to_its_streams_next_request_while_another_still_reads(engine, allocator):
    one, two = engine.new_queue(), engine.new_queue()
    first = Memory(allocator, 1000, one)
    block = first.block
    kernel(engine, two)  # reads it, as nobody told the allocator
    del first
    assert Memory(allocator, 900, two).block is not block  # of another stream
    assert Memory(allocator, 600, one).block is block


def test_record_stream_keeps_a_block_until_the_host_can_see_that_it_is_done(engine, allocator):
    one, two = engine.new_queue(), engine.new_queue()
    first = Memory(allocator, 1000, one)
    block = first.block
    block.users.add(two)
    kernel(engine, two, 3.0)
    del first
    kernel(engine, two, 3.0)  # queued after it was freed, so it does not count
    held = [Memory(allocator, 1000, one)]
    assert held[0].block is not block
    engine.advance(3.0)
    held.append(Memory(allocator, 1000, one))
    assert held[1].block is block
    assert kernel(engine, one).knows[two.number] == 1  # and what comes now is ordered after the kernel


def test_blocks_of_no_bytes(engine, allocator):
    assert len(Memory(allocator, 0, engine.new_queue()).block.data) == 512


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ((0, 8, True), (4, 12, False), 1),
        ((0, 8, False), (4, 12, True), 1),
        ((0, 8, True), (0, 8, True), 1),
        ((0, 8, False), (0, 8, False), 0),
        ((0, 8, True), (8, 16, True), 0),
    ],
)
@pytest.mark.parametrize("ordered", [False, True])
def test_races_are_overlapping_bytes_one_write_and_no_order(engine, first, second, found, ordered):
    one, two = engine.new_queue(), engine.new_queue()
    races, block = [], Block(torch.zeros(512, dtype=torch.uint8), 512, one)
    before = kernel(engine, one)
    block.note(Access(before, *first), races)
    block.note(Access(kernel(engine, two, after=before if ordered else None), *second), races)
    assert len(races) == (0 if ordered else found)
    for race in races:
        assert str(race) == "kernel on stream 1 does not wait for kernel on stream 0, and both use the same memory"


def test_a_race_is_found_behind_accesses_in_order(engine):
    one, two = engine.new_queue(), engine.new_queue()
    races, block = [], Block(torch.zeros(512, dtype=torch.uint8), 512, one)
    for _ in range(100):
        block.note(Access(kernel(engine, one), 0, 8, False), races)
    assert len(block.accesses) == 1  # each stands for those before it
    block.note(Access(kernel(engine, two), 0, 8, False), races)
    block.note(Access(kernel(engine, two), 0, 8, True), races)
    assert [race.first_stream for race in races] == [0]
