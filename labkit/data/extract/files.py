"""The members of a tar as files: written one by one, each whole or not at all, and compared with the archive."""

import filecmp
import os
import tarfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

from labkit.core import path_from_key, progress_bar
from labkit.data.extract.plan import Plan, find_case_collision
from labkit.data.extract.tree import Tree
from labkit.data.tar import TarStream


def unpack(archive: Path, plan: Plan, tree: Path, progress: bool) -> None:
    """Fill the folder `tree`; what it has already is whole and stays. The file being written is `half`, beside it."""
    tree.mkdir(exist_ok=True)
    if (pair := find_case_collision(plan)) and _ignores_case(tree):
        raise ValueError(f"{archive}: members {pair[0]!r} and {pair[1]!r} are one file here: choose another filesystem")
    half = tree.with_name("half")
    half.unlink(missing_ok=True)  # it may be a hard link to a whole file, which writing would spoil
    folders: dict[str, tarfile.TarInfo] = {}
    options = {"total": sum(plan.sizes.values()), "unit": "B", "unit_scale": True, "desc": archive.name}
    with TarStream(archive) as stream, progress_bar(show=progress, **options) as bar, Tree(tree) as inside:
        for info, paths in _planned_members(stream, plan):
            if info.isdir():
                folders[paths[0]] = info
                inside.enter(paths[0])
            else:
                _write_member(stream, info, paths, half, inside)
            bar.update(info.size)
        for path, info in folders.items():  # last: a new file would change the time of its folder
            inside.set_time(path, _mtime_ns(info))


def find_differences(archive: Path, plan: Plan, tree: Path) -> list[str]:
    """How the members under `tree` differ from those of the archive; more files may lie there."""
    with TarStream(archive) as stream:
        return [
            f"{path or '.'!r} {difference}"
            for info, paths in _planned_members(stream, plan)
            for path in paths
            if (difference := _find_difference(stream, info, tree / path, tree / paths[0]))
        ]


def _planned_members(stream: TarStream, plan: Plan) -> Iterator[tuple[tarfile.TarInfo, list[str]]]:
    """Members that fill paths, with these paths."""
    for number, info in enumerate(stream):
        if number in plan.places:
            yield info, plan.places[number]


def _write_member(stream: TarStream, info: tarfile.TarInfo, paths: list[str], half: Path, tree: Tree) -> None:
    """Fill the first path from the archive, the others by hard links to it."""
    for path in paths:
        if tree.has(path):
            continue
        if info.issym():
            os.symlink(path_from_key(info.linkname), half)
            _set_time(half, info)
        elif path == paths[0]:
            _write_file(stream, info, half)
        else:
            tree.link_to(paths[0], half)
        tree.put(half, path)


def _write_file(stream: TarStream, info: tarfile.TarInfo, half: Path) -> None:
    mode = info.mode & (0o755 if info.mode & 0o100 else 0o644) | 0o600  # as tarfile's data filter
    with open(half, "xb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, mode)) as file:  # less umask
        for block in stream.blocks(info):
            file.write(block)
    _set_time(half, info)


def _set_time(path: Path, info: tarfile.TarInfo) -> None:
    time_ns = _mtime_ns(info)
    os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)


def _mtime_ns(info: tarfile.TarInfo) -> int:
    """When the member was written; 0 if it says nothing that a file's time can be."""
    try:  # not tarfile's float, which cannot hold nanoseconds
        time_ns = Decimal(info.pax_headers.get("mtime", info.mtime)) * 10**9
        return int(time_ns) if abs(time_ns) < 1 << 63 else 0
    except (ArithmeticError, ValueError):
        return 0


def _ignores_case(tree: Path) -> bool:
    return tree.with_name(tree.name.upper()).exists()


def _find_difference(stream: TarStream, info: tarfile.TarInfo, path: Path, first: Path) -> str:
    """How the file at `path` differs from the member; `first` is the path that has the member's own data."""
    if not os.path.lexists(path):
        return "is missing"
    if info.isdir():
        return "" if path.is_dir() else "is not a folder"
    if info.issym():
        return "" if _is_link_to(path, path_from_key(info.linkname)) else "is not the same link"
    if path.is_symlink() or not path.is_file():
        return "is not a file"
    if (size := path.stat().st_size) != info.size:
        return f"has {size} bytes, not {info.size}"
    return "" if _has_data_of(stream, info, path, first) else "has other contents"


def _is_link_to(path: Path, target: str) -> bool:
    return path.is_symlink() and os.readlink(path) == target


def _has_data_of(stream: TarStream, info: tarfile.TarInfo, path: Path, first: Path) -> bool:
    if path != first:
        return filecmp.cmp(first, path, shallow=False)
    with open(path, "rb") as file:
        return all(file.read(len(block)) == block for block in stream.blocks(info))
