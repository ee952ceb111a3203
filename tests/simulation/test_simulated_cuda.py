"""`lk.simulated_cuda`: what code for CUDA computes there, when, and what goes wrong where it would on a GPU."""

import contextlib
import copy
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

import labkit as lk
from labkit import course

MIB = 2**20
SLOW = course.SimulatedDevice(
    pcie_bytes_per_s=MIB, staging_bytes_per_s=MIB / 2, launch_s=0.0, kernel_s=1.0, clock_hz=1000.0
)  # a second for each MiB copied and for each kernel


@pytest.fixture
def slow():
    with lk.simulated_cuda(SLOW) as simulation:
        yield simulation


def mib(value: float = 0.0) -> torch.Tensor:
    return torch.full((MIB // 4,), value)


# What it computes


def with_a_slice_set(x: torch.Tensor) -> torch.Tensor:
    x[:, 1:3] = x[:, :2] + 10
    return x


OPERATORS = {
    "elementwise": lambda x: x.mul(2).add_(1).sqrt(),
    "views": lambda x: x.view(4, 3).t()[1:].contiguous(),
    "split": lambda x: torch.cat(x.split(2, dim=1)[::-1], dim=1),
    "indexed": lambda x: x[torch.tensor([2, 0], device=x.device)],
    "indexed from the host": lambda x: x[torch.tensor([2, 0])],
    "written into": lambda x: x.clone().index_put_((torch.tensor([1], device=x.device),), x[0]),
    "a slice set": lambda x: with_a_slice_set(x.clone()),
    "masked": lambda x: x[x > 4],
    "nonzero": lambda x: (x > 4).nonzero(),
    "new": lambda x: x.new_zeros(2, 2) + x.new_tensor([1.0, 2.0]),
    "factory": lambda x: torch.arange(12.0, device=x.device).view(3, 4) + x,
    "out": lambda x: torch.add(x, x, out=torch.empty(3, 4, device=x.device)),
    "channels last": lambda x: x.view(1, 3, 2, 2).to(memory_format=torch.channels_last) + 1,
    "float64 scalar": lambda x: x * torch.tensor(2.0, dtype=torch.float64),
    "several results": lambda x: torch.stack(torch.var_mean(x, dim=1)),
    "empty": lambda x: x[:0] + 1,
    "viewed in place": lambda x: (x + 1).unsqueeze_(0).transpose_(1, 2) * 2,
    "colors": lambda x: v2.functional.adjust_hue(x.view(1, 3, 2, 2).to(torch.uint8), 0.2),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_give_what_they_give_on_the_cpu(name):
    expected = OPERATORS[name](torch.arange(12.0).view(3, 4))
    with lk.simulated_cuda() as simulation:
        found = OPERATORS[name](torch.arange(12.0).view(3, 4).cuda())
        assert (found.device, found.is_cuda) == (torch.device("cuda", 0), True)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found.cpu(), expected)
        assert simulation.races == []


def test_training_gives_the_losses_and_the_weights_of_the_cpu():
    def train(device):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)
        ).to(device)  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters())
        images, labels = torch.randn(8, 3, 14, 14).to(device), torch.arange(8).to(device)
        losses = []
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, {name: value.cpu() for name, value in model.state_dict().items()}

    losses, state = train("cpu")
    with lk.simulated_cuda() as simulation:
        found, found_state = train("cuda")
        assert simulation.races == []
    assert found == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(found_state, state)


def test_random_numbers_are_the_devices_own():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with lk.simulated_cuda():
        torch.cuda.manual_seed(5)
        first = torch.rand(4, device="cuda").cpu()
        assert torch.equal(torch.rand(3), expected)
        torch.cuda.manual_seed(5)
        assert torch.equal(torch.rand(4, device="cuda").cpu(), first)


def test_tensors_are_copied_read_and_written_out_as_others(slow):
    x = torch.tensor([1.0, 2.0], device="cuda")
    assert repr(x) == "tensor([1., 2.], device='cuda:0')"
    assert x.tolist() == copy.deepcopy(x).tolist() == x.numpy(force=True).tolist() == [1.0, 2.0]
    assert (float(x[1]), bool(x[0])) == (2.0, True)


# When


def test_a_kernel_runs_beside_the_host(slow):
    x = torch.zeros(4, device="cuda")
    _ = x + 1
    assert slow.now_s == time.perf_counter() == 0
    torch.cuda.synchronize()
    assert slow.now_s == 2


def test_kernels_take_what_they_compute_and_what_they_move():
    device = course.SimulatedDevice(flops_per_s=1e6, memory_bytes_per_s=1e6, launch_s=0.0, min_kernel_s=0.0)
    with lk.simulated_cuda(device) as simulation:
        a, b = torch.empty(100, 50, device="cuda"), torch.empty(50, 10, device="cuda")
        _ = a @ b
        torch.cuda.synchronize()
        assert simulation.now_s == pytest.approx(2 * 100 * 50 * 10 / 1e6)
        _ = a + 1
        torch.cuda.synchronize()
        assert simulation.now_s == pytest.approx(0.1 + 2 * 4 * 100 * 50 / 1e6)


def test_the_host_is_busy_with_launching():
    with lk.simulated_cuda(course.SimulatedDevice(launch_s=0.5)) as simulation:
        x = torch.zeros(4, device="cuda")
        x.view(2, 2)  # no kernel
        _ = x + 1
        assert simulation.now_s == 1.0


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "waited_s", "done_s"),
    [(False, False, 2, 2), (False, True, 2, 2), (True, False, 1, 1), (True, True, 0, 1)],
)
def test_the_host_goes_on_during_a_copy_from_pinned_memory_alone(slow, pinned, non_blocking, waited_s, done_s):
    source = mib(3.0).pin_memory() if pinned else mib(3.0)
    copied = source.to("cuda", non_blocking=non_blocking)
    assert slow.now_s == waited_s
    torch.cuda.synchronize()
    assert slow.now_s == done_s
    assert torch.equal(copied.cpu(), source)


def test_a_pageable_copy_waits_for_the_stream_first(slow):
    torch.cuda._sleep(5000)
    mib().to("cuda", non_blocking=True)
    assert slow.now_s == 7


def test_a_copy_to_the_host_lands_in_pinned_memory_where_the_host_goes_on(slow):
    x = torch.zeros(MIB // 4, device="cuda")
    x.cpu()
    assert slow.now_s == 2
    later = (x + 1).to("cpu", non_blocking=True)
    assert (later.is_pinned(), slow.now_s) == (True, 2)
    torch.cuda.synchronize()
    assert ((later == 1).all(), slow.now_s) == (True, 4)
    pageable = torch.ones(MIB // 4).copy_(x, non_blocking=True)
    assert ((pageable == 0).all(), slow.now_s) == (True, 5)


def test_events_tell_times_once_they_are_done(slow):
    start, end, other = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    assert other.query()  # nothing was recorded
    start.record()
    torch.cuda._sleep(3000)
    end.record()
    assert not end.query()
    for not_there in (end, other):
        with pytest.raises(RuntimeError, match="not ready"):
            start.elapsed_time(not_there)
    end.synchronize()
    assert (start.elapsed_time(end), slow.now_s) == (3000.0, 3.0)
    with pytest.raises(ValueError, match="enable_timing"):
        start.elapsed_time(torch.cuda.Event())


def first_fit(busy: list[tuple[float, float]], ready_s: float, seconds: float) -> float:
    """The oracle: second by second, until the engine is free for long enough."""
    while any(begin_s < ready_s + seconds and ready_s < end_s for begin_s, end_s in busy):
        ready_s += 1
    return ready_s


LANES = {"sleep": "compute", "send": "copy to device", "fetch": "copy to host", "mark": ""}
STEPS = st.tuples(
    st.integers(0, 3), st.sampled_from(list(LANES)), st.integers(0, 20), st.integers(0, 5), st.integers(-1, 30)
)


@given(st.lists(STEPS, max_size=25))
@settings(max_examples=60, deadline=None)
def test_in_any_program_each_operation_starts_as_soon_as_it_may(program):
    """After its stream's earlier ones, after an operation of any stream that it waits for, and on a free engine."""
    duration_s = [0]
    with lk.simulated_cuda(SLOW, duration=lambda name, seconds: duration_s[0]) as simulation:
        streams, zero = [torch.cuda.Stream() for _ in range(4)], torch.cuda.Event(enable_timing=True)
        on_host, on_device = torch.ones(1).pin_memory(), torch.ones(1, device="cuda")
        do = {
            "sleep": lambda: torch.cuda._sleep(1), "send": lambda: on_host.to("cuda", non_blocking=True),
            "fetch": lambda: on_device.to("cpu", non_blocking=True), "mark": lambda: None,
        }  # fmt: skip
        assert torch.cuda.current_stream() == torch.cuda.default_stream() not in streams
        torch.cuda.synchronize()
        zero.record()
        events, ends, newest_s, ran = [], [], [0.0] * 4, {lane: [] for lane in LANES.values()}
        for number, kind, seconds, pause_s, after in program:
            simulation.work(pause_s)
            ready_s = max(simulation.now_s, newest_s[number])
            with torch.cuda.stream(streams[number]):
                if 0 <= after < len(ends):
                    streams[number].wait_event(events[after])
                    ready_s = max(ready_s, ends[after])
                duration_s[0] = seconds = seconds if kind != "mark" else 0
                do[kind]()
                events.append(streams[number].record_event(torch.cuda.Event(enable_timing=True)))
            start_s = first_fit(ran[LANES[kind]], ready_s, seconds) if LANES[kind] else ready_s
            ran[LANES[kind]].append((start_s, start_s + seconds))
            newest_s[number] = start_s + seconds
            ends.append(start_s + seconds)
        torch.cuda.synchronize()
        assert simulation.now_s == max([sum(step[3] for step in program), *ends])
        assert [zero.elapsed_time(event) / 1000 for event in events] == ends
        frame = simulation.timeline()
        rows = frame[frame.lane != "host"][["lane", "start_s", "end_s"]].itertuples(index=False, name=None)
        assert sorted(rows) == sorted((lane, *span) for lane in ran if lane for span in ran[lane] if span[0] < span[1])
        assert simulation.races == []


# Races, and memory that is given away


@pytest.mark.parametrize(("waited_s", "seen"), [(0.0, 0), (10.0, MIB // 4)])
def test_a_kernel_that_does_not_wait_for_the_copy_is_a_race(slow, waited_s, seen):
    side, source = torch.cuda.Stream(), mib(1.0).pin_memory()
    with torch.cuda.stream(side):
        copied = source.to("cuda", non_blocking=True)
    slow.work(waited_s)
    assert copied.sum().item() == seen  # 0: the bytes had not come
    assert [(race.first, race.second) for race in slow.races] == [("copy to device", "sum")]
    assert str(slow.races[0]) == (
        "sum on stream 0 does not wait for copy to device on stream 1, and both use the same memory"
    )


def test_memory_of_a_stream_is_given_away_under_another_ones_kernels(slow):
    side, sources = torch.cuda.Stream(), [mib(float(n)).pin_memory() for n in range(2)]
    sums = []
    for source in sources:
        with torch.cuda.stream(side):
            copied = source.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda._sleep(5000)
        sums.append(copied.sum())
        del copied
    assert [total.item() for total in sums] == [MIB // 4, MIB // 4]  # the first is of the second batch
    assert [(race.first, race.second) for race in slow.races] == [("sum", "copy to device")]


USES = st.tuples(st.just("use"), st.integers(1, 3), st.integers(0, 12), st.integers(1, 8), st.booleans())
ORDERS = st.tuples(st.sampled_from(["wait", "host"]), st.integers(1, 3), st.integers(1, 3))


@given(st.lists(USES | ORDERS, max_size=20))
@example([("use", 1, 0, 8, False), ("use", 2, 0, 8, False), ("use", 2, 0, 8, True)])  # behind a use without an order
@example([("use", 1, 0, 8, True), ("use", 1, 10, 2, True), ("use", 2, 0, 2, False)])  # behind one of other bytes
@settings(max_examples=60, deadline=None)
def test_a_race_is_two_uses_of_bytes_without_an_order(program):
    """Against sets of what is done before each use: by its stream, by streams that it waits for, and by the host."""
    with lk.simulated_cuda() as simulation:
        x = torch.zeros(20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        streams = {number: torch.cuda.Stream() for number in range(1, 4)}
        done, seen_by_host, uses = {number: set() for number in streams}, set(), []
        for what, stream, *rest in program:
            if what == "host":
                streams[stream].synchronize()
                seen_by_host |= done[stream]
            elif what == "wait":
                streams[stream].wait_stream(streams[rest[0]])
                done[stream] |= done[rest[0]] | seen_by_host
            else:
                low, high, writes = rest[0], rest[0] + rest[1], rest[2]
                simulation.races.clear()
                with torch.cuda.stream(streams[stream]):
                    x[low:high].fill_(1) if writes else x[low:high].sum()
                done[stream] |= seen_by_host
                expected = {
                    (other, stream) for number, (other, begin, end, wrote) in enumerate(uses)
                    if number not in done[stream] and begin < high and low < end and (wrote or writes)
                }  # fmt: skip
                found = {(race.first_stream, race.second_stream) for race in simulation.races}
                assert found <= expected
                assert bool(found) == bool(expected)
                done[stream].add(len(uses))
                uses.append((stream, low, high, writes))


@pytest.mark.parametrize(("waited_s", "is_done"), [(0.5, False), (1.0, True)])
def test_a_query_orders_what_follows_only_if_it_says_yes(slow, waited_s, is_done):
    side, x = torch.cuda.Stream(), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.add_(1)
    slow.work(waited_s)
    assert side.record_event().query() == is_done
    x.sum()
    assert (slow.races == []) == is_done


def test_a_freed_block_goes_to_its_own_streams_next_request(slow):
    side, block = torch.cuda.Stream(), torch.empty(1000, dtype=torch.uint8, device="cuda")
    assert slow.max_reserved_bytes == 1024
    del block
    with torch.cuda.stream(side):
        others = [torch.empty(900, dtype=torch.uint8, device="cuda")]
    assert slow.max_reserved_bytes == 2048
    others.append(torch.empty(600, dtype=torch.uint8, device="cuda"))
    assert slow.max_reserved_bytes == 2048
    others.append(torch.empty(0, dtype=torch.uint8, device="cuda"))
    assert slow.max_reserved_bytes == 2560


def test_a_tensor_of_the_host_has_no_stream_to_record(slow):
    with pytest.raises(NotImplementedError, match=r"aten::record_stream.*'CPU' backend"):
        torch.zeros(1).record_stream(torch.cuda.current_stream())


def test_record_stream_keeps_a_block_until_the_host_sees_it_done(slow):
    side = torch.cuda.Stream()

    def request():
        with torch.cuda.stream(side):
            return torch.zeros(1000, dtype=torch.uint8, device="cuda")

    block = request()
    side.synchronize()
    block.add_(1)  # by the main stream, until second 2
    block.record_stream(torch.cuda.current_stream())
    del block
    torch.cuda._sleep(9000)  # queued after it was freed, so it does not count
    held = [request()]
    assert slow.max_reserved_bytes == 2048
    slow.work(1.0)
    held.append(request())
    assert slow.max_reserved_bytes == 2048  # it is free again
    torch.cuda.synchronize()
    assert slow.races == []  # and what came now was ordered after the kernel


# The simulation itself


def test_torch_is_as_before_afterwards():
    owners = (torch.Tensor, torch.cuda, torch.accelerator, torch, time)
    before = [dict(vars(owner)) for owner in owners]
    with contextlib.suppress(ZeroDivisionError), lk.simulated_cuda():
        assert torch.cuda.is_available()
        raise ZeroDivisionError
    for owner, names in zip(owners, before, strict=True):
        assert {name for name in names if vars(owner).get(name) is not names[name]} == set()
    assert "to" not in vars(torch.Tensor)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda x: x.to("cuda:1"), "'cpu' and 'cuda:0', got 'cuda:1'"),
        (lambda x: x + torch.zeros(3), r"same device.*cuda:0 and cpu"),
        (lambda x: x.pin_memory(), "only dense CPU tensors can be pinned"),
    ],
)
def test_mistakes_that_cuda_refuses_are_refused(slow, mistake, said):
    with pytest.raises(RuntimeError, match=said):
        mistake(torch.zeros(3, device="cuda"))


def test_waiting_can_be_forbidden(slow):
    x = torch.zeros(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    for waits in (lambda: x[0].item(), lambda: x.cpu(), lambda: x.nonzero(), lambda: torch.zeros(2).cuda()):
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            waits()


def test_views_of_pinned_memory_are_pinned_and_copies_are_not(slow):
    whole = torch.arange(6).view(2, 3).pin_memory()
    assert whole[1].is_pinned()
    assert whole.pin_memory() is whole
    assert not whole.clone().is_pinned()
    assert not whole[:0].is_pinned()
    assert torch.arange(6).view(2, 3).t().pin_memory().stride() == (1, 3)


def test_a_dataloader_pins(slow):
    loader = DataLoader([(torch.full((4,), n), n) for n in range(4)], batch_size=2, pin_memory=True)
    batches = list(loader)
    assert all(part.is_pinned() for batch in batches for part in batch)
    assert torch.equal(batches[1][0], torch.tensor([[2] * 4, [3] * 4]))


@pytest.mark.parametrize(("field", "value"), [("flops_per_s", 0), ("launch_s", -1.0), ("clock_hz", float("nan"))])
def test_figures_that_cannot_be_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        course.SimulatedDevice(**{field: value})


# A loader that takes simulated time


@pytest.mark.parametrize(
    ("is_pinned", "non_blocking", "ahead", "expected_s"),
    [
        (False, False, False, 4.0),  # staged in 2 s, and copied meanwhile
        (True, True, False, 3.0),  # in the queue of the steps
        (True, True, True, 2.0),
    ],
)
def test_a_step_and_a_copy_take_as_long_as_they_do_not_overlap(slow, is_pinned, non_blocking, ahead, expected_s):
    batches = [mib().pin_memory() if is_pinned else mib()] * 5
    sent = (batch.to("cuda", non_blocking=non_blocking) for batch in batches)
    for _ in lk.CUDAPrefetcher(batches, "cuda") if ahead else sent:
        torch.cuda._sleep(2000)
    torch.cuda.synchronize()
    ends_s = slow.timeline().query("kind == 'sleep'").end_s
    assert list(ends_s.diff()[1:]) == pytest.approx([expected_s] * 4)


def test_threads_may_queue_work_at_once():
    """A DataLoader's thread pins batches beside the training."""
    with lk.simulated_cuda() as simulation:

        def queue_events(_):
            for _ in range(500):
                torch.cuda.Event().record()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(queue_events, range(4)))
        torch.cuda.synchronize()
        assert simulation.now_s >= 0
