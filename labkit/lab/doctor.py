"""What this machine offers to the lab, and what is missing."""

import os
import time
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from labkit.core import core_limits, environment, package_version, photo_root, scale, usable_cores


def findings() -> list[tuple[str, str]]:
    """(subject, finding) pairs, in the order to read them."""
    return [
        ("usable cores", _cores()),
        ("memory", f"{environment()['memory_gib']} GiB"),
        ("photo folder", _disk()),
        ("GPU", _gpu()),
        *[
            (name, str(value))
            for name, value in environment().items()
            if name not in ("cpu", "usable_cores", "memory_gib", "gpu")
        ],
        ("decoders", _decoders()),
        ("JPEGs in part", _regions()),
        *[(f"extra {name!r}", finding) for name, finding in extras().items()],
    ]


def extras(distribution: str = "labkit") -> dict[str, str]:
    """Each optional extra: `complete`, or the missing packages and the command that installs them."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in requires(distribution) or []]
    except PackageNotFoundError:
        return {"labkit": 'is not installed: python -m pip install -e ".[test]"'}
    names = sorted(
        {part.split('"')[1] for req in wanted if req.marker for part in str(req.marker).split("extra == ")[1:]}
    )
    return {
        name: _extra(name, [req for req in wanted if req.marker and req.marker.evaluate({"extra": name})])
        for name in names
    }


def _extra(name: str, wanted: list) -> str:
    missing = [req.name for req in wanted if package_version(req.name) is None]
    return f'lacks {", ".join(missing)}: python -m pip install -e ".[{name}]"' if missing else "complete"


def _cores() -> str:
    limits = core_limits()
    binding = [name for name, cores in limits.items() if cores == usable_cores()]
    return f"{usable_cores()} ({', '.join(f'{name} {cores}' for name, cores in limits.items())}; bound by {binding[0]})"


def _gpu() -> str:
    import torch

    if torch.cuda.is_available():
        memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        return f"{torch.cuda.get_device_name(0)}, {memory_gib:.0f} GiB, CUDA {torch.version.cuda}"
    return "none that torch can use: cells that need one say so"


def _decoders() -> str:
    from labkit.data import missing_decoders

    return "; ".join(f"{name} is missing: {reason}" for name, reason in missing_decoders().items()) or "all present"


def _regions() -> str:
    from labkit.data import load_library

    try:
        return Path(load_library()._name).name
    except ImportError as error:
        return f"decoded whole, more slowly: {error}"


def _disk() -> str:
    """Kind of the disk below the photo folder, and its cold read speed where the kernel lets it be measured."""
    from labkit.data.stores import FolderStore

    root = photo_root("imagenet")
    if not root.is_dir():
        return f"{root} is missing: python -m labkit tour makes it ({scale().n_photos} photos at this scale)"
    return f"{root}, {disk_kind(root)}, {_cold_read(FolderStore(root).paths())}"


def disk_kind(path: Path) -> str:
    """`solid-state`, `rotating`, `virtual` (the host's disk may be anything) or `unknown`, as the kernel says."""
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for folder in (block, block.resolve().parent):  # a partition's queue is its disk's
        try:
            rotational = (folder / "queue/rotational").read_text().strip()
        except OSError:
            continue
        name = folder.resolve().name
        if name.startswith(("vd", "xvd")):
            return f"virtual disk {name}"
        return f"{'rotating' if rotational == '1' else 'solid-state'} disk {name}"
    return "unknown kind of disk"


def _cold_read(paths: list[Path]) -> str:
    from labkit.data.blobs import evict
    from labkit.measure import tree_usage

    try:
        n_bytes = evict(paths)
    except OSError as error:
        return f"cold speed not measured ({error})"
    before, start = tree_usage().read_bytes, time.perf_counter()
    for path in paths:
        path.read_bytes()
    seconds, after = time.perf_counter() - start, tree_usage().read_bytes
    if before is None or after is None or after - before < 0.9 * n_bytes:
        return "cold speed not measured (the kernel did not read the files from the disk)"
    return f"{n_bytes / 1e6 / seconds:,.0f} MB/s cold, {len(paths) / seconds:,.0f} files/s, one reader"
