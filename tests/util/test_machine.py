"""The machine and this process: usable cores, scales, names of environments, memory, threads, and values made once."""

import copy
import os
import pickle
import platform
import random
import subprocess
import sys
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch

import labkit as lk
from labkit import course
from labkit.app import doctor
from labkit.util import machine
from labkit.util.machine import env_id
from labkit.util.process import Lazy, PerProcess, preserve_rng_state
from tests.children import end_of_fork, in_children


def v1(controllers: str, quota: str, period: str) -> dict[str, str]:
    return {f"{controllers}/job/cpu.cfs_quota_us": quota, f"{controllers}/job/cpu.cfs_period_us": period}


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        (["0::/job"], {"job/cpu.max": "150000 100000\n"}, 1.5),
        (["0::/job"], {"job/cpu.max": "max 100000\n"}, None),
        # The lowest quota of the parents counts.
        (["0::/a/b"], {"cpu.max": "max 1000", "a/cpu.max": "2000 1000", "a/b/cpu.max": "8000 1000"}, 2.0),
        (["4:memory:/other", "3:cpu,cpuacct:/job"], v1("cpu,cpuacct", "3000", "1000"), 3),
        (["3:cpu:/job"], v1("cpu", "-1", "1000"), None),
        # cgroup v1 may be mounted under either name.
        (["3:cpu,cpuacct:/job", "2:cpuset:/", "1:name=a:b:/x"], v1("cpu", "5", "10"), 0.5),
        # What cannot be read is no quota.
        *[(["0::/job"], {"job/cpu.max": text}, None) for text in ("nonsense", "1 2 3", "1 0", "1 inf", "\udcff 1")],
        (None, {}, None),
        # Names of groups are any bytes; a broken line is none.
        (["0::/j\udcff b", "", "broken", "4:cpu", "::", "0::/nul\0"], {"j\udcff b/cpu.max": "3 2"}, 1.5),
    ],
)
def test_the_quota_of_a_cgroup(tmp_path, lines, files, expected):
    membership = tmp_path / "membership"
    if lines is not None:
        membership.write_bytes(os.fsencode("\n".join(lines)))
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(text))
    assert machine.cgroup_quota(tmp_path / "cgroup", membership) == expected


@pytest.mark.parametrize(
    ("n_cpus", "quota", "affinity", "limits"),
    [
        (64, 0.5, 4, {"cpu_count": 64, "affinity": 4, "cgroup_quota": 1}),
        (64, 2.9, 4, {"cpu_count": 64, "affinity": 4, "cgroup_quota": 2}),
        (64, None, 4, {"cpu_count": 64, "affinity": 4}),
        (None, None, None, {"cpu_count": 1}),  # as Python may answer; macOS and Windows
    ],
)
def test_usable_cores_is_the_least_limit(monkeypatch, n_cpus, quota, affinity, limits):
    monkeypatch.setattr(os, "cpu_count", lambda: n_cpus)
    monkeypatch.setattr(machine, "cgroup_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    if affinity is None:
        monkeypatch.delattr(os, "sched_getaffinity")
    assert machine.core_limits() == limits
    assert lk.usable_cores() == min(limits.values())


def cores_on_one() -> int:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return lk.usable_cores()


def test_the_affinity_of_a_child_counts():
    assert in_children("fork", cores_on_one, ()) == [1]


@pytest.mark.parametrize(("scale", "n_photos", "n_camera"), [("ci", 24, 3), ("laptop", 128, 16), ("gpu", 2048, 128)])
def test_each_scale_has_photos_of_its_own(monkeypatch, tmp_path, scale, n_photos, n_camera):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    monkeypatch.setenv("LABKIT_SCALE", scale)
    for profile, number in {"imagenet": n_photos, "camera": n_camera, "other": n_photos}.items():
        assert course.photo_root(profile) == tmp_path / "photos" / f"{profile}-{number}"


def test_the_scale_is_ci_under_pytest_and_an_unknown_one_is_refused(monkeypatch):
    monkeypatch.delenv("LABKIT_SCALE", raising=False)
    assert lk.scale().name == "ci"
    monkeypatch.delenv("PYTEST_VERSION")
    assert lk.scale().name == "laptop"
    monkeypatch.setenv("LABKIT_SCALE", "huge")
    with pytest.raises(ValueError, match="LABKIT_SCALE must be one of ci, laptop, gpu, got 'huge'"):
        lk.scale()


def test_the_home_is_in_the_cache_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("LABKIT_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.labkit_home() == tmp_path / "labkit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert machine.labkit_home() == Path.home() / ".cache" / "labkit"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch, tmp_path):
    """As in a container that is run with a number for its user; whatever needs no folder of labkit's works."""
    for name in ("HOME", "XDG_CACHE_HOME", "LABKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    with pytest.raises(OSError, match="this user has no home folder: set LABKIT_HOME"):
        machine.labkit_home()
    assert "set LABKIT_HOME" in dict(doctor.findings())["photo folder"]
    with tarfile.open(tmp_path / "one.tar", "w") as archive:
        archive.add(__file__, "one.jpg")
    assert lk.TarStore(tmp_path / "one.tar").read("one.jpg") == Path(__file__).read_bytes()
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    assert machine.labkit_home() == tmp_path


def test_the_environment_is_this_machine():
    facts = machine.environment.__wrapped__()
    assert facts["memory_gib"] == round(psutil.virtual_memory().total / 2**30)
    assert facts["usable_cores"] == lk.usable_cores()
    assert facts["system"] == f"{platform.system()} {platform.release()}"
    assert (facts["python"], facts["torch"]) == (platform.python_version(), machine.package_version("torch"))
    assert facts["gpu"] == (torch.cuda.get_device_name(0) if torch.cuda.is_available() else "")
    assert machine.package_version("labkit-is-not-this") is None


@pytest.mark.parametrize(
    ("cpu", "gpu", "start"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.10GHz", "", "intel-xeon-7c-cpu-"),
        ("AMD EPYC 9004 96-Core Processor", "NVIDIA H200 NVL 141GB", "amd-epyc-9004-7c-nvidia-h200-nvl-"),
    ],
)
def test_the_name_of_an_environment_begins_with_the_machine(monkeypatch, cpu, gpu, start):
    facts = {**machine.environment(), "cpu": cpu, "gpu": gpu, "usable_cores": 7}
    monkeypatch.setattr(machine, "environment", lambda: facts)
    found = env_id()
    assert found.startswith(start)
    assert len(found) == len(start) + 6
    for fact in ("cpu", "torch", "gpu", "memory_gib", "python", "kornia", "usable_cores"):
        monkeypatch.setattr(machine, "environment", lambda fact=fact: {**facts, fact: "99.1"})
        assert env_id()[-6:] != found[-6:]
    patch_release = facts["torch"].rpartition(".")[0] + ".99"
    monkeypatch.setattr(machine, "environment", lambda: {**facts, "torch": patch_release})
    assert env_id() == found


glibc_only = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other limits")


# In a process of its own: a fork inherits the heap, and glibc serves a process in which an allocation has once failed
# from a second heap, whose parts it gives back whatever the limits.
WORKERS = """
import resource, sys
from contextlib import closing
import labkit as lk
class Faults:  # page faults of this thread alone: that which sends batches copies pages that the fork shares
    def __len__(self):
        return 4
    def __getitem__(self, index):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        blocks = [bytearray(12_000_000) for _ in range(3)]
        del blocks
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
if __name__ == "__main__":
    config = lk.LoaderConfig(1, 1, start_method=sys.argv[1])
    with closing(lk.make_loader(Faults(), config, shuffle=False)) as loader:
        print(*(int(batch) for batch in loader))
"""


@glibc_only
def test_workers_of_make_loader_keep_the_memory_that_they_free(tmp_path):
    (script := tmp_path / "workers.py").write_text(WORKERS)
    done = subprocess.run([sys.executable, script, "fork"], capture_output=True, text=True, check=True)
    assert max(map(int, done.stdout.split()[1:])) < 100


def test_all_random_generators_are_given_back_after_an_error():
    drawn = []

    def draw() -> tuple[float, ...]:
        return random.random(), np.random.random(), torch.rand(1).item()

    @preserve_rng_state()
    def draw_and_fail() -> None:
        drawn.append(draw())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        draw_and_fail()
    assert draw() == drawn[0]


def pid_and_noise() -> tuple[int, float]:
    return os.getpid(), random.SystemRandom().random()


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
@pytest.mark.parametrize("kind", [Lazy, PerProcess])
def test_a_value_is_made_once_and_forks_keep_a_lazy_one(kind, start_method):
    def in_child() -> int:
        return in_children(start_method, value, ())[0]

    value = kind(os.getpid)
    assert in_child() != os.getpid()  # used for the first time there
    assert value() == os.getpid()
    assert (in_child() == os.getpid()) == (kind is Lazy and start_method == "fork")
    assert value() == os.getpid()


@pytest.mark.parametrize("kind", [Lazy, PerProcess])
def test_threads_share_one_value(kind):
    pause, made = threading.Event(), []
    value = kind(lambda: pause.wait(10) and (made.append(object()) or made[-1]))
    with ThreadPoolExecutor(20) as threads:
        got = [threads.submit(value) for _ in range(20)]
        pause.set()
    assert len(made) == 1
    assert {future.result() for future in got} == set(made)


@pytest.mark.parametrize(("kind", "made_before"), [(Lazy, False), (PerProcess, False), (PerProcess, True)])
def test_a_fork_while_another_thread_makes_the_value(kind, made_before):
    """The child must not wait for a lock whose holder it does not have."""
    slow, entered, release = [], threading.Event(), threading.Event()

    def make() -> int:
        if os.getpid() in slow:
            entered.set()
            release.wait(30)
        return os.getpid()

    value = kind(make)

    def check() -> None:
        slow.append(os.getpid())
        thread = threading.Thread(target=value)
        thread.start()
        entered.wait(10)
        assert end_of_fork(lambda: sys.exit(value() != os.getpid()), within_s=20) == 0
        release.set()
        thread.join()
        assert value() == os.getpid()

    if made_before:  # by an ancestor, of which the process that makes it again is a fork
        value()
        assert end_of_fork(check) == 0
    else:
        check()


def test_a_failure_is_not_kept():
    value = PerProcess(Mock(side_effect=[OSError("not yet"), 5]))
    with pytest.raises(OSError, match="not yet"):
        value()
    assert value() == value() == 5


@pytest.mark.parametrize("kind", [Lazy, PerProcess])
@pytest.mark.parametrize("copied", [lambda value: pickle.loads(pickle.dumps(value)), copy.deepcopy])
def test_copies_make_their_own(kind, copied):
    value = kind(pid_and_noise)
    assert copied(value)() != value()
    assert type(copied(value)) is kind
