"""Usable cores, scales, environment ids."""

import os
import subprocess
import sys

import pytest

from labkit.measure import env


def _cgroup(tmp_path, lines, files):
    membership = tmp_path / "membership"
    membership.write_text("\n".join(lines))
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return env.cgroup_quota(tmp_path / "cgroup", membership)


def test_cgroup_v2_quota(tmp_path):
    assert _cgroup(tmp_path, ["0::/job"], {"job/cpu.max": "150000 100000\n"}) == 1.5


def test_cgroup_v2_without_a_limit(tmp_path):
    assert _cgroup(tmp_path, ["0::/job"], {"job/cpu.max": "max 100000\n"}) is None


def test_the_tightest_parent_counts(tmp_path):
    files = {"cpu.max": "max 100000", "a/cpu.max": "200000 100000", "a/b/cpu.max": "800000 100000"}
    assert _cgroup(tmp_path, ["0::/a/b"], files) == 2.0


def test_cgroup_v1_quota(tmp_path):
    files = {"cpu,cpuacct/job/cpu.cfs_quota_us": "300000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"}
    assert _cgroup(tmp_path, ["4:memory:/other", "3:cpu,cpuacct:/job"], files) == 3.0


def test_cgroup_v1_without_a_limit(tmp_path):
    files = {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}
    assert _cgroup(tmp_path, ["3:cpu:/job"], files) is None


def test_no_cgroups_at_all(tmp_path):
    assert env.cgroup_quota(tmp_path, tmp_path / "missing") is None


@pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (1.9, 1), (None, 4)])
def test_usable_cores_is_the_least_limit(monkeypatch, quota, cores):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(env, "cgroup_quota", lambda: quota)
    assert env.usable_cores() == cores


def test_affinity_of_a_child_counts():
    code = "import os; os.sched_setaffinity(0, {0}); from labkit.measure.env import usable_cores; print(usable_cores())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "1"


def test_scale_is_ci_under_pytest(monkeypatch):
    monkeypatch.delenv("LABKIT_SCALE", raising=False)
    assert env.scale().name == "ci"
    monkeypatch.delenv("PYTEST_VERSION")
    assert env.scale().name == "laptop"


def test_unknown_scale_names_the_choices(monkeypatch):
    monkeypatch.setenv("LABKIT_SCALE", "huge")
    with pytest.raises(ValueError, match="'huge': choose one of ci, laptop, gpu"):
        env.scale()


def test_env_id_follows_machine_and_versions(monkeypatch):
    facts = env.environment()
    own = env.env_id()
    assert own == env.env_id()
    for change in ({"cpu": "Other CPU"}, {"usable_cores": 99}, {"torch": "1.0.0"}):
        monkeypatch.setattr(env, "environment", lambda change=change: {**facts, **change})
        assert env.env_id() != own
    monkeypatch.setattr(env, "environment", lambda: {**facts, "torch": facts["torch"].rpartition(".")[0] + ".99"})
    assert env.env_id() == own  # a patch release is the same environment


def test_env_id_is_a_safe_folder_name(monkeypatch):
    facts = env.environment()
    monkeypatch.setattr(env, "environment", lambda: {**facts, "cpu": "Weird/CPU (R) @ 3.2 GHz", "gpu": "NVIDIA H200"})
    assert env.env_id().startswith(f"weird-cpu-r-{facts['usable_cores']}c-nvidia-h200-") or "/" not in env.env_id()


def test_photo_root_honours_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    assert env.photo_root("camera") == tmp_path / "photos" / f"camera-{env.scale().n_camera}"
