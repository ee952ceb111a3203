"""The members of a tar as files: written one by one, each whole or not at all, and compared with the archive."""

import filecmp
import os
import shutil
import tarfile
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path

from labkit.data.tar_safety import Plan, colliding
from labkit.data.tar_stream import TarStream
from labkit.measure.progress import progress_bar


def unpack(archive: Path, plan: Plan, tree: Path, progress: bool) -> None:
    """Fill `tree`; what is there already is whole and stays. Beside it lies `half`, the one file in the making."""
    tree.mkdir(exist_ok=True)
    if (pair := colliding(plan)) and _ignores_case(tree):
        raise ValueError(f"{archive}: members {pair[0]!r} and {pair[1]!r} are one file here: choose another filesystem")
    half = tree.with_name("half")
    half.unlink(missing_ok=True)  # it may be a hard link to a whole file, which writing would spoil
    folders: dict[Path, tarfile.TarInfo] = {}
    options = {"total": sum(plan.sizes.values()), "unit": "B", "unit_scale": True, "desc": archive.name}
    with TarStream(archive) as stream, progress_bar(show=progress, **options) as bar:
        for info, paths in _placed(stream, plan, tree):
            if info.isdir():
                folders[paths[0]] = info
                paths[0].mkdir(parents=True, exist_ok=True)
            else:
                _fill(stream, info, paths, half)
            bar.update(info.size)
    for folder, info in folders.items():  # now that nothing more comes into them, which would change their times
        _set_time(folder, info)


def differences(archive: Path, plan: Plan, tree: Path) -> list[str]:
    """What is not under `tree` as it is in the archive, member by member; files that it lacks do not count."""
    found = []
    with TarStream(archive) as stream:
        for info, paths in _placed(stream, plan, tree):
            found += [
                f"{path.relative_to(tree).as_posix()!r} {what}"
                for path, what in ((path, _difference(stream, info, path, paths[0])) for path in paths)
                if what
            ]
    return found


def _placed(stream: TarStream, plan: Plan, tree: Path) -> Iterator[tuple[tarfile.TarInfo, list[Path]]]:
    for number, info in enumerate(stream):
        if number in plan.places:
            yield info, [tree / path for path in plan.places[number]]


def _fill(stream: TarStream, info: tarfile.TarInfo, paths: list[Path], half: Path) -> None:
    """The first path from the archive, the others as hard links to it."""
    for path in paths:
        if os.path.lexists(path):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if info.issym():
            os.symlink(info.linkname, half)
            _set_time(half, info)
        elif path == paths[0]:
            _write(stream, info, half)
        else:
            _link(paths[0], half)
        half.rename(path)


def _write(stream: TarStream, info: tarfile.TarInfo, half: Path) -> None:
    with open(half, "wb") as file:
        for block in stream.blocks(info):
            file.write(block)
    os.chmod(half, info.mode & (0o755 if info.mode & 0o100 else 0o644) | 0o600)  # as tarfile's data filter
    _set_time(half, info)


def _link(path: Path, half: Path) -> None:
    try:
        os.link(path, half)
    except OSError:  # a filesystem without hard links
        shutil.copy2(path, half)


def _set_time(path: Path, info: tarfile.TarInfo) -> None:
    time_ns = _mtime_ns(info)
    os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)


def _mtime_ns(info: tarfile.TarInfo) -> int:
    try:  # tarfile makes a float of it, which has no nanoseconds
        return int(Decimal(info.pax_headers.get("mtime", info.mtime)) * 10**9)
    except (InvalidOperation, ValueError, OverflowError):
        return 0


def _ignores_case(tree: Path) -> bool:
    return tree.with_name(tree.name.upper()).exists()


def _difference(stream: TarStream, info: tarfile.TarInfo, path: Path, first: Path) -> str:
    if not os.path.lexists(path):
        return "is missing"
    if info.isdir():
        return "" if path.is_dir() else "is no folder"
    if info.issym():
        return "" if path.is_symlink() and os.readlink(path) == info.linkname else "is not the same link"
    if path.is_symlink() or not path.is_file():
        return "is no file"
    if path.stat().st_size != info.size:
        return f"has {path.stat().st_size} bytes, not {info.size}"
    same = _same_data(stream, info, path) if path == first else filecmp.cmp(first, path, shallow=False)
    return "" if same else "has other contents"


def _same_data(stream: TarStream, info: tarfile.TarInfo, path: Path) -> bool:
    with open(path, "rb") as file:
        return all(file.read(len(block)) == block for block in stream.blocks(info))
