"""What this machine offers, and what is missing."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from labkit.data.decode import missing_decoders
from labkit.data.partial_jpeg import load_library
from labkit.data.sizes import disk_under
from labkit.util.machine import (
    DISTRIBUTION,
    core_limits,
    environment,
    install_command,
    package_version,
    photo_root,
    scale,
    usable_cores,
)
from labkit.watching.resources import ResourceWatch, place_of

_OWN_LINES = ("cpu", "usable_cores", "memory_gib", "gpu")  # of the environment


def findings() -> list[tuple[str, str]]:
    """Pairs of (subject, finding), in reading order."""
    limits, facts = core_limits(), environment()
    binding = next(name for name, cores in limits.items() if cores == usable_cores())
    listed = ", ".join(f"{name} {cores}" for name, cores in limits.items())
    gpu = "none that torch can use: cells that need one say so"
    if torch.cuda.is_available():
        memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        gpu = f"{torch.cuda.get_device_name(0)}, {memory_gib:.0f} GiB, CUDA {torch.version.cuda}"
    try:
        in_part = Path(load_library()._name).name
    except ImportError as error:
        in_part = f"not available, so images are decoded completely, which is slower: {error}"
    lacks = [f"{name} is missing: {reason}" for name, reason in missing_decoders().items()]
    return [
        ("usable cores", f"{usable_cores()} ({listed}; bound by {binding})"),
        ("memory", f"{facts['memory_gib']} GiB"),
        ("photo folder", _describe_photo_folder()),
        *ResourceWatch().read(torch_threads=torch.get_num_threads(), **_place_of_photos()).facts().items(),
        ("GPU", gpu),
        *[(name, str(fact)) for name, fact in facts.items() if name not in _OWN_LINES],
        ("decoders", "; ".join(lacks) or "all present"),
        ("JPEGs in part", in_part),
        *[(f"extra {name!r}", finding) for name, finding in extras().items()],
    ]


def extras(distribution: str = DISTRIBUTION) -> dict[str, str]:
    """For each optional extra: `complete`, or the missing packages and the command that installs them."""
    try:
        about = metadata(distribution)
    except PackageNotFoundError:
        return {distribution: f"is not installed: {install_command('test')}"}
    requirements = [Requirement(text) for text in about.get_all("Requires-Dist", [])]
    found = {}
    for name in sorted(about.get_all("Provides-Extra", [])):
        needed = [each.name for each in requirements if each.marker and each.marker.evaluate({"extra": name})]
        missing = [package for package in needed if package_version(package) is None]
        found[name] = f"lacks {', '.join(missing)}: {install_command(name)}" if missing else "complete"
    return found


def _describe_photo_folder() -> str:
    """The photos' place, and the kind of disk according to the kernel; a virtual disk may be of any kind."""
    try:
        root = photo_root("imagenet")
    except OSError as error:  # no home folder
        return str(error)
    if not root.is_dir():
        return f"{root} is missing: python -m labkit tour makes it ({scale().n_photos} photos at this scale)"
    name, rotating = disk_under(root)
    kind = "virtual" if name.startswith(("vd", "xvd")) else "rotating" if rotating else "solid-state"
    return f"{root}, {kind} disk {name}" if name else f"{root}, unknown kind of disk"


def _place_of_photos() -> dict[str, str]:
    with suppress(OSError):  # no home folder
        return place_of([str(photo_root("imagenet"))])
    return {}
