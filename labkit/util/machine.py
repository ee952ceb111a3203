"""The machine: its usable cores, its description, and the size of experiments on it."""

import hashlib
import math
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from traceback import walk_tb

from labkit.errors import MissingLibraryError, StorageError
from labkit.util.arguments import require_choice

DISTRIBUTION = "labkit-images"  # what pip calls labkit
LEAST_TORCH = 2, 11  # of the loaders; `watch` takes older ones

_PACKAGE = Path(__file__).resolve().parents[1]
_COURSE = _PACKAGE / "course"
IS_CLONE = not (_COURSE / "notebooks").is_dir()  # only wheels have that folder: see pyproject.toml
NOTEBOOK_FOLDER = (_PACKAGE.parent if IS_CLONE else _COURSE) / "notebooks"

CGROUP, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_VERSIONS = (
    "torch", "torchvision", "torchcodec", "pillow", "opencv-python-headless", "simplejpeg", "numpy",
    "albumentations", "kornia",
)  # fmt: skip


def usable_cores() -> int:
    """Cores that this process may use: the minimum of CPU affinity, cgroup quota and `os.cpu_count()`.

    `os.cpu_count()` alone counts the host's cores, which are too many inside a container or under `taskset`.

    Returns:
        At least 1. A quota of 1.5 cores counts as 1.

    >>> lk.usable_cores() >= 1
    True

    Source: sched_getaffinity(2); the kernel's cgroup-v1 and cgroup-v2 documentation.
    """
    return min(core_limits().values())


def core_limits() -> dict[str, int]:
    """The limits on the cores that apply here: `cpu_count`, `affinity`, `cgroup_quota`."""
    limits = {"cpu_count": os.cpu_count() or 1}
    if hasattr(os, "sched_getaffinity"):
        limits["affinity"] = len(os.sched_getaffinity(0))
    if (quota := cgroup_quota()) is not None:
        limits["cgroup_quota"] = max(1, math.floor(quota))
    return limits


def main_is_script() -> bool:
    """Whether this process runs a script, which new processes would import again, and not a notebook or console."""
    return hasattr(sys.modules["__main__"], "__file__")


def cgroup_quota(root: Path = CGROUP, membership: Path = MEMBERSHIP) -> float | None:
    """Cores that the cgroup's CPU quota grants, or None if there is no quota.

    A parent's quota limits its children too, so the lowest between this process's group and the root counts.
    """
    quotas = [quota for group in cgroup_folders(root, membership) if (quota := _read_quota(group)) is not None]
    return min(quotas, default=None)


def cgroup_folders(root: Path, membership: Path, controller: str = "cpu") -> list[Path]:
    """Folders of this process's groups and all their parents (cgroup v2, and one controller of v1)."""
    groups, lines = [], list[bytes]()
    with suppress(OSError):  # not Linux
        lines = membership.read_bytes().splitlines()
    for line in lines:
        _, *fields = map(os.fsdecode, line.split(b":", 2))  # names of groups are any bytes, as those of files
        if len(fields) < 2:
            continue
        controllers, group = fields
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            base = root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        parts = [part for part in group.split("/") if part]
        groups += [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return groups


def _read_quota(group: Path) -> float | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = " ".join((group / name).read_text() for name in names).split()
            return int(quota) / int(period) if quota not in ("max", "-1") else None
    return None


@dataclass(frozen=True)
class Scale:
    """The size of experiments.

    n_photos, n_camera, batch_size: In images.
    rounds: The fewest measured rounds of `labkit.compare`.
    budget_s: Seconds for them, for each variant.
    min_steady_s: Seconds for which a loader's steady state is timed, at least.
    """

    name: str
    n_photos: int
    n_camera: int
    batch_size: int
    rounds: int
    budget_s: float = 1.0
    min_steady_s: float = 0.25


_SCALES = {
    "ci": Scale("ci", n_photos=24, n_camera=3, batch_size=4, rounds=2, budget_s=0.0, min_steady_s=0.0),
    "laptop": Scale("laptop", n_photos=128, n_camera=16, batch_size=16, rounds=4),
    "gpu": Scale("gpu", n_photos=2048, n_camera=128, batch_size=64, rounds=5, budget_s=14.0, min_steady_s=1.0),
}


def scale() -> Scale:
    """The scale that `LABKIT_SCALE` names (`ci`, `laptop`, `gpu`); by default `ci` under pytest, else `laptop`.

    >>> lk.scale().name  # doctest: +SKIP
    'laptop'

    Raises:
        ValueError: unknown scale.
    """
    # pytest sets PYTEST_VERSION, and the kernels that nbval starts inherit it.
    name = os.environ.get("LABKIT_SCALE") or ("ci" if "PYTEST_VERSION" in os.environ else "laptop")
    return _SCALES[require_choice("LABKIT_SCALE", name, _SCALES)]


THOROUGH_VARIABLE = "LABKIT_THOROUGH"


def is_thorough() -> bool:
    """Whether all comparisons spend six budgets: if `LABKIT_THOROUGH` is set, as by `labkit tour --thorough`."""
    return bool(os.environ.get(THOROUGH_VARIABLE))


OWN_PHOTOS_VARIABLE = "LABKIT_PHOTOS"


def own_photos() -> Path | None:
    """The folder of the reader's own photos, where `LABKIT_PHOTOS` names one; None: the course makes its own."""
    named = os.environ.get(OWN_PHOTOS_VARIABLE)
    return Path(named).expanduser().absolute() if named else None


# Of the course's sets that this process uses: folder -> whether the photos are the reader's.
_photos_in_use = dict[Path, bool]()


def note_photos(root: Path, *, are_own: bool) -> None:
    """Note whose photos are in a set of the course that this process is about to use: titles tell it."""
    _photos_in_use[root] = are_own


def told_of_own_photos() -> str:
    """What a figure says of the photos of this process: that they are the reader's own, all or in part; else ""."""
    if own_photos() is None:
        return ""
    are_own = {_photos_in_use[root] for root in map(photo_root, ("imagenet", "camera")) if root in _photos_in_use}
    return "own photos, large ones made by labkit" if len(are_own) == 2 else "own photos" if True in are_own else ""


def own_photos_id() -> str:
    """A short digest of where they are, which does not tell where; "" without any."""
    own = own_photos()
    return hashlib.sha256(os.fsencode(own)).hexdigest()[:6] if own else ""


def photo_root(profile: str) -> Path:
    """Folder for the photos of one profile at the current scale, under `LABKIT_HOME` (default `~/.cache/labkit`).

    The number of photos is in its name: a scale reads those that it is about, unless a reader has added others. Where
    `LABKIT_PHOTOS` names a folder, `lk.make_photos` links photos of the reader's there.
    """
    count = scale().n_camera if profile == "camera" else scale().n_photos
    own = own_photos_id()
    return labkit_home() / "photos" / (f"own-{own}-{profile}-{count}" if own else f"{profile}-{count}")


def labkit_home() -> Path:
    """labkit's own folder: `LABKIT_HOME`, by default `~/.cache/labkit`. OSError: there is neither."""
    try:
        if chosen := os.environ.get("LABKIT_HOME"):
            return Path(chosen).expanduser()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a container's user without an entry
        raise StorageError(
            "this user has no home folder: set LABKIT_HOME to a folder that labkit may fill, or HOME"
        ) from error
    return cache / "labkit"


@cache
def environment() -> dict[str, str | int | float]:
    """What measurements depend on: CPU, cores, memory, GPU, operating system and library versions."""
    import torch

    return {
        "cpu": _cpu_name(),
        "usable_cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "",
        "system": f"{platform.system()} {platform.release()}",
        **installed_versions(),
    }


def device_kind() -> str:
    """Where batches can go: `"cpu"`, `"cuda"`, or `"cuda (simulated)"` within `lk.simulated_cuda`."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return "cuda (simulated)" if torch.cuda.get_device_name().endswith("(simulated)") else "cuda"


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that handle pixels, as far as they are installed."""
    libraries = {name: found for name in _VERSIONS if (found := package_version(name))}
    return {"python": platform.python_version(), **libraries}


def env_id() -> str:
    """Short name of this environment, such as `intel-xeon-2c-cpu-3fa91c`. Frames are compared only within one.

    Its last part is a digest of the machine and of the minor versions of Python and the libraries that handle pixels.
    Runs with a reader's own photos are of an environment of their own.

    >>> env_id()  # doctest: +SKIP
    'linux-8-cores-rtx-4090-torch-2.14-3f2a9c'
    """
    facts = environment()
    minor = [".".join(str(facts.get(name, "")).split(".")[:2]) for name in ("python", *_VERSIONS)]
    measured_on = [facts[name] for name in ("cpu", "usable_cores", "memory_gib", "gpu")]
    digest = hashlib.sha256(repr([*measured_on, minor]).encode())
    parts = [_slug(str(facts["cpu"]), 3), f"{facts['usable_cores']}c", _slug(str(facts["gpu"]), 3) or "cpu"]
    photos = [f"photos-{own_photos_id()}"] if own_photos() else []
    return "-".join([*parts, digest.hexdigest()[:6], *photos])


def package_version(name: str) -> str | None:
    """Installed version of a distribution, or None."""
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def install_command(extra: str) -> str:
    """The command that installs one of labkit's extras, from the clone or where a wheel was installed."""
    if not IS_CLONE:
        return f'python -m pip install "{DISTRIBUTION}[{extra}]"'
    clone = NOTEBOOK_FOLDER.parent
    with suppress(OSError):  # of a current folder that is gone
        clone = Path() if Path.cwd() == clone else clone
    return f'python -m pip install -e "{clone}[{extra}]"'


def missing_library(what: str, extra: str, error: ModuleNotFoundError) -> MissingLibraryError:
    """What to say where a name or a command needs a library that is not installed: which, and how to get it."""
    if error.name == "torch":
        return MissingLibraryError(
            f"{what} needs PyTorch, which {sys.executable} does not have: start labkit by the Python that trains, or "
            "install torch as pytorch.org says"
        )
    said = f"{what} needs {error.name}, of the extra {extra!r}: {install_command(extra)}"
    found = re.match(r"(\d+)\.(\d+)", torch_version := package_version("torch") or "")
    if found and (int(found[1]), int(found[2])) < LEAST_TORCH:
        needed = ".".join(map(str, LEAST_TORCH))
        said += f" (which replaces torch {torch_version} by {needed} or newer: use a new environment to keep it)"
    return MissingLibraryError(said)


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Say which extra is missing where labkit finds no library within this block."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not is_labkits(error):
            raise
        raise missing_library(what, extra, error) from None


def is_labkits(error: ModuleNotFoundError) -> bool:
    """Whether it is an import of labkit that found no library, and not one of a user's or of another library."""
    last = None
    for frame, _ in walk_tb(error.__traceback__):
        if "importlib" not in frame.f_code.co_filename:
            last = frame.f_code.co_filename
    is_own = (error.name or "labkit").partition(".")[0] == "labkit"  # a mistake, and no lack
    return last is not None and not is_own and Path(last).is_relative_to(_PACKAGE)


def disk_under(path: str | os.PathLike, devices: Path = Path("/sys/dev/block")) -> tuple[str, bool]:
    """Name of the disk that holds `path`, and whether the kernel reports that it rotates; `""` and False if unknown.

    Virtual machines often report this for any disk.
    """
    with suppress(OSError, ValueError):  # not a block device (tmpfs, network), or not Linux
        device = os.stat(path).st_dev
        block = (devices / f"{os.major(device)}:{os.minor(device)}").resolve()
        disk = block if (block / "queue").is_dir() else block.parent  # a partition has the queue of its disk
        return disk.name, (disk / "queue/rotational").read_text().strip() == "1"
    return "", False


def _slug(name: str, n_words: int) -> str:
    words = re.sub(r"\((r|tm)\)|@.*|processor|cpu", " ", name.lower())
    return "-".join(re.findall(r"[a-z0-9]+", words)[:n_words])


def _cpu_name() -> str:
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        if name := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return name[1]
    return platform.processor() or platform.machine()
