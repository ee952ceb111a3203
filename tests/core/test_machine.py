"""Usable cores, scales, environment ids."""

import os
import platform
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import psutil
import pytest
import torch

from labkit.util import machine as env


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
        (["0::/job"], {"job/cpu.max": "nonsense"}, None),
        (["0::/job"], {"job/cpu.max": "1 2 3"}, None),
        (["0::/job"], {"job/cpu.cfs_quota_us": "5"}, None),
        (None, {}, None),
    ],
)
def test_cgroup_quota(tmp_path, lines, files, expected):
    membership = tmp_path / "membership"
    if lines is not None:
        membership.write_text("\n".join(lines))
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert env.cgroup_quota(tmp_path / "cgroup", membership) == expected


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
    monkeypatch.setattr(env, "cgroup_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    if affinity is None:
        monkeypatch.delattr(os, "sched_getaffinity")
    assert env.core_limits() == limits
    assert env.usable_cores() == min(limits.values())


def test_affinity_of_a_child_counts():
    code = (
        "import os; os.sched_setaffinity(0, {0}); from labkit.util.machine import usable_cores; print(usable_cores())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "1\n"


def test_scale_is_ci_under_pytest(monkeypatch):
    monkeypatch.delenv("LABKIT_SCALE", raising=False)
    assert env.scale().name == "ci"
    monkeypatch.delenv("PYTEST_VERSION")
    assert env.scale().name == "laptop"


def test_unknown_scale_names_the_choices(monkeypatch):
    monkeypatch.setenv("LABKIT_SCALE", "huge")
    with pytest.raises(ValueError, match="LABKIT_SCALE must be one of ci, laptop, gpu, got 'huge'"):
        env.scale()


def test_env_id_ignores_patch_releases(monkeypatch):
    facts, own = env.environment(), env.env_id()
    monkeypatch.setattr(env, "environment", lambda: {**facts, "torch": facts["torch"].rpartition(".")[0] + ".99"})
    assert env.env_id() == own


def test_photo_roots_tell_profile_and_number(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    monkeypatch.setenv("LABKIT_SCALE", "gpu")
    for profile, number in {"imagenet": 2048, "camera": 128, "other": 2048}.items():
        assert env.photo_root(profile) == tmp_path / "photos" / f"{profile}-{number}"


def test_the_home_is_in_the_user_s_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("LABKIT_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.labkit_home() == tmp_path / "labkit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert env.labkit_home() == Path.home() / ".cache" / "labkit"


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("ci", (24, 3, 4, 2, 1, 0.0, 0.0)),
        ("laptop", (128, 16, 16, 5, 1, 3.0, 0.25)),
        ("gpu", (2048, 128, 64, 5, 1, 20.0, 1.0)),
    ],
)
def test_scales(monkeypatch, name, sizes):
    monkeypatch.setenv("LABKIT_SCALE", name)
    assert astuple(env.scale()) == (name, *sizes)


def test_the_environment_is_this_machine():
    facts = env.environment.__wrapped__()
    assert facts["memory_gib"] == round(psutil.virtual_memory().total / 2**30)
    assert facts["usable_cores"] == env.usable_cores()
    assert facts["system"] == f"{platform.system()} {platform.release()}"
    own = platform.python_version(), env.package_version("torch"), env._cpu_name()
    assert (facts["python"], facts["torch"], facts["cpu"]) == own
    assert facts["gpu"] == (torch.cuda.get_device_name(0) if torch.cuda.is_available() else "")
    assert "labkit-is-not-this" not in facts
    assert env.package_version("labkit-is-not-this") is None


@pytest.mark.parametrize(
    ("cpu", "gpu", "start"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.10GHz", "", "intel-xeon-7c-cpu-"),
        ("AMD EPYC 9004 96-Core Processor", "NVIDIA H200 NVL 141GB", "amd-epyc-9004-7c-nvidia-h200-nvl-"),
        ("Intel(TM) Core CPU i7", "", "intel-core-i7-7c-cpu-"),
        ("Weird/CPU (R) @ 3.2 GHz", "", "weird-7c-cpu-"),
    ],
)
def test_env_ids_begin_with_the_machine(monkeypatch, cpu, gpu, start):
    facts = {**env.environment(), "cpu": cpu, "gpu": gpu, "usable_cores": 7}
    monkeypatch.setattr(env, "environment", lambda: facts)
    found = env.env_id()
    assert found.startswith(start)
    assert len(found) == len(start) + 6
    for fact in ("cpu", "torch", "gpu", "memory_gib", "python", "kornia", "usable_cores"):
        monkeypatch.setattr(env, "environment", lambda fact=fact: {**facts, fact: "99.1"})
        assert env.env_id()[-6:] != found[-6:]


def test_a_processor_without_a_name_in_proc(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    for answer, processor, name in [
        (lambda path: "model name\t: First CPU\nmodel name\t: Second\n", "arm", "First CPU"),
        (lambda path: "processor: 0", "arm", "arm"),
        (lambda path: os.stat("/missing"), "", "aarch64"),
    ]:
        monkeypatch.setattr(Path, "read_text", answer)
        monkeypatch.setattr(platform, "processor", lambda processor=processor: processor)
        assert env._cpu_name() == name
