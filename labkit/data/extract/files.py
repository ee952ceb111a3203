"""The members of a tar as files: written one by one, each whole or not at all, and compared with the archive."""

import filecmp
import os
import tarfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

from labkit.core import path_from_key, progress_bar
from labkit.data.extract.plan import Plan, colliding
from labkit.data.extract.tree import Tree
from labkit.data.tar import TarStream


def unpack(archive: Path, plan: Plan, tree: Path, progress: bool) -> None:
    """Fill `tree`; what is there already is whole and stays. Beside it lies `half`, the one file in the making."""
    tree.mkdir(exist_ok=True)
    if (pair := colliding(plan)) and _ignores_case(tree):
        raise ValueError(f"{archive}: members {pair[0]!r} and {pair[1]!r} are one file here: choose another filesystem")
    half = tree.with_name("half")
    half.unlink(missing_ok=True)  # it may be a hard link to a whole file, which writing would spoil
    folders: dict[str, tarfile.TarInfo] = {}
    options = {"total": sum(plan.sizes.values()), "unit": "B", "unit_scale": True, "desc": archive.name}
    with TarStream(archive) as stream, progress_bar(show=progress, **options) as bar, Tree(tree) as inside:
        for info, paths in _placed(stream, plan):
            if info.isdir():
                folders[paths[0]] = info
                inside.make_folder(paths[0])
            else:
                _fill(stream, info, paths, half, inside)
            bar.update(info.size)
        for path, info in folders.items():  # now that nothing more comes into them, which would change their times
            inside.set_time(path, _mtime_ns(info))


def differences(archive: Path, plan: Plan, tree: Path) -> list[str]:
    """What is not under `tree` as it is in the archive, member by member; files that it lacks do not count."""
    found = []
    with TarStream(archive) as stream:
        for info, names in _placed(stream, plan):
            paths = [tree / name for name in names]
            found += [
                f"{path.relative_to(tree).as_posix()!r} {what}"
                for path, what in ((path, _difference(stream, info, path, paths[0])) for path in paths)
                if what
            ]
    return found


def _placed(stream: TarStream, plan: Plan) -> Iterator[tuple[tarfile.TarInfo, list[str]]]:
    for number, info in enumerate(stream):
        if number in plan.places:
            yield info, plan.places[number]


def _fill(stream: TarStream, info: tarfile.TarInfo, paths: list[str], half: Path, tree: Tree) -> None:
    """The first path from the archive, the others as hard links to it."""
    for path in paths:
        if tree.has(path):
            continue
        if info.issym():
            os.symlink(path_from_key(info.linkname), half)
            _set_time(half, info)
        elif path == paths[0]:
            _write(stream, info, half)
        else:
            tree.link_to(paths[0], half)
        tree.put(half, path)


def _write(stream: TarStream, info: tarfile.TarInfo, half: Path) -> None:
    mode = info.mode & (0o755 if info.mode & 0o100 else 0o644) | 0o600  # as tarfile's data filter
    with open(half, "xb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, mode)) as file:  # less umask
        for block in stream.blocks(info):
            file.write(block)
    _set_time(half, info)


def _set_time(path: Path, info: tarfile.TarInfo) -> None:
    time_ns = _mtime_ns(info)
    os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)


def _mtime_ns(info: tarfile.TarInfo) -> int:
    """When the member was written; 0 where it says nothing that a file's time can be."""
    try:  # tarfile makes a float of it, which has no nanoseconds
        time_ns = Decimal(info.pax_headers.get("mtime", info.mtime)) * 10**9
        return int(time_ns) if abs(time_ns) < 1 << 63 else 0
    except (ArithmeticError, ValueError):
        return 0


def _ignores_case(tree: Path) -> bool:
    return tree.with_name(tree.name.upper()).exists()


def _difference(stream: TarStream, info: tarfile.TarInfo, path: Path, first: Path) -> str:
    if not os.path.lexists(path):
        return "is missing"
    if info.isdir():
        return "" if path.is_dir() else "is no folder"
    if info.issym():
        return "" if path.is_symlink() and os.readlink(path) == path_from_key(info.linkname) else "is not the same link"
    if path.is_symlink() or not path.is_file():
        return "is no file"
    if path.stat().st_size != info.size:
        return f"has {path.stat().st_size} bytes, not {info.size}"
    same = _same_data(stream, info, path) if path == first else filecmp.cmp(first, path, shallow=False)
    return "" if same else "has other contents"


def _same_data(stream: TarStream, info: tarfile.TarInfo, path: Path) -> bool:
    with open(path, "rb") as file:
        return all(file.read(len(block)) == block for block in stream.blocks(info))
