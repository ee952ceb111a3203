"""Decide what may come out of a tar, from its headers alone, before anything is written.

`tarfile`'s own filter asks the filesystem where a name would lead, and was led astray there (CVE-2025-4517 and
others). Here no member may lie behind a link and no link may lead through another, so that names alone decide.
"""

import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from labkit.core import MAX_MEMBERS, MAX_PATH_BYTES, path_from_key

_MAX_PART_BYTES = 255  # NAME_MAX of Linux


class UnsafeTarError(ValueError):
    """A member that would leave its folder, or is not a file, folder or link. Nothing of the archive is extracted."""


@dataclass
class Plan:
    """What each member becomes. Of several with one name the last counts, as with `tar -x`.

    Args:
        places: Number of a member in the archive -> paths that it fills; several if hard links share its data.
        sizes: Number of a member -> bytes of its data; files only.
    """

    places: dict[int, list[str]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)


def plan_members(archive: str, members: Iterable[tarfile.TarInfo]) -> Plan:
    """The plan for the members of `archive`.

    Raises:
        UnsafeTarError: a member has an absolute name or `..` in it, a name of more than 4096 bytes or a part of it of
            more than 255, lies behind a link, is a device or a pipe, or is a link that leads out of the folder or
            through another link; names the archive, the member and the fault.
    """
    tree = _NamedTree()
    for number, info in enumerate(members):
        with _refusal_error(archive, info.name):
            tree.add(number, info)
    _check_paths(archive, tree)
    plan = Plan(sizes=tree.sizes)
    for path, number in tree.numbers.items():
        plan.places.setdefault(number, []).append(path)
    return plan


def safe_path(name: str) -> str:
    """`name` without `.` and doubled slashes, "" for the archive's own folder.

    Raises:
        ValueError: it would leave the folder, or no file can have it.
    """
    _check_length(name)
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if (longest := max(map(_n_bytes, parts), default=0)) > _MAX_PART_BYTES:
        raise ValueError(f"has {longest} bytes in a part of its name, where a file has at most {_MAX_PART_BYTES}")
    if name.startswith("/"):
        raise ValueError("is an absolute name")
    if ".." in parts:
        raise ValueError("has `..` in its name")
    if "\0" in name:
        raise ValueError("has a zero byte in its name")
    return path_from_key("/".join(parts))


def _check_length(path: str) -> None:
    """Refuse what is longer than a path can be: memory and time for it would grow with the square of its depth."""
    if (n_bytes := _n_bytes(path)) > MAX_PATH_BYTES:
        raise ValueError(f"has a path of {n_bytes} bytes, where a file has at most {MAX_PATH_BYTES}")


def _n_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def find_case_collision(plan: Plan) -> tuple[str, str] | None:
    """Two paths that differ in case alone, if there are any: one file where the filesystem ignores case."""
    seen: dict[str, str] = {}
    for path in (path for paths in plan.places.values() for path in paths):
        if (other := seen.setdefault(path.casefold(), path)) != path:
            return other, path
    return None


@dataclass
class _NamedTree:
    """What members make of each path, as far as read.

    numbers: Path -> number of the member whose data it has.
    folders, links, sizes: By number; a link has its target, a file its size.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    folders: set[int] = field(default_factory=set)
    links: dict[int, str] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    def add(self, number: int, info: tarfile.TarInfo) -> None:
        if number == MAX_MEMBERS:
            raise ValueError(f"is one more than the {MAX_MEMBERS} that labkit extracts from one archive")
        path = safe_path(info.name)
        if info.islnk():
            number = self._find_file(safe_path(info.linkname))
        elif info.isdir():
            self.folders.add(number)
        elif info.issym():
            self.links[number] = info.linkname
        elif info.isdev():
            raise ValueError("is a device or a pipe")
        elif not info.isreg():
            raise ValueError(f"is of unknown type {info.type!r}")
        elif not path:
            raise ValueError("has no name")
        else:
            self.sizes[number] = info.size
        self.numbers[path] = number

    def _find_file(self, target: str) -> int:
        number = self.numbers.get(target)
        if number is None or number in self.folders:
            raise ValueError(f"is a hard link to {target!r}, which is not a file before it in the archive")
        return number


@contextmanager
def _refusal_error(archive: str, name: str) -> Iterator[None]:
    """Turn a ValueError, which says what is wrong with a member, into an UnsafeTarError that names both."""
    try:
        yield
    except ValueError as error:
        shown = name if len(name) <= MAX_PATH_BYTES else name[:200] + "..."
        text = f"{archive}: member {shown!r} {error}. Nothing of the archive was extracted"
        raise UnsafeTarError(text) from error


def _check_paths(archive: str, tree: _NamedTree) -> None:
    """No path may lie under a file or behind a link, and no link may lead out."""
    parents = _find_parents(tree.numbers)
    targets = {path: tree.links[number] for path, number in tree.numbers.items() if number in tree.links}
    for path, number in tree.numbers.items():
        with _refusal_error(archive, path or "."):
            if number not in tree.folders and (not path or path in parents):
                raise ValueError("is a folder to other members, and a link or a file itself")
            if path in targets:
                _check_link(path, targets)


def _find_parents(paths: Iterable[str]) -> set[str]:
    """Those of the paths under which others lie: sorted with the slash as the first letter, one follows at once.

    A set of all folders that lie above a path would take memory with the square of its depth.
    """
    ordered = sorted(paths, key=lambda path: path.replace("/", "\0"))
    return {path for path, following in pairwise(ordered) if following.startswith(path + "/")}


def _check_link(path: str, targets: dict[str, str]) -> None:
    """Follow the link at `path` by names alone: it must stay inside, and must not lead through another link."""
    target = targets[path]
    _check_length(target)
    if not target:
        raise ValueError("is a link without a name")
    if "\0" in target:
        raise ValueError("is a link with a zero byte in its name")
    if target.startswith("/"):
        raise ValueError(f"is a link to {target!r}, an absolute name")
    folder = path.split("/")[:-1]
    for part in target.split("/"):
        if "/".join(folder) in targets:
            raise ValueError(f"is a link to {target!r}, which leads through another link")
        if part == "..":
            if not folder:
                raise ValueError(f"is a link to {target!r}, which leaves the folder")
            folder.pop()
        elif part not in ("", "."):
            folder.append(part)
