"""compare(): what it measures, with an injected clock; what it refuses."""

import gc
import multiprocessing
import os
import signal
import time
import types
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import labkit as lk
from labkit import course
from labkit.data.blobs import resident_fraction
from labkit.errors import VariantError
from labkit.measure import compare as timing, steady as batches, usage as processes
from labkit.measure.frames import COLUMNS
from labkit.measure.recorder import set_recorder
from labkit.measure.statistics import quiet_summary
from labkit.measure.steady import count_images, page_cache_state, synchronize
from tests.unsampled import leave_memory_out

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def sampled():
    """For tests of the memory that `compare` measures."""


@pytest.fixture(autouse=True)
def _unsampled(request, monkeypatch):
    if "sampled" not in request.fixturenames:
        leave_memory_out(monkeypatch)


def n_frozen() -> int:
    """How many objects are exempt from collection. Python 3.12 exempts hundreds of its own, whenever it collects."""
    gc.collect()
    return gc.get_freeze_count()


@pytest.fixture
def unfrozen(monkeypatch):
    """The heap and its collection as they are outside of these tests."""
    monkeypatch.setattr(timing, "gc", gc)
    gc.unfreeze()
    yield n_frozen()
    gc.freeze()


@contextmanager
def forked(function, *arguments):
    process = FORK.Process(target=function, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def measure(factory, **options) -> pd.Series:
    """The only run of a variant."""
    return lk.compare({"a": factory}, baseline="a", **{"rounds": 1, "warmups": 0, **options}).iloc[0]


class Clock:
    """A clock that only work advances."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def loader(self, startup, first, rest, n_batches=5, batch=2):
        def batches():
            self.now += first
            yield batch
            for _ in range(n_batches - 1):
                self.now += rest
                yield batch

        def factory():
            self.now += startup
            return batches()

        return factory


def test_the_three_parts_of_a_run():
    clock = Clock()
    run = measure(clock.loader(3.0, 2.0, 0.5), clock=clock)
    assert (run.startup_s, run.first_batch_s, run.steady_s) == pytest.approx((3.0, 2.0, 2.0))
    assert (run.n_images, run.images_per_s) == (10, pytest.approx(10 / 4.0))
    stopped = measure(lambda: [1], clock=lambda: 1.0)
    assert stopped.images_per_s == float("inf")


def test_known_ratio_and_equal_variants():
    clock, rng = Clock(), np.random.default_rng(0)

    def noisy(seconds):
        return lambda: clock.loader(0, *(seconds * rng.lognormal(0, 0.01, 2)))()

    runs = lk.compare(
        {"slow": noisy(2.0), "fast": noisy(1.0), "twin": noisy(2.0)}, baseline="slow", rounds=9, clock=clock
    )
    summary = lk.summarize(runs)
    fast = summary.loc["fast"]
    assert fast.ci_low < 2.0 < fast.ci_high
    assert fast.ci_high / fast.ci_low < 1.05
    assert dict(summary.verdict) == {"slow": "baseline", "fast": "faster", "twin": "inconclusive"}


def test_a_slow_round_cancels_in_the_ratio():
    clock, mood = Clock(), iter([1.0, 1.0, 5.0, 5.0, 0.2, 0.2, 3.0, 3.0])

    def moody(seconds):
        return lambda: (lambda factor: clock.loader(0, factor * seconds, factor * seconds)())(next(mood))

    runs = lk.compare({"a": moody(2.0), "b": moody(1.0)}, baseline="a", rounds=4, warmups=0, clock=clock)
    with pytest.warns(course.InstabilityWarning):
        b = lk.summarize(runs).loc["b"]
    assert (b.speedup, b.ci_low, b.ci_high) == pytest.approx((2.0, 2.0, 2.0))


def test_every_round_runs_every_variant_once_in_random_order_and_every_second_one_mirrors_the_one_before():
    calls = []
    variants = {name: (lambda name=name: calls.append(name) or [1]) for name in "abcd"}
    compare = partial(lk.compare, variants, baseline="a", rounds=6, warmups=2)
    runs = compare(seed=3)
    assert list(runs.variant) == list("abcd") * 8
    assert list(runs.sort_values(["round", "order"]).variant) == calls
    orders = [tuple(calls[start : start + 4]) for start in range(0, len(calls), 4)]
    assert all(sorted(order) == list("abcd") for order in orders)
    assert orders[1::2] == [order[::-1] for order in orders[::2]]
    assert len(set(orders)) > 3
    assert list(runs.is_warmup) == [True] * 8 + [False] * 24
    assert (set(runs.baseline), set(runs.seed)) == ({"a"}, {3})
    assert list(compare(seed=3).order) == list(runs.order) != list(compare(seed=2).order)


def test_different_numbers_of_images_are_said_to_the_caller():
    with pytest.warns(UserWarning, match=r"same number of images: \{'a': 1, 'b': 2\}") as caught:
        lk.compare({"a": lambda: [1], "b": lambda: [1, 1]}, baseline="a", rounds=1)
    assert caught[0].filename == __file__


def test_the_frame_has_the_columns_of_the_contract():
    loader = DataLoader(TensorDataset(torch.zeros(8, 3, 4, 4)), batch_size=4)
    run = measure(lambda: loader, experiment="e", factors={"storage": "folder", "flavour": "x"})
    assert list(run.index[: len(COLUMNS)]) == list(COLUMNS)
    own = ["experiment", "storage", "flavour", "batch_size", "num_workers", "env_id"]
    assert run[own].tolist() == ["e", "folder", "x", 4, 0, lk.env_id()]


def test_named_experiments_are_recorded():
    frames = []
    set_recorder(types.SimpleNamespace(record_frame=frames.append))
    named, _ = [lk.compare({"a": lambda: [1]}, baseline="a", rounds=1, experiment=name) for name in ("kept", "")]
    [recorded] = frames
    assert recorded is named


@dataclass
class Labeled:
    images: torch.Tensor
    names: list


@pytest.mark.parametrize(
    ("batch", "n_images"),
    [
        (torch.zeros(7, 3, 4, 4), 7), (np.zeros((5, 4, 4, 3)), 5), (torch.zeros(3, 9, 9), 1), (6, 6),
        ((torch.zeros(4, 3, 2, 2), torch.zeros(4)), 4), ({"rgb": torch.zeros(2, 3, 2, 2)}, 2), (torch.zeros(8), 8),
        (Labeled(torch.zeros(9, 3, 2, 2), ["a"]), 9),
    ],
)  # fmt: skip
def test_count_images(batch, n_images):
    assert count_images(batch) == n_images


def broken():
    yield 1
    raise OSError("disk on fire")


@pytest.mark.parametrize(
    ("factory", "said", "cause"),
    [
        (lambda: ["text"], "raised WrongTypeError: .* pass count= to compare", TypeError),
        (broken, "raised OSError: disk on fire", OSError),
        (list, "yielded no batch", type(None)),
    ],
)
def test_an_error_names_the_variant_and_thaws_the_heap(unfrozen, factory, said, cause):
    with pytest.raises(VariantError, match=f"^variant 'bad' {said}$") as caught:
        lk.compare({"good": lambda: [1], "bad": factory}, baseline="good")
    assert isinstance(caught.value.__cause__, cause)
    assert caught.value.__suppress_context__
    assert n_frozen() == unfrozen


@pytest.mark.parametrize(
    ("variants", "options", "message"),
    [
        ({}, {}, "no variants"),
        ({"a": list}, {"baseline": "b"}, "baseline must be one of a, got 'b'"),
        ({"a": list}, {"rounds": 0}, "rounds must be an integer >= 1, got 0"),
        ({"a": list}, {"precision": 0}, "precision must be > 0, as 0.05 for 5 %, got 0"),
        ({"a": list}, {"warmups": -1}, "warmups must be an integer >= 0, got -1"),
        ({"a": [1]}, {}, "'a' is not a function: write `lambda: loader`"),
    ],
)
def test_bad_arguments(variants, options, message):
    with pytest.raises(ValueError, match=message):
        lk.compare(variants, **{"baseline": "a", **options})


@pytest.mark.parametrize("option", ["round", "storage"])
def test_a_misspelt_option_or_a_column_outside_of_factors_is_an_error(option):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        lk.compare({"a": lambda: [1]}, baseline="a", **{option: 1})


def _burn():
    return sum(i * i for i in range(6_000_000))


@pytest.mark.alone
def test_cpu_seconds_of_children_that_ended_or_live_on_are_counted():
    def in_one_that_ends():
        with forked(_burn) as child:
            child.join()
        yield 1

    def in_one_that_lives():
        pipe.send("burn")
        yield pipe.recv()

    pipe, far = FORK.Pipe()
    variants = {"idle": lambda: [1], "ended": in_one_that_ends, "living": in_one_that_lives}
    with forked(_burn_on_demand, far):
        cpu_s = lk.compare(variants, baseline="idle", rounds=2).groupby("variant").cpu_s.min()
    assert min(cpu_s["ended"], cpu_s["living"]) > 0.05 > cpu_s["idle"]  # no timing: work elsewhere, seen or not seen


def test_cpu_seconds_are_all_four_that_the_system_knows(monkeypatch):
    times = types.SimpleNamespace(user=1.0, system=2.0, children_user=4.0, children_system=8.0)
    monkeypatch.setattr(processes.psutil, "Process", lambda pid: types.SimpleNamespace(cpu_times=lambda: times))
    assert processes._cpu_s(1) == 15.0
    del times.children_user, times.children_system  # macOS, Windows
    assert processes._cpu_s(1) == 3.0


def _burn_on_demand(pipe):
    while pipe.recv():
        _burn()
        pipe.send(1)


class _Hungry(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(0.1)
        self.memory = bytearray(80_000_000)
        self.memory[::4096] = b"x" * len(self.memory[::4096])
        return torch.zeros(3, 2, 2)


@pytest.mark.alone
@pytest.mark.usefixtures("sampled")
def test_peak_memory_includes_the_workers():
    with_workers = lambda: DataLoader(_Hungry(), batch_size=2, num_workers=1, multiprocessing_context="fork")  # noqa: E731
    variants = {"idle": lambda: [4], "worker": with_workers}
    for seed, warmups in (0, 1), (1, 0), (2, 1):  # the worker's run comes first in some
        runs = lk.compare(variants, baseline="idle", rounds=2, seed=seed, warmups=warmups)
        assert runs.peak_mem_mb.notna().tolist() == (runs["round"] == 0).tolist()
        peaks = lk.summarize(runs).peak_mem_mb
        assert peaks["worker"] > peaks["idle"] + 60


@pytest.mark.alone
@pytest.mark.usefixtures("sampled")
def test_the_sampler_ends_with_compare_and_its_loss_is_no_error():
    of_others = set(processes.apart)

    def kill_samplers():
        for pid in processes.apart - of_others:
            os.kill(pid, signal.SIGKILL)
        return [1]

    runs = lk.compare({"a": kill_samplers}, baseline="a", rounds=2)
    assert runs.peak_mem_mb.isna().all()
    assert processes.apart == of_others
    before = processes.descendants(os.getpid())
    assert lk.compare({"a": lambda: [1]}, baseline="a").peak_mem_mb[0] > 10
    assert processes.descendants(os.getpid()) == before


def test_the_memory_of_each_process_is_told_apart():
    block = np.ones(40_000_000, dtype=np.uint8)
    receiver, sender = FORK.Pipe(duplex=False)
    with forked(_touch_and_wait, block, sender) as child:
        receiver.recv()
        table = course.tree_memory()
    assert table["process"].tolist()[:2] == ["main", "child 1"]
    assert table["pid"][0] == os.getpid()
    own_mb = table.set_index("pid")["private_mb"][child.pid]
    assert 40 < own_mb < 80  # its copy of the block; what it only reads is shared
    assert (table["pss_mb"] >= table["private_mb"]).all()


def _touch_and_wait(block, sender):
    block += 1
    sender.send("touched")
    time.sleep(60)


@pytest.mark.alone
def test_cold_is_said_only_where_the_kernel_read_the_bytes(tmp_path):
    files = [tmp_path / str(number) for number in range(4)]
    for file in files:
        file.write_bytes(bytes(2_000_000))

    def read():
        return (len(file.read_bytes()) and 1 for file in files)

    runs = lk.compare({"cold": read}, baseline="cold", rounds=1, warmups=0, evict=lambda: course.evict(files))
    if resident_fraction(files) == 1 and runs.page_cache[0] == "not cold":
        pytest.skip("this file system's pages cannot be evicted")
    assert runs.page_cache[0] == "cold"
    pretended = lk.compare({"cold": read}, baseline="cold", rounds=1, warmups=1, evict=lambda: 8_000_000)
    assert pretended.page_cache.iloc[-1] == "not cold"
    one = lk.compare({"c": read, "w": read}, baseline="w", rounds=1, evict={"c": lambda: course.evict(files)})
    assert one.set_index("variant").page_cache["c"].tolist() == ["cold", "cold"]


def test_cuda_work_is_inside_the_clock(cuda):
    def kernels():
        for _ in range(10):
            torch.cuda._sleep(40_000_000)  # about 20 ms
            yield 1

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    list(kernels())
    torch.cuda.synchronize()
    start.record()
    list(kernels())
    end.record()
    torch.cuda.synchronize()
    runs = lk.compare({"kernels": kernels}, baseline="kernels", rounds=3, clock=time.perf_counter)
    waited_s = (runs.first_batch_s + runs.steady_s).median()
    assert waited_s > 0.8 * start.elapsed_time(end) / 1e3


def test_a_factor_may_differ_between_variants():
    variants = {"a": lambda: [1], "b": lambda: [1]}
    frame = lk.compare(
        variants, baseline="a", rounds=1, factors={"storage": {"b": "simulated hard disk"}, "host": "here"}
    )
    assert frame[frame.variant == "a"].storage.isna().all()
    assert set(frame[frame.variant == "b"].storage) == {"simulated hard disk"}
    assert set(frame.host) == {"here"}


@pytest.mark.parametrize(("scale", "rounds"), [("ci", 2), ("laptop", 5), ("gpu", 5)])
def test_defaults_are_the_rounds_of_the_scale_after_one_to_warm_up(monkeypatch, scale, rounds):
    monkeypatch.setenv("LABKIT_SCALE", scale)
    runs = lk.compare({"a": lambda: [1]}, baseline="a")
    assert runs.is_warmup.tolist() == [True] + [False] * rounds
    assert (runs.seed[0], runs.experiment[0], runs["round"].tolist()) == (0, "", list(range(rounds + 1)))


def test_only_the_variants_that_are_asked_for_get_a_verdict():
    variants = {name: lambda: [1] for name in "abc"}
    for verdicts, judged in (True, "abc"), (False, ""), (["b"], "b"):
        runs = lk.compare(variants, baseline="a", rounds=3, verdicts=verdicts)
        assert {row.variant for row in runs.itertuples() if row.has_verdict} == set(judged)
        found = quiet_summary(runs).verdict
        assert found["a"] == "baseline"
        assert [bool(found[name]) for name in "bc"] == [name in judged for name in "bc"]
    with pytest.raises(ValueError, match="verdicts must be one of a, b, c, got 'd'"):
        lk.compare(variants, baseline="a", verdicts=["d"])


def test_torch_s_threads_are_stated_and_the_same_for_all():
    n_threads = torch.get_num_threads()
    seen = []
    greedy = lambda: seen.append(torch.get_num_threads()) or torch.set_num_threads(n_threads + 3) or [1]  # noqa: E731
    runs = lk.compare({"a": greedy, "b": greedy}, baseline="a", rounds=2)
    assert set(seen) == set(runs.torch_num_threads) == {torch.get_num_threads()} == {n_threads}


def test_epochs_of_any_length_have_the_same_rate_and_images_are_compared_by_pass(recwarn):
    short, long = (DataLoader(TensorDataset(torch.zeros(n, 3, 4, 4)), batch_size=4) for n in (8, 40))
    runs = lk.compare({"a": lambda: short, "b": lambda: short}, baseline="a", rounds=2)
    assert not recwarn.list
    assert runs.is_steady.all()
    with pytest.warns(UserWarning, match="same number of images"):
        lk.compare({"a": lambda: short, "b": lambda: [4] * 10}, baseline="a", rounds=1)
    evicted = lk.compare(
        {"a": lambda: short, "b": lambda: long}, baseline="a", rounds=1, evict={"b": lambda: 0}, count=lambda batch: 1
    )
    assert evicted[evicted.variant == "b"].n_images.tolist() == [10, 10]  # each byte is read once


def test_an_iterable_tells_its_own_costs():
    class Told(list):
        batch_size, num_workers, cpu_s, peak_mem_mb, page_cache = 8, 3, 1.5, 77.0, "cold"

    run = measure(lambda: Told([1]))
    assert (run.batch_size, run.num_workers, run.cpu_s, run.peak_mem_mb, run.page_cache) == (8, 3, 1.5, 77.0, "cold")


def test_what_lives_already_is_not_collected_during_runs_(unfrozen):
    frozen = []
    variant = lambda: frozen.append(gc.get_freeze_count()) or [1]  # noqa: E731
    measure(variant)
    assert min(frozen) > unfrozen + 10_000
    assert n_frozen() == unfrozen


def test_files_are_evicted_before_each_run_of_the_variant_that_asks():
    events = []
    lk.compare(
        {"a": lambda: events.append("a") or [1], "b": lambda: events.append("b") or [1]},
        baseline="a", rounds=2, warmups=0, evict={"b": lambda: events.append("evict") or 0},
    )  # fmt: skip
    assert "".join(event[0] for event in events).replace("eb", "B") in ("aBBa", "BaaB")


@pytest.mark.parametrize("batch", ["text", [], (), {"a": "b"}.values()])
def test_a_batch_of_nothing_countable_is_refused_by_its_type_unless_a_count_is_given(batch):
    with pytest.raises(TypeError, match=f"images of a {type(batch).__name__}: pass count="):
        count_images(batch)
    assert measure(lambda: [batch], count=len).n_images == len(batch)


@pytest.mark.parametrize(
    ("before", "after", "said", "state"),
    [
        (None, 5, {}, "unknown"), (5, None, {}, "unknown"), (5, 5, {}, "warm"), (5, 6, {}, "unknown"),
        (1000, 1900, {"asked": True, "evicted": 1000}, "cold"),
        (1000, 1899, {"asked": True, "evicted": 1000}, "not cold"),
        (0, 900, {"asked": True, "evicted": 0}, "not cold"), (0, 0, {"asked": True}, "not cold"),
        (0, 2000, {"asked": True, "evicted": 1}, "cold"),
    ],
)  # fmt: skip
def test_cold_is_what_came_from_storage(before, after, said, state):
    assert page_cache_state(before, after, **said) == state


@pytest.mark.parametrize(("in_use", "waits"), [(True, 1), (False, 0)])
def test_a_gpu_in_use_is_waited_for(monkeypatch, in_use, waits):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(1))
    synchronize()
    assert len(calls) == waits
    monkeypatch.setattr(batches.sys, "modules", {})
    synchronize()  # without torch there is nothing to wait for
    assert len(calls) == waits


def test_where_the_kernel_tells_less_psutil_is_asked(monkeypatch):
    others = {child.pid for child in psutil.Process().children(recursive=True)}  # servers of multiprocessing's
    monkeypatch.setattr(processes, "apart", set(others))
    monkeypatch.setattr(processes, "_CHILDREN_FILE", "/nowhere")
    pipe, far = FORK.Pipe()
    with forked(_burn_on_demand, far) as worker:
        pipe.send("burn")
        pipe.recv()
        assert processes.descendants(os.getpid(), others) == [worker.pid]
        times, own = psutil.Process(worker.pid).cpu_times(), os.times()
        everything = own.user + own.system + own.children_user + own.children_system + times.user + times.system
        assert processes.tree_usage().cpu_s == pytest.approx(everything, rel=0.05)
        monkeypatch.delattr(psutil.Process, "io_counters")  # macOS
        assert processes.tree_usage().read_bytes is None


def test_a_process_that_has_ended_costs_nothing():
    with forked(int) as worker:
        pass
    assert (processes._cpu_s(worker.pid), processes.pss_bytes(worker.pid)) == (0, 0)
    assert processes._read_bytes(worker.pid) is None
    assert processes.descendants(worker.pid) == []


def test_sizes_are_those_that_the_kernel_and_psutil_tell():
    own = psutil.Process().memory_full_info()
    assert processes.pss_bytes(os.getpid()) == pytest.approx(own.pss, rel=0.1)
    row = course.tree_memory().iloc[0]
    assert row.pss_mb == pytest.approx(own.pss / 1e6, rel=0.1)
    assert row.private_mb == pytest.approx(own.uss / 1e6, rel=0.1)
    assert processes._read_bytes(os.getpid()) == psutil.Process().io_counters().read_bytes


def test_a_tree_is_told_without_those_apart(monkeypatch):
    pipe, far = FORK.Pipe(duplex=False)
    with forked(_with_a_child, far) as child:
        grandchild = pipe.recv()
        assert {child.pid, grandchild} <= set(processes.descendants(os.getpid()))
        assert processes.descendants(child.pid) == [grandchild]
        assert not {child.pid, grandchild} & set(processes.descendants(os.getpid(), {child.pid}))
        monkeypatch.setattr(processes, "_read_bytes", {os.getpid(): 1, child.pid: None, grandchild: 4}.get)
        assert processes.tree_usage().read_bytes == 5
        os.kill(grandchild, signal.SIGKILL)


def _with_a_child(pipe):
    with forked(time.sleep, 60) as child:
        pipe.send(child.pid)
        time.sleep(60)
