"""The machine: the cores that may be used, what it is, and how large experiments should be on it."""

import hashlib
import math
import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NOTEBOOK_FOLDER = Path(__file__).resolve().parents[2] / "notebooks"

_CGROUP = Path("/sys/fs/cgroup")
_VERSIONS = (
    "torch", "torchvision", "torchcodec", "pillow", "opencv-python-headless", "simplejpeg", "numpy",
    "albumentations", "kornia",
)  # fmt: skip


def usable_cores() -> int:
    """Cores that this process may keep busy: the least of CPU affinity, cgroup quota and `os.cpu_count()`.

    `os.cpu_count()` alone counts the host's cores: inside a container or under `taskset` it promises too many.

    Returns:
        At least 1. A quota of 1.5 cores counts as 1.

    Source: sched_getaffinity(2); the kernel's cgroup-v1 and cgroup-v2 documentation.
    """
    return min(core_limits().values())


def core_limits() -> dict[str, int]:
    """Every limit on the cores that is in force, by name: `cpu_count`, `affinity`, `cgroup_quota`."""
    limits = {"cpu_count": os.cpu_count() or 1}
    if hasattr(os, "sched_getaffinity"):
        limits["affinity"] = len(os.sched_getaffinity(0))
    if (quota := cgroup_quota()) is not None:
        limits["cgroup_quota"] = max(1, math.floor(quota))
    return limits


def cgroup_quota(root: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores that the cgroup's CPU quota grants, or None where there is none.

    The tightest quota on the way from this process's group to the root counts, since a parent's binds its children.
    """
    quotas = [quota for group in _groups(root, membership) if (quota := _group_quota(group)) is not None]
    return min(quotas, default=None)


def _groups(root: Path, membership: Path) -> list[Path]:
    """Folders of this process's groups and of all their parents (cgroup v2, and v1's cpu controller)."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base = root
        elif "cpu" in controllers.split(","):
            base = root / controllers if (root / controllers).is_dir() else root / "cpu"
        else:
            continue
        parts = [part for part in group.split("/") if part]
        groups += [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return groups


def _group_quota(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return None
    return float(quota) / float(period) if quota not in ("max", "-1") else None


@dataclass(frozen=True)
class Scale:
    """How large experiments are. Sizes are images; `rounds` and `warmups` go to `labkit.compare`."""

    name: str
    n_photos: int
    n_camera: int
    batch_size: int
    rounds: int
    warmups: int = 1


_SCALES = {
    "ci": Scale("ci", n_photos=24, n_camera=3, batch_size=4, rounds=2),
    "laptop": Scale("laptop", n_photos=128, n_camera=16, batch_size=32, rounds=5),
    "gpu": Scale("gpu", n_photos=2048, n_camera=128, batch_size=64, rounds=9),
}


def scale() -> Scale:
    """The scale that `LABKIT_SCALE` names (`ci`, `laptop`, `gpu`); without it `ci` under pytest, else `laptop`.

    Raises:
        ValueError: `LABKIT_SCALE` names no scale.
    """
    # pytest sets PYTEST_VERSION, and the kernels that nbval starts inherit it.
    name = os.environ.get("LABKIT_SCALE") or ("ci" if "PYTEST_VERSION" in os.environ else "laptop")
    if name not in _SCALES:
        raise ValueError(f"LABKIT_SCALE={name!r}: choose one of {', '.join(_SCALES)}")
    return _SCALES[name]


def photo_root(profile: str) -> Path:
    """Folder for the photos of one profile at the current scale, under `LABKIT_HOME` (default `~/.cache/labkit`).

    The number of photos is in its name, so that a set never has to shrink.
    """
    count = {"imagenet": scale().n_photos, "camera": scale().n_camera}.get(profile, scale().n_photos)
    return labkit_home() / "photos" / f"{profile}-{count}"


def labkit_home() -> Path:
    """labkit's own folder: `LABKIT_HOME`, by default `~/.cache/labkit`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("LABKIT_HOME") or cache / "labkit")


@cache
def environment() -> dict[str, str | int | float]:
    """What a measurement depends on: machine, cores, memory, GPU, operating system and library versions."""
    import psutil

    return {
        "cpu": _cpu_name(),
        "usable_cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": _gpu_name(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: found for name in _VERSIONS if (found := package_version(name))},
    }


def env_id() -> str:
    """Short name of this environment, such as `intel-xeon-2c-cpu-3fa91c`. Frames are compared only within one.

    The digest covers the machine and the minor versions of Python and the libraries that decode or move pixels.
    """
    facts = environment()
    minor = [".".join(str(facts.get(name, "")).split(".")[:2]) for name in ("python", *_VERSIONS)]
    digest = hashlib.sha256(
        repr([facts["cpu"], facts["usable_cores"], facts["memory_gib"], facts["gpu"], minor]).encode()
    )
    parts = [_slug(str(facts["cpu"]), 3), f"{facts['usable_cores']}c", _slug(str(facts["gpu"]), 3) or "cpu"]
    return "-".join([*parts, digest.hexdigest()[:6]])


def package_version(name: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _slug(name: str, n_words: int) -> str:
    words = re.sub(r"\((r|tm)\)|@.*|processor|cpu", " ", name.lower())
    return "-".join(re.findall(r"[a-z0-9]+", words)[:n_words])


def _cpu_name() -> str:
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
