"""What the machine did: processor seconds, memory and bytes of a process tree, time of all cores, and Python's lock.

The oracles are psutil, /proc, and work whose parts are known.
"""

import io
import multiprocessing
import os
import shutil
import signal
import time
import timeit
import zlib
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import labkit as lk
from labkit import course
from labkit.errors import GilError
from labkit.measure import usage
from labkit.measure.gil import gil_us_per_image
from labkit.measure.usage import CoreTime, core_time
from tests.stalling import Host
from tests.timing import leave_collections_out, leave_memory_out

FORK = multiprocessing.get_context("fork")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@contextmanager
def forked(function, *arguments):
    process = FORK.Process(target=function, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def use_cores():
    """Until the kernel has counted some ticks of either kind."""
    while min(os.times()[:2]) < 0.07:
        sum(range(100_000))
        os.urandom(1 << 20)


def use_cores_on_demand(pipe):
    while pipe.recv():
        with forked(use_cores) as child:
            child.join()
        use_cores()
        pipe.send(1)


def touch_and_wait_with_a_child(block, sender):
    with forked(time.sleep, 60) as child:
        block += 1
        sender.send(child.pid)
        time.sleep(60)


class Hungry(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(0.05)
        self.memory = bytearray(80_000_000)
        self.memory[::4096] = b"x" * len(self.memory[::4096])
        return torch.zeros(3, 2, 2)


class TestProcessorSeconds:
    @pytest.mark.alone
    def test_of_children_that_ended_or_live_on_are_counted(self, monkeypatch):
        leave_memory_out(monkeypatch)

        def in_one_that_ends():
            with forked(use_cores) as child:
                child.join()
            yield 1

        def in_one_that_lives():
            pipe.send("work")
            yield pipe.recv()

        pipe, far = FORK.Pipe()
        variants = {"idle": lambda: [1], "ended": in_one_that_ends, "living": in_one_that_lives}
        with forked(use_cores_on_demand, far):
            cpu_s = lk.compare(variants, baseline="idle", rounds=1).groupby("variant").cpu_s.min()
        assert min(cpu_s["ended"], cpu_s["living"]) > 0.05 > cpu_s["idle"]  # no timing: work elsewhere, seen or not

    @pytest.mark.alone
    def test_are_those_of_psutil_also_where_the_kernel_lists_no_children(self, monkeypatch):
        others = {child.pid for child in psutil.Process().children(recursive=True)}  # servers of multiprocessing's
        monkeypatch.setattr(usage, "excluded_pids", set(others))
        monkeypatch.setattr(usage, "_CHILDREN_FILE", "/nowhere")
        pipe, far = FORK.Pipe()
        with forked(use_cores_on_demand, far) as worker:
            before, own_s = usage.tree_usage(), time.process_time()
            pipe.send("work")
            pipe.recv()
            assert usage.descendants(os.getpid(), others) == [worker.pid]
            used_s, own_s = usage.tree_usage().cpu_s - before.cpu_s, time.process_time() - own_s
            times = psutil.Process(worker.pid).cpu_times()[:4]
            assert min(times) > 0.05
            assert used_s == pytest.approx(sum(times) + own_s, abs=0.04)


class TestMemory:
    @pytest.fixture(autouse=True)
    def _without_collections(self, monkeypatch):
        leave_collections_out(monkeypatch)

    @pytest.mark.alone
    def test_at_its_peak_includes_the_workers(self):
        with_workers = lambda: DataLoader(Hungry(), batch_size=2, num_workers=1, multiprocessing_context="fork")  # noqa: E731
        variants = {"idle": lambda: [4], "worker": with_workers}
        for seed, rounds, warmups in (0, 1, 1), (1, 1, 0):  # the worker's run comes first in one of them
            runs = lk.compare(variants, baseline="idle", rounds=rounds, seed=seed, warmups=warmups)
            assert runs.peak_mem_mb.notna().tolist() == (runs["round"] == 0).tolist()
            peaks = runs.groupby("variant").peak_mem_mb.max()
            assert peaks["worker"] > peaks["idle"] + 60

    @pytest.mark.alone
    def test_is_unknown_where_its_sampler_is_lost_which_ends_with_compare(self):
        of_others, before = set(usage.excluded_pids), usage.descendants(os.getpid())

        def kill_samplers():
            for pid in usage.excluded_pids - of_others:
                os.kill(pid, signal.SIGKILL)
            return [1]

        runs = lk.compare({"a": kill_samplers}, baseline="a", rounds=2)
        assert runs.peak_mem_mb.isna().all()
        assert lk.compare({"a": lambda: [1]}, baseline="a").peak_mem_mb[0] > 10
        assert (usage.excluded_pids, usage.descendants(os.getpid())) == (of_others, before)

    def test_of_each_process_is_told_apart(self, monkeypatch):
        receiver, sender = FORK.Pipe(duplex=False)
        with forked(touch_and_wait_with_a_child, np.ones(40_000_000, dtype=np.uint8), sender) as child:
            grandchild = receiver.recv()
            table = course.tree_memory()
            assert {child.pid, grandchild} <= set(usage.descendants(os.getpid()))
            assert usage.descendants(child.pid) == [grandchild]
            assert not {child.pid, grandchild} & set(usage.descendants(os.getpid(), {child.pid}))
            ended = psutil.Process(grandchild)
            os.kill(grandchild, signal.SIGKILL)
        psutil.wait_procs([ended], timeout=30)  # until then, pages are shared with it
        assert table["process"].tolist()[:2] == ["main", "child 1"]
        assert table["pid"][0] == os.getpid()
        assert 40 < table.set_index("pid")["private_mb"][child.pid] < 80  # its copy of the block; it reads the rest
        assert (table["pss_mb"] >= table["private_mb"]).all()
        own, alone = psutil.Process().memory_full_info(), course.tree_memory().iloc[0]
        assert (alone["pss_mb"], alone["private_mb"]) == pytest.approx((own.pss / 1e6, own.uss / 1e6), rel=0.1)
        assert usage.pss_bytes(os.getpid()) == pytest.approx(own.pss, rel=0.1)
        assert usage.tree_usage().read_bytes >= psutil.Process().io_counters().read_bytes
        for pid in (child.pid, grandchild):
            assert (usage.pss_bytes(pid), usage.descendants(pid)) == (0, [])


@pytest.fixture
def host(monkeypatch):
    host = Host()
    monkeypatch.setattr(usage, "cpu_times", host.cpu_times)
    return host


class TestCoreTime:
    def test_is_as_the_kernel_counts(self):
        def counted():
            """/proc/stat, by proc(5)."""
            user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
            return CoreTime((user + nice + system + irq + softirq) * TICK_S, steal * TICK_S)

        before, found, after = counted(), core_time(), counted()
        for name in ("busy_s", "stolen_s"):
            low, seconds, high = (getattr(each, name) for each in (before, found, after))
            assert low - TICK_S <= seconds <= high + TICK_S

    @pytest.mark.parametrize("told", [b"\xff", b"cpu 1 x\n", b"(a) R\n", b"Pss: many kB\n", PermissionError])
    def test_is_nothing_where_the_kernel_hides_it_or_says_something_else(self, monkeypatch, told):
        def opened(path):
            if told is PermissionError:
                raise told
            return io.TextIOWrapper(io.BytesIO(told), "utf-8")

        monkeypatch.setattr(usage, "open", opened, raising=False)
        assert core_time().stolen_s == 0
        assert usage.pss_bytes(os.getpid()) == 0
        assert usage.descendants(os.getpid()) == []

    @pytest.mark.parametrize(
        ("told", "busy_s"), [(OSError, 0.0), (ValueError, 0.0), ({"user": 2.0, "system": 1.0, "idle": 5.0}, 3.0)]
    )
    def test_is_what_a_kernel_tells_that_tells_little(self, monkeypatch, told, busy_s):
        monkeypatch.setattr(usage, "cpu_times", Mock(side_effect=[told] * 3))
        assert core_time() == CoreTime(busy_s, 0.0)
        assert core_time().with_stolen(0.25) == 0.25

    @pytest.mark.parametrize(
        ("busy_s", "stolen_s", "cpu_s", "expected_s"),
        [
            (2, 3, 2.0, 5.0),  # all is stolen from who ran alone
            (2, 3, 0.5, 0.5 + 0.75),  # and a part of it from who did a part of the work
            (2, 3, 0.0, 0.0),
            (0.01, 1, 0.5, 1.5),  # never more than was stolen: ticks are coarse
            (0, -1, 0.5, 0.5),  # nor less than nothing: a machine that moved to another host
        ],
    )
    def test_that_was_stolen_is_shared_by_the_work_done(self, host, busy_s, stolen_s, cpu_s, expected_s):
        host.passes(busy_s=5, stolen_s=5)
        before = core_time()
        host.passes(busy_s=busy_s, stolen_s=stolen_s)
        assert before.with_stolen(cpu_s) == pytest.approx(expected_s)


DATA = bytes(1_000_000)


def hold(n_steps):
    for _ in range(n_steps):
        pass


def checked(n_steps, n_bytes):
    """Each image takes `n_steps` of a loop under the lock, and a checksum of `n_bytes` without it."""
    for _ in range(100):
        hold(n_steps)
        zlib.crc32(memoryview(DATA)[:n_bytes])
        yield 1


class TestPythonsLock:
    @pytest.mark.exhaustive
    @pytest.mark.skipif(not shutil.which("py-spy"), reason="missing: python -m pip install py-spy")
    def test_is_held_for_the_part_that_runs_under_it(self):
        work = {1000: 800_000, 20_000: 10_000}  # mostly free, mostly held
        try:
            free_us, held_us = (gil_us_per_image(lambda own=own: checked(*own), seconds=2) for own in work.items())
        except GilError as error:
            pytest.skip(str(error))  # a container without the right to look into a process
        for found_us, n_steps in zip((free_us, held_us), work, strict=True):
            assert 0.3 < found_us / (1e6 * min(timeit.repeat(lambda n=n_steps: hold(n), number=1, repeat=50))) < 3
        assert held_us > 5 * free_us

    @pytest.mark.parametrize(
        ("program", "says"),
        [
            (None, r"py-spy is missing: python -m pip install.*peers"),
            ("echo 'Permission denied (os error 13)' >&2; exit 1", r"Permission denied.*SYS_PTRACE"),
            ("echo 'stack 25' > ${12}; exit 0", None),
        ],
    )
    def test_is_sampled_by_py_spy(self, tmp_path, monkeypatch, program, says):
        if program is not None:
            (tmp_path / "py-spy").write_text(f"#!/bin/sh\n{program}\n")
            (tmp_path / "py-spy").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
        if says is not None:
            with pytest.raises(GilError, match=says):
                gil_us_per_image(lambda: [1], seconds=0.01)
        else:  # 25 of the 250 samples of a second, in which each image takes a microsecond or longer
            assert 0.1 <= gil_us_per_image(lambda: time.sleep(0.001) or [1000], seconds=0.01) < 100
