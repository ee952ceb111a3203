"""The commands under test: each data script, `labkit convert`, tours and `labkit diagnose`."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.hardening.faults.launch import REPO
from tests.hardening.faults.sources import IMAGENETTE, md5_of


@dataclass(frozen=True)
class Command:
    """A command, and what may be said of its output.

    Args:
        main: File that Python runs.
        arguments: `{src}`, `{out}` and `{server}` stand for places of the trial.
        sources: Names that it reads, of `make_sources`.
        evolves: Patterns of files that have their name before their last content: any whole one will do.
        ready: What another run says, by an error, of what is there already.
        prepare: Called in the process before the script.
        timed: Its output holds times, so that files are compared by name, and frames by their rows.
        local: It starts workers, as its last "2" says.
        seconds: After which it hangs.
    """

    main: str
    arguments: tuple[str, ...]
    sources: tuple[str, ...] = ()
    evolves: tuple[str, ...] = ()
    ready: str = ""
    prepare: Callable[[Path, str], None] | None = None
    timed: bool = False
    local: bool = False
    seconds: float = 200.0  # for a busy machine: only what never ends takes so long


def _script(name: str) -> str:
    return str(REPO / "data_scripts" / f"{name}.py")


LABKIT = str(REPO / "labkit" / "__main__.py")


def _own_imagenette(src: Path, server: str) -> None:
    """The stand-in's own md5 in place of the real one's, and a server that stalls is given up soon."""
    from torchvision.datasets import Imagenette

    from labkit.data.samples import imagenette as download

    Imagenette._ARCHIVES["160px"] = (f"{server}{IMAGENETTE}.tgz", md5_of(src / f"{IMAGENETTE}.tgz"))
    download._TIMEOUT_S = 1.0


def _own_notebooks(src: Path, server: str) -> None:
    from labkit.lab import notebooks

    notebooks.find_notebooks.__defaults__ = ("", src / "notebooks")
    os.environ["LABKIT_SCALE"] = "ci"


def _few_photos(src: Path, server: str) -> None:
    from labkit.lab import tour

    _own_notebooks(src, server)
    tour.make_scale_photos = lambda: None


_PHOTOS = ("out/set/manifest.json",)
COMMANDS = {
    "make_photos": Command(
        _script("make_photos"), ("{out}/set", "5", "--num-threads", "2"), evolves=_PHOTOS,
    ),
    "make_photos local": Command(
        _script("make_photos"), ("{out}/set", "5", "--num-threads", "2", "--engine", "local"), evolves=_PHOTOS,
        local=True,
    ),
    "make_depth": Command(_script("make_depth"), ("{out}/set", "1", "--tar", "--num-workers", "1")),
    "make_depth local": Command(
        _script("make_depth"), ("{out}/set", "2", "--tar", "--num-workers", "2"), local=True,
    ),
    "make_shards": Command(
        _script("make_shards"), ("{src}/photos", "{out}/set", "--max-count", "3", "--seed", "0", "--engine", "threads"),
        ("photos",),
    ),
    "make_shards local": Command(
        _script("make_shards"), ("{src}/photos.tar", "{out}/set", "--max-count", "3", "--num-workers", "2"),
        ("photos.tar",), local=True,
    ),
    "make_pixels": Command(
        _script("make_pixels"), ("{src}/photos", "{out}/set.pixels", "--num-workers", "2"), ("photos",),
    ),
    "make_pixels local": Command(
        _script("make_pixels"), ("{src}/photos.tar", "{out}/set.pixels", "--num-workers", "2", "--engine", "local"),
        ("photos.tar",), local=True,
    ),
    "extract_tars": Command(
        _script("extract_tars"), ("{out}/set", "{src}/photos.tar.gz", "--verify"), ("photos.tar.gz",),
    ),
    "extract_tars local": Command(
        _script("extract_tars"), ("{out}/set", "{src}/photos.tar", "{src}/other.tar", "--num-workers", "2"),
        ("photos.tar", "other.tar"), local=True,
    ),
    "collect_sizes": Command(
        _script("collect_sizes"), ("{src}/photos", "{out}/sizes.csv", "--no-caches", "--write-metadata-cache"),
        ("photos",),
    ),
    "collect_sizes local": Command(
        _script("collect_sizes"), ("{src}/many", "{out}/sizes.csv", "--num-workers", "2"), ("many",), local=True,
    ),
    "download": Command(
        _script("download"), ("{out}/set",), (f"{IMAGENETTE}.tgz",), prepare=_own_imagenette,
    ),
    "labkit convert": Command(
        LABKIT, ("convert", "{src}/photos.tar.gz", "{out}/plain.tar"), ("photos.tar.gz",), ready="exists: remove it",
    ),
    "labkit tour": Command(
        LABKIT, ("tour",), ("notebooks",), prepare=_few_photos, timed=True,
    ),
    "labkit tour --only 00": Command(
        LABKIT, ("tour", "--only", "00", "--scale", "ci"), timed=True, seconds=400.0,
    ),
    # Two that measure what they are about, and start processes of all kinds.
    "labkit tour --only 03,08": Command(
        LABKIT, ("tour", "--only", "03,08", "--scale", "ci"), timed=True, seconds=600.0,
    ),
    "labkit peers": Command(
        LABKIT, ("peers", "--only", "albumentations", "--scale", "ci", "--rounds", "1"), timed=True, seconds=400.0,
    ),
    "labkit diagnose": Command(
        LABKIT, ("diagnose", "src.train:make_training", "--batches", "2", "--rounds", "1"), ("photos", "train.py"),
        timed=True,
    ),
}  # fmt: skip
