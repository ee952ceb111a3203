"""What this machine offers, and what is missing."""

import operator
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from labkit.util.machine import (
    DISTRIBUTION,
    core_limits,
    disk_under,
    environment,
    install_command,
    package_version,
    photo_root,
    scale,
    usable_cores,
)
from labkit.util.ranks import cores_per_rank, find_ranks, senseless_variables
from labkit.watching.resources import ResourceWatch, place_of

_OWN_LINES = ("cpu", "usable_cores", "memory_gib", "gpu")  # of the environment


def findings() -> list[tuple[str, str]]:
    """Pairs of (subject, finding), in reading order."""
    import torch

    limits, facts = core_limits(), environment()
    binding = next(name for name, cores in limits.items() if cores == usable_cores())
    listed = ", ".join(f"{name} {cores}" for name, cores in limits.items())
    gpu = "none that torch can use: cells that need one say so"
    if torch.cuda.is_available():
        memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        gpu = f"{torch.cuda.get_device_name(0)}, {memory_gib:.0f} GiB, CUDA {torch.version.cuda}"
    return [
        ("usable cores", f"{usable_cores()} ({listed}; bound by {binding})"),
        ("ranks", _describe_ranks()),
        ("memory", f"{facts['memory_gib']} GiB"),
        ("photo folder", _describe_photo_folder()),
        *ResourceWatch().read(torch_threads=torch.get_num_threads(), **_place_of_photos()).facts().items(),
        ("GPU", gpu),
        *[(name, str(fact)) for name, fact in facts.items() if name not in _OWN_LINES],
        *_decoding(),
        *[(f"extra {name!r}", finding) for name, finding in extras().items()],
    ]


def _describe_ranks() -> str:
    """Which rank of a training a loader in this process would take itself for, and from which variables."""
    found = find_ranks()
    told = [f"{found} ({found.told()}); cores for it: {cores_per_rank()}" if found.launcher else f"none: {found}"]
    return "; ".join([*told, *(f"ignored: {said}" for said in senseless_variables())])


def _decoding() -> Iterator[tuple[str, str]]:
    """What images are decoded by; nothing where the loaders' libraries are missing."""
    try:
        from labkit.data.decode import missing_decoders
        from labkit.data.partial_jpeg import load_library
    except ModuleNotFoundError:
        return
    lacks = [f"{name} is missing: {reason}" for name, reason in missing_decoders().items()]
    yield "decoders", "; ".join(lacks) or "all present"
    try:
        yield "JPEGs in part", Path(load_library()._name).name
    except ImportError as error:
        yield "JPEGs in part", f"not available, so images are decoded completely, which is slower: {error}"


_HERE = {
    "sys_platform": sys.platform,
    "platform_machine": platform.machine(),
    "python_version": "{}.{}".format(*sys.version_info),
}
_CONDITION = re.compile(r"""(\w+)\s*(==|!=|<=|>=|<|>)\s*["']([^"']+)["']""")
_SIGNS = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge,
}  # fmt: skip


def _applies(marker: str) -> bool:
    """Whether the conditions of a requirement hold here; they are joined by `and`, as pyproject.toml has them."""
    conditions = [each for each in _CONDITION.findall(marker) if each[0] in _HERE]
    return all(_SIGNS[sign](_comparable(_HERE[name]), _comparable(value)) for name, sign, value in conditions)


def _comparable(value: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in value.split(".")]


def extras(distribution: str = DISTRIBUTION) -> dict[str, str]:
    """For each optional extra: `complete`, or the missing packages and the command that installs them."""
    try:
        about = metadata(distribution)
    except PackageNotFoundError:
        return {"loaders": f"lacks labkit itself, which runs from its folder: {install_command('loaders')}"}
    requirements = [text.partition(";")[::2] for text in about.get_all("Requires-Dist", [])]
    found = {}
    for name in sorted(about.get_all("Provides-Extra", [])):
        own = [text for text, marker in requirements if re.search(f"extra == .{name}\\b", marker) and _applies(marker)]
        needed = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in own]
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
