import math
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from labkit.simulation.engine import ENGINES, Engine, Operation, Queue

KERNEL, TO_DEVICE, TO_HOST = ENGINES


@pytest.fixture
def engine():
    return Engine()


def submit(engine: Engine, queue: Queue, lane: str, seconds: float, after: Operation | None = None) -> Operation:
    return engine.submit(Operation(queue, lane, lane, seconds), after=after)


def test_the_host_goes_on_and_a_stream_keeps_its_order(engine):
    queue = engine.new_queue()
    first, second = submit(engine, queue, KERNEL, 2.0), submit(engine, queue, TO_HOST, 1.0)
    assert engine.now_s == 0.0
    engine.wait(second)
    assert (first.start_s, first.end_s, second.start_s, second.end_s, engine.now_s) == (0, 2, 2, 3, 3)


def test_streams_overlap_but_not_on_one_engine(engine):
    one, two = engine.new_queue(), engine.new_queue()
    kernel, copy, other = (
        submit(engine, one, KERNEL, 4.0), submit(engine, two, TO_DEVICE, 3.0), submit(engine, two, KERNEL, 1.0)
    )  # fmt: skip
    engine.wait(other)
    assert (kernel.start_s, copy.start_s, copy.end_s) == (0, 0, 3)
    assert (other.start_s, engine.now_s) == (4, 5)


def test_an_engine_does_not_stand_still_for_what_is_ready_later(engine):
    one, two = engine.new_queue(), engine.new_queue()
    submit(engine, two, TO_DEVICE, 5.0)
    late = submit(engine, two, KERNEL, 1.0)
    early, long = submit(engine, one, KERNEL, 4.0), submit(engine, one, KERNEL, 2.0)
    engine.wait(long)
    assert (early.start_s, late.start_s, long.start_s) == (0, 5, 6)


def test_an_operation_waits_for_one_of_another_stream(engine):
    one, two = engine.new_queue(), engine.new_queue()
    copy = submit(engine, one, TO_DEVICE, 3.0)
    mark = engine.submit(Operation(one, "event"))
    engine.submit(Operation(two, "wait"), after=mark)
    kernel = submit(engine, two, KERNEL, 1.0)
    engine.wait(kernel)
    assert (copy.end_s, kernel.start_s, kernel.end_s) == (3, 3, 4)


def test_nothing_starts_before_the_host_submits_it(engine):
    queue = engine.new_queue()
    submit(engine, queue, KERNEL, 1.0)
    engine.advance(5.0)
    second = submit(engine, queue, KERNEL, 1.0)
    engine.wait(second)
    assert second.start_s == 5


def test_order_is_known_by_streams_events_and_the_host_alone(engine):
    one, two = engine.new_queue(), engine.new_queue()
    first = submit(engine, one, KERNEL, 1.0)
    engine.advance(100.0)  # long over, but nothing waited for it
    unordered = submit(engine, two, TO_HOST, 1.0)
    assert not unordered.comes_after(first)
    assert submit(engine, one, KERNEL, 1.0).comes_after(first)
    after_event = submit(engine, two, TO_HOST, 1.0, after=first)
    assert after_event.comes_after(first)
    engine.wait(unordered)
    assert submit(engine, one, KERNEL, 1.0).comes_after(unordered)


def test_a_query_orders_only_if_it_says_yes(engine):
    one, two = engine.new_queue(), engine.new_queue()
    first = submit(engine, one, KERNEL, 1.0)
    assert not engine.has_seen(first)
    assert not submit(engine, two, TO_HOST, 1.0).comes_after(first)
    engine.advance(1.0)
    assert engine.has_seen(first)
    assert submit(engine, two, TO_HOST, 1.0).comes_after(first)
    assert engine.has_seen(None)


def test_spans_are_what_the_engines_did(engine):
    queue = engine.new_queue()
    submit(engine, queue, KERNEL, 2.0)
    engine.submit(Operation(queue, "event"))
    engine.wait(submit(engine, queue, TO_HOST, 1.0))
    assert [tuple(span) for span in engine.spans] == [
        (KERNEL, KERNEL, 0, 2), (TO_HOST, TO_HOST, 2, 3), ("host", "wait", 0, 3)
    ]  # fmt: skip


WORK = st.tuples(
    st.integers(0, 3), st.sampled_from([*ENGINES, ""]), st.integers(0, 20), st.integers(0, 5), st.integers(-1, 30)
)


@given(st.lists(WORK, max_size=40))
def test_any_program_runs_as_its_rules_say(program):
    """Against the rules themselves: each operation starts as soon as it may, and not before."""
    engine = Engine()
    queues = [engine.new_queue() for _ in range(4)]
    made = []
    for stream, lane, seconds, pause, after in program:
        engine.advance(pause)
        wanted = made[after] if 0 <= after < len(made) else None
        made.append(engine.submit(Operation(queues[stream], lane, lane, seconds if lane else 0.0), after=wanted))
        made[-1].wanted, made[-1].submitted_s = wanted, engine.now_s
    for queue in queues:
        engine.wait(queue.newest)
    assert all(operation.end_s <= engine.now_s for operation in made)
    ready = {}
    for operation in made:
        before = [one for one in made if one.queue is operation.queue and one.submitted_s <= operation.submitted_s]
        before = before[: before.index(operation)]
        waits = [one.end_s for one in [*before[-1:], operation.wanted] if one is not None]
        ready[operation] = max([operation.submitted_s, *waits])
        assert operation.end_s == operation.start_s + operation.seconds
        assert operation.start_s >= ready[operation]
    for lane in ENGINES:
        ran = sorted((one for one in made if one.engine == lane), key=lambda one: (one.start_s, one.end_s))
        for earlier, later in pairwise(ran):
            assert earlier.end_s <= later.start_s
        for operation in ran:
            busy = any(
                one.start_s <= operation.start_s - 0.5 < one.end_s or one.end_s == operation.start_s
                for one in ran if one is not operation
            )  # fmt: skip
            assert operation.start_s == ready[operation] or busy  # it waited only for the engine
    for operation in made:
        assert operation.engine or operation.start_s == ready[operation]
    assert not math.isnan(engine.now_s)
